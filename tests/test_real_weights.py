"""Real weights, in small: checkpoints that transformers' own classes made are read, trained, and written back."""
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

import train_grpo
from conftest import ROOT
from model import MiniMindForCausalLM, eos_token_ids, load_pretrained, load_tokenizer, save_pretrained

pytestmark = pytest.mark.usefixtures("one_thread")
SHIPPED = str(ROOT / "model/weights/reason_128")

# --- transformers' own, small and random -------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 400}      # of the four pairs one keeps its speed, one is between, two are slow
EXPERTS = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES = {
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biased": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4,
                               "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"tie_word_embeddings": False}),
    "qwen3_moe_raw_weights": ("Qwen3Moe", EXPERTS | {"tie_word_embeddings": True, "num_experts_per_tok": 3,
                                                     "norm_topk_prob": False}),
    "qwen3_moe_some_dense": ("Qwen3Moe", EXPERTS | {"tie_word_embeddings": False, "num_hidden_layers": 4,
                                                    "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


def reference(family, **sizes):
    """A small random model of transformers' class. No parameter keeps a value that would hide it (norm 1, bias 0), and
    neither the rope base nor the norm's epsilon is a default."""
    name, switches = FAMILIES[family]
    fields = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "pad_token_id": 0,
              "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    return randomized(getattr(transformers, name + "ForCausalLM")(
        getattr(transformers, name + "Config")(**fields | switches | sizes)))


@torch.no_grad()
def randomized(model):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator) + 1.0 * (parameter.dim() == 1))
    return model.eval()


def left_padded(lengths, vocab_size=61):
    """Random ids (N, T) of these lengths and their mask, padded on the left with id 0."""
    T = max(lengths)
    mask = torch.tensor([[0] * (T - length) + [1] * length for length in lengths])
    return torch.randint(1, vocab_size, (len(lengths), T), generator=torch.Generator().manual_seed(0)) * mask, mask


@torch.no_grad()
def assert_same_logits(ours, theirs, ids, mask):
    real = mask.bool()
    expected = theirs(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(ours(ids, mask)[real], expected[real], atol=1e-5, rtol=0)


def edit_json(path, remove=(), **fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in remove}))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_whichever_of_the_two_wrote_the_folder(family, tokenizer, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    ids, mask = left_padded([40, 7, 1])
    assert_same_logits(ours, theirs, ids, mask)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == theirs.config.tie_word_embeddings

    save_pretrained(ours, tokenizer, tmp_path / "ours")
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5      # for transformers 4 and for 5
    kind = theirs.config.rope_parameters["rope_type"]
    assert config["rope_parameters"]["rope_type"] == kind == config.get("rope_scaling", {}).get("rope_type", "default")
    names = [sorted(load_file(tmp_path / folder / "model.safetensors")) for folder in ("theirs", "ours")]
    assert names[0] == names[1]                                                         # the hub's, experts too
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32, output_loading_info=True)
    assert type(back) is type(theirs) and not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_logits(ours, back, ids, mask)
    assert_same_logits(load_pretrained(tmp_path / "ours"), theirs, ids, mask)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "ours")) == len(tokenizer)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_biased", "qwen2", "llama"])
def test_a_state_dict_moves_to_transformers_and_back_without_renaming(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    ours = MiniMindForCausalLM(load_pretrained(tmp_path).config)
    ours.load_state_dict(theirs.state_dict())
    assert_same_logits(ours, theirs, *left_padded([5, 3]))
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("family, scaling", [
    ("qwen3_tied", None), ("llama3", {name: value for name, value in LLAMA3.items() if name != "rope_theta"}),
    ("llama_linear", {"type": "linear", "factor": 2.5})])
def test_config_json_as_on_the_hub_with_rope_theta_at_the_top_is_read_the_same(family, scaling, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", ["rope_parameters"], rope_theta=5e5, rope_scaling=scaling)
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([40, 7]))


@pytest.mark.parametrize("family, fields", [("llama", ["tie_word_embeddings", "head_dim"]),
                                            ("llama_linear", ["num_key_value_heads"])])
def test_a_field_that_config_json_leaves_out_is_what_transformers_takes_for_it(family, fields, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", fields)
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([5, 3]))


def test_qwen2s_biases_are_its_own_whatever_attention_bias_says(tmp_path):
    theirs = reference("qwen2")
    theirs.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", attention_bias=True)
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([5, 3]))


@pytest.mark.parametrize("family", ["qwen3_biased", "qwen2_tied", "qwen3_moe"])
def test_weights_in_several_files_are_read_like_one(family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([4, 2]))


def test_the_rope_frequencies_in_llama_2s_files_are_passed_over(tmp_path):
    theirs = reference("llama")
    theirs.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    assert_same_logits(load_pretrained(tmp_path), theirs, *left_padded([4, 2]))


# --- the ids that end a reply, the tokenizer, the hub --------------------------------------------------------------------

