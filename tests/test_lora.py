"""LoRA: it starts as its base, learns what the dense formula says, and others can read it."""
import json

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from model import MiniMindConfig, MiniMindForCausalLM, fast, load_pretrained, sampler
from model.lora import adapters, merged_state, with_adapters
from steps import rollout_of_six
from support import POLICY, SMALL, jsonl
from train_grpo import token_logps

LAYERS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def pair():
    """A base, and a policy whose adapters have moved."""
    base, generator = load_pretrained(POLICY, dtype=torch.float32), torch.Generator().manual_seed(0)
    policy = with_adapters(base, rank=3, alpha=6, name=POLICY)
    for layer in adapters(policy).values():
        layer.lora_B.data.normal_(std=0.05, generator=generator)
    return base, policy


IDS = torch.randint(3, 280, (4, 20), generator=torch.Generator().manual_seed(1))


def test_adapters_start_as_their_base_and_share_its_weights():
    untouched, base = (load_pretrained(POLICY, dtype=torch.float32) for _ in range(2))
    policy = with_adapters(base, rank=2, alpha=32)
    assert torch.equal(policy(IDS), untouched(IDS)) and torch.equal(base(IDS), untouched(IDS))
    own = {weight.data_ptr() for weight in base.parameters()}
    learns = [weight for weight in policy.parameters() if weight.requires_grad]
    frozen = [weight for weight in policy.parameters() if not weight.requires_grad]
    assert len(learns) == 2 * 7 * 4 and {weight.data_ptr() for weight in frozen} == own
    layer = policy.model.layers[0].mlp.down_proj
    assert layer.lora_A.shape == (2, 352) and layer.lora_B.shape == (128, 2)
    assert 0 < layer.lora_A.std() < 1 and not layer.lora_B.any()
    again = with_adapters(untouched, rank=2, alpha=32)      # on every rank, and after a resume
    assert torch.equal(again.model.layers[0].mlp.down_proj.lora_A, layer.lora_A)


def test_adapters_compute_and_learn_what_dense_matrices_would(pair):
    base, policy = pair
    before = base(IDS)
    dense = load_pretrained(POLICY, dtype=torch.float32)
    dense.load_state_dict(merged_state(policy))
    assert (policy(IDS) - base(IDS)).abs().max() > 0.5
    torch.testing.assert_close(policy(IDS), dense(IDS), atol=1e-4, rtol=1e-5)
    for model in (policy, dense):
        model(IDS).logsumexp(-1).pow(2).mean().backward()
    for name, layer in adapters(policy).items():
        dW = dense.get_submodule(name).weight.grad
        torch.testing.assert_close(layer.lora_B.grad, 2 * dW @ layer.lora_A.T, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(layer.lora_A.grad, 2 * layer.lora_B.T @ dW, rtol=1e-3, atol=1e-6)
    assert torch.equal(base(IDS), before) and all(w.grad is None for w in base.parameters())


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_adapters_in_the_fast_pair_are_those_of_the_plain(dtype, atol, pair, monkeypatch):
    base, policy = pair
    monkeypatch.setattr(fast.shared_rows, "PACK_FROM", 1)       # packs weights of this size, too
    options = {"num_generations": 2, "max_new_tokens": 8, "eos_token_id": 2, "pad_token_id": 0,
               "greedy": True}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        plain, ours = (sample(policy, IDS[:, :9], torch.ones_like(IDS[:, :9]), **options)
                       for sample in (sampler.sample, fast.sample))
    if dtype == torch.float32:
        assert torch.equal(plain[0], ours[0])
    torch.testing.assert_close(plain[1], ours[1], atol=atol, rtol=0)
    six = rollout_of_six(base).sequences()
    torch.testing.assert_close(token_logps(policy, *six), fast.token_logps(policy, *six),
                               atol=1e-4, rtol=1e-4)


def test_adapters_are_saved_beside_merged_weights(tmp_path):
    train_grpo.main([*SMALL, "--lora_rank", "2", "--learning_rate", "1e-2", "--eval_interval", "0",
                     "--max_gen_len", "12", "--max_steps", "2", "--out_dir", str(tmp_path),
                     "--run_name", "run"])
    weights = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert weights.keys() == {
        f"base_model.model.model.layers.{i}.{name}.lora_{part}.weight" for i in range(4)
        for name in LAYERS for part in "AB"}
    config = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 32)
    assert config["target_modules"] == [name.partition(".")[2] for name in LAYERS]
    # The formula once more, from the files alone.
    final, base = (load_file(folder / "model.safetensors")
                   for folder in (tmp_path / "run/final", POLICY))
    for name, tensor in base.items():
        tensor, prefix = tensor.float(), f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{prefix}A.weight" in weights:
            tensor = tensor + 32 / 2 * weights[f"{prefix}B.weight"] @ weights[f"{prefix}A.weight"]
            assert not torch.equal(tensor, base[name].float())
        torch.testing.assert_close(final[name], tensor, rtol=1e-5, atol=1e-6)
    assert jsonl(tmp_path / "run/metrics.jsonl")[0]["kl"] == 0      # the policy is the reference


def test_adapters_leave_experts_alone():
    config = MiniMindConfig(vocab_size=99, hidden_size=16, intermediate_size=16, head_dim=4,
                            num_hidden_layers=2, num_experts=2)
    model = MiniMindForCausalLM(config)
    names = adapters(with_adapters(model, rank=1, alpha=1))
    assert "model.layers.1.self_attn.q_proj" in names
    assert not any("experts" in name for name in names)
