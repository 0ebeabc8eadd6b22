"""Experiments: many runs of train_grpo.py, summarised into one small file, and drawn from it.

    python -m report.experiments countdown              run what is missing, then draw
    python -m report.experiments loss_types --draw      only draw, from the results that we ship

An arm of an experiment is the flags of a run. Every arm runs with every seed, two runs at a time
with a thread each (--jobs), and each run becomes a line of report/results/<name>.jsonl:

    {"row", "arm", "seed", "seconds", "steps": [...], "series": {name: [...]}, "eval": {...}}

An arm may also change a line of the code (changes.py): it runs in a changed copy.

A series is averaged over each of up to 20 parts of the run. Interrupted, the same command goes on
with the runs that are missing; to run some again, delete their lines. The picture is
images/<name>.png, and the table is printed: means over the seeds, and the 95% confidence interval
of each (Student's t).
"""
import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .behaviour import behaviour_of_run
from .changes import BESIDE, LADDER, MUSEUM, NO_CLIP
from .command_line import UserError, user_errors
from .figures import draw_experiment, draw_lessons, print_table
from .jsonl import is_finite, read_jsonl

ROOT = Path(__file__).parent.parent
PARTS = 20

# --- the experiments ------------------------------------------------------------------------------
# {row of the picture: {arm: flags}}, the weights to make first, the seeds, and what to draw:
# {series: (title, what to see in it, format)}. {out} is the experiment's folder.

WEIGHTS = {
    "sooner": [
        "-m dataset.countdown --give_up 0.7 --sft {out}/sooner_texts --out_dir {out}/sooner_texts",
        "-m model.train_sft --data {out}/sooner_texts/give_up.jsonl --save {out}/sooner "
        "--init model/weights/countdown_128 --steps 80 --batch_size 64 --learning_rate 5e-4"],
    "random": [
        "-m dataset.countdown --order random --sft {out}/random_texts "
        "--out_dir {out}/random_texts",
        "-m model.train_sft --data {out}/random_texts/give_up.jsonl --save {out}/random "
        "--init model/weights/countdown_128 --steps 300 --batch_size 64 --learning_rate 1e-3"],
    "redundant": [
        "-m dataset.arithmetic --sft {out}/texts --out_dir {out}/texts",
        "-m model.train_sft --data {out}/texts/redundant.jsonl --init model/weights/reason_128 "
        "--save {out}/redundant --steps 400 --batch_size 64 --learning_rate 1e-3 "
        "--warmup_steps 20"],
}
COUNTDOWN = "@dataset/countdown.txt"
AVERAGES = {f"{loss_type}, {scale}": f"--loss_type {loss_type} --scale_rewards {scale} --beta 0 "
            "--batch_size 8 --num_generations 8 --num_minibatches 2 --max_steps 40 "
            "--eval_interval 0"
            for scale in ("group", "none") for loss_type in ("grpo", "bnpo", "dr_grpo", "r1")}
JUDGED = ("--reward_funcs format tag rm accuracy --reward_weights 1 1 1 0 --reward_model_clip 3 "
          "--max_steps 60 --eval_interval 0")
SHORT = "--max_steps 30 --eval_interval 5 --eval_samples 300"
REUSED = f"{SHORT} --num_iterations"
BRIEF = "--max_steps 120 --eval_interval 30 --eval_samples 500"

# Panels that several experiments have.
PANELS = {
    "eval/accuracy": ("Held-out accuracy, sampled", "never trained on", "{:.0%}"),
    "eval/greedy_accuracy": ("Held-out accuracy, greedy", "", "{:.0%}"),
    "eval/mean_length": ("Completion length, tokens", "held-out", "{:.0f}"),
    "length": ("Completion length, tokens", "", "{:.0f}"),
    "reward": ("Reward", "", "{:.2f}"),
    "frac_reward_zero_std": ("Dead groups", "whose rewards are all equal", "{:.0%}"),
    "kl": ("KL to the reference", "k3, per token", "{:.2g}"),
    "entropy": ("Entropy, nats per token", "", "{:.2g}"),
    "grad_norm": ("Gradient norm", "before it is clipped to 1", "{:.2g}"),
}


