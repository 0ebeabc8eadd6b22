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
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
DEVICE = "cuda"
SIZE = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
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
    print(f"| {'what':44} | how it went |\n|---|---|")
    for name in args.rows:
        title, limit = ROWS[name].__doc__, 600
        command = [sys.executable, __file__, "--row", name]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
            lines = done.stdout.strip().splitlines()
            how = lines[-1] if lines and done.returncode == 0 else failure(done.stderr)
        except subprocess.TimeoutExpired:
            how = f"failed: it took more than {limit} s"
        print(f"| {title:44} | {how.replace('|', '/')} |", flush=True)


def failure(text):
    return f"failed: {(text.strip().splitlines() or ['without a word'])[-1]}"


def print_row(name):
    """In a process of its own: what became of a row, as its last line."""
    import torch
    try:
        if not torch.cuda.is_available():
            raise Skipped("torch finds no GPU here")
        how = f"ran: {ROWS[name]()}"
    except Skipped as reason:
        how = f"skipped: {reason}"
    except Exception as error:
        how = failure(f"{type(error).__name__}: {error}")
    print(how)


def run(out, *flags, ranks=0, small=True):
    """The metrics of a run of the script, by step; an error with its last line if it fails."""
    from support import jsonl
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["train_grpo.py", "--device", DEVICE, *(SMALL if small else ())]
    done = subprocess.run([*command, "--out_dir", str(out), *flags], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "tests"})
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word of why"])[-1])
    return jsonl(next(Path(out).glob("*/metrics.jsonl")))


def figures(metrics):
    last = metrics[-1]
    return (f"reward {last['reward']:.2f}, gradient norm {last['grad_norm']:.2f}, sampler and "
            f"trainer differ by {last['rollout_probs_diff_mean']:.1e}")


# --- what runs ------------------------------------------------------------------------------------


def suite():
    """the suite's CUDA part"""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_cuda.py"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


def loaded(dtype, sampler="fast", *flags):
    import train_grpo
    args = train_grpo.parse_args(["--device", DEVICE, "--dtype", dtype, "--sampler", sampler,
                                  "--reward_funcs", "format", *flags])
    return train_grpo.load(args, train_grpo.World(DEVICE, dtype))


def answers(state, greedy=False):
    """A rollout of the default task, 16 prompts x 8."""
    from dataset import PromptCollator, PromptDataset
    problems = PromptDataset(ROOT / "dataset/heldout.jsonl")[:16]
    return state.generate(PromptCollator(state.tokenizer, 99)(problems), state.world.rng(1),
                          greedy=greedy)


def read(state, rollout, reader):
    """The log-probs of a rollout by this reader, without the comparison that a run begins with."""
    return state.compute_logps(replace(state.policy, reader=reader), rollout).cpu()


def readers(state, rollout):
    """How far apart three programs are at the tokens of a rollout: two readers and the sampler."""
    import train_grpo
    from model import fast
    ours, plain = (read(state, rollout, one) for one in (fast.token_logps, train_grpo.token_logps))
    mask = rollout.completion_mask.cpu() == 1
    apart, sampled = (ours - plain)[mask].abs(), (ours - rollout.sampling_logps.cpu())[mask].abs()
    return (f"model/fast and token_logps at most {apart.max():.1e} apart, on average "
            f"{apart.mean():.1e}, sampler and model/fast on average {sampled.mean():.1e}, at "
            f"{len(apart)} tokens")


def pair():
    """plain against fast, float32"""
    states = [loaded("float32", name) for name in ("plain", "fast")]
    return f"{same_texts(states)}, {readers(states[1], answers(states[1]))}"


def same_texts(states):
    plain, fast = (answers(state, greedy=True).completions for state in states)
    return f"{sum(map(str.__eq__, plain, fast))} of {len(plain)} greedy texts the same"


def bfloat16():
    """bfloat16: the same, and against float32"""
    from model import fast
    plain, state = (loaded("bfloat16", name) for name in ("plain", "fast"))
    rollout = answers(state)
    again = answers(state)
    logps = read(state, rollout, fast.token_logps)
    others = read(loaded("float32"), rollout, fast.token_logps)
    apart = (logps - others).abs()[rollout.completion_mask.cpu() == 1]
    repeated = sum(map(str.__eq__, rollout.completions, again.completions))
    return (f"log-probs {apart.mean():.1e} apart on average, {same_texts([plain, state])}, "
            f"{repeated} of {len(again.completions)} the same from one seed, "
            f"{readers(state, rollout)}")


def lora():
    """LoRA, three steps"""
    with tempfile.TemporaryDirectory() as folder:
        return figures(run(folder, "--lora_rank", "8"))


def two_on_one():
    """two processes on one card, by Gloo"""
    with tempfile.TemporaryDirectory() as folder:
        code = ("import os, sys, torch, torch.distributed as dist; sys.path.insert(0, '.'); "
                "os.environ['LOCAL_RANK'] = '0'; os.environ['LOCAL_WORLD_SIZE'] = '1'; "
                "begin = dist.init_process_group; "
                "dist.init_process_group = lambda kind, device_id, **options: begin("
                "'gloo', **options); import train_grpo; train_grpo.main(sys.argv[1:])")
        script = Path(folder, "two.py")
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
             str(script), *SMALL, "--device", DEVICE, "--out_dir", folder], cwd=ROOT,
            capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return "three steps"


