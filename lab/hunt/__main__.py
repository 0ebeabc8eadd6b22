"""The bug hunt: GRPO on one page, with a bug in it. Find it.

    python -m lab.hunt              makes out/hunt.py, and shows how it trains beside the right page
    python -m lab.hunt --check      is the bug out of it?
    python -m lab.hunt --hint       a hint; there are three
    python -m lab.hunt --list       the sixteen bugs, and which of them you have found
    python -m lab.hunt 7            begins with the seventh

Each bug is one to three lines of docs/grpo_on_one_page.py, raises no error, and is of a kind that
real trainers shipped. Edit out/hunt.py, then --check: it runs each function of your page and of the
right one on the same inputs, and compares. bugs.toml has the bugs and all sentences: do not look.
"""
import argparse
import json
import os
import tomllib
from pathlib import Path
from types import SimpleNamespace

from dataset.jsonl import read_jsonl
from errors import UserError, cut, user_errors

from .checks import alike, computed

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
DATA = tomllib.loads((HERE / "bugs.toml").read_text(encoding="utf-8"))
BUGS, RUNS = DATA["bugs"], HERE / "runs.jsonl"      # record.py made them
COPY, STATE = ROOT / "out/hunt.py", ROOT / "out/hunt.json"


@user_errors("lab.hunt")
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m lab.hunt", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="?", type=int, choices=range(1, len(BUGS) + 1),
                        metavar="NUMBER", help=f"of a bug, 1 to {len(BUGS)}; it begins anew")
    for flag in ("check", "hint", "list"):
        parser.add_argument(f"--{flag}", action="store_true")
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    parser.add_argument("--language", choices=("en", "zh"), help="default: that of the terminal",
                        default="zh" if locale.startswith("zh") else "en")
    args = parser.parse_args(argv)
    say = SimpleNamespace(**DATA[args.language], language=args.language)
    state = json.loads(STATE.read_text()) if STATE.exists() else {"number": None, "found": []}
    if args.list:
        for number, bug in enumerate(BUGS, start=1):
            name = bug[args.language]["name"] if number in state["found"] else "?"
            print(f"{number:3}  {say.levels[bug['level']]}  {name}")
    elif not (args.check or args.hint):
        begin(say, state, args.number)
    elif not state["number"] or not COPY.exists():
        raise UserError(say.no_copy)
    elif args.check:
        check(say, state, BUGS[state["number"] - 1][args.language])
    else:
        hints = BUGS[state["number"] - 1][args.language]["hints"]
        state["hints"] = min(state["hints"] + 1, len(hints))
        print(*hints[:state["hints"]], sep="\n")
    STATE.write_text(json.dumps(state))


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
    unsolved = [i + 1 for i in range(len(BUGS)) if i + 1 not in state["found"]]
    is_edited = not number and state["number"] in unsolved and COPY.exists()
    if not is_edited:
        state |= {"number": number or (unsolved or [1])[0], "hints": 0}
        COPY.write_text(source_of(state["number"]), encoding="utf-8")
    runs = {line["bug"]: line for line in read_jsonl(RUNS)}
    runs = {say.right: runs[0], say.wrong: runs[state["number"]]}
    print(say.begin.format(**state, level=say.levels[BUGS[state["number"] - 1]["level"]]))
    for key, title in say.series.items():
        values = [value for run in runs.values() for value in run["series"][key]]
        scale = [value for value in values if value is not None]
        print(f"\n{title}")
        for whose, run in runs.items():
            values = run["series"][key]
            print(f"  {curve(values, min(scale), max(scale))}  {number_of(values[0])} → "
                  f"{number_of(values[-1])}  {whose}")
    for whose, run in runs.items():
        print("\n" + say.group.format(whose=whose, question=run["question"]))
        for text, *numbers in run["group"]:
            print("  {:>6}  {:>9}  {:>6}  ".format(*map(number_of, numbers)), end="")
            print(cut(repr(text), 120))
    print("\n" + (say.edited if is_edited else say.end).format(**state))


def curve(values, low, high):
    """A mark of eight heights for each value; ! where it is no finite number."""
    unit = (high - low) / 7.999 or 1
    return "".join("!" if x is None else "▁▂▃▄▅▆▇█"[int((x - low) / unit)] for x in values)


def number_of(value):
    return "NaN" if value is None else f"{value:.3g}"


def check(say, state, bug):
    """Says whether the copy computes what the right page computes, function by function."""
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
        print(say.more.format(name=others[0]) if others else say.other)
    for name in differs:
        if isinstance(mine[name], str):             # why it fails
            print(f"{name}: {mine[name]}")


if __name__ == "__main__":
    main()
