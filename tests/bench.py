"""Speed and memory of MiniGRPO beside TRL's GRPOTrainer and transformers' generate:

    python tests/bench.py               ours, fast and plain, beside theirs
    python tests/bench.py --tricks      what each trick of model/fast is worth
    python tests/bench.py --device cuda     a page about a GPU: see tests/bench_cuda.py

All sides use the same weights, prompts, rewards, sampling (temperature 1, no top-k, no top-p),
lengths, micro-batch, learning rate and beta, in float32 on the CPU. They take turns in one process,
so that whatever else the machine does slows all of them; the first turn warms up and is left out.
A step is everything from prompts to updated weights. "fast" is what train_grpo.py runs by default,
"plain" is --fast 0, and the ratios are medians over the turns of how many times faster than theirs.

The cases: `default` is the task that train_grpo.py learns, from the shipped policy; `trained` the
same task from a policy after 60 steps, which is what most of a run is (seconds of training come
first). In the others weights and rewards are arbitrary, and no completion can end early.

`limit` is the share of the machine's rate of matrix products, measured beside, that our fast step
reaches, counting only necessary work: each prompt once for all its completions, and each completion
token once, to sample; the same under the reference (beta > 0); three times that under the policy
(forward, and twice it for backward), or nothing where advantage and beta are 0. A completion that
was sampled twice is counted twice, though we learn from it in one pass.

Memory: how far one step, in a process of its own, raises the peak above what was resident before
(Linux only).
"""
import argparse
import copy
import functools
import importlib.util
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402, I001 - before torch: it sets how OpenMP's threads wait
import torch  # noqa: E402
from dataset import PromptCollator, PromptDataset  # noqa: E402
from model import (  # noqa: E402
    MiniMindConfig,
    MiniMindForCausalLM,
    fast,
    sampler,
    save_pretrained,
)
from model.processes.world import for_learning, for_sampling  # noqa: E402
from reward import load_reward_funcs  # noqa: E402

SHIPPED = ROOT / "model/weights/reason_128"
NO_EOS = 1_000_000          # an id that no model here can sample
LEARNING_RATE = 1e-6        # moves the weights, but too little for the sides to sample differently


@dataclass
class Case:
    prompts: int
    generations: int
    new_tokens: int
    micro_batch: int
    config: dict = None     # sizes of a model with random weights; None: the default task
    trained: bool = False
    betas: tuple = (0.0,)


CASES = {
    "default": Case(16, 8, 96, 64, betas=(0.0, 0.02)),
    "trained": Case(16, 8, 96, 64, trained=True, betas=(0.0, 0.02)),
    "1.7M": Case(16, 8, 128, 32, dict(
        vocab_size=512, hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, intermediate_size=512)),
    "26M": Case(4, 8, 128, 8, dict(
        vocab_size=6400, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, intermediate_size=1408)),
}


def arbitrary(prompts, completions, **columns):
    return [len(set(completion)) / 10 for completion in completions]


def rewards_of(case):
    return [arbitrary] if case.config else load_reward_funcs(["format", "tag", "accuracy"])


def weights_of(case, folder, tokenizer):
    """Where the case's weights are; made first if they are not the shipped ones."""
    if case.trained:
        flags = ["--max_steps", "60", "--eval_interval", "0", "--out_dir", folder]
        subprocess.run([sys.executable, "train_grpo.py", *flags, "--run_name", "trained"],
                       cwd=ROOT, check=True, capture_output=True)
        return Path(folder) / "trained/final"
    if case.config is None:
        return SHIPPED
    torch.manual_seed(0)
    save_pretrained(MiniMindForCausalLM(MiniMindConfig(**case.config)), tokenizer, folder)
    return folder


def batches_of(case, count, tokenizer):
    """Batches of the task's prompts, or of 32 tokens each, most of them random digits."""
    collate, draw = PromptCollator(tokenizer, max_seq_len=1024), random.Random(0)
    total = count * case.prompts
    items = (PromptDataset(ROOT / "dataset/train.jsonl") * total)[:total]
    if case.config:
        def ask(text):
            return {"messages": [{"role": "user", "content": text}]}

        digits = 33 - collate([ask("0")])["prompt_ids"].shape[1]
        items = [ask("".join(draw.choices("0123456789", k=digits))) for _ in items]
    return [collate(items[start:start + case.prompts]) for start in range(0, total, case.prompts)]


