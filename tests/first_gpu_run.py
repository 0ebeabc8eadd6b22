"""The first ten minutes with a GPU: what runs, and how fast, as a table for docs/in_practice.md.

    python tests/first_gpu_run.py                       all rows
    python tests/first_gpu_run.py --rows lora resume    some of them

Each row is a process of its own, with a time limit: one that fails leaves the others. It ends as
`ran: figures`, `skipped: why` or `failed: error`. "0.6B" is a model of Qwen3-0.6B's shape with
random weights. Times are medians, in milliseconds unless said. All rows take about eight minutes
on an H200, by estimate; those of the speed alone are

    python tests/first_gpu_run.py --rows rollout token update default step
"""
import argparse
import importlib.util
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import bench  # first: it imports train_grpo before torch
import torch

import train_grpo
from dataset import PromptCollator, PromptDataset
from dataset.jsonl import read_jsonl
from model import MiniMindConfig, MiniMindForCausalLM, fast, sampler
from model.fast import graphs, reading, shared_rows

ROOT = bench.ROOT
DEVICE = "cuda"
SIZE = dict(        # Qwen3-0.6B's
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
CASE = bench.Case(8, 8, 256, 16, SIZE, dtype="bfloat16", device=DEVICE)
SMALL = ["--max_steps", "3", "--batch_size", "4", "--num_generations", "4", "--max_gen_len", "48",
         "--eval_interval", "0", "--save_interval", "1"]


class Skipped(Exception):
    pass


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--row", choices=tuple(ROWS), help=argparse.SUPPRESS)   # of a process
    args = parser.parse_args()
    if args.row:
        return print_row(args.row)
    print("| what | how it went |\n|---|---|")
    for name in args.rows:
        try:
            how = process([__file__, "--row", name], timeout=600).splitlines()[-1]
        except subprocess.TimeoutExpired as late:
            how = f"failed: it took more than {late.timeout} s"
        except RuntimeError as error:
            how = f"failed: {error}"
        print(f"| {ROWS[name].__doc__} | {how.replace('|', '/')} |", flush=True)


def print_row(name):
    """In a process of its own: what became of a row, as its last line."""
    try:
        if DEVICE == "cuda" and not torch.cuda.is_available():
            raise Skipped("torch finds no GPU here")
        how = f"ran: {ROWS[name]()}"
    except Skipped as reason:
        how = f"skipped: {reason}"
    except Exception as error:
        how = f"failed: {type(error).__name__}: {error}".splitlines()[0]
    print(how)


def process(command, timeout=None):
    """What a Python program prints; an error with its last line if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          timeout=timeout)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {done.returncode}")
    return done.stdout.strip()


def run(out, *flags, ranks=0, small=True, script="train_grpo.py"):
    """The metrics of a run of the script, by step; an error with its last line if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    process([*(torchrun if ranks else ()), script, "--device", DEVICE, *(SMALL if small else ()),
             "--out_dir", str(out), *flags])
    return rows_of(out, "metrics")


def rows_of(out, file):
    return read_jsonl(next(Path(out).glob(f"*/{file}.jsonl")))


def three_steps(*flags, **options):
    with tempfile.TemporaryDirectory() as folder:
        *_, last = run(folder, *flags, **options)
    apart = last["rollout_probs_diff_mean"]
    if apart > 5e-3:
        raise RuntimeError(f"sampler and trainer differ by {apart:.1e}")
    return (f"reward {last['reward']:.2f}, gradient norm {last['grad_norm']:.2f}, sampler and "
            f"trainer differ by {apart:.1e}")


def parts_of_a_step(metrics):
    """The median seconds of each part of a step."""
    parts = {name.removeprefix("timing_s/"): median(line.get(name, 0) for line in metrics)
             for name in metrics[-1] if name.startswith("timing_s/")}
    return ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())


# --- what runs ------------------------------------------------------------------------------------


def suite():
    """the suite's CUDA part"""
    return process(["-m", "pytest", "-q", "tests/test_cuda.py"]).splitlines()[-1]


def loaded(dtype, sampler="fast", *flags):
    args = train_grpo.parse_args(["--device", DEVICE, "--dtype", dtype, "--sampler", sampler,
                                  "--reward_funcs", "format", *flags])
    return train_grpo.load(args, train_grpo.World(DEVICE, dtype))


def answers(state, greedy=False):
    """A rollout of the default task, 16 prompts x 8."""
    problems = PromptDataset(ROOT / "dataset/heldout.jsonl")[:16]
    return state.generate(PromptCollator(state.tokenizer, 99)(problems), state.world.rng(1),
                          greedy=greedy)


