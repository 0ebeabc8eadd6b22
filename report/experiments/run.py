"""Runs what is missing of an experiment, and summarises each run into one line."""
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..command_line import UserError
from ..jsonl import columns, is_finite, read_jsonl, rounded, to_line
from .arms import WEIGHTS
from .behaviour import behaviour_of_run

ROOT = Path(__file__).parents[2]
PARTS = 20


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


def runs_of(experiment):
    """What names each of its runs: [(row, arm, seed)]."""
    return [(row, arm, seed) for seed in experiment.seeds
            for row, flags in experiment.rows.items() for arm in flags]


def results_of(experiment, path):
    """{(row, arm, seed): result} of the experiment's runs, of one that is there twice the last.

    Lines of arms that the experiment no longer has are left out.
    """
    found = {(line["row"], line["arm"], line["seed"]): line for line in read_jsonl(path)}
    return {run: found[run] for run in runs_of(experiment) if run in found}


def run_missing(experiment, results, out, jobs):
    """Run every arm with every seed, unless `results` has it, and append its summary there."""
    def run(key):
        row, arm, seed = key
        name = "".join(c if c.isalnum() else "_" for c in f"{row} {arm} {seed}".strip())
        command = experiment.rows[row][arm].format(out=quoted(out))
        if "train_grpo.py" not in command:          # with it, it also says how many processes
            command = f"train_grpo.py {command}"
        change = experiment.changes.get((row, arm))
        folder = change.copy(ROOT, out / "changed" / name) if change else ROOT
        python(f"{command} --seed {seed} --out_dir {quoted(out)} --run_name {name}",
               out / f"{name}.log", folder=folder,
               **({"OMP_NUM_THREADS": "1"} if jobs > 1 else {}))
        line = {"row": row, "arm": arm, "seed": seed, **summary(out / name, experiment.panels)}
        with open(results, "a", encoding="utf-8") as file:
            file.write(to_line(line))
        shutil.rmtree(out / name)           # its completions alone are megabytes
        shutil.rmtree(out / "changed" / name, ignore_errors=True)
        print(f"{row} {arm}, seed {seed}: done".strip(), flush=True)

    results.parent.mkdir(parents=True, exist_ok=True)
    done = results_of(experiment, results)
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(run, [key for key in runs_of(experiment) if key not in done]):
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
    names = [name for name in names
             if not name.startswith("eval/") and any(name in row for row in rows)]
    return {**in_parts(rows, names, PARTS),
            "eval": columns(read_jsonl(run_dir / "eval.jsonl")),
            "seconds": round(sum(row["step_time"] for row in rows))}


def in_parts(rows, names, parts):
    """The means of the steps and of these metrics over each of at most so many parts of a run."""
    parts = np.array_split(np.arange(len(rows)), min(parts, len(rows)))
    return {"steps": [float(np.mean([rows[i]["step"] for i in part])) for part in parts],
            "series": {name: [mean(rows[i].get(name) for i in part) for part in parts]
                       for name in names}}


def mean(values):
    values = [value for value in values if is_finite(value)]
    return rounded(sum(values) / len(values)) if values else None