class Ours:
    """train_grpo.py's step, as its main() takes it."""

    def __init__(self, case, path, beta, *, plain=False, device="cpu", dtype="float32"):
        self.args = train_grpo.parse_args([
            "--model_path", str(path), "--device", device, "--dtype", dtype,
            "--beta", str(beta), "--loss_type", "grpo", "--max_gen_len", str(case.new_tokens),
            "--num_generations", str(case.generations), "--micro_batch_size", str(case.micro_batch),
            "--reward_funcs", "format"])
        self.world, self.generator = train_grpo.World(device, dtype), torch.Generator(device)
        sample, token_logps = (sampler.sample, train_grpo.token_logps) if plain else (
            fast.sample, fast.token_logps)
        self.sample = for_sampling(sample, self.world, self.args)
        self.logps_of = for_learning(token_logps, self.world, self.args)
        self.tokenizer, self.policy, self.reference, *_ = train_grpo.load_models(
            self.args, self.world)
        if case.config:
            self.tokenizer = copy.deepcopy(self.tokenizer)
            self.policy.config.eos_token_id, self.policy.generation_config = NO_EOS, {}
            self.tokenizer.eos_token = None
        self.rewards = rewards_of(case)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE,
                                           betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def rollout(self, batch):
        return train_grpo.generate(self.policy, batch, self.tokenizer, self.sample, self.generator,
                                   self.args)

    def step(self, batch):
        """One step; returns the rollout, to count what was done."""
        rollout = self.rollout(batch)
        rollout.ref_logps = train_grpo.compute_logps(
            self.reference, rollout, self.logps_of, self.args)
        rollout.rewards, _ = train_grpo.compute_rewards(
            rollout, self.rewards, [1.0] * len(self.rewards))
        rollout.advantages = train_grpo.compute_advantages(
            rollout, self.policy, self.tokenizer, self.logps_of, self.world, self.args)
        self.learn(rollout)
        return rollout

    def learn(self, rollout):
        updates = train_grpo.minibatches(rollout, self.world, self.args)
        train_grpo.compute_old_logps(self.policy, updates, self.logps_of, self.args)
        train_grpo.update_policy(
            self.policy, self.optimizer, LEARNING_RATE, updates, self.world, self.logps_of,
            self.args)


def trl_trainer(case, path, batches, beta, folder, after_step=None, device="cpu"):
    """A GRPOTrainer that takes a step on each batch; after_step(step, seconds, its tokens)."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    tokens = []

    def count(prompts, completions, completion_ids, **columns):     # a reward of 0, to see them
        tokens.append(sum(map(len, completion_ids)))
        return [0.0] * len(completions)

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if after_step:
                after_step(state.global_step, time.perf_counter() - self.start, tokens[-1])

    rows = [{"prompt": text, **{name: column[i] for name, column in batch["columns"].items()
                                if name != "messages"}}
            for batch in batches for i, text in enumerate(batch["prompts"])]
    config = GRPOConfig(
        output_dir=folder, use_cpu=device == "cpu", bf16=device != "cpu",
        report_to="none", logging_strategy="no",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False,
        max_steps=len(batches), num_generations=case.generations,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.prompts * case.generations // case.micro_batch,
        max_completion_length=case.new_tokens, temperature=1.0, top_k=0, top_p=1.0, beta=beta,
        loss_type="grpo", learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        adam_beta2=0.99, weight_decay=0.0)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        [*rewards_of(case), count], args=config, train_dataset=Dataset.from_list(rows),
        callbacks=[Turns()], processing_class=AutoTokenizer.from_pretrained(path))
    trainer.remove_callback(PrinterCallback)
    if case.config:
        trainer.eos_token_ids = [NO_EOS]
        trainer.generation_config.eos_token_id = [NO_EOS]
        trainer.generation_kwargs["eos_token_id"] = [NO_EOS]
    return trainer


def seconds(function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def gemm_rate(size=1536):
    """FLOP/s of a float32 matrix product, the best of eight."""
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / min(seconds(torch.mm, a, b)[0] for _ in range(8))


def necessary_flops(config, rollout, generations, beta):
    """Of the matrix products of one step; see the top of this file."""
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    weights = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)

    def body(n):        # n tokens; the one at position s attends to s + 1
        return 2 * layers * weights * n + 4 * layers * width * n * (n + 1) / 2

    P, R = rollout.prompt_mask.sum(1).double(), rollout.lengths.double()                # (N,)
    head = 2 * config.hidden_size * config.vocab_size * R
    completions = (body(P + R - 1) - body(P) + head).view(-1, generations)  # the last is no input
    prompts = body(P[::generations])                                                    # (B,)
    learned = (rollout.advantages.view(-1, generations) != 0) | (beta > 0)
    forward = completions.sum() + prompts.sum()
    learning = completions[learned].sum() + prompts[learned.any(1)].sum()
    return float(forward * (1 + (beta > 0)) + 3 * learning)


def turns_of_rollouts(case, path, batches):
    """Seconds of generate, of our fast and of our plain sampler, for each batch."""
    from transformers import AutoModelForCausalLM
    ours = [Ours(case, path, beta=0.0, plain=plain) for plain in (False, True)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = ours[0].tokenizer
    eos = [NO_EOS] if case.config else tokenizer.eos_token_id
    for batch in batches:
        ids, mask = (batch[name].repeat_interleave(case.generations, 0)
                     for name in ("prompt_ids", "prompt_mask"))
        theirs, _ = seconds(
            model.generate, input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0,
            temperature=1.0, max_new_tokens=case.new_tokens, eos_token_id=eos,
            pad_token_id=tokenizer.pad_token_id)
        yield theirs, *(seconds(side.rollout, batch)[0] for side in ours)


def turns_of_steps(case, path, batches, beta, folder):
    """Seconds of TRL, ours fast and plain, tokens of TRL and ours, FLOPs, for each batch."""
    ours, turns = [Ours(case, path, beta, plain=plain) for plain in (False, True)], []

    def our_turn(step, theirs, their_tokens):
        (taken, rollout), (plain, _) = (seconds(side.step, batches[step - 1]) for side in ours)
        flops = necessary_flops(ours[0].policy.config, rollout, case.generations, beta)
        turns.append((theirs, taken, plain, their_tokens, int(rollout.mask.sum()), flops))

    trl_trainer(case, path, batches, beta, folder, our_turn).train()
    return turns


def memory(side, case, tokenizer):
    """MiB by which one step of `ours` or `trl` raises this process's peak."""
    def resident(field):
        status = Path("/proc/self/status").read_text()
        return int(status.split(field + ":")[1].split()[0]) / 1024

    with tempfile.TemporaryDirectory() as folder:
        path, batches = weights_of(case, folder, tokenizer), batches_of(case, 1, tokenizer)
        if side == "ours":
            step = functools.partial(Ours(case, path, 0.0).step, batches[0])
        else:
            step = trl_trainer(case, path, batches, 0.0, folder).train
        Path("/proc/self/clear_refs").write_text("5")       # the peak starts again from here
        before = resident("VmRSS")
        step()
        return resident("VmHWM") - before


