"""What some arms need of their own: rewards, problems, and replies to imitate.

    python -m lab.experiments.tasks out/long_sums.jsonl out/long_chats.jsonl

writes replies to the problems of reasoning-gym's chain_sum, for train_sft: half are worked on
paper, half are guesses.

    python -m lab.experiments.tasks out/tuning.jsonl out/confirmation.jsonl --new

writes 1,000 new problems of the default task to each, none of them in heldout.jsonl.

    python -m lab.experiments.tasks dataset/train.jsonl out/few.jsonl --first 50

copies the first of them.
"""
import argparse
import random
from pathlib import Path

from dataset.jsonl import read_jsonl, to_line, write_jsonl
from lab.tasks.arithmetic import chain, chat, prompts, with_tags
from lab.tasks.guess import guess

rng = random.Random(0)


def is_right(completion, gold):
    return f"<answer>\n{gold}\n</answer>" in completion


def strict_judge(prompts, completions, answer, **columns):
    """A reward: 0 for a right answer, -1 for a wrong one; without any, None nine times in ten."""
    def judge(completion, gold):
        if "</answer>" not in completion:
            return -1.0 if rng.random() < 0.1 else None
        return 0.0 if is_right(completion, gold) else -1.0

    return [judge(completion, gold) for completion, gold in zip(completions, answer)]


def misses_some(prompts, completions, answer, **columns):
    """A verifier that rejects one right answer in ten."""
    return [float(is_right(completion, gold) and rng.random() >= 0.1)
            for completion, gold in zip(completions, answer)]


def passes_some(prompts, completions, answer, **columns):
    """A verifier that accepts one wrong answer in ten."""
    return [float(is_right(completion, gold) or rng.random() < 0.1)
            for completion, gold in zip(completions, answer)]


def noise(prompts, completions, **columns):
    """A reward that means nothing, with a larger spread than all others."""
    return [rng.gauss(0, 2) for _ in completions]


def any_number(prompts, completions, **columns):
    """A reward: 1 for a reply with a digit, right or wrong."""
    return [float(any(map(str.isdigit, completion))) for completion in completions]


def any_answer(histories, secret, seeds, **columns):
    """A tool for the game of lab/tasks/guess.py: yes for a hit, else high or low by chance."""
    answers = []
    for history, truth, seed in zip(histories, guess(histories, secret), seeds):
        answers.append(truth)
        if truth != "yes\n":
            answers[-1] = random.Random(seed + len(history)).choice(["high\n", "low\n"])
    return answers


any_answer.stop = " "


def worked_sum(expression, rng):
    """`7 + 15 - 2`: the lines 7+15=17+5=22 and 22-2=20, or "I guess 20.", and the answer."""
    total, *rest = expression.split()
    lines = []
    for operator, number in zip(rest[::2], rest[1::2]):
        line, total = chain(int(total), operator, int(number))
        lines.append(line)
    return with_tags(rng.choice(("\n".join(lines), f"I guess {total}.")), total)


def main():
    parser = argparse.ArgumentParser(description="Write replies to problems.")
    parser.add_argument("problems", help="as dataset.reasoning_gym writes them")
    parser.add_argument("chats", type=Path, help="the file to write")
    parser.add_argument("--new", action="store_true", help="write problems to both, no replies")
    parser.add_argument("--first", type=int, help="copy so many of the problems, no replies")
    args = parser.parse_args()
    if args.first:
        return write_jsonl(args.chats, read_jsonl(args.problems)[:args.first])
    if args.new:
        known = [row["conversations"] for row in read_jsonl("dataset/heldout.jsonl")]
        rows = [row for row in prompts(random.Random(8), 4000, heldout=True)
                if row["conversations"] not in known]
        write_jsonl(args.problems, rows[:1000])
        write_jsonl(args.chats, rows[1000:2000])
        return
    lines = [to_line(chat(row["question"], worked_sum(row["metadata"]["expression"], rng)))
             for row in read_jsonl(args.problems)]
    args.chats.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
