"""The sampler's shortcuts: packed weights, rows that leave, rare looks at a GPU. None may change what is sampled."""
import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from model import MiniMindConfig, MiniMindForCausalLM, in_precision, sample, sampler
from train_grpo import completion_mask, token_logps

PROMPTS, PAD, EOS = [[3, 9, 27, 11, 2, 8, 8, 31, 5], [6, 4], [1, 30, 17, 3, 12]], 7, [13, 21, 38]
FAMILIES = {
    "qwen3": {},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "llama, one key head": {"qk_norm": False, "num_key_value_heads": 1},
    "a key head for each head": {"num_key_value_heads": 4},
    "experts": {"num_experts": 3, "moe_intermediate_size": 320},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def wide(**changes):
    """Random weights, norms and biases too; some of the layers are large enough to be packed."""
    torch.manual_seed(1)
    config = {"vocab_size": 40, "hidden_size": 320, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 16,
              "initializer_range": 0.1, "tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = MiniMindForCausalLM(MiniMindConfig(**config | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def padded(prompts):
    P = max(map(len, prompts))
    return (torch.tensor([[PAD] * (P - len(p)) + p for p in prompts]),
            torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompts]))


def run(model, prompts=PROMPTS, num_generations=1, max_new_tokens=24, **options):
    return sample(model, *padded(prompts), num_generations=num_generations, max_new_tokens=max_new_tokens, eos_token_id=EOS,
                  pad_token_id=PAD, generator=torch.Generator().manual_seed(0), **options)


@torch.no_grad()
def one_forward_per_token(model, prompt, max_new_tokens):
    """Greedy, without cache, padding or a batch."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in EOS:
            break
    return ids[len(prompt):]


def with_path(path, monkeypatch):
    if path == "packed" and not sampler.can_pack(torch.zeros(1)):
        pytest.skip("this PyTorch has no oneDNN")
    if path == "plain":
        monkeypatch.setattr(sampler, "can_pack", lambda weight: False)
    if path == "as on a GPU":
        monkeypatch.setattr(sampler, "CHECK_EVERY", {})


@pytest.mark.parametrize("path", ["packed", "plain", "as on a GPU"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_one_forward_per_token_on_every_path(family, path, monkeypatch):
    with_path(path, monkeypatch)
    model = wide(**FAMILIES[family])
    is_plain = isinstance(sampler.linear(nn.Linear(320, 320)), functools.partial)
    assert is_plain == (path == "plain" or not sampler.can_pack(torch.zeros(1)))
    expected = [one_forward_per_token(model, prompt, 24) for prompt in PROMPTS]
    got, _ = run(model, greedy=True)
    width = max(map(len, expected))
    assert got.tolist() == [row + [PAD] * (width - len(row)) for row in expected]
    for prompt, row in zip(PROMPTS, expected):              # alone nothing is padded: no mask
        assert run(model, [prompt], greedy=True)[0].tolist() == [row]


@pytest.mark.parametrize("path", ["packed", "plain", "as on a GPU"])
def test_logps_are_the_trainers_while_rows_leave_the_batch(path, monkeypatch):
    with_path(path, monkeypatch)
    model, sizes = wide(), []
    select = sampler.Decoding.select
    monkeypatch.setattr(sampler.Decoding, "select", lambda self, rows: (sizes.append(len(rows)), select(self, rows)))
    ids, logps = run(model, num_generations=8, max_new_tokens=40, temperature=0.7)
    mask = completion_mask(ids, EOS)
    assert sizes[0] == 24 and len(sizes) > (1 if path == "as on a GPU" else 3) and sizes[-1] < 12     # they did leave
    assert ids.shape[1] == mask.sum(1).max() and mask.sum(1).unique().numel() > 8
    prompt_ids, prompt_mask = (x.repeat_interleave(8, 0) for x in padded(PROMPTS))
    with torch.no_grad():
        trained = token_logps(model, torch.cat((prompt_ids, ids), 1), torch.cat((prompt_mask, mask), 1), ids.shape[1],
                              temperature=0.7)
    torch.testing.assert_close(logps, trained * mask, atol=1e-4, rtol=0)
    assert ids[mask == 0].eq(PAD).all()


def test_a_loss_may_use_what_was_sampled():
    model = wide()
    ids, logps = run(model)
    weight = torch.ones(3, 1, requires_grad=True)
    ((weight * logps).sum() + model(ids).gather(-1, ids[..., None]).sum()).backward()
    torch.testing.assert_close(weight.grad[:, 0], logps.sum(1))


def test_the_weights_are_those_of_now():
    model = wide()
    first = run(model, greedy=True)[1]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(first[:, 0], run(model, greedy=True)[1][:, 0])


@torch.no_grad()
def test_layers_side_by_side_are_the_layers():
    torch.manual_seed(0)
    layers, x = [nn.Linear(320, 200), nn.Linear(320, 120)], torch.randn(4, 320)
    torch.testing.assert_close(sampler.linear(*layers)(x), torch.cat([layer(x) for layer in layers], 1), atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sampler.linear(*layers)(x), torch.cat([layer(x) for layer in layers], 1))
    assert not sampler.can_pack(torch.zeros(1).bfloat16()) and not sampler.can_pack(torch.zeros(1, device="meta"))


def test_layers_elsewhere_than_on_a_cpu_are_not_copied(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)     # knows no meta device
    layers = [nn.Linear(320, size, device="meta") for size in (200, 120)]
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: torch.full((len(x), layer.out_features), layer.out_features))
    assert sampler.linear(*layers)(torch.zeros(4, 320)).tolist() == [[200] * 200 + [120] * 120] * 4


def test_a_rollout_in_bfloat16_converts_each_weight_once_for_prompts_and_once_for_all_tokens():
    model, converted = in_precision(wide(), "bfloat16", torch.device("cpu")), []

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default) and out.dtype == torch.bfloat16:
                converted.append(out.shape)
            return out
    with Conversions():
        ids, _ = run(model, num_generations=8)
    assert ids.shape[1] > 9 and converted.count(model.lm_head.weight.shape) == 2
    assert ids.tolist() == run(model, num_generations=8)[0].tolist() and not torch.is_autocast_enabled("cpu")
