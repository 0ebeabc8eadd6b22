"""Measures the peak memory of GRPO steps and their time, beside what model/storage/memory.py says:

    python tests/bench_memory.py

Each row runs in processes of its own, on the CPU, in float32 or in bfloat16: two steps of sampling,
log-probs under the reference, and learning, so that gradients and moments exist. The peak is the
high-water mark of the resident memory, less what the code itself takes. A sharded row takes the
first of two ranks.
"""
import copy
import json
import math
import os
import subprocess
import sys

import bench
import torch

import train_grpo
from model import MiniMindConfig, MiniMindForCausalLM, Rollout, World
from model.fast import pair as fast
from model.lora import AdaptersOff, with_adapters
from model.processes.shard import shard
from model.processes.world import for_learning, for_sampling
from model.storage.memory import SIZES, num_parameters, peak_bytes

SMALL = {"vocab_size": 6400, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "qk_norm": False}
LARGE = SMALL | {"hidden_size": 768, "intermediate_size": 2432, "num_key_value_heads": 4,
                 "head_dim": 96, "qk_norm": True}
WIDE = SMALL | {"vocab_size": 64000, "num_hidden_layers": 4}
DEEP = LARGE | {"num_hidden_layers": 24}
SMOLLM2 = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
           "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
           "head_dim": 64, "qk_norm": False}
SENTENCES = {"num_prompts": 8, "prompt_length": 49, "completion_length": 40, "micro_batch_size": 64}
RUN = {"num_prompts": 2, "num_generations": 8, "prompt_length": 32, "completion_length": 64,
       "micro_batch_size": 4, "reference": True, "gradient_checkpointing": False}
FEW = {"num_prompts": 1, "num_generations": 4, "completion_length": 16, "lora_rank": 16}
ROWS = [
    (vars(SIZES["Qwen3-0.6B"]), {}), (vars(SIZES["Qwen3-0.6B"]), {"lora_rank": 16}),
    (vars(SIZES["Qwen3-0.6B"]), FEW | {"gpu": True, "lora_rank": 0}),
    *((vars(SIZES[f"Qwen3-{size}B"]), FEW | {"gpu": True}) for size in ("0.6", "1.7", "4")),
    (vars(SIZES["Qwen3-1.7B"]), FEW),
    (SMOLLM2, SENTENCES), (SMOLLM2, SENTENCES | {"lora_rank": 16}),
    (SMOLLM2, SENTENCES | {"gpu": True}), (SMOLLM2, SENTENCES | {"gpu": True, "lora_rank": 16}),
    (SMALL, {}), (SMALL, {"micro_batch_size": 1}), (SMALL, {"micro_batch_size": 16}),
    (SMALL, {"micro_batch_size": 16, "gradient_checkpointing": True}),
    (SMALL, {"reference": False}),
    (SMALL, {"num_prompts": 8, "completion_length": 8, "prompt_length": 120,
             "micro_batch_size": 1}),
    (WIDE, {"micro_batch_size": 16, "completion_length": 256}),     # the head in four chunks
    (LARGE, {"lora_rank": 8}), (WIDE, {"lora_rank": 8, "micro_batch_size": 16}),
    (LARGE, {}), (LARGE, {"micro_batch_size": 16}), (WIDE, {}), (WIDE, {"micro_batch_size": 16}),
    (LARGE, {"gpu": True}), (LARGE, {"gpu": True, "gradient_checkpointing": True}),
    (LARGE, {"gpu": True, "lora_rank": 8}), (LARGE, {"gpu": True, "reference": False}),
    (DEEP, {"ranks": 2}), (DEEP, {"ranks": 2, "lora_rank": 8}), (DEEP, {"ranks": 2, "gpu": True})]


def frozen(policy, dtype):
    """The policy as a model that doesn't learn is stored."""
    for layer in policy.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.to(dtype)
    return policy