def arms(common, by_arm):
    return {arm: f"{common} {flags}" for arm, flags in by_arm.items()}


def panels(*names):
    return {name: PANELS[name] for name in names}


EXPERIMENTS = {
    "countdown": {
        "rows": {"": {
            "the shipped weights": COUNTDOWN,
            "gives up sooner": f"{COUNTDOWN} --model_path {{out}}/sooner",
            "tries in random order": f"{COUNTDOWN} --model_path {{out}}/random"}},
        "weights": ["sooner", "random"], "seeds": (42, 1, 2),
        "panels": {
            "eval/accuracy": ("Held-out accuracy, sampled", "problems never trained on", "{:.0%}"),
            "length": ("Completion length, tokens", "trying more pays", "{:.0f}"),
            "tries": ("Tries per answer", "at most 18 fit", "{:.1f}"),
            "gave_up": ("Gave up", "answers that end without a hit", "{:.0%}"),
            "checks_right": ("Checks that are right", "such as `56 57 no`", "{:.0%}"),
            "slips": ("Slips", "share of tries that compute wrongly", "{:.0%}"),
            "repeats": ("Repeats", "share of tries made before", "{:.0%}"),
            "cut_off": ("Cut off", "at 256 tokens", "{:.0%}")},
    },
    "loss_types": {
        "rows": {
            "Countdown": arms(COUNTDOWN, AVERAGES),
            "Countdown, cut off at 128 tokens": arms(f"{COUNTDOWN} --max_gen_len 128", AVERAGES),
            "Arithmetic, where half of the worked replies are wordy": arms(
                "--reward_funcs accuracy --model_path {out}/redundant --max_gen_len 192",
                AVERAGES)},
        "weights": ["redundant"], "seeds": (42, 1, 2, 3),
        "panels": {
            "length/right": ("Right answers, tokens", "mean length", "{:.0f}"),
            "length/wrong": ("Wrong answers, tokens", "mean length", "{:.0f}"),
            "right": ("Accuracy", "of training completions", "{:.0%}"),
            "cut_off": ("Cut off", "at the length limit", "{:.0%}"),
            "repeats": ("Repeated lines", "share of the thought", "{:.0%}")},
    },
    "reward_model": {
        "rows": {"": arms(JUDGED, {"no KL": "--beta 0"} | {
            f"{kl_type}, beta {beta}": f"--beta {beta} --kl_type {kl_type}"
            for beta in (0.3, 0.1) for kl_type in ("k1", "k2", "k3")}
            | {"k3, beta 0.02": "--beta 0.02"})},
        "weights": [], "seeds": (42, 1, 2),
        "panels": {
            "rewards/reward_model/mean": ("The reward model's score", "rewarded", "{:.2g}"),
            "rewards/accuracy_reward/mean": ("Right answers", "wanted, not rewarded", "{:.0%}"),
            "kl": ("KL to the reference", "k1, k2 or k3, per token", "{:.2g}"),
            "length": ("Completion length, tokens", "", "{:.0f}")},
    },
    "lora": {
        "rows": {"": {"all weights, 3e-4": BRIEF} | {
            f"rank {rank}, {rate}": f"{BRIEF} --lora_rank {rank} --learning_rate {rate}"
            for rank in (1, 4, 16) for rate in ("1e-3", "3e-3")}},
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "kl", "length"),
    },
    "clip": {
        "rows": {"": {f"{n} iteration{'s' * (n > 1)}, {name}": f"{REUSED} {n} {flags}".strip()
                      for name, flags in (("clip", ""), ("no clip", NO_CLIP)) for n in (1, 4, 16)}},
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "kl", "entropy", "grad_norm"),
    },
    "rewards": {
        "rows": {"": {"all four": BRIEF, "accuracy alone": f"{BRIEF} --reward_funcs accuracy"}},
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length",
                         "frac_reward_zero_std"),
    },
    "process": {
        "rows": {"": {"outcome": BRIEF, "process": f"{BRIEF} --supervision process"}},
        "weights": [], "seeds": (42, 1, 2, 3, 4),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length", "kl"),
    },
    "oversample": {
        "rows": {"": {"300 steps": "",
                      "150 steps with twice the prompts": "--oversample 2 --max_steps 150",
                      "188 steps with twice the prompts": "--oversample 2"}},     # an epoch
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "frac_reward_zero_std", "length")
        | {"eval/greedy_accuracy": ("Held-out accuracy, greedy", "", "{:.1%}")},
    },
    "groups": {
        "rows": {"": {f"groups of {size}": f"{SHORT} --num_generations {size} "
                      f"--batch_size {128 // size}" for size in (2, 4, 8, 16, 32)}
                 | {"groups of 8, beta 0": f"{SHORT} --beta 0"}},
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "frac_reward_zero_std", "reward", "grad_norm"),
    },
    "ladder": {
        "rows": {"": {rung: f"--max_steps 100 --eval_interval 20 --eval_samples 200 {change.flags}"
                      for rung, change in (LADDER | BESIDE).items()}},
        "changes": {("", rung): change for rung, change in (LADDER | BESIDE).items()
                    if change.before},
        "legend": ("Held-out accuracy", "with this line", "one rung below"),
        "lessons": {rung: (change.shown, "eval/accuracy", below and ("", below), ("", rung))
                    for below, (rung, change) in zip((None, *LADDER), LADDER.items())},
        "weights": [], "seeds": (42, 1, 2),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "length", "entropy", "grad_norm"),
    },
    "museum": {
        "rows": {error: {"right": change.flags, "wrong": change.flags}
                 for error, change in MUSEUM.items()},
        "changes": {(error, "wrong"): change for error, change in MUSEUM.items()},
        "legend": ("What an error does", "wrong", "right"),
        "lessons": {error: ("", change.watch, (error, "right"), (error, "wrong"))
                    for error, change in MUSEUM.items()},
        "weights": [], "seeds": (42, 1, 2, 3, 4),
        "panels": panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length", "kl",
                         "grad_norm")
        | {"rewards/format_reward/mean": ("Format reward", "at most 0.5", "{:.2f}"),
           "completions/clipped_ratio": ("Cut off", "at the length limit", "{:.0%}")},
    },
}


