"""The default task: arithmetic that a small model cannot do in its head, but can do on paper.

`python -m lab.tasks.arithmetic` writes the two files that we ship, dataset/train.jsonl and
dataset/heldout.jsonl. With `--sft FOLDER` it also writes the (much larger) texts that the shipped
weights were trained on. Every time they are the same.

A problem reads `What is 34 + 27*6?` and follows one of five templates. Worked on paper, it takes
one line per operation. Each line is a chain of equal expressions, and every link is easy because a
number is split into hundreds, tens and units:

    27*6=120+42=160+2=162
    162+34=192+4=196

The texts show four styles of reply, all with the right numbers. But a model of this size learns to
produce only the worked style reliably: the others ask it to compute several digits at once, without
writing anything down.
"""
import itertools
import random
import zlib
from operator import add, mul, sub, truediv
from pathlib import Path

from dataset.jsonl import write_new
from errors import Parser, user_errors

# The shares of the styles in the fine-tuning texts, and of replies with broken tags.
STYLES = {"steps": 0.27, "operations": 0.23, "guess": 0.25, "empty": 0.25}
# For experiments with length: half of the worked replies begin with FILLER, to no avail.
REDUNDANT_STYLES = {"steps": 0.3, "wordy": 0.3, "operations": 0.4}
FILLER = ["let me think"] * 3
MALFORMED = 0.12


# --- problems -------------------------------------------------------------------------------------

FIRST, SECOND = "first", "second"   # as an operand: the result of the first or second operation


def draw_problem(rng):
    """(expression, operations, key): `34 + 27*6`, [(27, "*", 6), (FIRST, "+", 34)], and the key.

    The key identifies the problem: it is the same for all orders of commuting operands.
    """
    def addend():
        return rng.randint(5, 49)

    def factors():
        return rng.randint(11, 39), rng.randint(2, 9)

    template = rng.randrange(5)
    if template == 0:
        a, (b, c) = addend(), factors()
        return f"{a} + {b}*{c}", [(b, "*", c), (FIRST, "+", a)], ("a+bc", a, b, c)
    if template == 1:
        (a, b), c = factors(), addend()
        return f"{a}*{b} - {c}", [(a, "*", b), (FIRST, "-", c)], ("ab-c", a, b, c)
    if template == 2:
        a, b, c = addend(), addend(), rng.randint(2, 9)
        return f"({a} + {b})*{c}", [(a, "+", b), (FIRST, "*", c)], ("(a+b)c", *sorted((a, b)), c)
    if template == 3:
        a, b, c, d = addend(), addend(), addend(), addend()
        operations = [(a, "+", b), (FIRST, "-", c), (SECOND, "+", d)]
        return f"{a} + {b} - {c} + {d}", operations, ("a+b-c+d", *sorted((a, b, d)), c)
    (a, b), (c, d) = factors(), factors()
    operations = [(a, "*", b), (c, "*", d), (FIRST, "+", SECOND)]
    return f"{a}*{b} + {c}*{d}", operations, ("ab+cd", *sorted(((a, b), (c, d))))


def evaluate(a, operator, b):
    return {"+": add, "-": sub, "*": mul, "/": truediv}[operator](a, b)


def is_heldout(key):
    """Whether to keep a problem for evaluation: one in ten, by its key alone.

    So it is held out of every file, in any order of its operands.
    """
    return zlib.crc32(repr(key).encode()) % 10 == 0


def problems(rng, *, heldout):
    """Endless (expression, operations, answer, key) from one side of the split.

    All results, intermediate ones too, are from 0 to 999.
    """
    while True:
        expression, operations, key = draw_problem(rng)
        _, results = work(operations)
        if is_heldout(key) == heldout and all(0 <= result <= 999 for result in results):
            yield expression, operations, results[-1], key


# --- ways to answer -------------------------------------------------------------------------------

