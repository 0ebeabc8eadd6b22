"""Models that transformers' own classes run: exact in a batch, trained, saved, or refused."""
import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

import train_grpo
from errors import UserError
from model import load_pretrained, sampler, save_pretrained
from model.load import read_config
from model.lora import adapters, merged_state, with_adapters
from model.transformers_model import AnyModel, Cache
from run.fsdp import shard
from support import edit, left_padded, measured

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
         "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
         "mamba_n_groups": 1, "mamba_chunk_size": 8}
FAMILIES = {    # attention within a window, learnt positions, convolutions, two recurrent states
    "Gemma3ForCausalLM": SIZES | {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "Lfm2ForCausalLM": SIZES | {"layer_types": ["conv", "full_attention"]},
    "Qwen3_5ForCausalLM": SIZES | LINEAR | {
        "layer_types": ["linear_attention", "full_attention"]},
    "FalconH1ForCausalLM": SIZES | MAMBA,
}

RWKV = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """Makes the folder of a small model with random weights, once; also returns the model."""
    made = {}

    @torch.no_grad()
    def make(family):
        if family not in made:
            folder, model_class = tmp_path_factory.mktemp(family), getattr(transformers, family)
            config = model_class.config_class(
                vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                **FAMILIES.get(family, RWKV))
            torch.manual_seed(0)
            model = model_class(config).eval()
            for name, weight in model.named_parameters():
                if "A_log" not in name and "dt" not in name:    # biases and norms: not 0, not 1
                    weight.add_(0.15 * torch.randn_like(weight))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[family] = str(folder), model
        return made[family]

    return make


of_each_family = pytest.mark.parametrize("family", FAMILIES)


def flags(folder, out, *more):
    return ["--model_path", folder, "--out_dir", str(out), "--run_name", "run", "--max_steps", "2",
            "--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--eval_interval",
            "0", "--learning_rate", "1e-2", "--reward_funcs", "odd:odd", *more]


@pytest.fixture
def odd(own_module):
    """A reward that random weights earn half of the time."""
    own_module("odd", "def odd(prompts, completions, completion_ids, **columns):\n"
                      "    return [ids[0] % 2 for ids in completion_ids]\n")


# --- exact ----------------------------------------------------------------------------------------


@of_each_family
def test_rows_of_a_batch_are_sampled_and_scored_as_each_alone(family, saved, tokenizer):
    folder, theirs = saved(family)
    policy, lengths = load_pretrained(folder), (11, 6, 2)
    ids, mask = left_padded(lengths, len(tokenizer))
    completions, logps = sampler.sample(        # many ends: rows leave at many steps
        policy, ids, mask, num_generations=3, max_new_tokens=10, temperature=0.7,
        eos_token_id=[*range(80)], pad_token_id=0, generator=torch.Generator().manual_seed(0))
    kept = train_grpo.completion_mask(completions, [*range(80)])
    assert len(set(kept.sum(1).tolist())) > 3
    prompts, prompt_mask = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    sequences = torch.cat((prompts, completions), 1), torch.cat((prompt_mask, kept), 1)
    scored, entropy = train_grpo.token_logps(
        policy, *sequences, completions.shape[1], temperature=0.7, with_entropy=True)
    for i, length in enumerate(n for n in lengths for _ in range(3)):
        count = int(kept[i].sum())
        alone = torch.cat((prompts[i, -length:], completions[i, :count]))
        with torch.no_grad():
            expected = (theirs(alone[None]).logits[0, length - 1:-1] / 0.7).log_softmax(-1)
        chosen = expected.gather(1, completions[i, :count, None])[:, 0]
        for found in (logps, scored):
            torch.testing.assert_close(found[i, :count], chosen, atol=1e-5, rtol=0)
            assert not found[i, count:].any()
        torch.testing.assert_close(entropy[i, :count], -(expected.exp() * expected).sum(1),
                                   atol=1e-4, rtol=0)
    plain = train_grpo.token_logps(policy, *sequences, completions.shape[1], temperature=0.7)
    assert torch.equal(plain, scored)


def test_gradient_checkpointing_recomputes_each_layer_of_any_model(saved):
    policy = load_pretrained(saved("FalconH1ForCausalLM")[0])
    (ids, mask), calls, gradients = left_padded((9, 4), 200), [], []
    layer = policy.model.model.layers[0].feed_forward
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    for policy.model.gradient_checkpointing in (False, True):
        loss = policy(ids, mask).logsumexp(-1)[mask.bool()].sum()
        gradients.append(torch.autograd.grad(loss, [*policy.parameters()]))
    assert len(calls) == 1 + 2
    torch.testing.assert_close(gradients[1], gradients[0])


def test_dropout_is_off_and_the_head_is_float32_under_autocast(saved):
    policy = load_pretrained(saved("GPT2LMHeadModel")[0])       # whose dropout is 0.1
    ids, mask = left_padded((9, 4), 200)
    policy.model.gradient_checkpointing = True
    assert torch.equal(policy(ids, mask), policy(ids, mask))
    with torch.autocast("cpu", torch.bfloat16):
        assert policy(ids, mask).dtype == torch.float32


def test_head_with_a_bias_or_of_its_own_is_kept(tokenizer, tmp_path):
    sizes = {name: SIZES[name] for name in SIZES if name != "head_dim"}
    theirs = transformers.PhiForCausalLM(transformers.PhiConfig(vocab_size=280, **sizes)).eval()
    theirs.lm_head.bias.data.normal_(std=2)
    theirs.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    ours, (ids, _) = load_pretrained(tmp_path), left_padded((9,), 200)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(ids), theirs(ids).logits.float(), atol=0.05, rtol=0)
    save_pretrained(ours, tokenizer, tmp_path / "final")
    assert not json.loads((tmp_path / "final/config.json").read_text())["tie_word_embeddings"]
    assert torch.equal(load_pretrained(tmp_path / "final")(ids), theirs(ids).logits)