# --- running --------------------------------------------------------------------------------------

def python(arguments, log, folder=ROOT, **environment):
    """Run python with these arguments in a folder; UserError if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([sys.executable, *shlex.split(arguments)], cwd=folder, stdout=file,
                              stderr=subprocess.STDOUT, env=os.environ | environment)
    if done.returncode:
        raise UserError(f"python {arguments} failed; its output is in {log}")


def quoted(path):
    """A path as a piece of a command: it may hold spaces, or the backslashes of Windows."""
    return shlex.quote(path.as_posix())


def make_weights(names, out):
    for name in names:
        if not (out / name / "config.json").exists():
            for number, command in enumerate(WEIGHTS[name]):
                command = command.format(out=quoted(out))
                print(f"python {command}", flush=True)
                python(command, out / f"{name}_{number}.log")


def run_missing(experiment, results, out, jobs):
    """Run every arm with every seed, unless `results` has it, and append its summary there."""
    done = {(row["row"], row["arm"], row["seed"]) for row in read_jsonl(results)}
    missing = [(row, arm, seed) for seed in experiment["seeds"]
               for row, flags in experiment["rows"].items() for arm in flags
               if (row, arm, seed) not in done]

    def run(key):
        row, arm, seed = key
        name = "".join(c if c.isalnum() else "_" for c in f"{row} {arm} {seed}".strip())
        command = experiment["rows"][row][arm].format(out=quoted(out))
        if "train_grpo.py" not in command:          # with it, it also says how many processes
            command = f"train_grpo.py {command}"
        change = experiment.get("changes", {}).get((row, arm))
        folder = change.copy(ROOT, out / "changed" / name) if change else ROOT
        python(f"{command} --seed {seed} --out_dir {quoted(out)} --run_name {name}",
               out / f"{name}.log", folder=folder,
               **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {}))
        line = json.dumps({"row": row, "arm": arm, "seed": seed,
                           **summary(out / name, experiment["panels"])})
        with open(results, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        shutil.rmtree(out / name)           # its completions alone are megabytes
        if change:
            shutil.rmtree(folder)
        print(f"{row} {arm}, seed {seed}: done".strip(), flush=True)

    results.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(run, missing):
            pass


def prove(changes):
    """Print how each change's test fails in a copy with the change; UserError if it passes."""
    for (row, _), change in changes.items():
        if change.test:
            with tempfile.TemporaryDirectory() as folder:
                said = change.verdict(change.copy(ROOT, Path(folder)))
            print(f"{row}: {change.test.partition('::')[2]} fails: {said}", flush=True)


