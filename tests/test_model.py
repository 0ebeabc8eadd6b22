"""The network, a chat and fine-tuning."""
import copy
import io
import itertools

import pytest
import torch

import train_grpo
from dataset import PromptCollator
from dataset.prompts import asking_as_trained
from errors import UserError
from model import (
    MiniMindConfig,
    MiniMindForCausalLM,
    chat,
    sample,
    save_pretrained,
    train_sft,
)
from model.model import KVCache, MixtureOfExperts
from support import left_padded, turns

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the network (against transformers' own: test_real_weights.py) --------------------------------


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[11, 11, 11], [11, 7, 6]])
def test_cache_of_pieces_of_a_sequence_gives_what_the_whole_does(lengths):
    torch.manual_seed(0)        # weights so large that a token depends on all before
    model = MiniMindForCausalLM(MiniMindConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        initializer_range=0.4))
    ids, mask = left_padded(lengths, 8)
    whole, cache, pieces, read = model(ids, mask), KVCache(), [], 0
    for T in (6, 4, 1):         # a prompt, several tokens at once, one token
        upto = None if mask.all() else mask[:, :read + T]
        pieces.append(model(ids[:, read:read + T], upto, cache=cache))
        read += T
        assert cache.length == read
    real = mask.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[real], whole[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("experts", [0, 3])
def test_gradient_checkpointing_computes_each_layer_twice_and_changes_no_gradient(experts):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(
        vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=4,
        num_experts=experts, moe_intermediate_size=8, initializer_range=0.3))
    (ids, mask), gradients, calls = left_padded([6, 3], 9), [], []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.model.gradient_checkpointing in (False, True):
        # What is computed again takes place under the same autocast.
        with torch.autocast("cpu", torch.bfloat16, enabled=experts > 0):
            loss = model(ids, mask)[mask.bool()].float().logsumexp(-1).sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert len(calls) == 1 + 2
    for stored, recomputed in zip(*gradients, strict=True):
        assert stored.abs().max() > 0 and torch.equal(stored, recomputed)


def test_experts_that_nobody_chooses_have_a_gradient_of_0():
    mlp = MixtureOfExperts(MiniMindConfig(hidden_size=16, num_experts=5, num_experts_per_tok=4))
    mlp.gate.weight.data[3] = -9.0          # with inputs above 0 nobody chooses it
    mlp(torch.rand(2, 7, 16)).sum().backward()
    assert [bool(expert.up_proj.weight.grad.any()) for expert in mlp.experts] == [1, 1, 1, 0, 1]


# --- a chat ---------------------------------------------------------------------------------------


def test_chat_prints_whole_characters_and_each_reply_sees_the_turns_before(
        tiny_policy, tmp_path, monkeypatch, capsys):
    tokenizer, model = tiny_policy
    save_pretrained(model, tokenizer, tmp_path)
    replies = ["小明有🙂", "<think>naïve</think>"]        # several tokens for a character
    eos = [tokenizer.eos_token_id]
    tokens = iter([i for reply in replies for i in tokenizer(reply)["input_ids"] + eos])
    monkeypatch.setattr(chat, "next_token", lambda *_: (torch.tensor([next(tokens)]), None))
    prompts, reply_to = [], chat.reply_to

    def listen(model, tokenizer, messages, **sampling):
        prompts.append([message["content"] for message in messages])
        return reply_to(model, tokenizer, messages, **sampling)

    monkeypatch.setattr(chat, "reply_to", listen)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))    # an empty line ends it
    chat.main([str(tmp_path)])
    assert capsys.readouterr().out == "小明有🙂\n<think>naïve</think>\n"
    assert prompts == [["one"], ["one", replies[0], "two"]]