# --- trained and saved ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Gemma3ForCausalLM", "Qwen3_5ForCausalLM"])
def test_run_of_any_model_takes_steps_and_transformers_reads_what_it_leaves(
        family, saved, odd, tmp_path, capsys):
    folder, before = saved(family)
    train_grpo.main(flags(folder, tmp_path))
    assert f"transformers' {family}, because of model_type" in capsys.readouterr().out
    first, second = measured(tmp_path / "run")
    assert first["rollout_probs_diff_max"] < 1e-6 and first["grad_norm"] > 0
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-4
    after, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run/final", output_loading_info=True)
    assert type(after).__name__ == family and not info["missing_keys"] | info["unexpected_keys"]
    names = [sorted(load_file(f"{path}/model.safetensors"))
             for path in (folder, tmp_path / "run/final")]
    assert names[0] == names[1]
    trained = load_pretrained(tmp_path / "run/checkpoint").state_dict()
    for (name, weight), old in zip(after.state_dict().items(), before.state_dict().values()):
        assert torch.equal(weight, trained[name])
        assert not weight.is_floating_point() or not torch.equal(weight, old), name


def test_adapters_learn_in_every_linear_layer_and_have_the_names_of_peft(saved, odd, tmp_path):
    folder, theirs = saved("FalconH1ForCausalLM")
    train_grpo.main(flags(folder, tmp_path, "--lora_rank", "2"))
    linear = [name for name, layer in theirs.named_modules()
              if isinstance(layer, torch.nn.Linear) and name != "lm_head"]
    assert "model.layers.0.mamba.in_proj" in linear
    state = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert state.keys() == {f"base_model.model.{name}.lora_{part}.weight"
                            for name in linear for part in "AB"}
    assert all(weight.any() for weight in state.values())       # each B was 0
    config = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert set(config["target_modules"]) == {name.rpartition(".")[2] for name in linear}
    final = load_file(tmp_path / "run/final/model.safetensors")
    for name in linear:
        A, B = (state[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(final[f"{name}.weight"],
                                   theirs.get_submodule(name).weight + 32 / 2 * B @ A)


def test_frozen_base_has_the_dtype_of_the_products_but_for_its_head(saved):
    base = load_pretrained(
        saved("Lfm2ForCausalLM")[0], dtype=torch.float32, matrix_dtype=torch.bfloat16)
    assert base.model.model.layers[0].feed_forward.w1.weight.dtype == torch.bfloat16
    assert base.model.model.embed_tokens.weight.dtype == base.lm_head.weight.dtype == torch.float32
    policy = with_adapters(base, rank=2, alpha=4)
    assert policy.lm_head is policy.model.lm_head and policy.lm_head is not base.lm_head
    assert merged_state(policy).keys() == base.state_dict().keys()
    assert adapters(policy) and not adapters(base)


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, more, words", [
    ("RwkvForCausalLM", [], "transformers cannot run it as a policy"),      # rows mix
    ("GPT2LMHeadModel", ["--max_gen_len", "120"], "train.jsonl, line 128 positions --max_gen_len")])
