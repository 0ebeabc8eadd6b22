"""Experiments: many runs of train_grpo.py, summarised into one small file, and drawn from it.

    python -m lab.experiments countdown            run what is missing, then draw
    python -m lab.experiments loss_types --draw    only draw, from the results that we ship
    python -m lab.experiments default --arm "the default run" --seeds 42
                                                    run this again, and print both ends
    python -m lab.experiments pages                write the numbers and the code on all pages
    python -m lab.experiments claims               print what the pages claim, and how sure it is

experiments.toml says what each experiment runs and draws, claims.toml which arms the pages compare.
Every arm runs with every seed, and each run becomes a line of results/<name>.jsonl, with its series
averaged over each of up to 20 parts:

    {"row", "arm", "seed", "commit", "flags", "machine", "seconds", "steps": [...],
     "series": {name: [...]}, "eval": {...}}

The commit ends in `-dirty` if the code had been changed since, and `flags` is a hash of the arm's
flags. Lines without `flags` are older: their commit may name a tree that lacks the arm.

Interrupted, the same command goes on with the runs that are missing; to run some again, delete
their lines. At the end the picture docs/images/<name>.png is drawn (of `default`, front.svg and
front_zh.svg, which the READMEs show), and a table printed.
"""
import argparse
import ast
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from dataset.jsonl import columns, is_finite, read_jsonl, rounded, to_line
from errors import COUNT, UserError, user_errors
from lab.tasks.guess import LARGEST

from .figures import draw, draw_against_tokens, draw_arrows, draw_bars, draw_front, draw_marks
from .measures import MEASURES
from .pages import (
    arms_of,
    cell_of,
    changed,
    changes,
    claim_texts,
    code_as_now,
    filled,
    texts_of,
)

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS, OUT = HERE / "results", ROOT / "out" / "experiments"
PARTS, PLACES = 20, 15
TEN_SEEDS = 42, 1, 2, 3, 4, 5, 6, 7, 8, 9
FRESH_SEEDS = tuple(range(101, 111))    # of headlines: nobody had seen them when these were written
EXPERIMENTS = tomllib.loads((HERE / "experiments.toml").read_text(encoding="utf-8"))
PANELS = EXPERIMENTS.pop("panels")
CLAIMS = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))
THOUGHT = re.compile(r"(?:<think>)?\s*(.*?)\s*(?:</think>|\Z)", re.DOTALL)
# A try at Countdown: `8*6=48+9=57 57 yes`, an expression worked left to right, target, verdict.
TRY = re.compile(r".*=\d+ \d+ (yes|no)")


@user_errors("lab.experiments")
def main():
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    # The others are further tables of the same results.
    names = [name for name, experiment in EXPERIMENTS.items() if "panels" in experiment]
    parser.add_argument("name", choices=(*names, "pages", "claims"))
    parser.add_argument("--draw", action="store_true", help="only draw, from the results so far")
    parser.add_argument("--jobs", type=COUNT, default=2, help="runs at a time (%(default)s)")
    parser.add_argument("--arm", help="run only this one, also if there are results of it")
    parser.add_argument("--row", default="", help="of the arm, if there are several")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="of the arm (42)")
    args = parser.parse_args()
    if args.name == "pages":
        return write_pages()
    if args.name == "claims":
        return print_claims()
    if args.arm:
        return repeat(args.name, args.row, args.arm, args.seeds, args.jobs)
    if not args.draw:
        run_all(args.name, args.jobs)
    results = known(args.name)
    if not results:
        raise UserError(f"{args.name}: there are no results yet; run the experiment first")
    experiment = EXPERIMENTS[args.name]
    path = ROOT / "docs/images" / f"{args.name}.png"
    if "front" in experiment:
        draw_front(results + known(args.name, fresh=True), experiment, path.parent)
    elif "bars" in experiment:
        draw_bars(results, experiment, path)
    elif "arrows" in experiment:
        draw_arrows(results, experiment, path)
    elif "marks" in experiment:
        draw_marks(results, experiment, PANELS, path)
    elif "against_tokens" in experiment:
        draw_against_tokens(results, experiment["against_tokens"], PANELS, path)
    else:
        draw(results, experiment, PANELS, path)
    if experiment["panels"]:
        print_table(results, experiment["panels"])


