"""Rewards that are rules: one function each, of the signature that TRL uses.

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (`answer`, ...), and always `messages` (the chats before the completions) and
`completion_ids`; None says that the reward does not apply to that completion. Where the chat template itself opens
`<think>`, a completion begins with that tag all the same: what is judged is the whole reply.
"""
import re
import threading
import warnings
from decimal import Decimal, InvalidOperation

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# The whole reply, nothing before or behind; one or two line breaks between the blocks; `.` matches line breaks too.
FORMAT = re.compile(r"<think>\n.*?\n</think>\n\n?<answer>\n.*?\n</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*\.?")
# What does not change a number: before or within it currency and LaTeX's thin spaces, behind it percent, degrees, a unit.
WITHIN_A_NUMBER = re.compile(r"\\?\$|\\[,!; ]|(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")         # 1,234 but not 1,2
BEHIND_A_NUMBER = re.compile(r"(?:\\?%|°|\^\{?\\circ\}?|\\(?:text|mathrm)\{[^{}]*\}|\.|\s)+$")
TEXT = re.compile(r"\\text(?:bf|rm)?\{([^{}]*)\}")


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
    """The final answer of a reply, "" if there is none; what stands in the last \\boxed{...} of it, if there is one.

    With an answer block behind the thinking it is what stands in the last one. Without a tag in the whole reply it is
    the last number. Where a reply has thinking but no answer block, only a box behind the thinking counts.
    """
    block = answer_block(completion)
    if block is not None:
        return block if boxed(block) is None else boxed(block)
    in_box = boxed(behind_thinking(completion))
    if in_box is not None:
        return in_box
    numbers = [] if any(tag in completion for tag in TAGS) else NUMBER.findall(completion)
    return numbers[-1] if numbers else ""


def answer_block(completion):
    """What stands in the last answer block behind the thinking, or None. An answer amid the thinking is a thought."""
    blocks = ANSWER.findall(behind_thinking(completion))
    return blocks[-1].strip() if blocks else None


def behind_thinking(completion):
    """The reply without its thinking; nothing while it is still thinking."""
    thought, end, rest = completion.rpartition("</think>")
    return rest if end or "<think>" not in rest else ""


def boxed(text):
    """What stands in the last complete \\boxed{...}, whose braces may be nested, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end, character in enumerate(text[start:], start):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return text[start:end].strip()
    return None


def same_answer(given, gold):
    """Equal as numbers; letter by letter where the gold answer is words; else as mathematics.

    A gold answer may be a worked solution: of GSM8K's counts what stands behind ####, of MATH's what is boxed. Where it is a
    number, the one given must be a number too, not an expression, or the question would be its own answer. ValueError if
    the gold answer is empty.
    """
    gold = str(gold).rpartition("####")[2].strip()
    gold = gold if boxed(gold) is None else boxed(gold)
    if not gold:
        raise ValueError("the column answer is empty; give the right answer, or leave the field out")
    number, gold_number = as_number(given), as_number(gold)
    if gold_number is not None:
        return number == gold_number
    words, gold_words = (TEXT.sub(r"\1", text).strip() for text in (given, gold))
    if words == gold_words or not given or WORDS.fullmatch(gold_words):
        return words == gold_words
    return same_mathematics(given, gold)


def as_number(text):
    try:
        number = Decimal(WITHIN_A_NUMBER.sub("", BEHIND_A_NUMBER.sub("", text.strip().removesuffix("$"))))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_mathematics(given, gold):
    """Whether two expressions in LaTeX are equal, by the library math-verify; without it, whether they are written alike."""
    try:
        from math_verify import parse, verify
    except ImportError:
        warnings.warn("some gold answers are expressions, and the library math-verify is not there to compare them: an "
                      "answer counts as right only if it is written alike; pip install 'math-verify[antlr4_13_2]'",
                      stacklevel=2)
        return re.sub(r"[\s$]", "", given) == re.sub(r"[\s$]", "", gold)
    # Its time limit is an alarm signal, which only the main thread receives.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    gold, given = (parse(f"${text.replace('$', '')}$", parsing_timeout=seconds) for text in (gold, given))
    return verify(gold, given, timeout_seconds=seconds)