def two_steps(sizes, run, world):
    """Sampling, log-probs under the reference, learning; twice. Returns the second's seconds."""
    G, dtype = run["num_generations"], world.matrix_dtype
    args = train_grpo.parse_args([
        "--micro_batch_size", str(run["micro_batch_size"]), "--shard", str(int("ranks" in run)),
        "--num_generations", str(G), "--beta", str(0.02 * run["reference"])])
    sample = for_sampling(fast.sample, world, args)
    logps_of = for_learning(fast.token_logps, world, args)
    with torch.device("meta"):          # a base in bfloat16 was never in float32
        policy, reference = MiniMindForCausalLM(MiniMindConfig(**sizes)), None
    base = frozen(policy, dtype) if run.get("lora_rank") else policy
    base.to_empty(device="cpu").tie_weights()
    for weight in base.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    policy.model.gradient_checkpointing = run["gradient_checkpointing"]
    if run.get("lora_rank"):
        policy = with_adapters(base, rank=run["lora_rank"], alpha=32)
        reference = AdaptersOff(policy) if args.shard else base
        del base
    elif run["reference"]:
        reference = frozen(copy.deepcopy(policy), dtype).requires_grad_(False)
    for model in (policy, reference) if args.shard else ():
        shard(model, world, dtype)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    prompts = torch.randint(1, 100, (run["num_prompts"], run["prompt_length"]))
    prompt_mask = torch.ones_like(prompts)
    prompt_mask[0, :8] = 0                                      # padding, as in any batch

    def step():
        ids, logps = sample(
            policy, prompts, prompt_mask, num_generations=G, eos_token_id=-1, pad_token_id=0,
            max_new_tokens=run["completion_length"])
        texts = [""] * len(ids)
        rollout = Rollout(
            prompts=texts, columns={}, prefills=texts, prompt_ids=prompts.repeat_interleave(G, 0),
            prompt_mask=prompt_mask.repeat_interleave(G, 0), completions=texts, completion_ids=ids,
            mask=torch.ones_like(ids), ended=torch.ones(len(ids)) == 0, sampling_logps=logps,
            rewards=torch.randn(len(ids)), advantages=torch.randn(len(ids)))
        if reference is not None:
            rollout.ref_logps = train_grpo.compute_logps(reference, rollout, logps_of, args)
        updates = train_grpo.minibatches(rollout, world, args)
        train_grpo.update_policy(policy, optimizer, 1e-6, updates, world, logps_of, args)

    return [bench.seconds(step) for _ in range(2)][1]


def measure(sizes, run):
    """Bytes at the peak of two steps, less those of two steps of a network of next to nothing;
    and the seconds of the second step."""
    nothing = {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16}
    world = World("cpu", "bfloat16" if run.get("gpu") else "float32")
    fast.PACK_FROM = math.inf if run.get("gpu") else fast.PACK_FROM     # a GPU packs nothing
    two_steps(SMALL | nothing | {"num_hidden_layers": 1}, run | {"lora_rank": 0}, world)
    baseline = bench.resident("VmHWM")
    seconds = two_steps(sizes, run, world)
    return bench.resident("VmHWM") - baseline, seconds


def measure_apart(sizes, run):
    """The same in a process of its own, so that no peak hides another."""
    # With this threshold freed tensors go back to the system, so the peak is that of live ones.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps([sizes, run])]
    if "ranks" in run:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={run['ranks']}"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    measured, seconds = process.stdout.split()
    return int(measured), float(seconds)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measured = measure(*json.loads(sys.argv[1]))
        if os.environ.get("RANK", "0") == "0":
            print(*measured)
    else:
        for sizes, changes in ROWS:
            run, config = RUN | changes, MiniMindConfig(**sizes)
            measured, seconds = measure_apart(sizes, run)
            formula = peak_bytes(config, num_parameters(config), **{"gpu": False} | run)["peak"]
            print(f"hidden {sizes['hidden_size']}, vocabulary {sizes['vocab_size']}, {changes}: "
                  f"measured {measured / 2**20:.0f} MiB, by the formula {formula / 2**20:.0f} MiB "
                  f"({formula / measured - 1:+.0%}), {seconds:.1f} s a step", flush=True)