def read(state, rollout, reader):
    """The log-probs of a rollout by this reader, without the comparison that a run begins with."""
    return state.compute_logps(replace(state.policy, reader=reader), rollout).cpu()


def same_texts(first, second):
    same = sum(map(str.__eq__, first.completions, second.completions))
    return f"{same} of {len(first.completions)}"


def pair():
    """plain against fast, in float32 and bfloat16"""
    found, in_float32 = [], loaded("float32")
    for dtype in ("float32", "bfloat16"):
        plain, state = (loaded(dtype, name) for name in ("plain", "fast"))
        drawn, greedy = answers(state), [answers(one, greedy=True) for one in (plain, state)]
        ours, theirs = (read(state, drawn, one) for one in (fast.token_logps,
                                                            train_grpo.token_logps))
        exact = read(in_float32, drawn, fast.token_logps)
        mask = drawn.completion_mask.cpu() == 1
        apart, sampled, rounded = ((ours - other)[mask].abs() for other in (
            theirs, drawn.sampling_logps.cpu(), exact))
        found.append(
            f"{dtype}: model/fast and token_logps at most {apart.max():.1e} apart, on average "
            f"{apart.mean():.1e}, sampler and model/fast on average {sampled.mean():.1e}, "
            f"model/fast here and in float32 {rounded.mean():.1e}, at {len(apart)} tokens; "
            f"{same_texts(*greedy)} greedy texts the same, {same_texts(drawn, answers(state))} the "
            "same from one seed")
    return "; ".join(found)


def lora():
    """LoRA, three steps"""
    return three_steps("--lora_rank", "8")


TWO_ON_ONE = """
import os, sys
import torch.distributed as dist
sys.path.insert(0, ".")
import train_grpo
os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
begin = dist.init_process_group
dist.init_process_group = lambda kind, device_id, **options: begin("gloo", **options)
train_grpo.main(sys.argv[1:])
"""


def two_on_one():
    """two processes on one card, by Gloo"""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "two.py")
        script.write_text(TWO_ON_ONE)
        return three_steps(ranks=2, script=str(script))


def two_on_two():
    """two processes on two cards, by NCCL"""
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one card")
    return three_steps(ranks=2)


def resume():
    """a resume"""
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole"), Path(folder, "parts")
        run(whole)
        run(parts, "--max_steps", "2")
        run(parts, "--resume")
        pairs = zip(rows_of(whole, "completions"), rows_of(parts, "completions"))
        same = [a["completion"] == b["completion"] for a, b in pairs if a["step"] == 3]
    return f"{sum(same)} of {len(same)} texts of the step after it as without a break"


def vllm():
    """vLLM, one rank under torchrun for each of at most two cards"""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    return three_steps("--sampler", "vllm", ranks=max(1, min(2, torch.cuda.device_count())))


def memory():
    """memory and time of a step, 0.6B"""
    with tempfile.TemporaryDirectory() as folder:
        metrics = run(
            f"{folder}/out", "--model_path", str(bench.weights_of(CASE, folder)), "--reward_funcs",
            "repetition", "--batch_size", "8", "--num_generations", "8", "--max_gen_len", "512",
            "--micro_batch_size", "16", "--gradient_checkpointing", "--save_interval", "99")
    measured = max(line.get("perf/peak_memory", 0.0) for line in metrics)
    return (f"{measured:.2f} GiB, {metrics[-1]['tokens']} tokens, seconds: "
            f"{parts_of_a_step(metrics)}")


# --- how fast -------------------------------------------------------------------------------------


def milliseconds(function, times=5):
    """Returns (the first call, the median of the others)."""
    first, *others = [1000 * bench.seconds(function) for _ in range(times + 1)]
    return first, median(others)


def samplers():
    return {"graphs": graphs.Graphs(), "shared rows": shared_rows.sample, "plain": sampler.sample}


def rollout():
    """a rollout of the default task, 16 prompts x 8"""
    state, found = loaded("bfloat16"), []
    for name, own in samplers().items():
        state.policy = replace(state.policy, sampler=own)
        first, usual = milliseconds(lambda: answers(state))
        found.append(f"{name} {usual:.0f} (the first {first:.0f})")
    return ", ".join(found)


