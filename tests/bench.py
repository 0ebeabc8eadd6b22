"""Speed and memory of MiniGRPO beside TRL's GRPOTrainer and transformers' generate, on the same machine in the same minutes.

    pip install -r requirements.txt -r tests/requirements-bench.txt
    python tests/bench.py                                        all three cases, about 8 minutes on two cores
    python tests/bench.py --cases default --threads 1

Both sides get the same weights, prompts, reward functions, sampling (temperature 1, no top-k, no top-p), lengths, micro-batch,
learning rate and beta, in float32 on the CPU. They take turns: one step of TRL, one of ours, and so on in one process, so that
whatever else the machine does slows both; the first turn warms up and is left out. A step is everything from prompts to
moved weights: sample, reward, reference, forward, backward, optimizer. The figures are medians; "x" says how many times faster
we are. In the case `default`, the task that train_grpo.py learns, completions end with their EOS; in the others EOS is an id
that no model can sample, and every completion has the full length, and its reward is an arbitrary number that differs.

`limit` is the share of the machine's matrix-product rate, measured next to each case, that our step reaches: seconds that the
necessary products would take at that rate, by seconds taken. Necessary is what the sampled tokens need without padding: each
prompt once and each completion token once to sample, each sequence once under the reference (beta > 0), and three times (one
forward, two backward) under the policy, unless its advantage is 0 and beta too.

Memory is measured in processes of their own: by how much one step raises the peak above what was resident before it.
"""
import argparse
import contextlib
import importlib.util
import io
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402
from dataset import PromptCollator, PromptDataset  # noqa: E402
from model import MiniMindConfig, MiniMindForCausalLM, sample, save_pretrained  # noqa: E402
from reward import load_reward_funcs  # noqa: E402

SHIPPED = ROOT / "model/weights/reason_128"
NO_EOS = 1_000_000          # an id that no model here can sample
LEARNING_RATE = 1e-6        # moves the weights, but not so far that the two sides sample differently


@dataclass
class Case:
    prompts: int
    generations: int
    new_tokens: int
    micro_batch: int
    betas: tuple = (0.0,)
    config: dict = None     # sizes of a model with random weights; None: the shipped weights and their task
    prompt_tokens: int = 32


CASES = {
    "default": Case(16, 8, 96, 64, betas=(0.0, 0.02)),
    "1.7M": Case(16, 8, 128, 32, config=dict(
        vocab_size=512, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
        intermediate_size=512)),
    "26M": Case(4, 8, 128, 8, config=dict(
        vocab_size=6400, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=1408)),
}


# --- what both sides work on ------------------------------------------------------------------------------------------


def some_number(prompts, completions, **columns):
    """A reward for random text: it only has to differ within a group, or nobody would have anything to learn."""
    return [len(set(completion)) / 10 for completion in completions]


def rewards_of(case):
    return [some_number] if case.config else load_reward_funcs(["format", "tag", "accuracy"])


def weights_of(case, folder, tokenizer):
    if case.config is None:
        return SHIPPED
    torch.manual_seed(0)
    save_pretrained(MiniMindForCausalLM(MiniMindConfig(**case.config)), tokenizer, folder)
    return folder


def batches_of(case, count, tokenizer):
    """`count` batches of prompts, rendered and tokenized as train_grpo.py does."""
    collate = PromptCollator(tokenizer, max_seq_len=1024)
    problems, total = PromptDataset(ROOT / "dataset/train.jsonl"), count * case.prompts
    items = [problems[i % len(problems)] for i in range(total)]
    if case.config:         # digits, a token each, as many as make a prompt of prompt_tokens
        digits, draw = 1, random.Random(0)
        item = [{"messages": [{"role": "user", "content": "0"}]}]
        digits += case.prompt_tokens - collate(item)["prompt_ids"].shape[1]
        items = [{"messages": [{"role": "user", "content": "".join(draw.choices("0123456789", k=digits))}]}
                 for _ in range(total)]
    return [collate(items[start:start + case.prompts]) for start in range(0, total, case.prompts)]


