"""Measures the memory that a rank of a sharded run takes to load its part, and to save the whole:

    python tests/bench_loading.py

Each row is a run of torchrun on the CPU, with random weights of a model's shape, saved in bfloat16
as they are published. The peak is that of rank 0's anonymous memory, less what it had before. What
is mapped does not count: those pages are the file's, one copy for all ranks, and the system takes
them back when it needs them. To load, a rank needs its parts of policy and reference; to save,
rank 0 needs all weights that are saved and all moments.
"""
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import bench
import torch

import train_grpo
from model import MiniMindConfig, MiniMindForCausalLM, Saver, World, load_tokenizer, save_pretrained
from model.storage.memory import num_parameters, peak_bytes

SMOLLM2 = MiniMindConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, head_dim=64, qk_norm=False)
FLAGS = ("--beta 0", "--beta 0.02", "--beta 0.02 --dtype bfloat16",
         "--beta 0.02 --dtype bfloat16 --lora_rank 16")


@contextmanager
def peak():
    """A list that gets the most anonymous memory during the block above that at its start."""
    anonymous, found, ended = [bench.resident("RssAnon")], [], threading.Event()

    def look():
        while not ended.wait(0.001):
            anonymous.append(bench.resident("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    ended.set()
    thread.join()
    found.append(max(anonymous) - anonymous[0])


def measure(folder, flags):
    """Bytes at the peak of loading, and of saving, on this rank."""
    args = train_grpo.parse_args(["--shard", "1", "--device", "cpu", "--model_path", folder,
                                  "--reward_funcs", "format", "--out_dir", folder,
                                  "--run_name", "run", *flags])
    world = World(args.device, args.dtype)
    world.gather([])                        # connects the ranks
    with peak() as loading:
        tokenizer, policy, reference, *_ = train_grpo.load_models(args, world)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    for weight in filter(lambda weight: weight.requires_grad, policy.parameters()):
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    saver = Saver(Path(folder) / "run", world, args)
    with peak() as saving:
        saver.save(1, 0, policy, tokenizer, optimizer, reference)
        saver.save_final(policy, tokenizer)
    world.close()
    return *loading, *saving


def measure_apart(config, ranks, flags):
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(bench.SHIPPED, 2**20)
        with torch.device("meta"):
            model = MiniMindForCausalLM(config)
        model.to(torch.bfloat16).to_empty(device="cpu").tie_weights()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        save_pretrained(model, tokenizer, folder)
        del model, weight
        # With this threshold freed tensors go back to the system, so the peak is that of live ones.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={ranks}", __file__, folder, *flags],
            env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return map(int, process.stdout.split())


def formula(config, ranks, flags):
    args = train_grpo.parse_args(flags)
    parts = peak_bytes(
        config, num_parameters(config), num_prompts=1, num_generations=1, prompt_length=1,
        completion_length=1, micro_batch_size=1, reference=args.beta > 0,
        gradient_checkpointing=False, gpu=args.dtype == "bfloat16", lora_rank=args.lora_rank)
    return (parts["weights"] + parts["reference"]) / ranks, parts["host"]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measured = measure(sys.argv[1], sys.argv[2:])
        if os.environ["RANK"] == "0":
            print(*measured)
    else:
        for flags, ranks in itertools.product(FLAGS, (2, 4)):
            pairs = zip(("loading", "saving"), measure_apart(SMOLLM2, ranks, flags.split()),
                        formula(SMOLLM2, ranks, flags.split()))
            print(f"{ranks} ranks, {flags}: " + "; ".join(
                f"{what} {measured / 2**20:.0f} MiB, by the formula {parts / 2**20:.0f} MiB"
                for what, measured, parts in pairs), flush=True)
