"""What only a GPU can show: python -m pytest tests/test_cuda.py. All other tests hide it.

Whole runs on a GPU are rows of tests/first_gpu_run.py.
"""
import pytest
import torch

import train_grpo
from model import fast, sampler
from model.fast import graphs, reading, shared_rows
from sampling import (
    FAMILIES,
    TEMPERATURE,
    draw,
    model_of,
    one_batch,
    pairs,
    sampler_is_off_by,
)

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_policy = pytest.mark.parametrize("family", [*FAMILIES, "adapters"])


def precision(dtype):
    return torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16)


def drawn(sample, model, dtype, **options):
    with precision(dtype):
        return draw(sample, model, num_generations=4, temperature=TEMPERATURE, **options)


def is_off_by(sample, model, dtype, **options):
    found = drawn(sample, model, dtype, **options)
    with precision(dtype):
        return sampler_is_off_by(model, *found)


@every_dtype
@every_policy
@pytest.mark.parametrize("sample", [shared_rows.sample, graphs.sample], ids=["rows", "graphs"])
def test_sampled_logps_are_those_of_a_plain_forward_on_a_gpu(sample, family, dtype):
    model = model_of(family).to(DEVICE)
    if sample is graphs.sample and graphs.lacking(model, dtype, torch.device(DEVICE)):
        pytest.skip("graphs don't cover this model")
    assert is_off_by(sample, model, dtype) < (1e-4 if dtype == torch.float32 else 0.02)
    if dtype == torch.float32:
        greedy = [drawn(one, model, dtype, greedy=True)[0] for one in (sample, sampler.sample)]
        assert torch.equal(*greedy)


@every_dtype
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "adapters"])
def test_graphs_follow_weights_that_change_or_move(family, dtype):
    model, own = model_of(family).to(DEVICE), graphs.Graphs()
    for i in range(4):
        assert is_off_by(own, model, dtype, seed=i) < 0.02
        number = len(own.buffers.graphs)
        for weight in model.parameters():
            weight.data = weight.data * 1.1 if i == 1 else weight.data.mul_(1.1)
    assert own.buffers.captures and number >= 1


def test_graphs_draw_by_their_seed_and_free_their_memory():
    model, own = model_of("qwen3").to(DEVICE), graphs.Graphs()
    found = [drawn(own, model, torch.bfloat16, seed=seed)[0].tolist() for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    del model
    own.free()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        drawn(own, model_of("qwen3").to(DEVICE), torch.bfloat16)
        own.free()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_flash_attention_is_aligned_at_the_end_of_the_keys():
    """As sdpa_attention is, which test_sampler.py computes by hand; gradients too."""
    torch.manual_seed(0)
    lengths = [2, 5, 1], [4, 5, 9]
    q, k, v = (torch.randn(sum(n), heads, 16, device=DEVICE, requires_grad=True)
               for n, heads in zip((lengths[0], lengths[1], lengths[1]), (4, 2, 2)))
    starts = [torch.tensor([0, *n], device=DEVICE).cumsum(0).int() for n in lengths]
    found = []
    for attend in (reading.flash_attention, reading.sdpa_attention):
        out = attend(q, k, v, starts=starts, longest=(5, 9)).float()
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, theirs in zip(*found):
        assert (ours - theirs).abs().max() < 0.03 * theirs.abs().max()


@every_dtype
@every_policy
def test_fast_logps_and_gradients_are_those_of_token_logps_on_a_gpu(family, dtype):
    model, sequences = model_of(family).to(DEVICE), [*one_batch(pairs())]
    sequences[:2] = (x.to(DEVICE) for x in sequences[:2])
    mask, results = sequences[1][:, -sequences[2]:] == 1, []
    for token_logps in (train_grpo.token_logps, fast.token_logps):
        with precision(dtype):
            logps = token_logps(model, *sequences)
        gradients = torch.autograd.grad(
            logps[mask].sum(), [x for x in model.parameters() if x.requires_grad])
        results.append((logps[mask], torch.cat([x.flatten() for x in gradients])))
    (plain, plain_gradient), (ours, gradient) = results
    assert (plain - ours).abs().mean() < (1e-5 if dtype == torch.float32 else 0.02)
    assert torch.cosine_similarity(plain_gradient, gradient, dim=0) > 0.99