class Ours:
    """train_grpo.py's step, as its main() makes it."""

    def __init__(self, case, path, beta):
        self.args = train_grpo.parse_args([
            "--model_path", str(path), "--device", "cpu", "--dtype", "float32", "--beta", str(beta), "--loss_type", "grpo",
            "--num_generations", str(case.generations), "--max_gen_len", str(case.new_tokens), "--reward_funcs", "format",
            "--micro_batch_size", str(case.micro_batch), "--learning_rate", str(LEARNING_RATE)])
        self.world = train_grpo.World("cpu")
        self.tokenizer, self.policy, self.reference, _ = train_grpo.load_models(self.args, self.world.device)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
        self.rewards = rewards_of(case)
        self.sampling, self.comparison, self.learning = train_grpo.settings_of(self.args)
        eos = [NO_EOS] if case.config else train_grpo.eos_token_ids(self.policy, self.tokenizer)
        self.sampling |= {"eos_token_id": eos, "pad_token_id": self.tokenizer.pad_token_id}

    def step(self, batch):
        """One step; the rollout, to count what was done."""
        G, logps_of = self.args.num_generations, {"micro_batch_size": self.args.micro_batch_size, "temperature": 1.0}
        rollout = train_grpo.ask(self.policy, batch, num_generations=G, **self.sampling)
        _, rewards, _ = train_grpo.judge(rollout, batch, self.tokenizer, self.rewards, [1.0] * len(self.rewards),
                                         num_generations=G)
        if self.reference is not None:
            rollout.ref_logps = train_grpo.remember(self.reference, rollout, **logps_of)
        rollout.advantages = train_grpo.compare(rollout, rewards, self.tokenizer, self.world, **self.comparison)
        train_grpo.learn(self.policy, self.optimizer, rollout, self.world, **self.learning, **logps_of)
        return rollout


def trl_trainer(case, path, batches, beta, folder, *, callbacks=(), counted=None):
    """A GRPOTrainer that takes one step on each batch; `counted` gets the number of completion tokens of each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def count(prompts, completions, completion_ids, **columns):
        if counted is not None:
            counted.append(sum(map(len, completion_ids)))
        return [0.0] * len(completions)

    rows = [{"prompt": prompt, "answer": answer} for batch in batches for prompt, answer in
            zip(batch["prompts"], batch["columns"].get("answer", [""] * len(batch["prompts"])))]
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False, max_steps=len(batches),
        per_device_train_batch_size=case.micro_batch, num_generations=case.generations,
        gradient_accumulation_steps=case.prompts * case.generations // case.micro_batch,
        max_completion_length=case.new_tokens, temperature=1.0, top_k=0, top_p=1.0, beta=beta, loss_type="grpo",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.99, weight_decay=0.0)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [*rewards_of(case), count],
                          args=config, train_dataset=Dataset.from_list(rows), callbacks=list(callbacks),
                          processing_class=AutoTokenizer.from_pretrained(path))
    if case.config:
        trainer.eos_token_ids = [NO_EOS]
        for settings in (trainer.generation_config.__dict__, trainer.generation_kwargs):
            settings["eos_token_id"] = [NO_EOS]
    return trainer


# --- measurements -----------------------------------------------------------------------------------------------------


def seconds(function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def gemm_rate(size=1536, repetitions=8):
    """FLOP/s of a float32 matrix product, the best of a few."""
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / min(seconds(torch.mm, a, b)[0] for _ in range(repetitions))


def necessary_flops(config, rollout, generations, beta):
    """Of one step's matrix products; see the top of this file."""
    layers, width = config.num_hidden_layers, config.num_attention_heads * config.head_dim
    linear = config.hidden_size * (2 * width + 2 * config.num_key_value_heads * config.head_dim + 3 * config.intermediate_size)

    def body(n):        # n tokens; the one at position s attends to s + 1
        return 2 * layers * linear * n + 4 * layers * width * n * (n + 1) / 2

    P, R = rollout.prompt_mask.sum(1).double(), rollout.mask.sum(1).double()            # (N,); the last token is no input
    sequence = body(P + R - 1) + 2 * config.hidden_size * config.vocab_size * R
    learned = torch.ones_like(R) if beta else (rollout.advantages != 0).double()
    sampling = (sequence - body(P)).sum() + body(P[::generations]).sum()
    return float(sampling + sequence.sum() * (beta > 0) + 3 * (sequence * learned).sum())


def compare_steps(case, path, batches, beta, folder):
    """Seconds and completion tokens of each step of the two sides, in turns, and of ours the necessary FLOPs."""
    from transformers import TrainerCallback

    ours, figures = Ours(case, path, beta), {"theirs": [], "ours": [], "their_tokens": [], "tokens": [], "flops": []}

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            figures["theirs"].append(time.perf_counter() - self.start)
            taken, rollout = seconds(ours.step, batches[state.global_step - 1])
            figures["ours"].append(taken)
            figures["tokens"].append(int(rollout.mask.sum()))
            figures["flops"].append(necessary_flops(ours.policy.config, rollout, case.generations, beta))

    trl_trainer(case, path, batches, beta, folder, callbacks=[Turns()], counted=figures["their_tokens"]).train()
    return figures


def compare_rollouts(case, path, batches):
    """Seconds of sampling alone, ours and generate's, in turns."""
    from transformers import AutoModelForCausalLM

    ours, model = Ours(case, path, 0.0), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    figures = {"theirs": [], "ours": []}
    for batch in batches:
        ids, mask = (batch[name].repeat_interleave(case.generations, 0) for name in ("prompt_ids", "prompt_mask"))
        figures["theirs"].append(seconds(
            model.generate, input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=case.new_tokens, eos_token_id=ours.sampling["eos_token_id"],
            pad_token_id=ours.sampling["pad_token_id"])[0])
        figures["ours"].append(seconds(sample, ours.policy, batch["prompt_ids"], batch["prompt_mask"],
                                       num_generations=case.generations, **ours.sampling)[0])
    return figures