def two_on_two():
    """two processes on two cards, by NCCL"""
    import torch
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one card")
    with tempfile.TemporaryDirectory() as folder:
        return figures(run(folder, ranks=2))


def resume():
    """a resume"""
    from support import jsonl
    with tempfile.TemporaryDirectory() as folder:
        run(f"{folder}/whole")
        run(f"{folder}/parts", "--max_steps", "2")
        run(f"{folder}/parts", "--resume")
        whole, parts = (jsonl(next(Path(folder, name).glob("*/completions.jsonl")))
                        for name in ("whole", "parts"))
    same = [a["completion"] == b["completion"] for a, b in zip(whole, parts) if a["step"] == 3]
    return f"{sum(same)} of {len(same)} texts of the step after it as without a break"


def vllm():
    """vLLM, one rank under torchrun"""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    with tempfile.TemporaryDirectory() as folder:
        return figures(run(folder, "--sampler", "vllm", ranks=1))


def random_weights(folder):
    """Weights of Qwen3-0.6B's shape, made by transformers' class."""
    import transformers

    from model import load_tokenizer
    tokenizer = load_tokenizer(ROOT / "model/weights/reason_128", 10**9)
    config = transformers.Qwen3Config(**SIZE | {"eos_token_id": SIZE["vocab_size"] - 1})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ["--model_path", folder, "--reward_funcs", "repetition", "--batch_size", "8",
            "--num_generations", "8", "--max_gen_len", "512", "--micro_batch_size", "16",
            "--gradient_checkpointing", "--save_interval", "99"]


def memory():
    """memory and time of a step, 0.6B"""
    with tempfile.TemporaryDirectory() as folder:
        flags = random_weights(folder)
        metrics = run(f"{folder}/out", *flags)
    measured = max(line.get("perf/peak_memory", 0.0) for line in metrics)
    parts = {name.removeprefix("timing_s/"): f"{seconds:.1f}"
             for name, seconds in metrics[-1].items() if name.startswith("timing_s/")}
    return f"{measured:.2f} GiB, {metrics[-1]['tokens']} tokens, seconds: {parts}"


# --- how fast -------------------------------------------------------------------------------------


def milliseconds(function, times=5):
    """Returns (the first call, the median of the others)."""
    import torch
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - start))
    return taken[0], median(taken[1:])


def samplers():
    from model import sampler
    from model.fast import graphs, shared_rows
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
    import torch

    from model import MiniMindConfig, MiniMindForCausalLM
    from run.distributed import World
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return MiniMindForCausalLM(MiniMindConfig(**SIZE)), World(DEVICE, "bfloat16")


def bandwidth():
    """Bytes a second that the card copies: read and written."""
    import torch
    x = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds(lambda: y.copy_(x), 10)[1] * 1000


def token():
    """a sampled token of all rows, 0.6B"""
    import torch
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
                    max_new_tokens=length, eos_token_id=10**6, pad_token_id=0)

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


@contextmanager
def reading_by(name):
    """Lets model/fast use this reader; "chosen" is the one that it chooses."""
    from model.fast import reading
    choose = reading.reader_of
    if name != "chosen":
        reading.reader_of = lambda *sequences: getattr(reading, f"read_{name}")
    try:
        yield
    finally:
        reading.reader_of = choose


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
    import torch
    taken = {}
    for name in ("plain", "tree", "packed", "chosen"):
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
    import torch
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (rows // 8, P), generator=generator).repeat_interleave(8, 0)
    ids = torch.cat((prompts, torch.randint(V, (rows, R), generator=generator)), 1).to(DEVICE)
    return ids, torch.ones_like(ids)


def passes(model, world, sequences, R, size, name):
    import train_grpo
    from model import fast
    reader = train_grpo.token_logps if name == "plain" else fast.token_logps
    with reading_by("chosen" if name == "plain" else name), world.autocast():
        for part in zip(*(x.split(size) for x in sequences)):
            reader(model, *part, R).sum().backward()
    model.zero_grad()


def default():
    """the default run, whole"""
    from support import jsonl
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        metrics = run(folder, small=False)
        taken = time.perf_counter() - start
        before, *_, after = jsonl(next(Path(folder).glob("*/eval.jsonl")))
    parts = {name.removeprefix("timing_s/"): f"{median(line.get(name, 0) for line in metrics):.3f}"
             for name in metrics[0] if name.startswith("timing_s/")}
    return (f"{taken:.0f} s, sampled accuracy {before['eval/accuracy']:.1%} to "
            f"{after['eval/accuracy']:.1%}, greedy {before['eval/greedy_accuracy']:.1%} to "
            f"{after['eval/greedy_accuracy']:.1%}; median seconds of a step: {parts}")


def step():
    """a step of 64 x 256 tokens, 0.6B, beside TRL's"""
    done = subprocess.run(
        [sys.executable, "tests/bench.py", "--device", DEVICE, "--cases", "0.6B-256",
         "--repetitions", "2"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    rows = [line.strip("| ").replace(" | ", ", ") for line in done.stdout.splitlines()
            if line.startswith("| ") and "what" not in line]
    has_trl = importlib.util.find_spec("trl") is not None
    return "; ".join(rows) + " (theirs, fast, plain in seconds; fast, plain times as fast)" + (
        "" if has_trl else "; TRL is not installed")


ROWS = {row.__name__: row for row in (
    suite, pair, bfloat16, lora, two_on_one, two_on_two, resume, vllm, memory, rollout, token,
    update, default, step)}

if __name__ == "__main__":
    main()