def commands_of(experiment):
    """{(row, arm): the flags of its runs}"""
    commands = {}
    for row, flags in experiment.get("rows", {"": ""}).items():
        arms = {arm: own for arm, own in experiment["arms"].items() if isinstance(own, str)}
        for arm, own in (arms | experiment["arms"].get(row, {})).items():
            for each in experiment.get("each", [""]):       # an arm without a $ is the same in all
                own_flags = own.replace("$", each)
                common = experiment.get("common", "")
                commands[row, arm.replace("$", each)] = f"{flags} {common} {own_flags}"
    return commands


def results_of(name, fresh=False):
    """{(row, arm, seed): the last result, or None}; lines of other arms and seeds are left out.

    fresh: of headlines, with FRESH_SEEDS.
    """
    name = EXPERIMENTS[name].get("results", name)
    experiment, lines = EXPERIMENTS[name], read_jsonl(RESULTS / f"{name}.jsonl")
    if "program" in experiment:
        return dict(enumerate(lines))
    found = {(line["row"], line["arm"], line["seed"]): line for line in lines}
    seeds = dict.fromkeys((*TEN_SEEDS, *experiment.get("seeds", ())))
    runs = [(*arm, seed) for seed in seeds for arm in commands_of(experiment)
            if seed in seeds_of(experiment, *arm)]
    if fresh:
        runs = [(*arm, seed) for seed in FRESH_SEEDS for arm in experiment.get("headline", ())]
    return {run: found.get(run) for run in runs}


def seeds_of(experiment, row, arm):
    """Those of the experiment; ten for an arm of a headline, the first for one that is not kept."""
    if [row, arm] in experiment.get("headline", ()):
        return TEN_SEEDS
    if "kept" in experiment and arm not in experiment["kept"].get(row, ()):
        return experiment["seeds"][:1]
    return experiment.get("seeds", (42, 1, 2))


def known(name, fresh=False):
    return [result for result in results_of(name, fresh).values() if result]


def table_of(name):
    """The rows of texts of an experiment's table; or of claims, those of all headlines.

    A headline has its difference with the first ten seeds, and all numbers with the fresh ones.
    """
    if name == "claims":
        first = [(claim, texts[1]) for claim, texts in claims_and_texts() if "headline" in claim]
        results = {name: known(name, fresh=True) for name in {c["experiment"] for c, _ in first}}
        fresh = claim_texts([claim for claim, _ in first], results, PANELS)
        return [[difference, *texts] for (_, difference), texts in zip(first, fresh)]
    return texts_of(EXPERIMENTS[name], known(name), PANELS)


def claims_and_texts():
    """All claims, each with its numbers as texts."""
    for family, of_experiments in CLAIMS.items():
        claims, results = claims_of(family), {name: known(name) for name in of_experiments}
        yield from zip(claims, claim_texts(claims, results, PANELS))


def print_claims():
    """Print all claims as a table, in the families of claims.toml."""
    print("claim", "arms", "seeds", "difference", "p", "p corrected (Holm)", sep=" | ")
    for claim, texts in claims_and_texts():
        where = ", ".join(filter(None, [claim["experiment"], claim["row"]]))
        minus = ", ".join(filter(None, [claim.get("minus_row"), claim["minus"]]))
        print(claim["says"], f"{where}: {claim['arm']} - {minus}", *texts, sep=" | ")


def claims_of(family):
    """The claims of a family as cells of the tables of their experiments."""
    claims = []
    for name, rows in CLAIMS[family].items():
        table = EXPERIMENTS[name].get("table", {}) | {"form": "", "experiment": name}
        for row in rows:
            arm, minus = row["arms"]
            claims.append(cell_of(table, {}, row | {"arm": arm, "minus": minus}))
    return claims


def page_files():
    return sorted(path for room in ("docs", "lab") for path in ROOT.glob(f"{room}/**/*.md"))


def write_pages():
    """Write the numbers and the code on all pages, and print which pages that changes."""
    for page in page_files():
        old = page.read_text(encoding="utf-8")
        new = code_as_now(filled(old, table_of, page.name), source_of, page.name)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


def source_of(name):
    """The source of a function of the script, or of a file."""
    if name.endswith(".py"):
        return (ROOT / name).read_text(encoding="utf-8")
    source = source_of("train_grpo.py")
    return next(ast.get_source_segment(source, node) for node in ast.walk(ast.parse(source))
                if getattr(node, "name", None) == name.rpartition(".")[2])


def print_table(results, keys):
    """Print where each arm ends in each of these series, as a table on the pages would."""
    titles = [PANELS[key][0] for key in keys]
    print("", *titles, sep=" | ")
    texts = texts_of({"table": {"columns": keys}}, results, PANELS)
    for line, cells in zip(arms_of(results), texts):
        print(f"{line['row']} {line['arm']}".strip(), *cells, sep=" | ")


