"""How many small mistakes in the code does the suite notice?

    python tests/mutants.py             draws 100 mutants, tests each, prints the survivors
    python tests/mutants.py --again     tests the survivors again, after new tests

cosmic-ray (tests/requirements-bench.txt) makes the mutants: a plus becomes a minus, 1 becomes 2, a
loop runs zero times. Each is tested in a copy of the repository, first by the test files that
concern its module, then by the rest of the suite. tests/mutants.toml names the modules and these
files. Messages of errors and warnings are left out, and what only runs under `if __name__`. Places
in the code are drawn, and of the mutants of each place one.

The results so far are in --session: interrupted, the same command goes on from there. After a
change of the code, start a new one. Takes an hour.

docs/in_practice.md has the result. Survivors that change nothing: another negative id for padding,
or a bias of -1 for 0 at all that a query sees (model/fast; softmax takes it out); `>=` for
`==` where a dict grows by one (lab/tasks/arithmetic.py) or `t + 1` reaches a maximum
(model/sampler.py); no cache for `tries` (lab/tasks/countdown.py); a byte more in `readline`
(dataset/prompts.py); a pixel of a picture (run/report/picture.py), the width of the bar and a
default that is only asked whether it is finite (run/report/terminal.py); gradients that nobody
takes (model/chat.py).
"""
import argparse
import ast
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome

ROOT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
SETTINGS, MODULES = CONFIG["cosmic-ray"], list(CONFIG["tests"])
EXCLUDED = re.compile("|".join(SETTINGS["exclude-operators"]))


def left_out(node):
    """Whether a piece of syntax is the message of an error or warning, or the script's own part."""
    return (isinstance(node, ast.Raise)
            or isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
            or isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]).strip("()") in CONFIG["skip"]["constants"]
            or isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))


def surveyed_lines(module):
    source = (ROOT / module).read_text(encoding="utf-8")
    out = {line for node in ast.walk(ast.parse(source)) if left_out(node)
           for line in range(node.lineno, node.end_lineno + 1)}
    return set(range(1, len(source.splitlines()) + 1)) - out


def compiles(item):
    """cosmic-ray takes the star in `def f(a, *, b)` for a product, too."""
    mutation = item.mutations[0]
    source = (ROOT / mutation.module_path).read_text(encoding="utf-8")
    try:
        ast.parse(mutate_code(source, get_operator(mutation.operator_name)(), mutation.occurrence))
    except SyntaxError:
        return False
    return True


def draw(count, seed):
    """cosmic-ray's mutants of the surveyed lines: `count` places, one mutant of each."""
    places, rng = defaultdict(list), random.Random(seed)    # {(module, position): [mutant]}
    for module in MODULES:
        lines = surveyed_lines(module)
        for item in _all_work_items([Path(module)], {}):
            mutation = item.mutations[0]
            if mutation.start_pos[0] in lines and not EXCLUDED.match(mutation.operator_name):
                places[module, mutation.start_pos].append(item)
    one_each = (rng.choice(places[place]) for place in rng.sample(sorted(places), len(places)))
    return list(itertools.islice(filter(compiles, one_each), count))


def judge(item):
    """The result of the files that concern the mutant's module, or else of the others."""
    names = CONFIG["tests"][str(item.mutations[0].module_path)]
    near = [str(path) for name in names for path in ROOT.glob(f"**/tests/{name}.py")]
    for files in (near, ["tests", *(f"--ignore={name}" for name in near)]):
        result = mutate_and_test(item.mutations, command(*files), SETTINGS["timeout"])
        if result.worker_outcome is not WorkerOutcome.NORMAL:
            raise RuntimeError(result.output)
        if result.is_killed:
            break
    return result


def command(*files):
    return " ".join([sys.executable, SETTINGS["test-command"], *files])


def report(finished):
    counts = Counter((str(item.mutations[0].module_path), result.is_killed)
                     for item, result in finished)
    print(f"\n{'module':24}killed  survived")
    for module in MODULES:
        print(f"{module:24}{counts[module, True]:6}{counts[module, False]:10}")
    killed = sum(result.is_killed for _, result in finished)
    print(f"{'all':24}{killed:6}{len(finished) - killed:10}")
    print("killed by the time limit:", sum(result.output == "timeout" for _, result in finished))
    for item, result in finished:
        if not result.is_killed:
            print(f"\n{item.mutations[0].operator_name}\n{result.diff}")


def main():
    parser = argparse.ArgumentParser(description="Mutate the code and test the tests.")
    parser.add_argument("--count", type=int, default=100, help="of mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--session", type=Path, default=ROOT / "out/mutants.sqlite")
    parser.add_argument("--again", action="store_true", help="test the survivors once more")
    args = parser.parse_args()
    with use_db(args.session.resolve(), WorkDB.Mode.create) as db, \
            tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(ROOT, Path(folder) / "copy", ignore=shutil.ignore_patterns(
            ".git", "out", "__pycache__"))
        (copy / "out").mkdir()
        os.chdir(copy)
        if not db.num_work_items:
            db.add_work_items(draw(args.count, args.seed))
        items = list(db.pending_work_items)
        if args.again:
            items = [item for item, result in db.completed_work_items if not result.is_killed]
        outcome, output = run_tests(command("tests"), SETTINGS["timeout"])
        if outcome is not TestOutcome.SURVIVED:
            sys.exit(f"the tests fail without any mutant:\n{output}")
        for number, item in enumerate(items, start=1):
            result, where = judge(item), item.mutations[0]
            db.set_result(item.job_id, result)
            print(f"{number}/{len(items)} {'killed  ' if result.is_killed else 'SURVIVED'} "
                  f"{where.module_path}:{where.start_pos[0]} {where.operator_name}", flush=True)
        report(db.completed_work_items)


if __name__ == "__main__":
    main()
