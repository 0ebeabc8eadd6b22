"""The bug hunt: GRPO on one page, with a bug in it. Find it.

    python -m lab.hunt              makes out/hunt.py, and shows how it trains beside the right page
    python -m lab.hunt --check      is the bug out of it?
    python -m lab.hunt --hint       a hint; there are three
    python -m lab.hunt --list       the sixteen bugs, and which of them you have found
    python -m lab.hunt 7            the seventh; it writes out/hunt.py anew, without your edits

Each bug is one to three lines of docs/grpo_on_one_page.py, raises no error, and is of a kind that
real trainers shipped. Edit out/hunt.py, then --check: it runs the functions of a step, yours and
the right ones, on the same inputs, and compares what they compute. The exit code is 0 if they
agree. lab/hunt, docs/grpo_on_one_page.py and docs/museum.md have the answers: do not look there.
"""
import argparse
import json
import math
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

from dataset.jsonl import read_jsonl
from errors import UserError, user_errors

from .checks import alike, computed

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
DATA = tomllib.loads((HERE / "bugs.toml").read_text(encoding="utf-8"))
BUGS, RUNS = DATA["bugs"], HERE / "runs.jsonl"      # record.py made them
LOGARITHMIC = ("kl", "grad_norm")
COPY, STATE = ROOT / "out/hunt.py", ROOT / "out/hunt.json"


@user_errors("lab.hunt")
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m lab.hunt", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("number", nargs="?", type=int, choices=range(1, len(BUGS) + 1),
                      metavar="NUMBER", help=f"of a bug, 1 to {len(BUGS)}")
    for flag, says in (("check", "is the bug out of out/hunt.py?"), ("hint", "one more hint"),
                       ("list", "what you have found")):
        what.add_argument(f"--{flag}", action="store_true", help=says)
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    parser.add_argument("--language", choices=("en", "zh"), help="default: that of the terminal",
                        default="zh" if locale.startswith("zh") else "en")
    args = parser.parse_args(argv)
    say = SimpleNamespace(**DATA[args.language])
    state = json.loads(STATE.read_text()) if STATE.exists() else {"number": 0, "found": []}
    is_right = True
    if args.list:
        for number, bug in enumerate(BUGS, start=1):
            name = bug[args.language]["name"] if number in state["found"] else "?"
            print(f"{number:3}  {say.levels[bug['level']]}  {name}")
    elif not (args.check or args.hint):
        begin(say, state, args.number)
    elif not state["number"] or not COPY.exists():
        raise UserError(say.no_copy)
    elif args.check:
        is_right = check(say, state, BUGS[state["number"] - 1][args.language])
    else:
        hints = [*BUGS[state["number"] - 1][args.language]["hints"], say.no_hint]
        state["hints"] = min(state["hints"] + 1, len(hints))
        print(*hints[:state["hints"]], sep="\n")
    STATE.write_text(json.dumps(state))
    if not is_right:
        raise SystemExit(1)


def source_of(number):
    """The page with two updates per rollout, and with the bug of this number; 0: without one."""
    source = (ROOT / "docs/grpo_on_one_page.py").read_text(encoding="utf-8")
    bugs = [(bug["before"], bug["after"]) for bug in BUGS[:number][-1:]]
    for before, after in [("\nUPDATES = 1 ", "\nUPDATES = 2 "), *bugs]:
        if source.count(before) != 1:
            raise RuntimeError(f"bugs.toml: {before!r} does not stand in the page once")
        source = source.replace(before, after)
    return source


def begin(say, state, number):
    """Writes the copy, unless it is the one being edited, and shows both runs."""
    left = [i + 1 for i in range(len(BUGS)) if i + 1 not in state["found"]]
    is_edited = not number and state["number"] in left and COPY.exists()
    if not is_edited:
        number = number or next((i for i in left if i > state["number"]), (left or [1])[0])
        state |= {"number": number, "hints": 0}
        COPY.write_text(source_of(number), encoding="utf-8")
        STATE.write_text(json.dumps(state))     # before the prints: `| head` ends the program
    runs = {line["bug"]: line for line in read_jsonl(RUNS)}
    runs = {say.right: runs[0], say.wrong: runs[state["number"]]}
    print(say.begin.format(**state, level=say.levels[BUGS[state["number"] - 1]["level"]]))
    for key, title in say.series.items():
        heights = [[height(key, value) for value in run["series"][key]] for run in runs.values()]
        scale = [x for x in sum(heights, []) if x is not None]
        print(f"\n{title}")
        for (whose, run), own in zip(runs.items(), heights):
            first, last = (number_of(run["series"][key][i]) for i in (0, -1))
            print(f"  {curve(own, min(scale), max(scale))}  {first} → {last}  {whose}")
    for whose, run in runs.items():
        print("\n" + say.group.format(whose=whose, question=run["question"]))
        for completion, *numbers in run["group"]:
            text = repr(completion)
            print("  {:>6}  {:>9}  {:>6}  ".format(*map(number_of, numbers)), end="")
            print(text if len(text) < 120 else f"{text[:80]} … {text[-36:]}")
    print("\n" + (say.edited if is_edited else say.end).format(**state))


def height(key, value):
    """Of a value in a curve; a logarithm for series of which one value may dwarf the others."""
    return math.log10(max(value, 1e-3)) if value is not None and key in LOGARITHMIC else value


def curve(values, low, high):
    """A mark of eight heights for each value; ! where it is no finite number."""
    unit = (high - low) / 7.999 or 1
    return "".join("!" if x is None else "▁▂▃▄▅▆▇█"[int((x - low) / unit)] for x in values)


def number_of(value):
    return "NaN" if value is None else f"{value:.3g}"


def check(say, state, bug):
    """Says whether the copy computes what the right page computes; True if it does."""
    print(say.comparing, flush=True)
    right, wrong, mine = map(computed, (
        source_of(0), source_of(state["number"]), COPY.read_text(encoding="utf-8")))
    bugs, differs = ([name for name in right if not alike(page[name], right[name])]
                     for page in (wrong, mine))
    if not differs:
        print(say.fixed.format(**bug))
        state["found"] = sorted({*state["found"], state["number"]})
    elif alike([*mine.values()], [*wrong.values()]):
        print(say.left)
    elif bugs[0] not in differs:
        print(say.gone.format(name=differs[0]))
    else:
        others = [name for name in differs if name not in bugs]
        print(say.more.format(name=others[0]) if others else say.other.format(name=bugs[0]))
    for name in differs:
        if isinstance(mine[name], str):             # why it fails
            print(f"{name}: {mine[name]}")
    return not differs


if __name__ == "__main__":
    main()