def model_of_06b():
    """A policy of this shape and its world, without files."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return MiniMindForCausalLM(MiniMindConfig(**SIZE)), train_grpo.World(DEVICE, "bfloat16")


def bandwidth():
    """Bytes a second that the card copies: read and written."""
    x = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds(lambda: y.copy_(x), 10)[1] * 1000


def token():
    """a sampled token of all rows, 0.6B"""
    model, world = model_of_06b()
    found, speed = [], bandwidth()
    matrices = sum(weight.numel() for weight in model.model.layers.parameters())
    per_token = 2 * 2 * SIZE["num_hidden_layers"] * SIZE["num_key_value_heads"] * SIZE["head_dim"]
    for name, rows, length in (("graphs", 64, 256), ("graphs", 256, 512), ("shared rows", 64, 64),
                               ("plain", 64, 64)):
        prompts, own = torch.full((rows // 8, 30), 7, device=DEVICE), samplers()[name]

        def sampled(own=own, prompts=prompts, length=length):
            with world.autocast():
                own(model, prompts, torch.ones_like(prompts), num_generations=8,
                    max_new_tokens=length, eos_token_id=bench.NO_EOS, pad_token_id=0)

        first, usual = milliseconds(sampled, 2)
        weights = 2 * matrices + 4 * model.lm_head.weight.numel()
        moved = weights + rows * (30 + length / 2) * per_token
        share = moved / speed / (usual / 1000 / length)
        found.append(f"{name}, {rows} rows x {length}: {usual / length:.1f} ms, {share:.0%} of the "
                     f"bandwidth, {rows * length / usual * 1000:,.0f} tokens/s, the first call "
                     f"{(first - usual) / 1000:.1f} s more")
        if name == "graphs":
            own.free()
    return f"{'; '.join(found)}; copies {speed / 1e12:.1f} TB/s"


def update():
    """log-probs and gradients by reader"""
    small, (large, world), found = loaded("bfloat16").policy.model, model_of_06b(), []
    for what, model, rows, sizes, R in (("default", small, 128, (64, 128), 81),
                                        ("0.6B", large, 64, (16, 64), 256)):
        for P in (30, 1000):
            sequences = repeated_prompts(rows, P, R, model.config.vocab_size)
            found += [f"{what}, prompts of {P}, micro-batch {size}: "
                      + of_readers(model, world, sequences, R, size) for size in sizes]
    return "; ".join(found)


def of_readers(model, world, sequences, R, size):
    taken = {}
    for name in ("plain", "tree", "packed", "chosen"):      # model/fast chooses one of two readers
        try:
            both = partial(passes, model, world, sequences, R, size, name)
            taken[name] = milliseconds(both, 2)[1]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    best = min(taken.get(name, float("inf")) for name in ("plain", "tree"))
    return (", ".join(f"{name} {ms:.0f}" for name, ms in taken.items())
            + f", {taken['chosen'] / best:.2f} of the faster of plain and tree")


def repeated_prompts(rows, P, R, V):
    """Groups of 8 with a prompt each, and random completions of R tokens: ids and mask."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (rows // 8, P), generator=generator).repeat_interleave(8, 0)
    ids = torch.cat((prompts, torch.randint(V, (rows, R), generator=generator)), 1).to(DEVICE)
    return ids, torch.ones_like(ids)


def passes(model, world, sequences, R, size, name):
    token_logps = train_grpo.token_logps if name == "plain" else fast.token_logps
    choose = {"tree": lambda *sequences: reading.read_tree,
              "packed": lambda *sequences: reading.read_packed}.get(name, reading.reader_of)
    with patch.object(reading, "reader_of", choose), world.autocast():
        for part in zip(*(x.split(size) for x in sequences)):
            token_logps(model, *part, R).sum().backward()
    model.zero_grad()


def default():
    """the default run, whole"""
    with tempfile.TemporaryDirectory() as folder:
        taken = bench.seconds(partial(run, folder, small=False))
        metrics, (before, *_, after) = rows_of(folder, "metrics"), rows_of(folder, "eval")
    sampled, greedy = ([line[name] for line in (before, after)]
                       for name in ("eval/accuracy", "eval/greedy_accuracy"))
    if sampled[1] < sampled[0] + 0.25:
        raise RuntimeError(f"it learned nothing: sampled accuracy {sampled}")
    return (f"{taken:.0f} s, sampled accuracy {sampled[0]:.1%} to {sampled[1]:.1%}, greedy "
            f"{greedy[0]:.1%} to {greedy[1]:.1%}; median seconds of a step: "
            f"{parts_of_a_step(metrics)}")


def step():
    """a step of 64 x 256 tokens, 0.6B, beside TRL's"""
    rows = [", ".join(row) for row in bench.rows_of(CASE, repetitions=2)]
    return "; ".join(rows) + " (theirs, fast, plain in seconds; fast, plain times as fast)" + (
        "" if bench.HAS_TRL else "; TRL is not installed")


ROWS = {row.__name__: row for row in (
    suite, pair, lora, two_on_one, two_on_two, resume, vllm, memory, rollout, token,
    update, default, step)}

if __name__ == "__main__":
    main()
