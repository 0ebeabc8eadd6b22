"""Speed and memory of MiniGRPO beside TRL's GRPOTrainer and transformers' generate: python tests/bench.py

Same weights, prompts, rewards, sampling (temperature 1, no top-k, no top-p), lengths, micro-batch, learning rate and beta,
in float32 on the CPU. The two take turns in one process, so that whatever else the machine does slows both; the first turn
warms up and is left out. A step is everything from prompts to moved weights; "x" is how many times faster we are. In
`default`, the task that train_grpo.py learns, completions end with their EOS; in the other cases none can, and rewards are
arbitrary numbers.

`limit` is the share of the machine's rate of matrix products, measured beside, that our step reaches, counting only what
real tokens need: each prompt once for all its completions, and each completion token once, to sample; the same under the
reference (beta > 0); three times that under the policy (forward, twice it for backward), or nothing where advantage and beta
are 0. A completion that was sampled twice is counted twice, though we learn from it in one pass.

Memory: how far one step, in a process of its own, raises the peak above what was resident before (Linux only).
"""
import argparse
import importlib.util
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

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
    config: dict = None     # sizes of a model with random weights; None: the shipped weights and their task
    betas: tuple = (0.0,)


CASES = {
    "default": Case(16, 8, 96, 64, betas=(0.0, 0.02)),
    "1.7M": Case(16, 8, 128, 32, dict(vocab_size=512, hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
                                      num_key_value_heads=2, head_dim=32, intermediate_size=512)),
    "26M": Case(4, 8, 128, 8, dict(vocab_size=6400, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
                                   num_key_value_heads=2, head_dim=64, intermediate_size=1408)),
}


def arbitrary(prompts, completions, **columns):
    return [len(set(completion)) / 10 for completion in completions]


def rewards_of(case):
    return [arbitrary] if case.config else load_reward_funcs(["format", "tag", "accuracy"])


def weights_of(case, folder, tokenizer):
    if case.config is None:
        return SHIPPED
    torch.manual_seed(0)
    save_pretrained(MiniMindForCausalLM(MiniMindConfig(**case.config)), tokenizer, folder)
    return folder


def batches_of(case, count, tokenizer):
    """Batches of the task's prompts, tokenized as train_grpo.py does; or of 32 tokens each, most of them random digits."""
    collate, draw, total = PromptCollator(tokenizer, max_seq_len=1024), random.Random(0), count * case.prompts
    items = (PromptDataset(ROOT / "dataset/train.jsonl").rows * total)[:total]
    if case.config:
        digits = 33 - collate([{"messages": [{"role": "user", "content": "0"}]}])["prompt_ids"].shape[1]
        items = [{"messages": [{"role": "user", "content": "".join(draw.choices("0123456789", k=digits))}]} for _ in items]
    return [collate(items[start:start + case.prompts]) for start in range(0, total, case.prompts)]


class Ours:
    """train_grpo.py's step, as its main() makes it."""

    def __init__(self, case, path, beta):
        self.args = train_grpo.parse_args([
            "--model_path", str(path), "--device", "cpu", "--dtype", "float32", "--beta", str(beta), "--loss_type", "grpo",
            "--num_generations", str(case.generations), "--max_gen_len", str(case.new_tokens), "--reward_funcs", "format"])
        self.world, self.rewards = train_grpo.World("cpu"), rewards_of(case)
        self.tokenizer, self.policy, self.reference, _ = train_grpo.load_models(self.args, self.world.device)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0,
                                           fused=True)
        self.sampling, self.comparison, self.learning = train_grpo.settings_of(self.args)
        eos = [NO_EOS] if case.config else train_grpo.eos_token_ids(self.policy, self.tokenizer)
        self.sampling |= {"eos_token_id": eos, "pad_token_id": self.tokenizer.pad_token_id}
        self.logps_of = {"micro_batch_size": case.micro_batch, "temperature": 1.0}

    def step(self, batch):
        """One step; returns the rollout, to count what was done."""
        G = self.args.num_generations
        rollout = train_grpo.ask(self.policy, batch, num_generations=G, **self.sampling)
        _, rewards, _ = train_grpo.judge(rollout, batch, self.tokenizer, self.rewards, [1.0] * len(self.rewards),
                                         num_generations=G)
        if self.reference is not None:
            rollout.ref_logps = train_grpo.remember(self.reference, rollout, **self.logps_of)
        rollout.advantages = train_grpo.compare(rollout, rewards, self.tokenizer, self.world, **self.comparison)
        train_grpo.learn(self.policy, self.optimizer, rollout, self.world, **self.learning, **self.logps_of)
        return rollout


