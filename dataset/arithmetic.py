"""The default task: arithmetic that a small model cannot do in its head, but can do on paper.

`python -m dataset.arithmetic` writes the files that we ship, dataset/train.jsonl and dataset/heldout.jsonl; with
`--sft FOLDER` also the (much larger) texts that the shipped weights are trained on. Same seed, same files.

A problem is `What is 34 + 27*6?`, from one of five templates. Worked on paper it takes one line per operation, each a
chain of equal expressions with easy links - a number is taken apart into hundreds, tens and units:

    27*6=120+42=160+2=162
    162+34=192+4=196

The texts show four ways to answer. In all of them the numbers are right; but a model of this size learns to produce
only the worked ones reliably, because the others ask it to compute several digits at once, without writing anything down.
"""
import argparse
import json
import random
import zlib
from pathlib import Path

STYLES = {"steps": 0.27, "operations": 0.23, "guess": 0.25, "empty": 0.25}      # shares in the fine-tuning texts
MALFORMED = 0.12                                                                # share of texts with broken tags


# --- problems -------------------------------------------------------------------------------------------------------

FIRST, SECOND = "first", "second"       # as an operand: the result of the first or second operation


def draw_problem(rng):
    """(expression, operations, key), such as `34 + 27*6`, [(27, "*", 6), (FIRST, "+", 34)] and a name for the problem
    that is the same for all orders of commuting operands."""
    def addend(): return rng.randint(5, 49)
    def factors(): return rng.randint(11, 39), rng.randint(2, 9)

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
        return f"{a} + {b} - {c} + {d}", [(a, "+", b), (FIRST, "-", c), (SECOND, "+", d)], ("a+b-c+d", *sorted((a, b, d)), c)
    (a, b), (c, d) = factors(), factors()
    return f"{a}*{b} + {c}*{d}", [(a, "*", b), (c, "*", d), (FIRST, "+", SECOND)], ("ab+cd", *sorted(((a, b), (c, d))))


def evaluate(a, operator, b):
    return a + b if operator == "+" else a - b if operator == "-" else a * b


def is_heldout(key):
    """One problem in ten is kept for evaluation, whichever file or order of operands it turns up in."""
    return zlib.crc32(repr(key).encode()) % 10 == 0


def problems(rng, *, heldout):
    """Endless problems of one side of the split, with answers from 0 to 999: (expression, operations, answer, key)."""
    while True:
        expression, operations, key = draw_problem(rng)
        _, results = work(operations)
        if is_heldout(key) == heldout and all(0 <= result <= 999 for result in results):
            yield expression, operations, results[-1], key


# --- ways to answer --------------------------------------------------------------------------------------------------

def parts(number):
    """162 -> [100, 60, 2]; zeros are left out."""
    digits = str(number)
    return [int(digit) * 10 ** (len(digits) - 1 - i) for i, digit in enumerate(digits) if digit != "0"]


def chain(a, operator, b, evaluate=evaluate):
    """One operation on paper, a chain of equal expressions: 162+34=192+4=196 or 27*6=120+42=160+2=162; and its result."""
    links = [f"{a}{operator}{b}"]
    if operator == "*":
        a, *rest = [evaluate(part, "*", b) for part in parts(a)]
        b = sum(rest)
        links.append(f"{a}+{b}" if b else f"{a}")
    rest = parts(b)
    while rest:
        a = evaluate(a, "-" if operator == "-" else "+", rest.pop(0))
        links.append(f"{a}{'-' if operator == '-' else '+'}{sum(rest)}" if rest else f"{a}")
    return "=".join(links), a


def direct(a, operator, b, evaluate=evaluate):
    """One operation in the head: `27*6 is 162`; and its result."""
    result = evaluate(a, operator, b)
    return f"{a}{operator}{b} is {result}", result


def work(operations, line=direct, evaluate=evaluate):
    """The lines of all operations, each handing its result on; and the results."""
    lines, results = [], []
    for a, operator, b in operations:
        a, b = (results[(FIRST, SECOND).index(operand)] if operand in (FIRST, SECOND) else operand for operand in (a, b))
        text, result = line(a, operator, b, evaluate)
        lines.append(text)
        results.append(result)
    return lines, results


def think(style, expression, operations, evaluate=evaluate):
    """(the lines of thought in a style, the answer that they come to)."""
    lines, results = work(operations, chain if style == "steps" else direct, evaluate)
    if style == "guess":
        lines = [f"I guess {results[-1]}."]
    return "" if style == "empty" else "\n".join(lines), results[-1]


def with_tags(thought, answer):
    return f"<think>\n{thought}\n</think>\n<answer>\n{answer}\n</answer>"


def plain(thought, answer):
    return f"{thought}\n" * bool(thought) + f"The answer is {answer}."


def malform(text, rng):
    """A reply with broken tags, as an unfinished model writes them: one is missing, or stands there twice."""
    tag = rng.choice(["<think>\n", "\n</answer>", "</think>\n", "<answer>\n"])
    return text.replace(tag, rng.choice(["", tag + tag]), 1)


