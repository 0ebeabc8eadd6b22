"""Experiments: many runs of train_grpo.py, summarised into one small file, and drawn from it.

    python -m docs.experiments countdown            run what is missing, then draw
    python -m docs.experiments loss_types --draw    only draw, from the results that we ship
    python -m docs.experiments pages                write the numbers of the tables of all pages

experiments.toml says what each experiment runs and draws. Every arm runs with every seed, and each
run becomes a line of results/<name>.jsonl, with its series averaged over each of up to 20 parts:

    {"row", "arm", "seed", "seconds", "steps": [...], "series": {name: [...]}, "eval": {...}}

Interrupted, the same command goes on with the runs that are missing; to run some again, delete
their lines. At the end the picture images/<name>.png is drawn, and a table printed.
"""
import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from report import UserError, user_errors
from report.metrics import mean_metrics
from report.text import columns, is_finite, read_jsonl, rounded, to_line

from .figures import draw
from .pages import changed, changes, filled, texts_of

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PARTS = 20
THOUGHT = re.compile(r"(?:<think>)?\s*(.*?)\s*(?:</think>|\Z)", re.DOTALL)
# A try at Countdown: `8*6=48+9=57 57 yes`, an expression worked left to right, target, verdict.
TRY = re.compile(r"(.*=(\d+)) (\d+) (yes|no)")
EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(?=(\d+))")


def read_toml(name):
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


EXPERIMENTS = read_toml("experiments.toml")
PANELS = EXPERIMENTS.pop("panels")


@user_errors("docs.experiments")
def main():
    parser = argparse.ArgumentParser(
        prog="python -m docs.experiments", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=(*EXPERIMENTS, "pages"))
    parser.add_argument("--draw", action="store_true", help="only draw, from the results so far")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    args = parser.parse_args()
    if args.name == "pages":
        write_pages()
        return
    experiment, out = EXPERIMENTS[args.name], ROOT / "out" / "experiments" / args.name
    path = HERE / "results" / f"{args.name}.jsonl"
    if not args.draw:
        run_all(experiment, path, out, args.jobs)
    results = [result for result in results_of(experiment, path).values() if result]
    if not results:
        raise UserError(f"{path}: there are no results yet; run the experiment first")
    panels = panels_of(experiment)
    draw(results, panels, ROOT / "images" / f"{args.name}.png", experiment.get("cells", ()),
         experiment.get("legend"), experiment.get("columns"))
    print_table(results, panels)


def panels_of(experiment):
    """{series: (title, subtitle, format of a value)}"""
    panels = {}
    for panel in experiment["panels"]:
        key, *how = [panel, *PANELS[panel]] if isinstance(panel, str) else panel
        panels[key] = how
    return panels


def commands_of(experiment):
    """{(row, arm): the flags of its runs}"""
    commands = {}
    for row, flags in experiment.get("rows", {"": ""}).items():
        arms = experiment["arms"]
        for arm, own in arms.get(row, arms).items():
            commands[row, arm] = f"{flags} {experiment.get('common', '')} {own}"
    return commands


def results_of(experiment, path):
    """{(row, arm, seed): the last result, or None}; lines of other arms and seeds are left out."""
    found = {(line["row"], line["arm"], line["seed"]): line for line in read_jsonl(path)}
    return {(*arm, seed): found.get((*arm, seed)) for seed in experiment.get("seeds", (42, 1, 2))
            for arm in commands_of(experiment)}


def tables():
    """{name: what stands in the last cells of its table on the pages, row by row}"""
    texts = {}
    for name, table in read_toml("tables.toml").items():
        experiment = EXPERIMENTS[name]
        results = results_of(experiment, HERE / "results" / f"{name}.jsonl").values()
        texts[name] = texts_of(table, [*filter(None, results)], PANELS | panels_of(experiment))
    return texts


def write_pages():
    """Write the numbers in the tables of all pages, and print which pages that changes."""
    known = tables()
    for page in sorted(ROOT.glob("docs/*.md")):
        old = page.read_text(encoding="utf-8")
        new = filled(old, known, page.name)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"wrote docs/{page.name}")


