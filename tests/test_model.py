import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from model import MiniMindConfig, MiniMindForCausalLM, load_pretrained, sample, save_pretrained
from model.sampler import next_token
from model.tokenizer import TAGS

pytestmark = pytest.mark.usefixtures("one_thread")

# --- the network against transformers' own ---------------------------------------------------------------------------

FAMILIES = {
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": False, "num_experts": 5, "num_experts_per_tok": 2,
                               "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3_moe_raw_weights": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": True, "num_experts": 4,
                                           "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False}),
}


def reference(family):
    """A small random model of transformers' class. No parameter keeps a value that would hide it (norm 1, bias 0), and
    neither the rope base nor the norm's epsilon is a default."""
    name, switches = FAMILIES[family]
    config = getattr(transformers, name + "Config")(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, pad_token_id=0, **switches)
    model = getattr(transformers, name + "ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator) + 1.0 * (parameter.dim() == 1))
    return model


def left_padded(lengths, vocab_size, seed=0):
    """Random ids (N, T) of these lengths and their mask, padded on the left with id 0."""
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths)
    mask = torch.tensor([[0] * (T - length) + [1] * length for length in lengths])
    return torch.randint(1, vocab_size, (len(lengths), T), generator=generator) * mask, mask


@torch.no_grad()
def assert_same_logits(ours, theirs, ids, mask):
    real = mask.bool()
    torch.testing.assert_close(ours(ids, mask)[real], theirs(input_ids=ids, attention_mask=mask).logits[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_whichever_of_the_two_wrote_the_folder(family, tokenizer, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    ids, mask = left_padded([12, 7, 1], 61)
    assert_same_logits(ours, theirs, ids, mask)

    save_pretrained(ours, tokenizer, tmp_path / "ours")
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5      # for transformers 4 and for 5
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert type(back) is type(theirs) and not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_logits(ours, back, ids, mask)
    assert_same_logits(load_pretrained(tmp_path / "ours"), theirs, ids, mask)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) == len(tokenizer)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_untied", "qwen2", "llama"])
def test_a_state_dict_moves_to_transformers_and_back_without_renaming(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    ours = MiniMindForCausalLM(load_pretrained(tmp_path).config)
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours, theirs, *left_padded([5, 3], 61))
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("family", ["qwen3_tied", "llama"])
def test_config_json_of_transformers_4_with_rope_theta_at_the_top_is_read_the_same(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_scaling": None}))
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([12, 7], 61))


def test_a_config_json_that_leaves_tie_word_embeddings_out_keeps_the_head_of_the_weights(tmp_path):
    theirs = reference("llama")         # untied, which is what transformers takes a Llama without the field for
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings is False
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([5, 3], 61))


def test_weights_in_several_files_are_read_like_one(tmp_path):
    theirs = reference("qwen3_untied")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([4, 2], 61))


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


# --- errors ------------------------------------------------------------------------------------------------------------

def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_folder_without_config_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="config.json") as error:
        load_pretrained(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(error.value)


def test_an_unknown_model_type_is_named_with_its_file(tokenizer, tmp_path):
    save_pretrained(tiny(seed=0), tokenizer, tmp_path)
    edit_config(tmp_path, model_type="mamba")
    with pytest.raises(ValueError, match="'mamba'") as error:
        load_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("fields, tensor", [
    ({"num_hidden_layers": 3}, "model.layers.2."),                      # tensors are missing
    ({"num_hidden_layers": 1}, "model.layers.1."),                      # tensors are left over
    ({"intermediate_size": 40}, "model.layers.0.mlp.down_proj.weight"), # tensors have another shape
    ({"model_type": "llama"}, "model.layers.0.self_attn.k_norm.weight"),
])
def test_weights_that_do_not_fit_config_json_are_named_by_tensor_and_folder(fields, tensor, tokenizer, tmp_path):
    save_pretrained(tiny(seed=0), tokenizer, tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ValueError) as error:
        load_pretrained(tmp_path)
    assert tensor in str(error.value) and str(tmp_path) in str(error.value)


def test_a_missing_weights_file_and_scaled_rope_are_named(tokenizer, tmp_path):
    save_pretrained(tiny(seed=0), tokenizer, tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ValueError, match="yarn"):
        load_pretrained(tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        load_pretrained(tmp_path)


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
    completion_ids, logps = sample(model, ids, mask, num_generations=8, max_new_tokens=30, temperature=TEMPERATURE, eos_token_id=EOS,
                                   pad_token_id=PAD, generator=torch.Generator().manual_seed(0))
    return model, unpadded(ids, mask), completion_ids, logps


def test_sampled_logps_are_those_of_a_full_forward_while_finished_rows_leave_the_batch(sampled):
    model, prompts, completion_ids, logps = sampled
    lengths = sorted(len(through_eos(row, [EOS])) for row in completion_ids)
    assert lengths[8] < lengths[13] - 1 < lengths[17] - 2           # a third of the rows is finished, later half of the rest, ...
    for i, (row, row_logps) in enumerate(zip(completion_ids, logps)):
        completion = through_eos(row, [EOS])
        torch.testing.assert_close(row_logps[:len(completion)], score(model, prompts[i // 8], completion), atol=1e-5, rtol=0)


def test_the_completions_of_a_prompt_are_adjacent(sampled):
    model, prompts, completion_ids, logps = sampled
    for i, (row, row_logps) in enumerate(zip(completion_ids, logps)):
        completion = through_eos(row, [EOS])
        fits = [torch.allclose(row_logps[:len(completion)], score(model, prompt, completion), atol=1e-4) for prompt in prompts]
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
    first, again, other = (sample(tiny(seed=0), ids, mask, num_generations=4, max_new_tokens=9, eos_token_id=EOS, pad_token_id=PAD,
                                  generator=torch.Generator().manual_seed(seed))[0] for seed in (5, 5, 6))
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


@pytest.mark.parametrize("text", ["小明有3个苹果，又买了12个。", "🙂👨‍👩‍👧 naïve é", "a\tb\r\n\n  c ", "nul \0 byte", " leading , and n't . spaces ", "7 + 3*7=28", ""])
def test_any_text_survives_a_round_trip(text, any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_each_tag_is_one_ordinary_token_that_decoding_keeps(any_tokenizer):
    assert [len(any_tokenizer(tag, add_special_tokens=False)["input_ids"]) for tag in TAGS] == [1, 1, 1, 1]
    text = "<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>"
    ids = any_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any_tokenizer.decode(ids + [any_tokenizer.eos_token_id, any_tokenizer.pad_token_id], skip_special_tokens=True) == text


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