def test_every_eos_id_of_the_checkpoint_counts_and_is_saved_with_what_else_its_server_reads(tokenizer, tmp_path):
    theirs = reference("llama")
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = 7
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_k": 20}))
    ours = load_pretrained(tmp_path / "theirs")
    assert eos_token_ids(ours, tokenizer) == [tokenizer.eos_token_id, 7, 9] == [2, 7, 9]
    save_pretrained(ours, tokenizer, tmp_path / "ours")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config
    assert generation.eos_token_id == [2, 7, 9] and (generation.temperature, generation.top_k) == (0.6, 20)
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert eos_token_ids(load_pretrained(tmp_path / "ours"), tokenizer) == [2, 7, 9]


def test_a_users_tokenizer_comes_back_the_same_in_words_that_transformers_4_reads(tmp_path):
    vocab = {token: i for i, token in enumerate(["a", "b", "Ġ", "Ċ", "ab", "Ġab"])}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")], eos_token="<|im_end|>", pad_token="<|endoftext|>",
                            unk_token=None, model_max_length=131072)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|vision|>"]})
    theirs.add_tokens(["<think>", "</think>"])
    theirs.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
    save_pretrained(load_pretrained(SHIPPED), theirs, tmp_path)
    back = load_tokenizer(tmp_path, 512)
    text = "<|im_start|>ab ab\n<think>a</think><|vision|><|im_end|>"
    assert back(text)["input_ids"] == theirs(text)["input_ids"] and back.get_vocab() == theirs.get_vocab()
    assert back.decode(back(text)["input_ids"], skip_special_tokens=True) == "ab ab\n<think>a</think>"
    for name in ("all_special_tokens", "chat_template", "eos_token", "pad_token", "bos_token", "model_max_length"):
        assert getattr(back, name) == getattr(theirs, name), name
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    # 5 writes a list named extra_special_tokens, which 4 takes for a dictionary and fails.
    assert config["additional_special_tokens"] == ["<|im_start|>", "<|vision|>"] and "extra_special_tokens" not in config
    assert config["tokenizer_class"] == "Qwen2Tokenizer"


def test_a_hub_id_is_downloaded_and_a_failure_is_one_sentence(monkeypatch, tmp_path):
    theirs = reference("qwen2")
    theirs.save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    assert_same_logits(load_pretrained("Somebody/tiny-Qwen2.5"), theirs, *left_padded([4, 2]))
    with pytest.raises(ValueError, match="no config.json there"):
        load_pretrained("nowhere")                                          # not owner/name: nothing to ask the hub for
    assert asked == ["Somebody/tiny-Qwen2.5"]

    def fail(name, **_):
        raise ConnectionError("a page\nof text")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match="Somebody/else.*ConnectionError") as error:
        load_pretrained("Somebody/else")
    assert "\n" not in str(error.value)


# --- MiniMind's .pth ------------------------------------------------------------------------------------------------------

CONSTANTS = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 8, "pad_token_id": 0, "eos_token_id": 2,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}
MINIMIND = {
    "minimind2": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "intermediate_size": 192,
                            "num_hidden_layers": 3}),
    "minimind3": ("Qwen3", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "head_dim": 8, "intermediate_size": 256,
                            "num_hidden_layers": 2}),
    "minimind3_moe": ("Qwen3Moe", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "head_dim": 8, "intermediate_size": 256,
                                   "moe_intermediate_size": 256, "num_hidden_layers": 2, "num_experts": 4,
                                   "num_experts_per_tok": 1, "norm_topk_prob": True}),
}