# --- running --------------------------------------------------------------------------------------

def run_all(name, jobs):
    """Run what is missing; if a page changes the code, also the tests that should notice it."""
    experiment = EXPERIMENTS[name]
    if "program" in experiment:
        python(f"-m {experiment['program']}", OUT / name / "log")
        return
    missing = [key for key, result in results_of(name).items() if not result]
    prepare(name, missing)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda key: run(name, *key), missing))
    if "page" in experiment:
        prove(experiment["page"])


def prepare(name, runs):
    """Make the files that these runs, (row, arm, seed) each, read: the experiment's `first`."""
    commands = commands_of(EXPERIMENTS[name])
    if any("{out}" in commands[row, arm] for row, arm, _ in runs):
        for number, line in enumerate(EXPERIMENTS[name].get("first", ())):
            print(f"python {line}", flush=True)
            python(line.format(out=quoted(OUT / name)), OUT / name / f"first_{number}.log")


def repeat(name, row, arm, seeds, jobs):
    """Run an arm again, and print where it and all earlier runs of the same seeds end."""
    if (row, arm) not in commands_of(EXPERIMENTS[name]):
        raise UserError(f"{name} has no arm {arm!r} in row {row!r}; its pairs of row and arm are "
                        f"{[*commands_of(EXPERIMENTS[name])]}")
    prepare(name, [(row, arm, seed) for seed in seeds])
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda seed: run(name, row, arm, seed), seeds))
    for line in read_jsonl(RESULTS / f"{name}.jsonl"):
        if (line["row"], line["arm"]) == (row, arm) and line["seed"] in seeds:
            ends = {key: values[-1] for key, values in line["eval"].items() if "/" in key}
            print(line["seed"], line.get("commit", ""), ends or line["series"])


def run(name, row, arm, seed):
    """Run an arm with a seed, and append its summary to the results."""
    experiment, out = EXPERIMENTS[name], OUT / name
    run_name = re.sub(r"\W", "_", f"{row} {arm} {seed}".strip())
    flags = commands_of(experiment)[row, arm]
    shutil.rmtree(out / run_name, ignore_errors=True)       # of an interrupted experiment
    command = flags.format(out=quoted(out))
    if not command.lstrip().startswith("-m "):
        command = f"train_grpo.py {command}"
    change = change_of(experiment, row, arm)
    with tempfile.TemporaryDirectory() as folder:
        where = copy(*change, experiment["page"], folder) if change else ROOT
        python(f"{command} --seed {seed} --out_dir {quoted(out)} --run_name {run_name}",
               out / f"{run_name}.log", folder=where)
        line = {"row": row, "arm": arm, "seed": seed, **where_run(flags),
                **summary(out / run_name, experiment["panels"] + experiment.get("also", []))}
        measure = experiment.get("measure", {})
        measure = measure.get(row) if isinstance(measure, dict) else measure
        if measure:                     # it may read the weights that the copy began with
            line["series"] |= MEASURES[measure](out / run_name)
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.write(to_line(line))
    shutil.rmtree(out / run_name)           # its completions alone are megabytes
    print(f"{row} {arm}, seed {seed}: done".strip(), flush=True)


def where_run(flags):
    """What made a run, and on which machine: on two machines the same run may round differently."""
    return {"commit": git("rev-parse", "--short", "HEAD") + "-dirty" * is_dirty(),
            "flags": hashlib.sha256(" ".join(flags.split()).encode()).hexdigest()[:8],
            "machine": f"{platform.system()} {platform.machine()}, "
            f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"}


def is_dirty():
    """Whether anything but results and pictures, which runs themselves write, is uncommitted."""
    return bool(git("status", "--porcelain", "--", ".", ":!lab/experiments/results",
                    ":!docs/images"))


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def python(arguments, log, folder=ROOT):
    """Run python with these arguments in a folder; UserError if it fails."""
    # With one thread, weights that are made again are the same, and runs do not wait.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run([sys.executable, *shlex.split(arguments)], cwd=folder, stdout=file,
                              stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise UserError(f"python {arguments} failed; its output is in {log}")


def quoted(path):
    """A path as a piece of a command: it may hold spaces, or the backslashes of Windows."""
    return shlex.quote(path.as_posix())


def change_of(experiment, row, arm):
    """(diff, file) of the experiment's page that change the code of this arm, or None."""
    kind = arm.partition(",")[0]
    if "page" not in experiment or kind in ("right", "control"):
        return None
    name = row or kind
    found = changes(ROOT / experiment["page"]).get(name.lower())
    return found and found[:2]


def copy(diff, file, page, folder):
    """The repository with the diff, in a folder; UserError, naming the page, if it does not fit."""
    shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        ".?*", "venv", "out", "__pycache__", "images"))
    script = Path(folder, file)
    source = changed(script.read_text(encoding="utf-8"), diff, page)
    script.write_text(source, encoding="utf-8")
    return folder


