"""Replies to the problems of chain_sum, for train_sft: half are worked on paper, half are guesses.

    python -m report.experiments.worked_sums out/long_sums.jsonl out/long_chats.jsonl
"""
import argparse
import random
from pathlib import Path

from dataset.arithmetic import chain, chat, with_tags, write
from dataset.prompts import read_lines

from .. import UserError, user_errors


def reply(expression, answer, rng):
    """`7 + 15 - 2`: the lines 7+15=17+5=22 and 22-2=20, or "I guess 20.", and the answer."""
    total, *rest = expression.split()
    lines = []
    for operator, number in zip(rest[::2], rest[1::2]):
        line, total = chain(int(total), operator, int(number))
        lines.append(line)
    if str(total) != answer:
        raise ValueError        # another task, or numbers beyond chain()
    return with_tags(rng.choice(("\n".join(lines), f"I guess {total}.")), total)


@user_errors("report.experiments.worked_sums")
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("problems", type=Path, help="as dataset.reasoning_gym writes them")
    parser.add_argument("chats", type=Path, help="the file to write")
    args = parser.parse_args(argv)
    rng, chats = random.Random(0), []
    for where, row in read_lines(args.problems):
        try:
            expression = row["metadata"]["expression"]
            chats.append(chat(row["question"], reply(expression, row["answer"], rng)))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{where}: no sum of numbers below 10,000; write the file with python "
                            "-m dataset.reasoning_gym chain_sum") from None
    write(args.chats, chats)


if __name__ == "__main__":
    main()