def resident(field):
    """MiB of this process, by Linux: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def memory_of_step(side, case, folder, tokenizer):
    """MiB by which one step raises the peak: the child process's part."""
    path, batches = weights_of(case, folder, tokenizer), batches_of(case, 1, tokenizer)
    ours = Ours(case, path, case.betas[0]) if side == "ours" else None
    trainer = trl_trainer(case, path, batches, case.betas[0], folder) if side == "trl" else None
    Path("/proc/self/clear_refs").write_text("5")       # the peak is now what is resident now
    before = resident("VmRSS")
    ours.step(batches[0]) if ours else trainer.train()
    return resident("VmHWM") - before


def memory_in_child(side, name, times, threads):
    command = [sys.executable, __file__, "--memory", side, "--cases", name, "--times", str(times), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


# --- the report -------------------------------------------------------------------------------------------------------


def report_case(name, case, repetitions, threads, tokenizer):
    """Two tables of one case."""
    size = "weights of the default task" if case.config is None else "random weights"
    print(f"\n## {name}: {size}, {case.prompts} prompts x {case.generations}, at most {case.new_tokens} new tokens\n")
    print("| what | theirs, s | ours, s | x | completions/s | tokens, theirs and ours | GEMM, GFLOP/s | limit |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    completions, median = case.prompts * case.generations, statistics.median
    with tempfile.TemporaryDirectory() as folder:
        path, batches = weights_of(case, folder, tokenizer), batches_of(case, repetitions + 1, tokenizer)
        for beta in (None, *case.betas):
            rate = gemm_rate()
            figures = compare_rollouts(case, path, batches) if beta is None else compare_steps(case, path, batches, beta, folder)
            rate = max(rate, gemm_rate())
            figures = {key: values[1:] for key, values in figures.items()}          # the first turn warmed up
            theirs, ours = median(figures["theirs"]), median(figures["ours"])
            ratio = median(a / b for a, b in zip(figures["theirs"], figures["ours"]))
            what, tokens, limit = "rollout: generate", "", ""
            if beta is not None:
                what, tokens = f"step: TRL, beta {beta}", f"{median(figures['their_tokens']):.0f} {median(figures['tokens']):.0f}"
                limit = f"{median(flops / rate / taken for flops, taken in zip(figures['flops'], figures['ours'])):.0%}"
            print(f"| {what} | {theirs:.2f} | {ours:.2f} | {ratio:.2f} | {completions / ours:.0f} | {tokens} | {rate / 1e9:.0f} "
                  f"| {limit} |", flush=True)
    sides = (("trl", 1), ("ours", 1), ("ours", 2))
    trl, ours, doubled = (memory_in_child(side, name, times, threads) for side, times in sides)
    print(f"\nMemory of a step at micro-batch {case.micro_batch}: TRL {trl:.0f} MiB, ours {ours:.0f} MiB; "
          f"ours with twice the prompts {doubled:.0f} MiB", flush=True)


def report_growth(repetitions, tokenizer):
    """How our step's time grows, beside the work that it has to do."""
    base = CASES["1.7M"]
    wide = base.config | {"hidden_size": 384, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 1024}
    cases = {"1.7M": base, "twice the completions": replace(base, generations=16),
             "twice the new tokens": replace(base, new_tokens=256), "twice the width": replace(base, config=wide)}
    print("\n## how our step grows\n\n| what | seconds | time | necessary work |\n|---|---|---|---|")
    first = None
    for what, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            ours, batches = Ours(case, weights_of(case, folder, tokenizer), 0.0), batches_of(case, repetitions + 1, tokenizer)
            turns = [seconds(ours.step, batch) for batch in batches][1:]
        taken = statistics.median(turn[0] for turn in turns)
        flops = necessary_flops(ours.policy.config, turns[0][1], case.generations, 0.0)
        first = first or (taken, flops)
        print(f"| {what} | {taken:.2f} | {taken / first[0]:.2f} | {flops / first[1]:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="MiniGRPO beside TRL and transformers' generate")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=3, help="turns that count, of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", choices=("ours", "trl"), help=argparse.SUPPRESS)        # for the child processes
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("tests/bench.py: TRL is not installed; run pip install -r tests/requirements-bench.txt")
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    torch.set_num_threads(args.threads)
    if args.memory:
        case = CASES[args.cases[0]]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            used = memory_of_step(args.memory, replace(case, prompts=case.prompts * args.times), folder, tokenizer)
        print(used)
        return
    import transformers
    import trl
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}, "
          f"{args.threads} threads, medians of {args.repetitions}")
    for name in args.cases:
        report_case(name, CASES[name], args.repetitions, args.threads, tokenizer)
    report_growth(args.repetitions, tokenizer)


if __name__ == "__main__":
    main()