def trl_trainer(case, path, batches, beta, folder, after_step=None):
    """A GRPOTrainer that takes a step on each batch, then calls after_step(step, seconds, completion tokens)."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    tokens = []

    def count(prompts, completions, completion_ids, **columns):     # a reward of 0 that sees what TRL sampled
        tokens.append(sum(map(len, completion_ids)))
        return [0.0] * len(completions)

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if after_step:
                after_step(state.global_step, time.perf_counter() - self.start, tokens[-1])

    rows = [{"prompt": text, **{name: column[i] for name, column in batch["columns"].items() if name != "messages"}}
            for batch in batches for i, text in enumerate(batch["prompts"])]
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=False, shuffle_dataset=False, max_steps=len(batches),
        per_device_train_batch_size=case.micro_batch, num_generations=case.generations,
        gradient_accumulation_steps=case.prompts * case.generations // case.micro_batch,
        max_completion_length=case.new_tokens, temperature=1.0, top_k=0, top_p=1.0, beta=beta, loss_type="grpo",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", adam_beta2=0.99, weight_decay=0.0)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), [*rewards_of(case), count],
                          args=config, train_dataset=Dataset.from_list(rows), callbacks=[Turns()],
                          processing_class=AutoTokenizer.from_pretrained(path))
    trainer.remove_callback(PrinterCallback)
    if case.config:
        trainer.eos_token_ids = trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = [NO_EOS]
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
    linear = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)     # weights of a layer

    def body(n):        # n tokens; the one at position s attends to s + 1
        return 2 * layers * linear * n + 4 * layers * width * n * (n + 1) / 2

    P, R = rollout.prompt_mask.sum(1).double(), rollout.mask.sum(1).double()            # (N,)
    # The last token is no input.
    completions = (body(P + R - 1) - body(P) + 2 * config.hidden_size * config.vocab_size * R).view(-1, generations)
    prompts = body(P[::generations])                                                    # (B,)
    learned = (rollout.advantages.view(-1, generations) != 0) | (beta > 0)
    forward = completions.sum() + prompts.sum()
    return float(forward * (1 + (beta > 0)) + 3 * (completions[learned].sum() + prompts[learned.any(1)].sum()))


def turns_of_rollouts(case, path, batches):
    """(seconds of generate, of our sampler) for each batch."""
    from transformers import AutoModelForCausalLM
    ours, model = Ours(case, path, beta=0.0), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for batch in batches:
        ids, mask = batch["prompt_ids"], batch["prompt_mask"]
        theirs, _ = seconds(model.generate, input_ids=ids.repeat_interleave(case.generations, 0), do_sample=True, top_k=0,
                            attention_mask=mask.repeat_interleave(case.generations, 0), top_p=1.0, temperature=1.0,
                            **{name: ours.sampling[name] for name in ("max_new_tokens", "eos_token_id", "pad_token_id")})
        yield theirs, seconds(sample, ours.policy, ids, mask, num_generations=case.generations, **ours.sampling)[0]


def turns_of_steps(case, path, batches, beta, folder):
    """(seconds of TRL, of ours, completion tokens of TRL, of ours, FLOPs that ours needs) for each batch."""
    ours, turns = Ours(case, path, beta), []

    def our_turn(step, theirs, their_tokens):
        taken, rollout = seconds(ours.step, batches[step - 1])
        flops = necessary_flops(ours.policy.config, rollout, case.generations, beta)
        turns.append((theirs, taken, their_tokens, int(rollout.mask.sum()), flops))

    trl_trainer(case, path, batches, beta, folder, our_turn).train()
    return turns


def memory(side, case, tokenizer):
    """MiB by which one step of `ours` or `trl` raises this process's peak."""
    def resident(field):
        return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1024

    with tempfile.TemporaryDirectory() as folder:
        path, batches = weights_of(case, folder, tokenizer), batches_of(case, 1, tokenizer)
        step = Ours(case, path, 0.0).step if side == "ours" else trl_trainer(case, path, batches, 0.0, folder).train
        Path("/proc/self/clear_refs").write_text("5")       # from here on the peak is what is resident now, or more
        before = resident("VmRSS")
        step(*batches if side == "ours" else ())
        return resident("VmHWM") - before