def test_run_that_a_model_cannot_take_is_one_sentence(family, more, words, saved, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_grpo.main(flags(saved(family)[0], tmp_path, *more))
    error = capsys.readouterr().err.splitlines()[-1]
    for word in words.split():
        assert word in error


def test_router_whose_loss_is_left_out_is_a_warning(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SIZES, vocab_size=9, num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=8, output_router_logits=True)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="router's balancing loss"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("wrong", ["positions", "cache"])
def test_rows_that_differ_from_single_sequences_are_noticed(wrong, saved, monkeypatch):
    folder, _ = saved("GPT2LMHeadModel")
    forward, select = AnyModel.forward, Cache.select
    if wrong == "positions":
        monkeypatch.setattr(AnyModel, "forward", lambda self, *args, **options: (
            self.known.discard("position_ids"), forward(self, *args, **options))[1])
    else:           # another row leaves than should
        monkeypatch.setattr(Cache, "select", lambda self, rows: select(
            self, rows.roll(1) if rows.dtype == torch.bool else rows))
    with pytest.raises(UserError, match="rows of a padded batch get logits that differ by"):
        load_pretrained(folder)


def test_lora_and_shard_need_layers_that_they_know(saved):
    folder, _ = saved("GPT2LMHeadModel")
    policy = load_pretrained(folder)
    with pytest.raises(UserError, match="--lora_rank: some/path"):
        with_adapters(policy, rank=1, alpha=1, name="some/path")
    with pytest.raises(UserError, match="--shard 1"):
        shard(policy, SimpleNamespace(), torch.float32, folder)


@pytest.mark.parametrize("change, message", [
    ({"n_layer": 3}, "is missing"), ({"model_type": "somebodys"}, "model type")])
def test_config_json_of_another_model_is_refused(change, message, saved, tmp_path):
    saved("GPT2LMHeadModel")[1].save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **change)
    with pytest.raises(UserError, match=message):
        load_pretrained(tmp_path)


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize("family, options, lacking", [
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "rope_type dynamic"),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2,
                  "decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ("Llama", {"mlp_bias": True}, "mlp_bias True"), ("Qwen3", {"hidden_act": "gelu"}, "gelu"),
    ("Qwen3", WINDOW, "sliding_window 8"), ("Qwen2", WINDOW, "sliding_window 8"),
    ("Qwen3", {"use_sliding_window": False, "sliding_window": 8}, ""),
])
def test_config_json_with_an_option_that_we_lack_leaves_a_model_to_transformers(
        family, options, lacking, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES | {"vocab_size": 99, "initializer_range": 0.3} | options)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert isinstance(ours, AnyModel) == bool(lacking)
    assert lacking in getattr(ours, "run_by", "")
    ids, mask = left_padded((15, 6), 99)
    with torch.no_grad():
        expected = theirs(ids[1:, -6:]).logits
        torch.testing.assert_close(ours(ids, mask)[1:, -6:], expected, atol=1e-5, rtol=0)
    if lacking:
        with pytest.raises(UserError, match=f"does not support .*{lacking}"):
            read_config(tmp_path)
