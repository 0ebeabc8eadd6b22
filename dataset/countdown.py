"""Countdown: make a target from numbers, each used exactly once. Here trying more pays.

`python -m dataset.countdown` writes the three files that we ship, in the form of the public data
set, {"nums": [9, 8, 6], "target": 57}: countdown_train.jsonl and countdown_heldout.jsonl have three
numbers and + - *, countdown_hard.jsonl four numbers and + - * /. With `--sft FOLDER` it also writes
the texts that the shipped weights were trained on, and `--hard FOLDER` writes problems with four
numbers to train on. Every time they are the same.

A thought is a list of tries, one a line: an expression worked from left to right, its result, the
target, and the verdict. The comparison is the hard part for a small model, so both numbers stand
side by side.

    <think>
    9+8=17+6=23 57 no
    9*6=54+8=62 57 no
    8*6=48+9=57 57 yes
    </think>
    <answer>
    8*6+9
    </answer>

The texts try the expressions in one fixed order, from a random start and round in a circle, so no
try is wasted on a repeat. `--order random` draws each try anew.
"""
import argparse
import functools
import itertools
import random
import zlib
from pathlib import Path

from report.text import write_jsonl

from .arithmetic import chat, evaluate, with_tags
from .prompts import countdown_prompt

LARGEST = 100           # no result, intermediate ones too, is larger, or below 0
GAVE_UP = "none"        # the answer of a reply that stopped without a hit
# How many numbers, from 1 to 10, and the operators.
KINDS = {"easy": (3, "+-*"), "hard": (4, "+-*/")}


# --- problems -------------------------------------------------------------------------------------

def results(numbers, operators):
    """The results from left to right: (8, 6, 9), ("*", "+") -> [8, 48, 57].

    None if one of them is not a whole number from 0 to LARGEST.
    """
    values = [numbers[0]]
    for operator, number in zip(operators, numbers[1:]):
        value = evaluate(values[-1], operator, number)
        if value != int(value) or not 0 <= value <= LARGEST:
            return None
        values.append(int(value))
    return values


# Two expressions are the same if they agree on numbers that have nothing to do with each other.
STAND_INS, DIGITS = dict(enumerate((2**0.5, 3**0.5, 5**0.5, 7**0.5, 11**0.5))), 9


@functools.cache
def tries(nums, operators="+-*"):
    """All expressions in these numbers, [(numbers, operators)], in the order of the texts.

    By operators, then larger numbers first. Of 9+8+6 and 8+9+6 only the first one is there.
    """
    found = {}
    for chosen in itertools.product(operators, repeat=len(nums) - 1):
        for places in itertools.permutations(range(len(nums))):
            value = STAND_INS[places[0]]
            for operator, place in zip(chosen, places[1:]):
                value = evaluate(value, operator, STAND_INS[place])
            numbers = tuple(nums[place] for place in places)
            if results(numbers, chosen):
                found.setdefault(round(value, DIGITS), (numbers, chosen))
    # Equal numbers make equal expressions at different places.
    return list(dict.fromkeys(found.values()))


def is_heldout(nums, target):
    """Whether to keep a problem for evaluation: one in six, by its numbers and target alone."""
    return zlib.crc32(repr((sorted(nums), target)).encode()) % 6 == 0


@functools.cache
def problems(count, operators, *, heldout):
    """All (nums, target) with so many numbers from 1 to 10, from one side of the split."""
    return [(nums, target)
            for nums in itertools.combinations_with_replacement(range(10, 0, -1), count)
            for target in sorted({results(*one)[-1] for one in tries(nums, operators)})
            if is_heldout(nums, target) == heldout]


# --- ways to answer -------------------------------------------------------------------------------

def line(numbers, operators, target):
    """One try and its verdict: `8*6=48+9=57 57 yes`."""
    first, *rest = results(numbers, operators)
    text = str(first)
    for operator, number, result in zip(operators, numbers[1:], rest):
        text += f"{operator}{number}={result}"
    return f"{text} {target} {'yes' if result == target else 'no'}"