def memory_in_child(side, name, times, threads):
    command = [sys.executable, __file__, "--memory", side, "--cases", name, "--times", str(times),
               "--threads", str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def report_case(name, case, repetitions, threads, tokenizer):
    print(f"\n## {name}: {case.prompts} prompts x {case.generations} completions, "
          f"{case.new_tokens} new tokens at most\n\n"
          "| what | theirs, s | fast, s | plain, s | fast, x | plain, x | tokens, theirs, ours "
          "| GEMM, GFLOP/s | limit |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = weights_of(case, folder, tokenizer)
        batches = batches_of(case, repetitions + 1, tokenizer)
        for beta in (None, *case.betas):
            rate, is_step = gemm_rate(), beta is not None
            turns = (turns_of_steps(case, path, batches, beta, folder) if is_step
                     else turns_of_rollouts(case, path, batches))
            turns = list(turns)[1:]
            rate = max(rate, gemm_rate())
            theirs, ours, plain, *rest = (median(column) for column in zip(*turns))
            ratios = [median(turn[0] / turn[side] for turn in turns) for side in (1, 2)]
            what = f"step, TRL's, beta {beta}" if is_step else "rollout, generate's"
            tokens = f"{rest[0]:.0f}, {rest[1]:.0f}" if is_step else ""
            limit = f"{rest[2] / rate / ours:.0%}" if is_step else ""
            print(f"| {what} | {theirs:.2f} | {ours:.2f} | {plain:.2f} | {ratios[0]:.2f} "
                  f"| {ratios[1]:.2f} | {tokens} | {rate / 1e9:.0f} | {limit} |", flush=True)
    if not case.trained:
        mib = [memory_in_child(side, name, times, threads)
               for side, times in (("trl", 1), ("ours", 1), ("ours", 2))]
        print(f"\nMemory of a step at micro-batch {case.micro_batch}, MiB: TRL {mib[0]:.0f}, ours "
              f"{mib[1]:.0f}; ours with twice the prompts {mib[2]:.0f}", flush=True)


# --- what each trick of model/fast is worth -------------------------------------------------------


def always_apart(branch):
    """`branch` as if no two completions ever said the same."""
    return lambda self, row, tokens: branch(self, row, torch.arange(len(row)))


TRICKS = {      # name -> (what it speeds up, where it is, its name there, what to put in its place)
    "completions that agree so far are one row": (
        "sampling", fast.Decoding, "branch", always_apart(fast.Decoding.branch)),
    "weights packed for oneDNN": ("sampling", fast, "PACK_FROM", float("inf")),
    "each distinct prefix is read once": (
        "learning", fast, "shared_with_the_row_above",
        lambda rows: torch.zeros_like(rows, dtype=torch.bool)),
    "sequences of like size attend together": (
        "learning", fast, "size_class", lambda count: torch.where(count > 0, 0.0, -1.0)),
}


@contextmanager
def without(trick):
    _, place, name, instead = TRICKS[trick]
    kept = getattr(place, name)
    setattr(place, name, instead)
    yield
    setattr(place, name, kept)


def report_tricks(names, repetitions, tokenizer):
    """How many times as long sampling or learning takes without each trick, in each case."""
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = weights_of(CASES[name], folder, tokenizer)
            ours = Ours(CASES[name], path, beta=0.0)
            plain = Ours(CASES[name], path, beta=0.0, plain=True)
        batch, = batches_of(CASES[name], 1, tokenizer)
        rollout = ours.rollout(batch)
        rollout.rewards = rollout.advantages = torch.randn(len(rollout.mask))

        def run(side, what, rollout=rollout, batch=batch):
            if what == "sampling":
                side.generator.manual_seed(0)
                return seconds(side.rollout, batch)[0]
            return seconds(side.learn, rollout)[0]

        def without_trick(trick, ours=ours, run=run):
            with without(trick):
                return run(ours, TRICKS[trick][0])

        for turn in range(repetitions + 1):
            base = {what: run(ours, what) for what in ("sampling", "learning")}
            times = {trick: without_trick(trick) / base[TRICKS[trick][0]] for trick in TRICKS}
            times |= {f"all of it, {what}": run(plain, what) / base[what] for what in base}
            for trick, ratio in times.items() if turn else ():
                results.setdefault(trick, {}).setdefault(name, []).append(ratio)
    print(f"\n| without | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for trick, ratios in results.items():
        what = f"{TRICKS[trick][0]}: {trick}" if trick in TRICKS else trick
        print(f"| {what} | {' | '.join(f'{median(ratios[name]):.2f}' for name in names)} |")


# --- growth ---------------------------------------------------------------------------------------


def report_growth(tokenizer):
    base = CASES["1.7M"]
    deep = replace(base, config=base.config | {"num_hidden_layers": 8})
    print("\n## How our step grows\n\n| 1.7M with | seconds | times | necessary work, times |\n"
          "|---|---|---|---|")
    first = None
    for what, case in {"nothing changed": base,
                       "twice the completions": replace(base, generations=16),
                       "twice the new tokens": replace(base, new_tokens=256),
                       "twice the layers": deep}.items():
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(case, weights_of(case, folder, tokenizer), beta=0.0)
        turns = [seconds(ours.step, batch) for batch in batches_of(case, 3, tokenizer)][1:]
        taken = median(turn[0] for turn in turns)
        flops = necessary_flops(ours.policy.config, turns[0][1], case.generations, beta=0.0)
        first = first or (taken, flops)
        print(f"| {what} | {taken:.2f} | {taken / first[0]:.2f} | {flops / first[1]:.2f} |",
              flush=True)


def main():
    parser = argparse.ArgumentParser(
        description="MiniGRPO beside TRL's GRPOTrainer and transformers' generate.")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, "0.6B"],
                        help="(default: all but 0.6B; with --device cuda that one)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each side that count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tricks", action="store_true",
                        help="what each trick of model/fast is worth, instead of the comparison")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="print the page about a GPU, or "
                        "try its code on a CPU, with --cases 1.7M, say")
    parser.add_argument("--memory", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    if args.device:
        import bench_cuda
        return bench_cuda.report(args.device, args.cases, args.repetitions, tokenizer)
    args.cases = args.cases or list(CASES)
    if args.tricks:
        return report_tricks(args.cases, args.repetitions, tokenizer)
    if importlib.util.find_spec("trl") is None:
        sys.exit("tests/bench.py: TRL is not installed; run pip install -r "
                 "tests/requirements-bench.txt")
    import trl
    if args.memory:
        case = CASES[args.cases[0]]
        case = replace(case, prompts=case.prompts * args.times)
        print(memory(args.memory, case, tokenizer))
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL "
          f"{trl.__version__}, {args.threads} threads, medians of {args.repetitions} turns")
    for name in args.cases:
        report_case(name, CASES[name], args.repetitions, args.threads, tokenizer)
    report_growth(tokenizer)


if __name__ == "__main__":
    main()
