"""Sums and products, with a calculator that costs something: docs/turns.md.

    python -m lab.tasks.calculator out/sums.jsonl out/calls.jsonl

writes 5,000 problems of five levels, {"prompt", "answer", "level"}, and 40,000 replies to imitate:
half ask the tool, half guess. A run then has

    --tool lab.tasks.calculator:calculator
    --reward_funcs accuracy lab.tasks.calculator:calls_reward
"""
import random
import re
from pathlib import Path

from dataset.jsonl import write_new
from errors import Parser, user_errors
from reward.process_rewards import value_of

from .arithmetic import chat, evaluate

# From, to, operator, from, to.
LEVELS = [(2, 9, "+", 2, 9), (11, 99, "+", 11, 99), (101, 999, "+", 101, 999),
          (11, 99, "*", 2, 9), (101, 999, "*", 11, 99)]


def calculation(level, rng):
    """A problem of a level: {"prompt": "What is 347*82?", "answer", "level"}."""
    low, high, operator, second_low, second_high = LEVELS[level]
    a, b = rng.randint(low, high), rng.randint(second_low, second_high)
    return {"prompt": f"What is {a}{operator}{b}?", "answer": evaluate(a, operator, b),
            "level": level + 1}


def with_calculator(row, rng):
    """A chat: the answer at once, or `347*82=28454` and a line break, of which the tool writes all
    after the =, and then the answer."""
    answer, call = str(row["answer"]), row["prompt"].removeprefix("What is ").replace("?", "=")
    reply = chat(row["prompt"], answer)
    if rng.random() < 0.5:
        reply = chat(row["prompt"], f"{call}{answer}\n{answer}")
        reply["conversations"][-1]["forced"] = [[len(call), len(f"{call}{answer}\n")]]
    return reply


def calculator(histories, **columns):
    """The value of the expression that ends with =, `347*82=` say, and a line break."""
    answers = []
    for history in histories:
        # Backwards, from the = on: a search would try all beginnings.
        value = value_of(re.match(r"=[\d+\-*/(). ]*", history[-1][::-1])[0][:0:-1])
        answers.append("?\n" if value is None else f"{value}\n")
    return answers


calculator.stop = "="


def calls_reward(prompts, completions, own_words, **columns):
    """Minus the number of = that the policy wrote: each asks the tool `calculator`."""
    return [-float(words.count("=")) for words in own_words]


@user_errors("lab.tasks.calculator")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.calculator", description=__doc__)
    parser.add_argument("problems", type=Path, help="the file to write them to")
    parser.add_argument("chats", type=Path, help="the file to write replies to")
    args = parser.parse_args(argv)
    rng, levels = random.Random(0), range(len(LEVELS))
    write_new(args.problems, [calculation(rng.choice(levels), rng) for _ in range(5000)])
    write_new(args.chats, [with_calculator(calculation(rng.choice(levels), rng), rng)
                           for _ in range(40_000)])


if __name__ == "__main__":
    main()
