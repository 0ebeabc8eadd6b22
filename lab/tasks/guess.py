"""Guess the number: a game in turns, which the tool `guess` answers.

`python -m lab.tasks.guess` writes guess.jsonl, {"prompt", "secret"}: a line for each number. With
`--sft FOLDER` it also writes the games that the included weights imitate, and, for an experiment,
others that have players who halve. The files are always the same.

    Guess my number from 1 to 63.

    34 high
    14 high
    7 high
    5 yes

The policy writes `34 `, the tool the rest of the line; `high` means that the guess was too high.
There are six guesses, and who always takes the middle of what is left needs no more. These are the
kinds of players, of which one plays a whole game:

    random     any number
    bounded    any number that is still possible
    halving    the middle of these

A run has the tool and the reward of this file:

    --tool lab.tasks.guess:guess --reward_funcs lab.tasks.guess:guess_reward
"""
import random
from pathlib import Path

from dataset.jsonl import write_new
from errors import Parser, user_errors

LARGEST, MOST_GUESSES = 63, 6
PROMPT = f"Guess my number from 1 to {LARGEST}."
# How many of ten players are of each kind.
WITHOUT_HALVING = {"random": 1, "bounded": 9}
WITH_HALVING = {"random": 5, "bounded": 3, "halving": 2}


def play(rng, kind, secret):
    """A game as an assistant's turn; `forced` are the tool's words, [[first character, end]]."""
    text, forced, low, high = "", [], 0, LARGEST + 1
    for _ in range(MOST_GUESSES):
        number = rng.randint(low + 1, high - 1)
        if kind == "random":
            number = rng.randint(1, LARGEST)
        elif kind == "halving":
            number = (low + high) // 2
        answer = "yes\n"
        if number > secret:
            answer, high = "high\n", min(high, number)
        elif number < secret:
            answer, low = "low\n", max(low, number)
        text += f"{number} "
        forced.append([len(text), len(text) + len(answer)])
        text += answer
        if number == secret:
            break
    return {"role": "assistant", "content": text, "forced": forced}


def games(rng, players, count):
    kinds = rng.choices(list(players), list(players.values()), k=count)
    for kind in kinds:
        turn = play(rng, kind, rng.randint(1, LARGEST))
        yield {"conversations": [{"role": "user", "content": PROMPT}, turn]}


def guess(histories, secret, **columns):
    """The tool: how the last guess compares with the column `secret`."""
    answers = []
    for history, number in zip(histories, secret):
        last = history[-1].strip()
        if not last.isdecimal() or len(last) > 4300:    # more digits than Python reads
            answers.append("?\n")
        elif int(last) == number:
            answers.append("yes\n")
        else:
            answers.append("high\n" if int(last) > number else "low\n")
    return answers


guess.stop = " "


def guess_reward(prompts, completions, own_words, secret, **columns):
    """1 if one of the policy's first six words is the column `secret`, else 0."""
    return [float(str(number) in words.split()[:6]) for words, number in zip(own_words, secret)]


@user_errors("lab.tasks.guess")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.guess", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("dataset"), help="the folder")
    parser.add_argument("--sft", type=Path, help="also write the games to this folder")
    args = parser.parse_args(argv)
    secrets = [{"prompt": PROMPT, "secret": secret} for secret in range(1, LARGEST + 1)]
    files = {args.out_dir / "guess.jsonl": secrets}
    if args.sft:
        files |= {args.sft / "guess.jsonl": games(random.Random(1), WITHOUT_HALVING, 60_000),
                  args.sft / "guess_halving.jsonl": games(random.Random(2), WITH_HALVING, 60_000)}
    for path, lines in files.items():
        print(f"wrote {write_new(path, lines)} lines to {path}")


if __name__ == "__main__":
    main()
