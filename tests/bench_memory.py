"""Measures the peak memory of GRPO steps and holds it against model/memory.py: python tests/bench_memory.py

Each row runs in a process of its own, on the CPU in float32: sample, remember, learn, twice, so that gradients and moments
are there; its peak is the high-water mark of the resident memory, less what the imports took.
"""
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_grpo                                                                               # noqa: E402
from model import MiniMindConfig, MiniMindForCausalLM                                           # noqa: E402
from model.memory import num_parameters, peak_bytes                                             # noqa: E402

SMALL = {"vocab_size": 6400, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "qk_norm": False}
LARGE = SMALL | {"hidden_size": 768, "intermediate_size": 2432, "num_key_value_heads": 4, "head_dim": 96, "qk_norm": True}
WIDE = SMALL | {"vocab_size": 64000, "num_hidden_layers": 4}
RUN = {"num_prompts": 2, "num_generations": 8, "prompt_length": 32, "completion_length": 64, "micro_batch_size": 4,
       "reference": True, "gradient_checkpointing": False}
ROWS = [(SMALL, {}), (SMALL, {"micro_batch_size": 1}), (SMALL, {"micro_batch_size": 16}),
        (SMALL, {"micro_batch_size": 16, "gradient_checkpointing": True}), (SMALL, {"reference": False}),
        (SMALL, {"num_prompts": 8, "completion_length": 8, "prompt_length": 120, "micro_batch_size": 1}),
        (LARGE, {}), (LARGE, {"micro_batch_size": 16}), (WIDE, {}), (WIDE, {"micro_batch_size": 16})]


def peak_of_this_process():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def two_steps(sizes, run):
    """Sample, remember, learn, twice."""
    policy = MiniMindForCausalLM(MiniMindConfig(**sizes))
    policy.model.gradient_checkpointing = run["gradient_checkpointing"]
    reference = copy.deepcopy(policy) if run["reference"] else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    prompts = torch.randint(1, 100, (run["num_prompts"], run["prompt_length"]))
    mask = torch.ones_like(prompts)
    mask[0, :8] = 0                                             # padding, as in any batch
    logps_of = {"micro_batch_size": run["micro_batch_size"], "temperature": 1.0}
    for _ in range(2):
        rollout = train_grpo.ask(policy, {"prompt_ids": prompts, "prompt_mask": mask}, eos_token_id=-1, pad_token_id=0,
                                 num_generations=run["num_generations"], max_new_tokens=run["completion_length"])
        rollout.advantages = torch.randn(len(rollout.mask))
        if reference is not None:
            rollout.ref_logps = train_grpo.remember(reference, rollout, **logps_of)
        train_grpo.learn(policy, optimizer, rollout, train_grpo.World("cpu"), num_iterations=1, grad_clip=1.0,
                         beta=0.02 if reference is not None else 0.0, **logps_of)


def measure(sizes, run):
    """Bytes at the peak of two steps, above what two steps of next to nothing take: the code itself."""
    two_steps(SMALL | {"vocab_size": 100, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}, RUN)
    baseline = peak_of_this_process()
    two_steps(sizes, run)
    return peak_of_this_process() - baseline


def measure_apart(sizes, run):
    """The same in a process of its own, so that no peak hides another."""
    # Large tensors go back to the system when freed: the peak is then that of the live ones, not of gaps between them.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, __file__, json.dumps([sizes, run])], env=environment,
                             capture_output=True, text=True, check=True)
    return int(process.stdout)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(*json.loads(sys.argv[1])))
    else:
        for sizes, changes in ROWS:
            run, config = RUN | changes, MiniMindConfig(**sizes)
            measured, told = measure_apart(sizes, run), peak_bytes(config, num_parameters(config), **run, gpu=False)["peak"]
            print(f"hidden {sizes['hidden_size']}, vocabulary {sizes['vocab_size']}, {changes}: "
                  f"measured {measured / 2**20:.0f} MiB, "
                  f"by the formula {told / 2**20:.0f} MiB ({told / measured - 1:+.0%})", flush=True)
