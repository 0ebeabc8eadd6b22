"""Countdown: make a target from numbers, each used exactly once. Here trying more pays.

`python -m lab.tasks.countdown` writes the three files that we ship, in the form of the public data
set, {"nums": [9, 8, 6], "target": 57}: countdown_train.jsonl and countdown_heldout.jsonl have three
numbers and + - *, countdown_hard.jsonl four numbers and + - * /. With `--sft FOLDER` it also writes
the texts that the included weights were trained on, and what experiments train on besides. Every
time they are the same.

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
try is wasted on a repeat.

    --reward_funcs lab.tasks.countdown:countdown_reward
"""
import functools
import itertools
import random
import re
import reprlib
import zlib
from numbers import Real
from pathlib import Path

from dataset.jsonl import write_new
from dataset.prompts import countdown_prompt
from errors import Parser, UserError, user_errors
from reward.answers import extract_answer
from reward.process_rewards import value_of

from .arithmetic import chat, evaluate, with_tags

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
STAND_INS = [2**0.5, 3**0.5, 5**0.5, 7**0.5, 11**0.5]
DIGITS = 9


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


def search(nums, operators, target, rng, *, most, give_up=0.0, in_order=True):
    """A reply that hits within `most` tries, or gives up, with a probability, after each miss.

    in_order: in the order of tries(), and not each of them at random.
    """
    all_tries = tries(nums, operators)
    hits = {i for i, one in enumerate(all_tries) if results(*one)[-1] == target}
    indices = []
    while hits.isdisjoint(indices):
        if in_order:
            start = rng.randrange(len(all_tries))
            indices = [(start + i) % len(all_tries) for i in range(most)]
        else:
            indices = [rng.randrange(len(all_tries)) for _ in range(most)]
    lines = []
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


def pretraining_chats(rng, count):
    """Comparisons; searches that hit within three tries; and long ones."""
    short, long = searches(rng, most=3), searches(rng, most=18)
    for _ in range(count):
        kind = rng.random()
        if kind < 0.25:
            yield chat("Compare.", drill(rng))
        else:
            yield next(short if kind < 0.5 else long)


def giving_up(**options):
    """The last texts: searches that may end after each miss."""
    return itertools.islice(searches(random.Random(2), most=18, **options), 20_000)


def rows(some_problems):
    return [{"nums": nums, "target": target} for nums, target in some_problems]


# --- the reward -----------------------------------------------------------------------------------

def countdown_reward(prompts, completions, nums=None, target=None, own_words=None, **columns):
    """1 if the answer is an expression in `nums`, each used once, that equals `target`, else 0.

    None for rows without these two columns. An `= 57` at its end is ignored. For the usual 0.1 for
    the format alone, add `format` and pass --reward_weights 0.9 0.2.
    """
    missing = [None] * len(completions)
    return [None if numbers is None or goal is None else
            float(is_solution(extract_answer(completion), numbers, goal))
            for completion, numbers, goal in zip(
                own_words or completions, nums or missing, target or missing)]


def is_solution(text, numbers, target):
    check("nums", numbers, isinstance(numbers, (list, tuple)) and numbers and all(
        isinstance(number, Real) and number % 1 == 0 <= number for number in numbers),
        "a list of whole numbers")
    check("target", target, isinstance(target, Real), "a number")
    text = text.partition("=")[0].strip()
    # A model wrote it: a short text of these characters, in which a sign is always an operator.
    if not re.fullmatch(r"[\d+\-*/() ]{1,100}", text) or re.search(r"(^|[-+*/(]) *[-+]", text):
        return False
    used = [int(number) for number in re.findall(r"\d+", text)]
    return value_of(text) == target and sorted(used) == sorted(numbers)


def check(column, value, is_right, needed):
    """UserError unless a row's value is right: else all its answers would be wrong, in silence."""
    if not is_right:
        raise UserError(f"the column {column} must be {needed}, but a row has "
                        f"{reprlib.repr(value)}; mend the data")


@user_errors("lab.tasks.countdown")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.countdown", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("dataset"),
                        help="the folder for the problems that we ship")
    parser.add_argument("--sft", type=Path, help="also write the training texts to this folder")
    args = parser.parse_args(argv)
    easy, hard = KINDS["easy"], KINDS["hard"]
    hard_heldout = random.Random(0).sample(problems(*hard, heldout=True), 500)
    files = {args.out_dir / "countdown_train.jsonl": rows(problems(*easy, heldout=False)),
             args.out_dir / "countdown_heldout.jsonl": rows(problems(*easy, heldout=True)),
             args.out_dir / "countdown_hard.jsonl": rows(hard_heldout)}
    if args.sft:
        hard_train = random.Random(3).sample(problems(*hard, heldout=False), 5000)
        files |= {
            args.sft / "pretrain.jsonl": pretraining_chats(random.Random(1), 100_000),
            args.sft / "give_up.jsonl": giving_up(give_up=0.4),
            # For experiments:
            args.sft / "give_up_sooner.jsonl": giving_up(give_up=0.7),
            args.sft / "give_up_random.jsonl": giving_up(give_up=0.4, in_order=False),
            args.sft / "countdown_hard_train.jsonl": rows(hard_train),
        }
    for path, lines in files.items():
        print(f"wrote {write_new(path, lines)} lines to {path}")


if __name__ == "__main__":
    main()
