import io
import sys

import pytest
import torch
from transformers import AutoTokenizer

from bench_memory import RUN, SMALL, measure_apart
from conftest import ROOT
from model import MiniMindConfig, MiniMindForCausalLM, chat, load_pretrained, sample, save_pretrained
from model.memory import SIZES, num_parameters, peak_bytes
from model.sampler import next_token
from model.tokenizer import TAGS

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the network (against transformers' own: test_real_weights.py) ----------------------------------------------------

def left_padded(lengths, vocab_size, seed=0):
    """Random ids (N, T) of these lengths and their mask, padded on the left with id 0."""
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths)
    mask = torch.tensor([[0] * (T - length) + [1] * length for length in lengths])
    return torch.randint(1, vocab_size, (len(lengths), T), generator=generator) * mask, mask


def test_dtype_is_that_of_the_file_unless_asked_for(tokenizer, tmp_path):
    save_pretrained(tiny(seed=0).to(torch.bfloat16), tokenizer, tmp_path)
    for asked, got in [(None, torch.bfloat16), (torch.float32, torch.float32)]:
        model = load_pretrained(tmp_path, dtype=asked)
        assert {parameter.dtype for parameter in model.parameters()} == {got}


@torch.no_grad()
def test_logits_to_keep_gives_the_last_positions_of_all_logits():
    model = tiny(seed=0)
    ids, mask = left_padded([6, 3], 8)
    full = model(ids, mask)
    assert full.shape == (2, 6, 8)
    for k in (1, 4, 6):
        torch.testing.assert_close(model(ids, mask, logits_to_keep=k), full[:, -k:])


@pytest.mark.parametrize("experts", [0, 3])
def test_gradient_checkpointing_computes_each_layer_twice_and_changes_no_gradient(experts):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(
        vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=4, num_experts=experts,
        moe_intermediate_size=8, initializer_range=0.3))
    ids, mask = left_padded([6, 3], 9)
    gradients, calls = {}, []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.model.gradient_checkpointing in (False, True):
        model.zero_grad()
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=experts > 0):    # then so is what is computed anew
            loss = model(ids, mask)[mask.bool()].float().logsumexp(-1).sum()
        loss.backward()
        gradients[model.model.gradient_checkpointing] = [parameter.grad for parameter in model.parameters()]
        assert len(calls) == 1 + model.model.gradient_checkpointing
    for kept, anew in zip(gradients[False], gradients[True], strict=True):
        assert kept.abs().max() > 0 and torch.equal(kept, anew)
    calls.clear()
    with torch.no_grad():
        model(ids, mask)
    assert len(calls) == 1                                                      # no gradient, nothing is computed anew


# --- what a run needs in memory ----------------------------------------------------------------------------------------

def test_the_parameters_of_real_sizes_are_counted_as_the_hub_counts_them():
    assert {name: num_parameters(config) for name, config in SIZES.items()} == {
        "MiniMind2 (0.1B)": 104_030_976, "Qwen2.5-0.5B": 494_032_768, "Qwen3-1.7B": 1_720_574_976, "Qwen3-4B": 4_022_468_096}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and steers glibc's malloc")
@pytest.mark.parametrize("changes", [                                    # where learning, and where sampling takes most
    {"micro_batch_size": 16},
    {"micro_batch_size": 8, "num_prompts": 8, "prompt_length": 120, "completion_length": 8, "reference": False}])
def test_the_memory_of_a_run_is_foretold_within_15_percent(changes):
    sizes, run = SMALL | {"num_hidden_layers": 3}, RUN | changes
    config = MiniMindConfig(**sizes)
    foretold = peak_bytes(config, num_parameters(config), gpu=False, **run)["peak"]
    assert measure_apart(sizes, run) == pytest.approx(foretold, rel=0.15)


# --- a chat ------------------------------------------------------------------------------------------------------------

def test_a_chat_streams_whole_characters_and_each_reply_sees_the_turns_before(tokenizer, tmp_path, monkeypatch, capsys):
    save_pretrained(tiny(seed=0, vocab_size=len(tokenizer)), tokenizer, tmp_path)
    replies = ["小明有🙂", "<think>naïve</think>"]
    tokens = iter([i for reply in replies for i in tokenizer(reply)["input_ids"] + [tokenizer.eos_token_id]])
    monkeypatch.setattr(chat, "next_token", lambda *_: (torch.tensor([next(tokens)]), None))
    pieces, prompts, stream = [], [], chat.stream

    def listen(model, tokenizer, messages, **sampling):
        prompts.append([message["content"] for message in messages])
        for piece in stream(model, tokenizer, messages, **sampling):
            pieces.append(piece)
            yield piece
    monkeypatch.setattr(chat, "stream", listen)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nthree\n"))     # an empty line ends it
    chat.main([str(tmp_path)])
    assert capsys.readouterr().out == "小明有🙂\n<think>naïve</think>\n"
    assert [piece for piece in pieces if piece][:4] == list("小明有🙂")      # of several tokens each
    assert prompts == [["one"], ["one", replies[0], "two"]]


