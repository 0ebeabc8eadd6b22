"""Rewards that are rules: one function each, of the signature that TRL uses.

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (`answer`, ...), and always `messages` (the chats before the completions) and
`completion_ids`; None says that the reward does not apply to that completion.
"""
import re
from decimal import Decimal, InvalidOperation

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# The whole reply, nothing before or behind; one or two line breaks between the blocks; `.` matches line breaks too.
FORMAT = re.compile(r"<think>\n.*?\n</think>\n\n?<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def format_reward(prompts, completions, **columns):
    """0.5 for `<think>\\n...\\n</think>\\n<answer>\\n...\\n</answer>` and nothing else, 0 otherwise."""
    return [0.5 if FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def tag_reward(prompts, completions, **columns):
    """0.25 for each of the four tags that occurs exactly once: a slope towards the format, from 0 to 1."""
    return [sum(0.25 for tag in TAGS if completion.count(tag) == 1) for completion in completions]


def accuracy_reward(prompts, completions, answer=None, **columns):
    """1 where the reply's answer equals the column `answer`, 0 where not, None where there is nothing to compare with."""
    golds = answer if answer is not None else [None] * len(completions)
    return [None if gold is None else float(same_answer(extract_answer(completion), gold))
            for completion, gold in zip(completions, golds)]


def extract_answer(completion):
    """The last answer block behind the thinking; of a reply without any tag the last number in it; "" if there is none."""
    if not any(tag in completion for tag in TAGS):
        numbers = NUMBER.findall(completion)
        return numbers[-1] if numbers else ""
    return answer_block(completion) or ""


def answer_block(completion):
    """What stands in the last answer block behind the thinking, or None. An answer amid the thinking is a thought."""
    thought, end, rest = completion.rpartition("</think>")
    blocks = ANSWER.findall(rest) if end or "<think>" not in rest else []
    return blocks[-1].strip() if blocks else None


def same_answer(given, gold):
    """Equal as numbers, or letter by letter where they are not numbers. ValueError if the gold answer is empty."""
    gold = str(gold).strip()
    if not gold:
        raise ValueError("the column answer is empty; give the right answer, or leave the field out")
    number, gold_number = as_number(given), as_number(gold)
    return given == gold if gold_number is None else number == gold_number


def as_number(text):
    try:
        number = Decimal(text.replace(",", "").removeprefix("$").removesuffix(".").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