def expression(numbers, operators):
    """The same, left to right, as one writes it: `(7+4)*5`."""
    text = str(numbers[0])
    for i, (operator, number) in enumerate(zip(operators, numbers[1:])):
        if operator in "*/" and i and operators[i - 1] in "+-":
            text = f"({text})"
        text += f"{operator}{number}"
    return text


def search(nums, operators, target, rng, *, order, most, give_up=0.0):
    """A reply that hits within `most` tries, or gives up, with a probability, after each miss."""
    all_tries, lines, indices = tries(nums, operators), [], []
    hits = {i for i, one in enumerate(all_tries) if results(*one)[-1] == target}
    while hits.isdisjoint(indices):
        if order == "random":
            indices = [rng.randrange(len(all_tries)) for _ in range(most)]
        else:
            start = rng.randrange(len(all_tries))
            indices = [(start + i) % len(all_tries) for i in range(most)]
    for i in indices:
        lines.append(line(*all_tries[i], target))
        if i in hits:
            return with_tags("\n".join(lines), expression(*all_tries[i]))
        if rng.random() < give_up:
            return with_tags("\n".join(lines), GAVE_UP)


def drill(rng):
    """Nothing but comparisons, half of them of equal numbers."""
    lines = []
    for _ in range(12):
        a = rng.randint(0, LARGEST)
        b = a if rng.random() < 0.5 else rng.randint(0, LARGEST)
        lines.append(f"={a} {b} {'yes' if a == b else 'no'}")
    return "\n".join(lines)


# --- files ----------------------------------------------------------------------------------------

def searches(rng, **options):
    """Endless replies to training problems, every fifth to a hard one."""
    while True:
        kind = KINDS["hard" if rng.random() < 0.2 else "easy"]
        nums, target = rng.choice(problems(*kind, heldout=False))
        yield chat(countdown_prompt(nums, target), search(nums, kind[1], target, rng, **options))


def pretraining_chats(rng, count, order):
    """Comparisons; searches that hit within three tries; and long ones."""
    short, long = (searches(rng, order=order, most=most) for most in (3, 18))
    for _ in range(count):
        kind = rng.random()
        if kind < 0.25:
            yield chat("Compare.", drill(rng))
        else:
            yield next(short if kind < 0.5 else long)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the problems of Countdown and, with --sft, the texts that the shipped "
                    "weights were trained on.")
    flag = parser.add_argument
    flag("--out_dir", type=Path, default=Path(__file__).parent,
         help="the folder for countdown_train.jsonl, countdown_heldout.jsonl, countdown_hard.jsonl")
    flag("--sft", type=Path, help="also write the training texts to this folder")
    flag("--hard", type=Path, help="write nothing but 5,000 hard problems to train on, "
                                   "countdown_hard_train.jsonl, to this folder")
    flag("--order", choices=("methodical", "random"), default="methodical",
         help="of the tries in these texts (default: %(default)s)")
    flag("--give_up", type=float, default=0.4,
         help="probability of giving up after a miss (default: %(default)s)")
    args = parser.parse_args()

    easy, hard = KINDS["easy"], KINDS["hard"]
    found = {"train": problems(*easy, heldout=False), "heldout": problems(*easy, heldout=True),
             "hard": random.Random(0).sample(problems(*hard, heldout=True), 500)}
    if args.hard:
        found = {"hard_train": random.Random(3).sample(problems(*hard, heldout=False), 5000)}
    files = {(args.hard or args.out_dir) / f"countdown_{name}.jsonl":
             [{"nums": nums, "target": target} for nums, target in found[name]] for name in found}
    if args.sft:
        early = searches(random.Random(2), order=args.order, most=18, give_up=args.give_up)
        files |= {
            args.sft / "pretrain.jsonl": pretraining_chats(random.Random(1), 100_000, args.order),
            args.sft / "give_up.jsonl": itertools.islice(early, 20_000),
        }
    for path, rows in files.items():
        print(f"wrote {write_jsonl(path, rows)} lines to {path}")
