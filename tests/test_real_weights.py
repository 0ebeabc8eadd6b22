"""Reads and writes back small checkpoints that transformers' own classes have made."""
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

import train_grpo
from model import eos_token_ids, load_pretrained, load_tokenizer, save_pretrained
from pages import PAGES, blocks
from run import checkpoint
from run.distributed import World
from run.policy import load_models
from support import edit, left_padded

pytestmark = pytest.mark.usefixtures("one_thread")

# --- transformers' own models, small and random ---------------------------------------------------

# Scales the four frequencies of a head in every way: one is kept, one interpolated, two divided.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 400}
EXPERTS = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES = {
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biased": ("Qwen3", {
        "head_dim": 16, "tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama3": ("Llama", {
        "tie_word_embeddings": False, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "llama_linear": ("Llama", {
        "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"tie_word_embeddings": False}),
    "qwen3_moe_raw_weights": ("Qwen3Moe", EXPERTS | {
        "tie_word_embeddings": True, "num_experts_per_tok": 3, "norm_topk_prob": False}),
}
CONSTANTS = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 8, "eos_token_id": 2,
             "tie_word_embeddings": True,
             "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
THREE = CONSTANTS | {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "head_dim": 8,
                     "intermediate_size": 256}
MINIMIND = {
    "minimind2": ("Llama", CONSTANTS | {"intermediate_size": 192, "num_hidden_layers": 3}),
    "minimind3": ("Qwen3", THREE),
    "minimind3_moe": ("Qwen3Moe", THREE | {
        "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 1,
        "norm_topk_prob": True}),
}


@torch.no_grad()
def reference(family, **sizes):
    """A small model of transformers' class for this family.

    Its RoPE base and its norms' epsilon are no defaults: ignoring them would change the logits. All
    parameters are random, also norms and biases: their initial 1 or 0 would hide them.
    """
    name, switches = (FAMILIES | MINIMIND)[family]
    fields = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "rms_norm_eps": 1e-5, "pad_token_id": 0,
              "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    config = getattr(transformers, name + "Config")(**fields | switches | sizes)
    model = getattr(transformers, name + "ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.15 * noise + 1.0 * (parameter.dim() == 1))
    return model.eval()


@torch.no_grad()
def assert_same_logits(ours, theirs, lengths=(40, 7, 1)):
    ids, mask = left_padded(lengths, 61)
    real = mask.bool()
    expected = theirs(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(ours(ids, mask)[real], expected[real], atol=1e-5, rtol=0)


def saved_by_us(ours, theirs, tokenizer, folder):
    """It is the same model to transformers and to us; returns what its config.json says."""
    save_pretrained(ours, tokenizer, folder)
    back, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    assert type(back) is type(theirs)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert_same_logits(ours, back)
    assert_same_logits(load_pretrained(folder), theirs)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers_whoever_saved_them(family, tokenizer, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert_same_logits(ours, theirs)
    tied = ours.lm_head.weight is ours.model.embed_tokens.weight
    assert tied == theirs.config.tie_word_embeddings

    rope = saved_by_us(ours, theirs, tokenizer, tmp_path / "ours")["rope_parameters"]
    assert rope["rope_theta"] == 5e5
    assert rope["rope_type"] == theirs.config.rope_parameters["rope_type"]
    names = [sorted(load_file(tmp_path / folder / "model.safetensors"))
             for folder in ("theirs", "ours")]
    assert names[0] == names[1]
    modes = {file.stat().st_mode for file in (tmp_path / "ours").iterdir()}
    assert len(modes) == 1          # whoever may read config.json may read the weights


THETA, LINEAR = {"rope_theta": 5e5}, {"type": "linear", "factor": 2.5}


@pytest.mark.parametrize("family, remove, changes", [
    # as transformers 4 writes it
    ("llama3", ["rope_parameters"], THETA | {"rope_scaling": LLAMA3}),
    ("llama_linear", ["rope_parameters"], THETA | {"rope_scaling": LINEAR}),
    # What is missing has the default of transformers.
    ("llama", ["tie_word_embeddings", "head_dim"], {}),
    ("llama_linear", ["num_key_value_heads"], {}),
    # Qwen2 has its own biases, whatever this says.
    ("qwen2", [], {"attention_bias": True}),
])
def test_config_json_of_another_form_is_read_the_same(family, remove, changes, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", remove, **changes)
    assert_same_logits(load_pretrained(tmp_path), theirs)


# --- EOS ids, the tokenizer, the hub --------------------------------------------------------------

def test_eos_ids_and_sampling_defaults_survive_a_round_trip(tokenizer, tmp_path):
    theirs = reference("llama")
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = 7
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "do_sample": True, "temperature": 0.6, "top_k": 20}))
    ours = load_pretrained(tmp_path / "theirs")
    assert eos_token_ids(ours, tokenizer) == [tokenizer.eos_token_id, 7, 9] == [2, 7, 9]
    save_pretrained(ours, tokenizer, tmp_path / "ours")
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generation_config
    assert generation.eos_token_id == [2, 7, 9]
    assert (generation.temperature, generation.top_k) == (0.6, 20)
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert eos_token_ids(load_pretrained(tmp_path / "ours"), tokenizer) == [2, 7, 9]


def test_tokenizer_of_a_user_comes_back_the_same(policy, tmp_path):
    vocab = {token: i for i, token in enumerate(["a", "b", "Ġ", "Ċ", "ab", "Ġab"])}
    theirs = Qwen2Tokenizer(
        vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", unk_token=None, model_max_length=131072)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|vision|>"]})
    theirs.add_tokens(["<think>", "</think>"])
    theirs.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    save_pretrained(policy, theirs, tmp_path)
    back = load_tokenizer(tmp_path, 512)
    text = "<|im_start|>ab ab\n<think>a</think><|vision|><|im_end|>"
    ids = back(text)["input_ids"]
    assert ids == theirs(text)["input_ids"] and back.get_vocab() == theirs.get_vocab()
    assert back.decode(ids, skip_special_tokens=True) == "ab ab\n<think>a</think>"
    for name in ("all_special_tokens", "chat_template", "eos_token", "pad_token", "bos_token",
                 "model_max_length"):
        assert getattr(back, name) == getattr(theirs, name), name


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_hub_policy_is_downloaded_and_read(kind, shard_size, monkeypatch, tmp_path):
    theirs, here = reference("llama"), tmp_path / "here"
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    if kind == "bin":
        for file in tmp_path.glob("*.safetensors"):
            name = file.stem.replace("model", "pytorch_model", 1)
            # Llama 2's files also hold the RoPE frequencies.
            frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
            torch.save(load_file(file) | frequencies, tmp_path / f"{name}.bin")
            file.unlink()
        for index in tmp_path.glob("*.index.json"):
            text = index.read_text().replace("model-", "pytorch_model-")
            index.unlink()
            file = tmp_path / "pytorch_model.bin.index.json"
            file.write_text(text.replace(".safetensors", ".bin"))

    def download(name, *, allow_patterns, ignore_patterns):
        assert name == "Somebody/old"
        here.mkdir(exist_ok=True)
        for file in tmp_path.iterdir():
            if file.is_file() and any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, here)
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_same_logits(load_pretrained("Somebody/old"), theirs)


def test_hub_policy_that_cannot_be_downloaded_is_one_sentence(monkeypatch):
    def download(name, **patterns):
        raise ConnectionError("a page\nof text")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match="Somebody/else.*ConnectionError") as error:
        load_pretrained("Somebody/else")
    assert "\n" not in str(error.value)


def test_shards_are_those_that_the_index_names_and_a_missing_one_is_named(tmp_path):
    theirs = reference("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("model-*"))
    left_over = {name: tensor + 1 for name, tensor in load_file(first).items()}
    save_file(left_over, tmp_path / "model-00009-of-00009.safetensors")
    assert_same_logits(load_pretrained(tmp_path), theirs)
    second.unlink()
    with pytest.raises(ValueError, match=second.name):
        load_pretrained(tmp_path)


def test_head_of_its_own_is_kept_beside_a_config_that_ties_it(tokenizer, tmp_path):
    theirs = reference("qwen2")
    theirs.save_pretrained(tmp_path / "merged")
    edit(tmp_path / "merged/config.json", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="merged: config.json ties head and embedding, but"):
        ours = load_pretrained(tmp_path / "merged")
    assert_same_logits(ours, theirs)
    assert not saved_by_us(ours, theirs, tokenizer, tmp_path / "final")["tie_word_embeddings"]


# --- MiniMind's .pth ------------------------------------------------------------------------------

def minimind(generation, folder, **sizes):
    """A random model of transformers' class, and the path of its tensors as MiniMind saves them."""
    theirs = reference(generation, **sizes)
    with torch.no_grad():
        theirs.model.embed_tokens.weight.mul_(0.01)     # so small that the norms' epsilon matters
    theirs.save_pretrained(folder / "by_transformers")
    state = load_file(folder / "by_transformers/model.safetensors")
    # MiniMind saves the head although it is tied to the embedding.
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    torch.save(state, folder / f"{generation}.pth")
    return theirs, folder / f"{generation}.pth"


@pytest.mark.parametrize("generation", MINIMIND)
def test_minimind_pth_is_read_and_then_saved_for_transformers(generation, tokenizer, tmp_path):
    theirs, path = minimind(generation, tmp_path)
    ours = load_pretrained(path)
    assert_same_logits(ours, theirs)
    config = saved_by_us(ours, theirs, tokenizer, tmp_path / "ours")
    assert config["tie_word_embeddings"] and config["eos_token_id"] == 2
    with pytest.raises(ValueError, match="--tokenizer_path"):
        load_tokenizer(path, 512)


def test_minimind_gets_weights_back_as_the_page_prints_it(
        tokenizer, tmp_path, monkeypatch, capsys):
    _, path = minimind("minimind3", tmp_path)
    save_pretrained(load_pretrained(path), tokenizer, tmp_path / "out/minimind/final")
    monkeypatch.chdir(tmp_path)
    generation, code, of_verl = [text for language, text in blocks(PAGES["docs/coming_from.md"])
                                 if language == "python"]
    for other in ("minimind2", "minimind3"):
        exec(generation.replace("full_sft_768.pth", minimind(other, tmp_path)[1].as_posix()), {})
    assert capsys.readouterr().out.split() == ["False", "True"]
    exec(code, {})
    before, after = (torch.load(file) for file in (path, "grpo_768.pth"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.half(), after[name])
    names = {"compute_score": lambda source, text, gold: float((source, text) == ("sums", gold))}
    exec(of_verl, names)
    assert names["score"](["2+3?"] * 2, ["5", "6"], data_source=["sums"] * 2,
                          reward_model=[{"ground_truth": "5"}] * 2) == [1, 0]


def test_minimind_pth_of_another_format_is_refused(tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"tok_embeddings.weight": torch.ones(2, 2)}, path)
    with pytest.raises(ValueError, match="other.pth.*embed_tokens.weight"):
        load_pretrained(path)


def test_minimind_pth_in_the_output_folder_is_found_by_its_name(tmp_path):
    (tmp_path / "reason_64.pth").touch()
    args = train_grpo.parse_args(["--hidden_size", "64", "--from_weight", "reason",
                                  "--reasoning", "0", "--save_dir", str(tmp_path)])
    assert args.model_path == str(tmp_path / "reason_64.pth")
    assert checkpoint.default_name(vars(args)) == "grpo_reason_64"


# --- memory ---------------------------------------------------------------------------------------

def test_gradient_checkpointing_reaches_the_model():
    args = train_grpo.parse_args(["--reward_funcs", "format", "--gradient_checkpointing"])
    policy, _ = load_models(args, World("cpu"), train_grpo.token_logps)
    assert policy.model.model.gradient_checkpointing