def test_a_chat_at_temperature_0_says_what_greedy_sampling_says(tokenizer):
    model = tiny(seed=3, vocab_size=len(tokenizer))
    messages = [{"role": "user", "content": "What is 3+4*5?"}]
    text = "".join(chat.stream(model, tokenizer, messages, max_new_tokens=12, temperature=0))
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    sampled, _ = sample(model, ids, torch.ones_like(ids), num_generations=1, max_new_tokens=12, greedy=True,
                        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    assert text == tokenizer.decode(sampled[0], skip_special_tokens=True) != ""


def test_a_chat_with_nothing_there_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as exit:
        chat.main(["nowhere"])
    assert exit.value.code == 2 and capsys.readouterr().err.startswith("model.chat: error: nowhere: no config.json")


# --- the sampler against a full forward for every token --------------------------------------------------------------

LENGTHS, EOS, PAD, TEMPERATURE = [9, 2, 5], 5, 7, 0.7       # PAD is a token that the model may also sample


def tiny(seed, vocab_size=8):
    """Random weights, large enough that the next token depends on all the tokens before."""
    torch.manual_seed(seed)
    return MiniMindForCausalLM(MiniMindConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, initializer_range=0.4))


@torch.no_grad()
def naive_greedy(model, prompt, max_new_tokens, eos):
    ids, logps = list(prompt), []
    while len(logps) < max_new_tokens and (not logps or ids[-1] not in eos):
        distribution = (model(torch.tensor([ids]))[0, -1].double() / TEMPERATURE).log_softmax(-1)
        ids.append(int(distribution.argmax()))
        logps.append(float(distribution[ids[-1]]))
    return ids[len(prompt):], logps


@torch.no_grad()
def score(model, prompt, completion):
    """log pi of each completion token behind an unpadded prompt, in one forward without a cache."""
    logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].float()


def through_eos(row, eos):
    row = row.tolist()
    return row[:next((t + 1 for t, token in enumerate(row) if token in eos), len(row))]


def unpadded(ids, mask):
    return [row[real.bool()].tolist() for row, real in zip(ids, mask)]