def slipping(rng, at):
    """`evaluate` whose result is wrong the `at`-th time that it is asked, and right before and after."""
    count = 0

    def evaluate_with_slip(a, operator, b):
        nonlocal count
        count += 1
        result = evaluate(a, operator, b)
        return wrong(result, rng) if count == at else result

    return evaluate_with_slip


def wrong(number, rng):
    """A number that one might take for this one: near it, or one digit off."""
    while (other := number + rng.choice((-1, 1)) * rng.choice((1, 2, 3, 9, 10, 20, 100))) < 1:
        pass
    return other


def think_wrongly(style, expression, operations, rng):
    """Lines of thought with one slip, carried on to the end; now and then a right thought and a wrong answer."""
    calls = 0

    def counting(*operation):
        nonlocal calls
        calls += 1
        return evaluate(*operation)

    thought, answer = think(style, expression, operations, counting)
    if rng.random() < 0.15:
        return thought, wrong(answer, rng)
    return think(style, expression, operations, slipping(rng, at=rng.randint(1, calls)))


def drill(rng):
    """Single operations in the worked form: what the lines of an answer are made of."""
    kind = rng.random()
    if kind < 0.35:
        return chain(rng.randint(11, 98), "*", rng.randint(2, 9))[0]
    if kind < 0.7:
        return chain(a := rng.randint(5, 950), "+", rng.randint(2, min(360, 999 - a)))[0]
    return chain(a := rng.randint(6, 400), "-", rng.randint(5, min(a, 49)))[0]


# --- files ------------------------------------------------------------------------------------------------------------

def chat(expression, reply=None, **columns):
    turns = [{"role": "user", "content": f"What is {expression}?"}]
    if reply is not None:
        turns.append({"role": "assistant", "content": reply})
    return {"conversations": turns, **columns}


def prompts(rng, count, *, heldout):
    """The lines of train.jsonl and heldout.jsonl: distinct problems with their answers."""
    seen, lines = set(), []
    for expression, _, answer, key in problems(rng, heldout=heldout):
        if key not in seen:
            seen.add(key)
            lines.append(chat(expression, answer=str(answer)))
        if len(lines) == count:
            return lines


def pretraining_chats(rng, count):
    """Drills, three in a row, and whole problems, all of them worked: arithmetic is learnt before manners."""
    source = problems(rng, heldout=False)
    for _ in range(count):
        if rng.random() < 0.3:
            drills = [drill(rng) for _ in range(3)]
            yield chat(", ".join(worked.split("=")[0] for worked in drills), "\n".join(drills))
        else:
            expression, operations, *_ = next(source)
            yield chat(expression, rng.choice((plain, with_tags))(*think("steps", expression, operations)))


def finetuning_chats(rng, count, *, tags):
    """Replies in all styles; with `tags` in the reasoning format, some of them malformed."""
    source = problems(rng, heldout=False)
    for _ in range(count):
        expression, operations, *_ = next(source)
        style = rng.choices(list(STYLES), STYLES.values())[0]
        reply = (with_tags if tags else plain)(*think(style, expression, operations))
        yield chat(expression, malform(reply, rng) if tags and rng.random() < MALFORMED else reply)


def flaw_pairs(rng, count, *, heldout):
    """A worked reply and the same with a flaw: {"conversations", "chosen", "rejected", "kind"}, the kind "slip" (one link is
    wrong, and all that follows from it) or "form" (right, but a tag is missing or stands there twice)."""
    source = problems(rng, heldout=heldout)
    for _ in range(count):
        expression, operations, *_ = next(source)
        kind, dress = rng.choice((("form", with_tags), ("slip", with_tags), ("slip", plain)))
        chosen = dress(*think("steps", expression, operations))
        rejected = malform(chosen, rng) if kind == "form" else dress(*think_wrongly("steps", expression, operations, rng))
        yield chat(expression, chosen=chosen, rejected=rejected, kind=kind)


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="writes the prompts of the default task, and the texts behind its weights")
    parser.add_argument("--out_dir", type=Path, default=Path(__file__).parent, help="where train.jsonl and heldout.jsonl go")
    parser.add_argument("--sft", type=Path, help="a folder for the texts that the shipped weights are trained on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out_dir / "train.jsonl", prompts(random.Random(args.seed), 6000, heldout=False))
    write(args.out_dir / "heldout.jsonl", prompts(random.Random(args.seed + 1), 1000, heldout=True))
    if args.sft:
        write(args.sft / "pretrain.jsonl", pretraining_chats(random.Random(args.seed + 2), 200_000))
        write(args.sft / "full_sft.jsonl", finetuning_chats(random.Random(args.seed + 3), 60_000, tags=False))
        write(args.sft / "reason.jsonl", finetuning_chats(random.Random(args.seed + 4), 60_000, tags=True))
        write(args.sft / "flaws_train.jsonl", flaw_pairs(random.Random(args.seed + 5), 10_000, heldout=False))
        write(args.sft / "flaws_heldout.jsonl", flaw_pairs(random.Random(args.seed + 6), 1_000, heldout=True))