def summary(run_dir, names):
    """These series of a run, metrics or behaviour, in at most PARTS parts, and its evaluations."""
    behaviour = behaviour_of_run(run_dir)
    rows = [row | behaviour[row["step"]] for row in read_jsonl(run_dir / "metrics.jsonl")]
    evaluations = read_jsonl(run_dir / "eval.jsonl")
    names = [name for name in names if not name.startswith("eval/")]
    parts = np.array_split(np.arange(len(rows)), min(PARTS, len(rows)))
    return {
        "steps": [float(np.mean([rows[i]["step"] for i in part])) for part in parts],
        "series": {name: [mean(rows[i].get(name) for i in part) for part in parts]
                   for name in names if any(name in row for row in rows)},
        "eval": {name: [rounded(row.get(name)) for row in evaluations]
                 for name in (evaluations[0] if evaluations else ())},
        "seconds": round(sum(row["step_time"] for row in rows)),
    }


def results_of(experiment, path):
    """The results of the experiment's runs, in its order; of a run that is there twice, the last.

    Lines of arms that the experiment no longer has are left out.
    """
    found = {(line["row"], line["arm"], line["seed"]): line for line in read_jsonl(path)}
    runs = [(row, arm, seed) for row, flags in experiment["rows"].items() for arm in flags
            for seed in experiment["seeds"]]
    return [found[run] for run in runs if run in found]


def mean(values):
    values = [value for value in values if is_finite(value)]
    return rounded(sum(values) / len(values)) if values else None


def rounded(value):
    return float(f"{value:.4g}") if is_finite(value) else None


@user_errors("report.experiments")
def main():
    parser = argparse.ArgumentParser(
        prog="python -m report.experiments", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=tuple(EXPERIMENTS))
    parser.add_argument("--draw", action="store_true", help="only draw, from the results so far")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    args = parser.parse_args()
    experiment, out = EXPERIMENTS[args.name], ROOT / "out" / "experiments" / args.name
    results = Path(__file__).parent / "results" / f"{args.name}.jsonl"
    if not args.draw:
        make_weights(experiment["weights"], out)
        run_missing(experiment, results, out, args.jobs)
        prove(experiment.get("changes", {}))
    rows = results_of(experiment, results)
    picture = ROOT / "images" / f"{args.name}.png"
    if "lessons" in experiment:
        draw_lessons(rows, experiment["lessons"], experiment["panels"],
                     experiment["legend"], picture)
    else:
        draw_experiment(rows, experiment["panels"], picture)
    print_table(rows, experiment["panels"])


if __name__ == "__main__":
    main()