def test_chat_at_temperature_0_says_what_greedy_sampling_says(policy, tokenizer):
    messages = turns("What is 3+4*5?")
    text = chat.reply_to(policy, tokenizer, messages, max_new_tokens=12, temperature=0)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    sampled, _ = sample(policy, ids, torch.ones_like(ids), num_generations=1, max_new_tokens=12,
                        greedy=True, eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id)
    assert text == tokenizer.decode(sampled[0], skip_special_tokens=True) != ""


@pytest.mark.parametrize("reasoning", [1, 0])
def test_chat_has_the_prompts_of_a_run(reasoning, tiny_policy, tmp_path, monkeypatch):
    tokenizer, model = copy.deepcopy(tiny_policy[0]), tiny_policy[1]
    tokenizer.chat_template += "{{ '' if enable_thinking | default(true) else 'quiet' }}"
    save_pretrained(model, asking_as_trained(tokenizer, {"enable_thinking": bool(reasoning)}),
                    tmp_path)
    asked, args = [], train_grpo.parse_args(["--system_prompt", "r1", f"--reasoning={reasoning}"])
    collate = PromptCollator(tokenizer, 99, args.system_prompt, bool(args.reasoning))

    class Watched(type(tokenizer)):
        def __call__(self, text, **options):
            asked.append(text)
            return super().__call__(text, **options)

    tokenizer = Watched.from_pretrained(tmp_path)
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    chat.main([str(tmp_path), "--system_prompt", "r1", "--max_new_tokens", "1"])
    assert asked[0] == collate.render(turns("one"))
    assert "and </answer>" in asked[0] and asked[0].endswith("quiet") != bool(reasoning)


# --- fine-tuning ----------------------------------------------------------------------------------

@pytest.mark.parametrize("template, learnt", [
    (None, ["is 28<|im_end|>", "<think>sure<|im_end|>"]),
    # another header, and no EOS at the end of a turn
    ("{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
     "{% if add_generation_prompt %}assistant:\n{% endif %}", ["is 28\n", "<think>sure\n"]),
    # like Qwen3's: only the last reply keeps its thought
    ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
     "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.replace('<think>', '') }}{% endif %}"
     "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
     "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
     ["is 28<|im_end|>", "<think>sure<|im_end|>"]),
])
def test_sft_learns_what_the_assistant_says_in_any_chat_template(template, learnt, tokenizer):
    other = copy.deepcopy(tokenizer)
    template = other.chat_template = template or tokenizer.chat_template
    chats = [turns("7 + 3*7?", "is 28", "sure? 小明", "<think>sure"), turns("7?", "7")]
    for chat_, wanted in zip(chats, (learnt, [learnt[0].replace("is 28", "7")])):
        (ids, labels), = train_sft.encode([chat_], other)
        assert ids == other(other.apply_chat_template(chat_, tokenize=False),
                            add_special_tokens=False)["input_ids"]
        assert {label for label, i in zip(labels, ids) if label != i} == {-100}
        found = itertools.groupby(labels, key=lambda label: label == -100)
        assert [other.decode([*group]) for is_other, group in found if not is_other] == wanted
    other.chat_template = "{{ messages | length }}" + template
    with pytest.raises(UserError, match="chat 1: .* no reply can be located"):
        train_sft.encode([turns("7?", "7")], other)
    other.chat_template = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"
    forced = {"role": "assistant", "content": "7 high", "forced": [[2, 6]]}
    with pytest.raises(UserError, match="rewrites a turn with the field forced, '7 high'"):
        train_sft.encode([[*turns("7?"), forced]], other)


def test_sft_loss_is_the_cross_entropy_of_each_labeled_token(policy):
    batch = [([3, 9, 27, 11], [-100, -100, 27, 11]), ([6, 4], [-100, 4])]
    expected = 0
    for ids, labels in batch:
        logps = policy(torch.tensor([ids]))[0].log_softmax(-1)
        expected -= sum(logps[t - 1, ids[t]] for t, label in enumerate(labels) if label != -100)
    torch.testing.assert_close(train_sft.loss_of(policy, batch, 3, "cpu"), expected / 3)