def prove(page):
    """See the test of each diff of a page fail in a copy with it; UserError if it passes."""
    for heading, (diff, file, test) in changes(ROOT / page).items():
        if not test:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pytest", "-q", "-x", f"tests/{test}"]
            done = subprocess.run(command, cwd=copy(diff, file, page, folder))
        if done.returncode != 1:
            raise UserError(f"{page}: {test} should fail with the diff of {heading!r}")


# --- what stays of a run --------------------------------------------------------------------------

def summary(run_dir, names):
    """These series of a run, metrics or behaviour, in at most PARTS parts, and its evaluations."""
    replies = {}        # {step: the behaviour of each}
    for row in read_jsonl(run_dir / "completions.jsonl"):
        replies.setdefault(row["step"], []).append(behaviour(row))
    rows = read_jsonl(run_dir / "metrics.jsonl")
    for row in rows:
        of_step = replies[row["step"]]
        row |= {name: fmean(reply[name] for reply in of_step if name in reply)
                for name in {name for reply in of_step for name in reply}}
        if "entropy" in row and "kl" in row:
            # kl, k3, is on average log pi - log pi_ref, so this is log pi_ref.
            row["likelihood"] = -row["entropy"] - row["kl"]
    parts = np.array_split(rows, min(PARTS, len(rows)))
    series = {}
    for name in names:
        if not name.startswith("eval/") and any(name in row for row in rows):
            series[name] = [mean_of(name, part) for part in parts]
    evaluations = [{name: value for name, value in row.items() if name != "measure"}
                   for row in read_jsonl(run_dir / "eval.jsonl")]
    return {"steps": [fmean(row["step"] for row in part) for part in parts], "series": series,
            "eval": columns(evaluations),
            "seconds": round(sum(row["step_time"] for row in rows))}


def mean_of(name, rows):
    """The mean of the finite values that rows have by this name, to four digits, or None."""
    values = [row[name] for row in rows if is_finite(row.get(name))]
    return rounded(fmean(values)) if values else None


def behaviour(row):
    """The behaviour of one reply, a row of completions.jsonl: {name: number}.

    It has what applies to the reply, such as `length/right` if it is right: its reward is 1 or
    more.
    """
    lines = THOUGHT.match(row["completion"])[1].splitlines()
    words = row["completion"].lower().split()
    verdicts = [found[1] for found in map(TRY.fullmatch, lines) if found]
    right = row["reward"] is not None and row["reward"] >= 1
    found = {"right": right, "length": row["length"], "cut_off": not row["ended"]}
    if right:
        found["length/right"] = row["length"]
    else:
        found["length/wrong"] = row["length"]
    if words:
        found["repeated_words"] = fmean(word in words[:i] for i, word in enumerate(words))
    if lines:
        found["repeats"] = fmean(line in lines[:i] for i, line in enumerate(lines))
    if verdicts:
        found["tries"] = len(verdicts)
        found["hit"] = "yes" in verdicts
        found["gave_up"] = row["ended"] and "yes" not in verdicts
    of_data = row.get("columns", {})
    if "secret" in of_data:
        found |= places(row["turns"])
    if "level" in of_data:
        found[f"calls/{of_data['level']}"] = len(row["turns"]) // 2
    return found


def places(turns):
    """How many guesses a game of lab/tasks/guess.py took, and where they fell.

    place/i: the share in the i-th of PLACES equal parts between the bounds known so far, of those
    made while more than seven numbers were left.
    """
    low, high, found = 0, LARGEST + 1, []
    for guess, answer in zip(turns[::2], turns[1::2]):
        guess = guess.strip()
        if not guess.isdecimal() or not low < int(guess) < high:
            continue
        if high - low > 8:
            found.append((int(guess) - low) * PLACES // (high - low))
        if "high" in answer:
            high = int(guess)
        elif "low" in answer:
            low = int(guess)
    shares = {f"place/{i}": found.count(i) / len(found) for i in range(PLACES) if found}
    return shares | {"guesses": len(turns) // 2}


if __name__ == "__main__":
    main()