def parts(number):
    """162 -> [100, 60, 2], of a number below 10,000; zeros are skipped."""
    all_parts = [number // place % 10 * place for place in (1000, 100, 10, 1)]
    return [part for part in all_parts if part]


def chain(a, operator, b, evaluate=evaluate):
    """One operation on paper, as a chain of equal expressions, and its result.

    162+34=192+4=196 or 27*6=120+42=160+2=162
    """
    links = [f"{a}{operator}{b}"]
    if operator == "*":
        a, *rest = [evaluate(part, "*", b) for part in parts(a)]
        b, operator = sum(rest), "+"
        links.append(f"{a}+{b}" if b else f"{a}")
    rest = parts(b)
    while rest:
        a = evaluate(a, operator, rest.pop(0))
        links.append(f"{a}{operator}{sum(rest)}" if rest else f"{a}")
    if len(links) == 1:         # 7+0, of which nothing is split off
        links.append(f"{a}")
    return "=".join(links), a


def direct(a, operator, b, evaluate=evaluate):
    """One operation in the head, `27*6 is 162`, and its result."""
    result = evaluate(a, operator, b)
    return f"{a}{operator}{b} is {result}", result


def work(operations, line=direct, evaluate=evaluate):
    """Do the operations in order, passing results on: (their lines, their results)."""
    lines, results = [], []
    for a, operator, b in operations:
        known = dict(zip((FIRST, SECOND), results))
        text, result = line(known.get(a, a), operator, known.get(b, b), evaluate)
        lines.append(text)
        results.append(result)
    return lines, results


def think(style, operations, evaluate=evaluate):
    """(the thought in this style, the answer it arrives at)."""
    worked = style in ("steps", "wordy")
    lines, results = work(operations, chain if worked else direct, evaluate)
    if style == "wordy":
        lines = FILLER + lines
    if style == "guess":
        lines = [f"I guess {results[-1]}."]
    if style == "empty":
        lines = []
    return "\n".join(lines), results[-1]


def with_tags(thought, answer):
    return f"<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>"


def plain(thought, answer):
    end = f"The answer is {answer}."
    return f"{thought}\n{end}" if thought else end


def malform(text, rng):
    """The reply with one tag missing or doubled, as a half-trained model would write it."""
    tag = rng.choice(["<think>\n", "\n</answer>", "</think>\n", "<answer>\n"])
    return text.replace(tag, rng.choice(["", tag + tag]), 1)


def wrong(number, rng):
    """A plausible mistake for this number: close to it, or one digit off."""
    other = 0
    while other < 1:
        other = number + rng.choice((-1, 1)) * rng.choice((1, 2, 3, 9, 10, 20, 100))
    return other


def think_wrongly(style, operations, rng):
    """`think` with one slip, carried on to the end.

    In 15% of the cases the thought is right and only the answer is wrong.
    """
    done, slip = [], 0

    def with_slip(*operation):
        done.append(operation)
        result = evaluate(*operation)
        return wrong(result, rng) if len(done) == slip else result

    thought, answer = think(style, operations, with_slip)
    if rng.random() < 0.15:
        return thought, wrong(answer, rng)
    slip = len(done) + rng.randint(1, len(done))
    return think(style, operations, with_slip)


def drill(rng):
    """A single worked operation, the building block of a worked reply."""
    kind = rng.random()
    if kind < 0.35:
        return chain(rng.randint(11, 98), "*", rng.randint(2, 9))[0]
    if kind < 0.7:
        a = rng.randint(5, 950)
        return chain(a, "+", rng.randint(2, min(360, 999 - a)))[0]
    a = rng.randint(6, 400)
    return chain(a, "-", rng.randint(5, min(a, 49)))[0]


# --- files ----------------------------------------------------------------------------------------

def chat(prompt, reply=None, **columns):
    turns = [{"role": "user", "content": prompt}]
    if reply is not None:
        turns.append({"role": "assistant", "content": reply})
    return {"conversations": turns, **columns}


def prompts(rng, count, *, heldout):
    """The lines of train.jsonl or heldout.jsonl: distinct problems with their answers."""
    lines = {}                          # by the keys of the problems
    for expression, _, answer, key in problems(rng, heldout=heldout):
        lines.setdefault(key, chat(f"What is {expression}?", answer=str(answer)))
        if len(lines) == count:
            return list(lines.values())


def pretraining_chats(rng, count):
    """Drills, three to a chat, and whole problems, all of them worked.

    The model learns arithmetic first; the styles come with fine-tuning.
    """
    source = problems(rng, heldout=False)
    for _ in range(count):
        if rng.random() < 0.3:
            drills = [drill(rng) for _ in range(3)]
            expression, reply = ", ".join(text.split("=")[0] for text in drills), "\n".join(drills)
        else:
            expression, operations, *_ = next(source)
            reply = rng.choice((plain, with_tags))(*think("steps", operations))
        yield chat(f"What is {expression}?", reply)


def finetuning_chats(rng, count, *, tags, styles=STYLES, malformed_share=MALFORMED):
    """Replies in all styles; with `tags` in the reasoning format, some of them malformed."""
    for expression, operations, *_ in itertools.islice(problems(rng, heldout=False), count):
        style = rng.choices(list(styles), styles.values())[0]
        dress = with_tags if tags else plain
        reply = dress(*think(style, operations))
        if tags and rng.random() < malformed_share:
            reply = malform(reply, rng)
        yield chat(f"What is {expression}?", reply)


def flaw_pairs(rng, count, *, heldout):
    """Pairs of a worked reply and a flawed copy: {"conversations", "chosen", "rejected", "kind"}.

    Kind "slip": one result is wrong, and so is everything computed from it. Kind "form": the
    numbers are right, but a tag is missing or doubled.
    """
    for expression, operations, *_ in itertools.islice(problems(rng, heldout=heldout), count):
        kind, dress = rng.choice((("form", with_tags), ("slip", with_tags), ("slip", plain)))
        chosen = dress(*think("steps", operations))
        if kind == "form":
            rejected = malform(chosen, rng)
        else:
            rejected = dress(*think_wrongly("steps", operations, rng))
        yield chat(f"What is {expression}?", chosen=chosen, rejected=rejected, kind=kind)


@user_errors("lab.tasks.arithmetic")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.arithmetic", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("dataset"),
                        help="the folder for train.jsonl and heldout.jsonl")
    parser.add_argument("--sft", type=Path, help="also write the training texts to this folder")
    args = parser.parse_args(argv)
    files = {args.out_dir / "train.jsonl": prompts(random.Random(0), 6000, heldout=False),
             args.out_dir / "heldout.jsonl": prompts(random.Random(1), 1000, heldout=True)}
    if args.sft:
        files |= {
            args.sft / "pretrain.jsonl": pretraining_chats(random.Random(2), 200_000),
            args.sft / "full_sft.jsonl": finetuning_chats(random.Random(3), 60_000, tags=False),
            args.sft / "reason.jsonl": finetuning_chats(random.Random(4), 60_000, tags=True),
            args.sft / "flaws_train.jsonl": flaw_pairs(random.Random(5), 10_000, heldout=False),
            args.sft / "flaws_heldout.jsonl": flaw_pairs(random.Random(6), 1_000, heldout=True),
            args.sft / "redundant.jsonl": finetuning_chats(
                random.Random(7), 20_000, tags=True, styles=REDUNDANT_STYLES, malformed_share=0.0),
        }
    for path, rows in files.items():
        print(f"wrote {write_new(path, rows)} lines to {path}")


if __name__ == "__main__":
    main()
