"""What replies do, read off completions.jsonl: how long, how often wrong, how they search."""
import re

from ..jsonl import read_jsonl
from ..metrics import mean_metrics

THOUGHT = re.compile(r"(?:<think>)?\s*(.*?)\s*(?:</think>|\Z)", re.DOTALL)
# A try at Countdown: `8*6=48+9=57 57 yes`, an expression worked left to right, target, verdict.
TRY = re.compile(r"(.*=(\d+)) (\d+) (yes|no)")
EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(?=(\d+))")


def behaviour(row):
    """The behaviour of one reply, a row of completions.jsonl: {name: number, or None}.

    None means that it does not apply: `length/right` of a wrong reply, `checks_right` of one
    without a check. A reply is right if its reward is 1 or more.
    """
    lines = THOUGHT.match(row["completion"])[1].splitlines()
    tries = [found for found in map(TRY.fullmatch, lines) if found]
    right = row["reward"] is not None and row["reward"] >= 1
    hit = any(found[4] == "yes" for found in tries)
    return {
        "right": float(right),
        "length": row["length"],
        "length/right": row["length"] if right else None,
        "length/wrong": None if right else row["length"],
        "cut_off": float(not row["ended"]),
        "repeats": share(line in lines[:i] for i, line in enumerate(lines)),
        "tries": len(tries) or None,
        "gave_up": float(row["ended"] and not hit) if tries else None,
        "checks_right": share((found[2] == found[3]) == (found[4] == "yes") for found in tries),
        "slips": share(not adds_up(found[1]) for found in tries),
    }


def adds_up(text):
    """Whether all equations in `8*6=48+9=57` hold."""
    return all({"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[operator]
               for a, operator, b, c in ((int(a), operator, int(b), int(c))
                                         for a, operator, b, c in EQUATION.findall(text)))


def share(conditions):
    """The share of the conditions that hold, None if there are none."""
    conditions = list(conditions)
    return sum(conditions) / len(conditions) if conditions else None


def behaviour_of_run(run_dir):
    """{step: {name: the mean over the step's replies to which it applies}}"""
    replies = {}
    for row in read_jsonl(run_dir / "completions.jsonl"):
        known = {name: value for name, value in behaviour(row).items() if value is not None}
        replies.setdefault(row["step"], []).append(known)
    return {step: mean_metrics(of_step) for step, of_step in replies.items()}