def test_greedy_sampling_is_a_full_forward_for_every_token():
    model = tiny(seed=1, vocab_size=32)
    ids, mask = left_padded([9, 2, 5, 7], 32)
    eos = [7, 13]
    got_ids, got_logps = sample(model, ids, mask, num_generations=1, max_new_tokens=20, temperature=TEMPERATURE,
                                eos_token_id=eos, pad_token_id=0, greedy=True)
    expected = [naive_greedy(model, prompt, 20, eos) for prompt in unpadded(ids, mask)]
    assert [len(tokens) for tokens, _ in expected] == [20, 4, 14, 10]       # one row never ends, the others at their time
    for i, (tokens, logps) in enumerate(expected):
        assert got_ids[i].tolist() == tokens + [0] * (20 - len(tokens))
        torch.testing.assert_close(got_logps[i, :len(logps)], torch.tensor(logps), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def sampled():
    """The model, unpadded prompts a, b, c, and 8 completions of each; they end at quite different times."""
    model = tiny(seed=2)
    ids, mask = left_padded(LENGTHS, 8)
    completion_ids, logps = sample(model, ids, mask, num_generations=8, max_new_tokens=30, temperature=TEMPERATURE,
                                   eos_token_id=EOS, pad_token_id=PAD, generator=torch.Generator().manual_seed(0))
    return model, unpadded(ids, mask), completion_ids, logps


def test_sampled_logps_are_those_of_a_full_forward_while_finished_rows_leave_the_batch(sampled):
    model, prompts, completion_ids, logps = sampled
    lengths = sorted(len(through_eos(row, [EOS])) for row in completion_ids)
    assert lengths[8] < lengths[13] - 1 < lengths[17] - 2       # a third of the rows is finished, later half of the rest
    for i, (row, row_logps) in enumerate(zip(completion_ids, logps)):
        completion = through_eos(row, [EOS])
        torch.testing.assert_close(row_logps[:len(completion)], score(model, prompts[i // 8], completion), atol=1e-5, rtol=0)


def test_the_completions_of_a_prompt_are_adjacent(sampled):
    model, prompts, completion_ids, logps = sampled
    for i, (row, row_logps) in enumerate(zip(completion_ids, logps)):
        completion = through_eos(row, [EOS])
        fits = [torch.allclose(row_logps[:len(completion)], score(model, prompt, completion), atol=1e-4)
                for prompt in prompts]
        assert fits == [p == i // 8 for p in range(3)]


def test_a_completion_ends_with_its_eos_and_is_padded_behind_it(sampled):
    _, _, completion_ids, logps = sampled
    ended = 0
    for row, row_logps in zip(completion_ids, logps):
        length = len(through_eos(row, [EOS]))
        ended += row[length - 1] == EOS
        assert row[length:].eq(PAD).all() and row_logps[length:].eq(0).all()
        assert row_logps[:length].lt(0).all()                       # the EOS has a log-probability too
    assert 12 < ended < 24


def test_the_width_is_the_longest_completion_and_a_list_of_eos_ends_at_any_of_them():
    ids, mask = left_padded(LENGTHS, 8)
    completion_ids, _ = sample(tiny(seed=0), ids, mask, num_generations=4, max_new_tokens=500, eos_token_id=[1, 2, 3, 4],
                               pad_token_id=0, generator=torch.Generator().manual_seed(0))
    rows = [through_eos(row, [1, 2, 3, 4]) for row in completion_ids]
    assert {row[-1] for row in rows} <= {1, 2, 3, 4} and len({row[-1] for row in rows}) > 1
    assert completion_ids.shape == (12, max(map(len, rows))) and completion_ids.shape[1] < 500


def test_the_same_generator_seed_samples_the_same_and_another_does_not():
    ids, mask = left_padded(LENGTHS, 8)
    first, again, other = (sample(tiny(seed=0), ids, mask, num_generations=4, max_new_tokens=9, eos_token_id=EOS,
                                  pad_token_id=PAD, generator=torch.Generator().manual_seed(seed))[0] for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_next_token_draws_from_softmax_of_logits_over_temperature():
    probabilities = torch.tensor([0.0, 0.05, 0.5, 0.0, 0.25, 0.2, 0.0])     # a zero at both ends and in the middle
    logits = (TEMPERATURE * probabilities.log()).expand(20_000, -1)
    tokens, logps = next_token(logits, TEMPERATURE, torch.Generator().manual_seed(0), greedy=False)
    counts = tokens.bincount(minlength=7)
    sigma = (20_000 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 20_000 * probabilities).abs() <= 4 * sigma).all()     # sigma 0: never drawn
    torch.testing.assert_close(logps, probabilities[tokens].log())


# --- the tokenizer -----------------------------------------------------------------------------------------------------

SHIPPED = ROOT / "model/weights/reason_128"


@pytest.fixture(params=["trained", *["shipped"] * SHIPPED.exists()])
def any_tokenizer(request, tokenizer):
    return tokenizer if request.param == "trained" else AutoTokenizer.from_pretrained(SHIPPED)


@pytest.mark.parametrize("text", ["小明有3个苹果，又买了12个。", "🙂👨‍👩‍👧 naïve é", "a\tb\r\n\n  c ", "nul \0 byte",
                                  " leading , and n't . spaces ", "7 + 3*7=28", ""])
def test_any_text_survives_a_round_trip(text, any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_each_tag_is_one_ordinary_token_that_decoding_keeps(any_tokenizer):
    assert [len(any_tokenizer(tag, add_special_tokens=False)["input_ids"]) for tag in TAGS] == [1, 1, 1, 1]
    text = "<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>"
    ids = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    ids += [any_tokenizer.eos_token_id, any_tokenizer.pad_token_id]
    assert any_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_digit_and_sign_is_a_token_of_its_own(any_tokenizer):
    ids = any_tokenizer("1234+56*78=90", add_special_tokens=False)["input_ids"]
    assert [any_tokenizer.decode([i]) for i in ids] == list("1234+56*78=90")


def test_the_chat_template_opens_the_assistants_turn_only_when_asked(any_tokenizer):
    chat = [{"role": "user", "content": "What is 1+1?"}]
    closed = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
    assert any_tokenizer.apply_chat_template(chat, tokenize=False) == closed
    opened = any_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == closed + "<|im_start|>assistant\n"
    ids = any_tokenizer(opened, add_special_tokens=False)["input_ids"]
    assert ids.count(any_tokenizer.eos_token_id) == 1 and any_tokenizer.decode(any_tokenizer.eos_token_id) == "<|im_end|>"
    assert any_tokenizer.pad_token_id not in (None, any_tokenizer.eos_token_id)