def print_table(results, panels):
    """Print where each arm begins and ends in each panel, and the 95% interval of the end."""
    keys = [key for key in panels if " against " not in key]
    print("| |", *(f"{panels[key][0]} |" for key in keys))
    print("|---|" + "---|" * len(keys))
    arms = dict.fromkeys((run["row"], run["arm"]) for run in results)
    form = "{begin:.3g} → {end:.3g} ± {half:.2g}"
    for (row, arm), texts in zip(arms, texts_of({"columns": keys, "form": form}, results, panels)):
        print(f"| {f'{row}: {arm}' if row else arm} |", *(f"{text} |" for text in texts))


# --- running --------------------------------------------------------------------------------------

def run_all(experiment, results, out, jobs):
    """Run what is missing; if a page changes the code, also the tests that should notice it."""
    if not all(results_of(experiment, results).values()):
        for number, line in enumerate(experiment.get("first", ())):
            line = " ".join(line.split()).format(out=quoted(out))
            print(f"python {line}", flush=True)
            # With one thread, weights that are made again are the same.
            python(line, out / f"first_{number}.log", OMP_NUM_THREADS="1")
    run_missing(experiment, results, out, jobs)
    if "page" in experiment:
        prove(experiment["page"])


def run_missing(experiment, results, out, jobs):
    """Run every arm with every seed, unless `results` has it, and append its summary there."""
    commands = commands_of(experiment)

    def run(key):
        row, arm, seed = key
        name = "".join(c if c.isalnum() else "_" for c in f"{row} {arm} {seed}".strip())
        command = commands[row, arm].format(out=quoted(out))
        if "train_grpo.py" not in command:          # with it, it also says how many processes
            command = f"train_grpo.py {command}"
        diff = diff_of(experiment, row, arm)
        threads = {"OMP_NUM_THREADS": "1"} if jobs > 1 else {}
        with tempfile.TemporaryDirectory() as folder:
            where = copy(diff, experiment["page"], folder) if diff else ROOT
            python(f"{command} --seed {seed} --out_dir {quoted(out)} --run_name {name}",
                   out / f"{name}.log", folder=where, **threads)
        line = {"row": row, "arm": arm, "seed": seed,
                **summary(out / name, panels_of(experiment))}
        with open(results, "a", encoding="utf-8") as file:
            file.write(to_line(line))
        shutil.rmtree(out / name)           # its completions alone are megabytes
        print(f"{row} {arm}, seed {seed}: done".strip(), flush=True)

    results.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [key for key, result in results_of(experiment, results).items()
                            if not result]))


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


def diff_of(experiment, row, arm):
    """The diff on the experiment's page that changes the code of this arm, or None."""
    if "page" not in experiment or arm == "right":
        return None
    name = row or arm.partition(",")[0]
    diff, _ = changes(ROOT / experiment["page"]).get(name.lower(), (None, None))
    return diff


def copy(diff, page, folder):
    """The repository with the diff, in a folder; UserError, naming the page, if it does not fit."""
    shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        ".?*", "venv", "out", "__pycache__", "images"))
    script = Path(folder, "train_grpo.py")
    source = changed(script.read_text(encoding="utf-8"), diff, page)
    script.write_text(source, encoding="utf-8")
    return folder


def prove(page):
    """Print how the test of each diff of a page fails in a copy with it; UserError if it passes."""
    for heading, (diff, test) in changes(ROOT / page).items():
        if not test:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                       "--color=no", node(test)]
            done = subprocess.run(command, cwd=copy(diff, page, folder), capture_output=True,
                                  text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        said = re.search(r"^E +(.*)$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or not said:
            raise UserError(f"{page}: {test} should fail with the diff of {heading!r}, and does "
                            f"not:\n{done.stdout}")
        print(f"{heading}: {test} fails: {said[1]}", flush=True)


def node(test):
    """The test as pytest takes it: tests/test_run.py::test_it."""
    for path in sorted(ROOT.glob("tests/test_*.py")):
        if f"\ndef {test}(" in path.read_text(encoding="utf-8"):
            return f"{path.relative_to(ROOT).as_posix()}::{test}"
    raise UserError(f"there is no {test} in tests/; put the name of the test that catches it on "
                    "the page")


# --- what stays of a run --------------------------------------------------------------------------

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
