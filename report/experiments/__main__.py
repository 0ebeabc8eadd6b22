"""Experiments: many runs of train_grpo.py, summarised into one small file, and drawn from it.

    python -m report.experiments countdown              run what is missing, then draw
    python -m report.experiments loss_types --draw      only draw, from the results that we ship

An arm of an experiment is the flags of a run. Every arm runs with every seed, two runs at a time
with a thread each (--jobs), and each run becomes a line of report/experiments/results/<name>.jsonl:

    {"row", "arm", "seed", "seconds", "steps": [...], "series": {name: [...]}, "eval": {...}}

An arm may also change a line of the code: it runs in a changed copy. A series is averaged over each
of up to 20 parts of the run. Interrupted, the same command makes again what the arms read, and goes
on with the runs that are missing; to run some again, delete their lines. The picture is
images/<name>.png, and the table is printed: means over the seeds, and the 95% confidence interval
of each (Student's t). arms.py holds what each experiment runs and draws.
"""
import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import UserError, user_errors
from ..metrics import mean_metrics
from ..text import columns, is_finite, read_jsonl, rounded, to_line
from .arms import EXPERIMENTS
from .figures import draw_experiment, draw_lessons, print_table

ROOT = Path(__file__).parents[2]
PARTS = 20
THOUGHT = re.compile(r"(?:<think>)?\s*(.*?)\s*(?:</think>|\Z)", re.DOTALL)
# A try at Countdown: `8*6=48+9=57 57 yes`, an expression worked left to right, target, verdict.
TRY = re.compile(r"(.*=(\d+)) (\d+) (yes|no)")
EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(?=(\d+))")


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
    path = Path(__file__).parent / "results" / f"{args.name}.jsonl"
    if not args.draw:
        if not all(results_of(experiment, path).values()):
            for number, line in enumerate(experiment.first):
                line = line.format(out=quoted(out))
                print(f"python {line}", flush=True)
                # With one thread, weights that are made again are the same.
                python(line, out / f"first_{number}.log", OMP_NUM_THREADS="1")
        run_missing(experiment, path, out, args.jobs)
        prove(experiment.changes)
    results = [result for result in results_of(experiment, path).values() if result]
    if not results:
        raise UserError(f"{path}: there are no results yet; run the experiment first")
    picture = ROOT / "images" / f"{args.name}.png"
    if experiment.lessons:
        draw_lessons(results, experiment.lessons, experiment.panels, experiment.legend, picture)
    else:
        draw_experiment(results, experiment.panels, picture)
    print_table(results, experiment.panels)


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


def results_of(experiment, path):
    """{(row, arm, seed): the last result, or None}; lines of other arms and seeds are left out."""
    found = {(line["row"], line["arm"], line["seed"]): line for line in read_jsonl(path)}
    return {(row, arm, seed): found.get((row, arm, seed)) for seed in experiment.seeds
            for row, flags in experiment.rows.items() for arm in flags}


def run_missing(experiment, results, out, jobs):
    """Run every arm with every seed, unless `results` has it, and append its summary there."""
    def run(key):
        row, arm, seed = key
        name = "".join(c if c.isalnum() else "_" for c in f"{row} {arm} {seed}".strip())
        command = experiment.rows[row][arm].format(out=quoted(out))
        if "train_grpo.py" not in command:          # with it, it also says how many processes
            command = f"train_grpo.py {command}"
        change = experiment.changes.get((row, arm))
        with tempfile.TemporaryDirectory() as folder:
            python(f"{command} --seed {seed} --out_dir {quoted(out)} --run_name {name}",
                   out / f"{name}.log", folder=change.copy(ROOT, folder) if change else ROOT,
                   **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {}))
        line = {"row": row, "arm": arm, "seed": seed, **summary(out / name, experiment.panels)}
        with open(results, "a", encoding="utf-8") as file:
            file.write(to_line(line))
        shutil.rmtree(out / name)           # its completions alone are megabytes
        print(f"{row} {arm}, seed {seed}: done".strip(), flush=True)

    results.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [key for key, result in results_of(experiment, results).items()
                            if not result]))


def prove(changes):
    """Print how each change's test fails in a copy with the change; UserError if it passes."""
    for (row, _), change in changes.items():
        if not change.test:
            continue
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                 "--color=no", change.test], cwd=change.copy(ROOT, folder), capture_output=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
        said = re.search(r"^E +(.*)$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or "1 failed" not in done.stdout or not said:
            raise UserError(f"{change.test} should fail with {row!r}, and does not:\n{done.stdout}")
        print(f"{row}: {change.test.partition('::')[2]} fails: {said[1]}", flush=True)


def summary(run_dir, names):
    """These series of a run, metrics or behaviour, in at most PARTS parts, and its evaluations."""
    replies = {}        # {step: the behaviour of each, as far as it applies}
    for row in read_jsonl(run_dir / "completions.jsonl"):
        known = {name: value for name, value in behaviour(row).items() if value is not None}
        replies.setdefault(row["step"], []).append(known)
    rows = [row | mean_metrics(replies[row["step"]]) for row in read_jsonl(
        run_dir / "metrics.jsonl")]
    for row in rows:        # kl, k3, is on average log pi - log pi_ref, so this is log pi_ref
        if {"entropy", "kl"} <= row.keys():
            row["likelihood"] = -row["entropy"] - row["kl"]
    names = [name for name in names
             if not name.startswith("eval/") and any(name in row for row in rows)]
    return {**in_parts(rows, names, PARTS),
            "eval": columns(read_jsonl(run_dir / "eval.jsonl")),
            "seconds": round(sum(row["step_time"] for row in rows))}


def in_parts(rows, names, parts):
    """The means of the steps and of these metrics over each of at most so many parts of a run."""
    parts = np.array_split(np.arange(len(rows)), min(parts, len(rows)))

    def average(name, part):
        return rounded(mean(filter(is_finite, (rows[i].get(name) for i in part))))

    return {"steps": [mean(rows[i]["step"] for i in part) for part in parts],
            "series": {name: [average(name, part) for part in parts] for name in names}}


def mean(values):
    """The mean, such as the share of conditions that hold; None of no value."""
    values = list(values)
    return sum(values) / len(values) if values else None


def behaviour(row):
    """The behaviour of one reply, a row of completions.jsonl: {name: number, or None}.

    None means that it does not apply: `length/right` of a wrong reply, `checks_right` of one
    without a check. A reply is right if its reward is 1 or more.
    """
    lines = THOUGHT.match(row["completion"])[1].splitlines()
    tries = [found for found in map(TRY.fullmatch, lines) if found]
    right = row["reward"] is not None and row["reward"] >= 1
    words = row["completion"].lower().split()
    hit = any(found[4] == "yes" for found in tries)
    return {
        "right": float(right),
        "length": row["length"],
        "length/right": row["length"] if right else None,
        "length/wrong": None if right else row["length"],
        "cut_off": float(not row["ended"]),
        "repeated_words": mean(word in words[:i] for i, word in enumerate(words)),
        "repeats": mean(line in lines[:i] for i, line in enumerate(lines)),
        "tries": len(tries) or None,
        "gave_up": float(row["ended"] and not hit) if tries else None,
        "checks_right": mean((found[2] == found[3]) == (found[4] == "yes") for found in tries),
        "slips": mean(not adds_up(found[1]) for found in tries),
    }


def adds_up(text):
    """Whether all equations in `8*6=48+9=57` hold."""
    return all({"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[operator]
               for a, operator, b, c in ((int(a), operator, int(b), int(c))
                                         for a, operator, b, c in EQUATION.findall(text)))


if __name__ == "__main__":
    main()
