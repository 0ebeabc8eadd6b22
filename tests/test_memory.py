"""The forecast of a run's memory, against what a process really took."""
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import train_grpo
from conftest import ROOT
from model import MiniMindConfig, MiniMindForCausalLM
from model.commands import memory
from model.fast import pair
from run.backends import forecast

SIZES = dict(vocab_size=6000, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
             num_attention_heads=6, num_key_value_heads=3, head_dim=64, tie_word_embeddings=True)
RUN = dict(num_prompts=4, num_generations=4, prompt_length=40, completion_length=64)
# The same steps with numbers. What a process has before is not counted, nor is a second thread's.
STEPS = """
import re, sys
import torch
from model import MiniMindConfig, MiniMindForCausalLM
from model.commands.memory import frozen_copy
from model.fast import pair
from model.lora import with_adapters

def steps(sizes, rows, rank, checkpointing, dtype, N=16, G=4, P=40, R=64):
    policy = MiniMindForCausalLM(MiniMindConfig(**sizes))
    if rank:
        policy = with_adapters(frozen_copy(policy, dtype), rank=rank, alpha=1)
    policy.model.gradient_checkpointing = checkpointing
    learns = [weight for weight in policy.parameters() if weight.requires_grad]
    moments = [torch.ones_like(weight) for weight in (*learns, *learns)]
    prompts = torch.randint(sizes["vocab_size"], (N // G, P))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16,
                        cache_enabled=False):
        ids, _ = pair.sample(policy, prompts, torch.ones_like(prompts), num_generations=G,
                             max_new_tokens=R, eos_token_id=[], pad_token_id=0)
    ids = torch.cat((prompts.repeat_interleave(G, 0), ids), 1)
    for part in ids[:2 * rows].split(rows):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16,
                            cache_enabled=False):
            logps, entropy = pair.token_logps(policy, part, torch.ones_like(part), R,
                                              with_entropy=True)
        entropy = entropy.detach()
        (logps - logps.detach()).exp().sum().backward()

torch.set_num_threads(1)
pair.PACK_FROM = 10**12                     # a GPU's products need no packed copies
sizes, rows, rank, checkpointing, dtype = eval(sys.argv[1])
# Not ru_maxrss, which begins with that of the process that started this one.
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
steps(sizes | dict(vocab_size=99, hidden_size=32, intermediate_size=32), rows, rank, checkpointing,
      dtype, R=9)
before = peak()
steps(sizes, rows, rank, checkpointing, dtype)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rows, rank, checkpointing, dtype", [
    (8, 0, False, torch.float32), (16, 0, True, torch.bfloat16), (8, 16, True, torch.float32)])
def test_the_forecast_is_what_a_step_takes(rows, rank, checkpointing, dtype, monkeypatch):
    flags = f"({SIZES}, {rows}, {rank}, {checkpointing}, {dtype})"
    # Freed memory goes back at once, so that the peak is that of what is in use.
    result = subprocess.run(
        [sys.executable, "-c", STEPS, flags], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
                          "MALLOC_ARENA_MAX": "1"})
    assert result.returncode == 0, result.stderr
    monkeypatch.setattr(pair, "PACK_FROM", 10**12)
    forecast = memory.of_rank(memory.step_bytes(
        MiniMindConfig(**SIZES), **RUN, micro_batch_size=rows, lora_rank=rank,
        checkpointing=checkpointing, dtype=dtype, device="cpu:0"))
    assert 0.9 < forecast["peak"] / int(result.stdout) < 1.1


def test_the_parameters_and_the_peak_of_a_real_size():
    run = {"num_prompts": 8, "num_generations": 8, "prompt_length": 256, "completion_length": 1024,
           "rollout_batch_size": 16}
    step = memory.step_bytes(memory.SIZES["Qwen3-0.6B"], reference=True, **run)
    one, of_eight = memory.of_rank(step), memory.of_rank(step, ranks=8)
    n, matrices = 596_049_920, 596_049_920 - 151_936 * 1024 - 65_536    # the norms: 65,536
    # 16 bytes a parameter, and the reference in bfloat16 but for what is no matrix.
    assert one["parameters"] == 16 * n + 2 * matrices + 4 * (n - matrices)
    assert of_eight["parameters"] == one["parameters"] / 8 and of_eight["peak"] < one["peak"]
    assert one["cache"] == 2 * 2 * 28 * 1024 * 16 * (256 + 1024)


@pytest.mark.parametrize("flags, MiB, first", [
    ("--batch_size 4", 600, "--gradient_checkpointing"),
    ("--batch_size 4 --gradient_checkpointing --micro_batch_size 8", 600, ""),
    ("--batch_size 48 --gradient_checkpointing --micro_batch_size 8", 600,
     "--rollout_batch_size 16"),
    ("--lora_rank 16 --sampler vllm --vllm_gpu_memory_utilization 0.9 --gradient_checkpointing "
     "--micro_batch_size 4", 300, "a lower --vllm_gpu_memory_utilization")])
def test_the_first_lines_say_whether_a_run_fits(flags, MiB, first, monkeypatch):
    args = train_grpo.parse_args(["--max_gen_len", "300", *flags.split()])
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=MiB * 2**20))
    with torch.device("meta"):
        policy = MiniMindForCausalLM(MiniMindConfig(**SIZES))
    world = SimpleNamespace(device=torch.device("cuda:0"), size=1, matrix_dtype=torch.bfloat16)
    said = forecast(SimpleNamespace(args=args, world=world, reference=None,
                                    policy=SimpleNamespace(model=policy),
                                    num_prompts=args.batch_size))
    assert said.startswith("about ") and f"of {MiB / 1024:.1f} GiB" in said
    assert said.partition("what helps: ")[2].split(", ")[0] == first