def memory_in_child(side, name, times, threads):
    command = [sys.executable, __file__, "--memory", side, "--cases", name, "--times", str(times), "--threads", str(threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def report_case(name, case, repetitions, threads, tokenizer):
    print(f"\n## {name}: {case.prompts} prompts x {case.generations} completions, {case.new_tokens} new tokens at most\n\n"
          "| what | theirs, s | ours, s | x | our completions/s | tokens, theirs, ours | GEMM, GFLOP/s | limit |\n"
          "|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, batches = weights_of(case, folder, tokenizer), batches_of(case, repetitions + 1, tokenizer)
        for beta in (None, *case.betas):
            rate, step = gemm_rate(), beta is not None
            turns = turns_of_steps(case, path, batches, beta, folder) if step else turns_of_rollouts(case, path, batches)
            rate, turns = max(rate, gemm_rate()), list(turns)[1:]
            theirs, ours, *rest = (median(column) for column in zip(*turns))
            what = f"step, TRL's, beta {beta}" if step else "rollout, generate's"
            tokens, limit = (f"{rest[0]:.0f}, {rest[1]:.0f}", f"{rest[2] / rate / ours:.0%}") if step else ("", "")
            print(f"| {what} | {theirs:.2f} | {ours:.2f} | {median(turn[0] / turn[1] for turn in turns):.2f} "
                  f"| {case.prompts * case.generations / ours:.1f} | {tokens} | {rate / 1e9:.0f} | {limit} |", flush=True)
    mib = [memory_in_child(side, name, times, threads) for side, times in (("trl", 1), ("ours", 1), ("ours", 2))]
    print(f"\nMemory of a step at micro-batch {case.micro_batch}, MiB: TRL {mib[0]:.0f}, ours {mib[1]:.0f}; ours with twice "
          f"the prompts {mib[2]:.0f}", flush=True)


def report_growth(tokenizer):
    base = CASES["1.7M"]
    deep = replace(base, config=base.config | {"num_hidden_layers": 8})
    print("\n## How our step grows\n\n| 1.7M with | seconds | times | necessary work, times |\n|---|---|---|---|")
    first = None
    for what, case in {"nothing changed": base, "twice the completions": replace(base, generations=16),
                       "twice the new tokens": replace(base, new_tokens=256), "twice the layers": deep}.items():
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(case, weights_of(case, folder, tokenizer), beta=0.0)
        turns = [seconds(ours.step, batch) for batch in batches_of(case, 3, tokenizer)][1:]
        taken = median(turn[0] for turn in turns)
        flops = necessary_flops(ours.policy.config, turns[0][1], case.generations, beta=0.0)
        first = first or (taken, flops)
        print(f"| {what} | {taken:.2f} | {taken / first[0]:.2f} | {flops / first[1]:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description="MiniGRPO beside TRL's GRPOTrainer and transformers' generate.")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=3, help="turns that count, of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", choices=("ours", "trl"), help=argparse.SUPPRESS)        # for memory_in_child
    parser.add_argument("--times", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("tests/bench.py: TRL is not installed; run pip install -r tests/requirements-bench.txt")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    import trl
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    if args.memory:
        case = CASES[args.cases[0]]
        print(memory(args.memory, replace(case, prompts=case.prompts * args.times), tokenizer))
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL {trl.__version__}, "
          f"{args.threads} threads, medians of {args.repetitions} turns")
    for name in args.cases:
        report_case(name, CASES[name], args.repetitions, args.threads, tokenizer)
    report_growth(tokenizer)


if __name__ == "__main__":
    main()
