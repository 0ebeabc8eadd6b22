"""The first ten minutes with a GPU: what runs, and how fast, as a table for docs/in_practice.md.

    python tests/first_gpu_run.py                       all rows
    python tests/first_gpu_run.py --rows lora resume    some of them

Each row is a process of its own, with a time limit: one that fails leaves the others. It ends as
`ran: figures`, `skipped: why` or `failed: error`. The model of the last rows has the shape of
Qwen3-0.6B and random weights.
"""
import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
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


def run(out, *flags, ranks=0):
    """The metrics of a run of the script, by step; an error with its last line if it fails."""
    from support import jsonl
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += ["train_grpo.py", "--device", "cuda"]
    done = subprocess.run([*command, *SMALL, "--out_dir", str(out), *flags], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "tests"})
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word of why"])[-1])
    return jsonl(next(Path(out).glob("*/metrics.jsonl")))


def figures(metrics):
    last = metrics[-1]
    return (f"reward {last['reward']:.2f}, gradient norm {last['grad_norm']:.2f}, sampler and "
            f"trainer differ by {last['rollout_probs_diff_mean']:.1e}")


# --- the rows -------------------------------------------------------------------------------------


def suite():
    """the suite's CUDA part"""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_cuda.py"], cwd=ROOT,
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout.strip().splitlines()[-1])
    return done.stdout.strip().splitlines()[-1]


def loaded(dtype, sampler="fast", *flags):
    import train_grpo
    args = train_grpo.parse_args(["--device", "cuda", "--dtype", dtype, "--sampler", sampler,
                                  "--reward_funcs", "format", *flags])
    return train_grpo.load(args, train_grpo.World("cuda", dtype))


def answers(state, prompts=8, greedy=False):
    """A rollout of the default task."""
    from dataset import PromptCollator, PromptDataset
    problems = PromptDataset(ROOT / "dataset/heldout.jsonl")[:prompts]
    return state.generate(PromptCollator(state.tokenizer, 99)(problems), state.world.rng(1),
                          greedy=greedy)


def read(state, rollout, reader):
    """The log-probs of a rollout by this reader, without the comparison that a run begins with."""
    return state.compute_logps(replace(state.policy, reader=reader), rollout).cpu()


def readers(state, rollout):
    """How far model/fast and token_logps are apart at a token of this rollout."""
    import train_grpo
    from model import fast
    ours, theirs = (read(state, rollout, one) for one in (
        fast.token_logps, train_grpo.token_logps))
    apart = (ours - theirs).abs()[rollout.completion_mask.cpu() == 1]
    return (f"model/fast and token_logps at most {apart.max():.1e} apart, on average "
            f"{apart.mean():.1e}, at {len(apart)} tokens")


def pair():
    """plain against fast, float32"""
    states = [loaded("float32", name) for name in ("plain", "fast")]
    plain, fast = (answers(state, greedy=True) for state in states)
    same = sum(a == b for a, b in zip(plain.completions, fast.completions))
    return (f"{same} of {len(plain.completions)} greedy texts the same, "
            f"{readers(states[1], answers(states[1]))}")


def bfloat16():
    """bfloat16 against float32"""
    from model import fast
    state = loaded("bfloat16")
    rollout = answers(state)
    found = readers(state, rollout)
    logps = read(state, rollout, fast.token_logps)
    others = read(loaded("float32"), rollout, fast.token_logps)
    apart = (logps - others).abs()[rollout.completion_mask.cpu() == 1]
    return f"log-probs {apart.mean():.1e} apart on average, {found}"


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
             str(script), *SMALL, "--device", "cuda", "--out_dir", folder], cwd=ROOT,
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
    sizes = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "tie_word_embeddings": True}
    tokenizer = load_tokenizer(ROOT / "model/weights/reason_128", 10**9)
    config = transformers.Qwen3Config(**sizes | {"eos_token_id": sizes["vocab_size"] - 1})
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


def speed():
    """sampled tokens a second, 0.6B"""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        flags = random_weights(folder)
        for sampler in ("plain", "fast", "vllm"):
            if sampler == "vllm" and importlib.util.find_spec("vllm") is None:
                continue
            metrics = run(f"{folder}/{sampler}", *flags, "--sampler", sampler)
            rate = metrics[-1]["tokens"] / metrics[-1]["timing_s/rollout"]
            found.append(f"{sampler} {rate:,.0f}")
        found.append(f"generate {generated(folder):,.0f}")
    return ", ".join(found)


def generated(folder):
    """Tokens a second of transformers' generate, the second time."""
    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model, ids = model.to("cuda"), torch.full((64, 30), 7)
    for _ in range(2):
        start = time.perf_counter()
        texts = model.generate(ids.to(model.device), max_new_tokens=512, do_sample=True, top_k=0)
        torch.cuda.synchronize()
        rate = texts[:, 30:].numel() / (time.perf_counter() - start)
    return rate


ROWS = {row.__name__: row for row in (
    suite, pair, bfloat16, lora, two_on_one, two_on_two, resume, vllm, memory, speed)}

if __name__ == "__main__":
    main()