def minimind(generation, folder, **sizes):
    """A random model of transformers' class, and a .pth of its tensors as MiniMind would have saved them."""
    name, fields = MINIMIND[generation]
    theirs = randomized(getattr(transformers, name + "ForCausalLM")(
        getattr(transformers, name + "Config")(**CONSTANTS | fields | sizes)))
    with torch.no_grad():
        theirs.model.embed_tokens.weight.mul_(0.01)         # so small that the norms' epsilon shows
    theirs.save_pretrained(folder / "by_transformers")
    state = load_file(folder / "by_transformers/model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()        # MiniMind saves the head, though tied
    torch.save(state, folder / f"{generation}.pth")
    return theirs, folder / f"{generation}.pth"


@pytest.mark.parametrize("generation", MINIMIND)
def test_a_minimind_pth_is_what_its_tensors_tell_and_is_saved_for_transformers(generation, tokenizer, tmp_path):
    theirs, path = minimind(generation, tmp_path)
    ours = load_pretrained(path)
    ids, mask = left_padded([40, 7, 1])
    assert_same_logits(ours, theirs, ids, mask)
    save_pretrained(ours, tokenizer, tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(theirs) and back.config.tie_word_embeddings and back.config.eos_token_id == 2
    assert_same_logits(ours, back, ids, mask)


@pytest.mark.parametrize("content, words", [
    ({"model.layers.0.mlp.shared_experts.0.up_proj.weight": torch.ones(2, 2)}, "shared experts"),
    ({"tok_embeddings.weight": torch.ones(2, 2)}, "before April 2025"),
    ({"weight": torch.ones(2, 2)}, "model.embed_tokens.weight"),
    (b"version https://git-lfs.github.com/spec/v1", "not a file of tensors"),
])
def test_another_pth_is_refused_by_what_it_is(content, words, tmp_path):
    path = tmp_path / "other.pth"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=words) as error:
        load_pretrained(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_minimind2s_experts_are_refused_and_a_pth_without_a_tokenizer_is_told_where_it_gets_one(tmp_path):
    _, path = minimind("minimind3_moe", tmp_path)
    with pytest.raises(ValueError, match="--tokenizer_path"):
        load_tokenizer(path, 512)
    state = {name: tensor for name, tensor in torch.load(path).items() if "_norm." not in name.replace("layernorm", "")}
    torch.save(state, path)
    with pytest.raises(ValueError, match="experts without q/k-norm"):
        load_pretrained(path)


# --- a few steps of GRPO -----------------------------------------------------------------------------------------------

def any_score(prompts, completions, *, completion_ids, **_):
    """Rewards that random weights earn, too, and each completion another."""
    return [sum(ids) / 100 for ids in completion_ids]


def train(path, out, *flags):
    train_grpo.main(["--model_path", str(path), "--tokenizer_path", SHIPPED, "--out_dir", str(out), "--run_name", "run",
                     "--max_steps", "2", "--batch_size", "2", "--num_generations", "3", "--max_gen_len", "6",
                     "--eval_interval", "0", "--device", "cpu",
                     "--reward_funcs", "format", "tag", "accuracy", "test_real_weights:any_score", *flags])
    assert len((out / "run/metrics.jsonl").read_text().splitlines()) == 2
    return AutoModelForCausalLM.from_pretrained(out / "run/final", dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_biased", "qwen2_tied", "llama3", "qwen3_moe_some_dense"])
def test_a_few_steps_of_grpo_train_each_architecture(family, tmp_path):
    theirs = reference(family, vocab_size=300)
    theirs.save_pretrained(tmp_path / "weights")
    trained = train(tmp_path / "weights", tmp_path, "--gradient_checkpointing")
    assert type(trained) is type(theirs)
    moved = {name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, theirs.state_dict()[name])}
    assert moved == set(theirs.state_dict()) or "moe" in family             # an expert that no token chose stays


@pytest.mark.parametrize("generation", ["minimind2", "minimind3_moe"])
def test_a_few_steps_of_grpo_train_a_minimind(generation, tmp_path):
    theirs, path = minimind(generation, tmp_path, vocab_size=300)
    assert type(train(path, tmp_path)) is type(theirs)
    (tmp_path / "reason_64.pth").write_bytes(path.read_bytes())             # found by its name, too
    args = train_grpo.parse_args(["--hidden_size", "64", "--out_dir", str(tmp_path)])
    assert args.model_path == str(tmp_path / "reason_64.pth") and args.run_name == "grpo_reason_64"


@pytest.mark.parametrize("flags", [[], ["--gradient_checkpointing"]])
def test_gradient_checkpointing_is_a_flag(flags):
    args = train_grpo.parse_args(["--model_path", SHIPPED, "--reward_funcs", "format", *flags])
    _, policy, _, _ = train_grpo.load_models(args, torch.device("cpu"))
    assert policy.model.gradient_checkpointing == bool(flags)


def test_a_tokenizer_that_knows_more_tokens_than_the_weights_is_refused(tmp_path, capsys):
    reference("qwen2").save_pretrained(tmp_path / "weights")
    with pytest.raises(SystemExit):
        train(tmp_path / "weights", tmp_path)
    assert "know 61" in capsys.readouterr().err


# --- errors ------------------------------------------------------------------------------------------------------------

def test_a_folder_without_config_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="config.json") as error:
        load_pretrained(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(error.value)


@pytest.mark.parametrize("fields, words", [
    ({"model_type": "mamba"}, "'mamba'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "'dynamic'"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
    ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
])
def test_what_we_do_not_build_is_refused_by_name_with_its_file(fields, words, tmp_path):
    reference("qwen3_biased").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError, match=words) as error:
        load_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("fields, tensor", [
    ({"num_hidden_layers": 3}, "model.layers.2."),                      # tensors are missing
    ({"num_hidden_layers": 1}, "model.layers.1."),                      # tensors are left over
    ({"intermediate_size": 40}, "model.layers.0.mlp.down_proj.weight"), # tensors have another shape
    ({"model_type": "llama"}, "model.layers.0.self_attn.k_norm.weight"),
])
def test_weights_that_do_not_fit_config_json_are_named_by_tensor_and_folder(fields, tensor, tmp_path):
    reference("qwen3_tied").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    with pytest.raises(ValueError) as error:
        load_pretrained(tmp_path)
    assert tensor in str(error.value) and str(tmp_path) in str(error.value)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path):
    reference("qwen3_tied").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="model.safetensors.*git-lfs"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        load_pretrained(tmp_path)
