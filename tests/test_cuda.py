"""What only a GPU can show: python -m pytest tests/test_cuda.py. All other tests hide it."""
import importlib.util
import subprocess
import sys

import pytest
import torch

import train_grpo
from model import fast, sampler
from model.fast import graphs, reading, shared_rows
from model.lora import adapters, with_adapters
from sampling import EOS, FAMILIES, PAD, PROMPTS, TEMPERATURE, one_batch, padded, pairs, wide
from support import ROOT, jsonl
from train_grpo import completion_mask

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_policy = pytest.mark.parametrize("family", [*FAMILIES, "adapters"])


def precision(dtype):
    return torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16)


def draw(sample, model, dtype, *, max_new_tokens=40, seed=0, **options):
    prompts = [x.to(DEVICE) for x in padded(PROMPTS)]
    with precision(dtype):
        return sample(model, *prompts, num_generations=4, max_new_tokens=max_new_tokens,
                      temperature=TEMPERATURE, eos_token_id=EOS, pad_token_id=PAD,
                      generator=torch.Generator(DEVICE).manual_seed(seed), **options)


def policy(family):
    if family != "adapters":
        return wide(**FAMILIES[family]).to(DEVICE)
    adapted = with_adapters(wide(), rank=4, alpha=32)
    for layer in adapters(adapted).values():
        torch.nn.init.normal_(layer.lora_B, std=0.05)
    return adapted.to(DEVICE)


@every_dtype
@every_policy
@pytest.mark.parametrize("sample", [shared_rows.sample, graphs.sample], ids=["rows", "graphs"])
def test_the_sampler_against_plain_forward(sample, family, dtype):
    model = policy(family)
    if sample is graphs.sample and graphs.lacking(model, dtype, torch.device(DEVICE)):
        pytest.skip("graphs don't cover this model")
    ids, logps = draw(sample, model, dtype)
    assert apart(model, ids, logps, dtype) < (1e-4 if dtype == torch.float32 else 0.02)
    if dtype == torch.float32:
        greedy = [draw(one, model, dtype, greedy=True)[0] for one in (sample, sampler.sample)]
        assert torch.equal(*greedy)


def apart(model, ids, logps, dtype):
    """How far the sampler's log-probs are from those of token_logps, on average."""
    mask = completion_mask(ids, EOS)
    prompt_ids, prompt_mask = (x.to(DEVICE).repeat_interleave(4, 0) for x in padded(PROMPTS))
    sequences = torch.cat((prompt_ids, ids), 1), torch.cat((prompt_mask, mask), 1), ids.shape[1]
    with torch.no_grad(), precision(dtype):
        trained = train_grpo.token_logps(model, *sequences, temperature=TEMPERATURE)
    return (logps - trained)[mask == 1].abs().mean()


@every_dtype
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "adapters"])
def test_graphs_follow_weights_that_change_or_move(family, dtype):
    model, own = policy(family), graphs.Graphs()
    for i in range(4):
        assert apart(model, *draw(own, model, dtype, seed=i), dtype) < 0.02
        number = len(own.buffers.graphs)
        for weight in model.parameters():
            weight.data = weight.data * 1.1 if i == 1 else weight.data.mul_(1.1)
    assert own.buffers.captures and number >= 1


def test_graphs_draw_by_their_seed_and_free_their_memory():
    model, own = policy("qwen3"), graphs.Graphs()
    found = [draw(own, model, torch.bfloat16, seed=seed)[0].tolist() for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
    del model
    own.free()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        draw(own, policy("qwen3"), torch.bfloat16)
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
def test_the_learning_passes_agree(family, dtype):
    model, sequences = policy(family), [*one_batch(pairs())]
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


def train(out, *flags, ranks=1):
    """The metrics of a run of the script."""
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         "train_grpo.py", "--device", DEVICE, "--out_dir", str(out), "--run_name", "run", *flags],
        cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return jsonl(out / "run/metrics.jsonl")


@every_dtype
def test_accuracy_rises_within_30_steps(dtype, tmp_path):
    metrics = train(tmp_path, "--max_steps", "30", "--eval_samples", "400",
                    "--dtype", str(dtype).removeprefix("torch."))
    before, *_, after = (line["eval/accuracy"] for line in jsonl(tmp_path / "run/eval.jsonl"))
    assert len(metrics) == 30 and before < 0.5 and after > before + 0.25
    assert max(line["rollout_probs_diff_mean"] for line in metrics) < 2e-3


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("ranks", range(1, 1 + min(2, torch.cuda.device_count())))
def test_vllm_samples_with_the_weights_of_each_step(ranks, tmp_path):
    metrics = train(tmp_path, "--sampler", "vllm", "--max_steps", "6", "--eval_samples", "16",
                    ranks=ranks)
    assert len(metrics) == 6 and metrics[5]["kl"] > 1e-4
    assert max(line["rollout_probs_diff_mean"] for line in metrics) < 5e-3
