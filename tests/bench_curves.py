"""The same learning curve as TRL's GRPOTrainer, run by hand:

    pip install -r tests/requirements-bench.txt
    python tests/bench_curves.py            120 steps of each, three seeds: about 15 minutes
    python tests/bench_curves.py --draw     only draw, from the results that we ship

Both sides start from the shipped policy and take the default task's steps: the same prompts in the
same order, the same four rewards, sampling at temperature 1, and one AdamW with the same learning
rate at each step. Only the random numbers of sampling differ. TRL's weights are evaluated by our
evaluation on the same problems, outside of its time. Both run in float32 on the CPU, one after the
other.

It writes docs/experiments/results/trl.jsonl and images/trl.png, as docs/experiments does.
"""
import argparse
import itertools
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo  # noqa: E402, I001 - before torch: it sets how OpenMP's threads wait
import torch  # noqa: E402
from dataset import batches_from, read_prompts  # noqa: E402
from model import fast, load_pretrained  # noqa: E402
from docs.experiments.figures import draw  # noqa: E402
from docs.experiments.__main__ import in_parts, print_table  # noqa: E402
from report.text import columns, read_jsonl, to_line  # noqa: E402
from report.metrics import training_time  # noqa: E402

RESULTS, PICTURE = ROOT / "docs/experiments/results/trl.jsonl", ROOT / "images/trl.png"
PANELS = {
    "eval/accuracy": ("Held-out accuracy, sampled", "1,000 problems never trained on", "{:.0%}"),
    "eval/greedy_accuracy": ("Held-out accuracy, greedy", "", "{:.0%}"),
    "reward": ("Reward", "the total of the training completions", "{:.3g}"),
    "completions/mean_length": ("Completion length, tokens", "in training", "{:.0f}"),
    "kl": ("KL to the reference", "k3, per token", "{:.3g}"),
    "minutes": ("Minutes of training", "without evaluations", "{:.1f}"),
}
FLAGS = ["--device", "cpu", "--dtype", "float32"]
EVERY = 20      # steps between evaluations; a point of the other curves is the mean of so many / 4


def save(arm, seed, rows, evaluations):
    """Append a run to the results; rows: the metrics of each step, with the seconds it took."""
    seconds = list(itertools.accumulate(row["seconds"] for row in rows))
    rows = [row | {"step": i + 1, "minutes": seconds[i] / 60} for i, row in enumerate(rows)]
    names = [name for name in PANELS if not name.startswith("eval/")]
    result = {"row": "", "arm": arm, "seed": seed,
              **in_parts(rows, names, 4 * len(rows) // EVERY),
              "eval": columns(evaluations), "seconds": round(seconds[-1])}
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(to_line(result))
    print(f"{arm}, seed {seed}: {seconds[-1]:.0f} s, held-out accuracy "
          f"{result['eval']['eval/accuracy']}", flush=True)


def ours(args):
    """python train_grpo.py itself, and what it wrote: (rows, evaluations), as save() takes them."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "train_grpo.py", *FLAGS, "--seed", str(args.seed), "--max_steps",
             str(args.max_steps), "--eval_interval", str(EVERY), "--out_dir", folder],
            cwd=ROOT, check=True, capture_output=True)
        run_dir, = Path(folder).iterdir()
        rows = [row | {"seconds": training_time(row)}
                for row in read_jsonl(run_dir / "metrics.jsonl")]
        return rows, read_jsonl(run_dir / "eval.jsonl")


def theirs(args):
    """GRPOTrainer with everything set as train_grpo.py has it."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, model, **kwargs):
            self.seconds = time.perf_counter() - self.start

        def on_log(self, args, state, control, logs, model, **kwargs):
            if "reward" not in logs:        # the summary after the last step
                return
            rows.append(logs | {"seconds": self.seconds})
            if state.global_step % EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    evaluate_weights(folder, state.global_step)

    def evaluate_weights(folder, step):
        policy = load_pretrained(folder, dtype=torch.float32)
        evaluations.append({"step": step} | train_grpo.evaluate(
            policy, problems=heldout, eval_funcs=eval_funcs, collate=collate, world=world,
            sample=fast.sample, args=args, step=step))

    rows, evaluations, path, world = [], [], args.model_path, train_grpo.World("cpu")
    tokenizer, _, _, reward_funcs, eval_funcs = train_grpo.load_models(args, world)
    collate, problems, heldout = read_prompts(args, tokenizer)
    prompts = [{"prompt": text, "messages": batch["columns"]["messages"][i],
                "answer": batch["columns"]["answer"][i]}
               for batch in batches_from(1, problems, collate, world, args)[0]
               for i, text in enumerate(batch["prompts"])]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.99),
                                  weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: train_grpo.lr_at(
            done + 1, args.max_steps, peak=1.0, warmup_steps=args.warmup_steps))
    with tempfile.TemporaryDirectory() as folder:
        completions = args.batch_size * args.num_generations
        trainer = GRPOTrainer(
            model, reward_funcs, train_dataset=Dataset.from_list(prompts), callbacks=[Steps()],
            processing_class=AutoTokenizer.from_pretrained(path), optimizers=(optimizer, schedule),
            args=GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, report_to="none", logging_steps=1,
                logging_strategy="steps", save_strategy="no", disable_tqdm=True, seed=args.seed,
                gradient_checkpointing=False, shuffle_dataset=False, max_steps=args.max_steps,
                num_generations=args.num_generations, max_grad_norm=args.grad_clip,
                per_device_train_batch_size=args.micro_batch_size,
                gradient_accumulation_steps=completions // args.micro_batch_size,
                max_completion_length=args.max_gen_len, temperature=1.0, top_k=0, top_p=1.0,
                beta=args.beta, loss_type="grpo", use_bias_correction_kl=False,
                scale_rewards="group", num_iterations=1, epsilon=args.epsilon_low))
        trainer.remove_callback(PrinterCallback)
        evaluate_weights(path, 0)
        trainer.train()
    return rows, evaluations


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    done = {(row["arm"], row["seed"]) for row in read_jsonl(RESULTS)}
    for seed in () if options.draw else options.seeds:
        args = train_grpo.parse_args(
            [*FLAGS, "--seed", str(seed), "--max_steps", str(options.steps)])
        for arm, train in (("MiniGRPO", ours), ("TRL", theirs)):
            if (arm, seed) not in done:
                save(arm, seed, *train(args))
    rows = read_jsonl(RESULTS)
    draw(rows, PANELS, PICTURE)
    print_table(rows, PANELS)


if __name__ == "__main__":
    main()
