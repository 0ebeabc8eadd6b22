"""Rewards by rule: one function each, with TRL's signature.

    f(prompts: list[str], completions: list[str], **columns) -> list[float | None]

`columns` holds the dataset's other fields (`answer`, ...), `messages` (the chat before each
completion), `completion_ids`, and `own_words`, the completions without a tool's. A rule has no
options: a column of that name would set them.
None: the reward does not apply. If the chat template opens `<think>`, completions begin with it.
"""
import functools
import logging
import re
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from decimal import Decimal, InvalidOperation

from errors import UserError

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# DOTALL: `.` matches line breaks, too.
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*\.?")
# What can be deleted without changing a number: currency signs, LaTeX's thin spaces and thousands
# separators (1,234 but not 1,2) in front or inside; percent, degrees, a unit or a full stop after.
WITHIN_A_NUMBER = re.compile(r"\\?\$|\\[,!; ]|(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
AFTER_A_NUMBER = re.compile(r"(?:\\?%|°|\^\{?\\circ\}?|\\(?:text|mathrm)\{[^{}]*\}|\.|\s){1,50}$")
TEXT = re.compile(r"\\text(?:bf|rm)?\{([^{}]*)\}")
SECONDS = 5             # that math-verify, or a judge of reasoning-gym, may take for an answer
NGRAM = 4               # tokens; of repetition_reward


def accuracy_reward(prompts, completions, answer=None, own_words=None, **columns):
    """1 if the reply's answer, or all of it, equals the gold answer in the column `answer`, else 0.

    None where there is no gold answer. A tool's words are not the reply's.
    """
    return [None if gold is None else
            float(same_answer(extract_answer(completion), gold)
                  or completion.strip() == str(gold).strip())
            for completion, gold in zip(own_words or completions,
                                        answer or [None] * len(completions))]


def extract_answer(completion):
    """The final answer of a reply, "" if there is none. The first of these that exists:

    - the last answer block after the thinking, or the last \\boxed{...} in it if it has one;
    - the last \\boxed{...} after the thinking;
    - the last number, if the reply has no tags at all.
    """
    block = answer_block(completion)
    if block is not None:
        return block if boxed(block) is None else boxed(block)
    in_box = boxed(after_thinking(completion))
    if in_box is not None:
        return in_box
    numbers = [] if any(tag in completion for tag in TAGS) else NUMBER.findall(completion)
    return numbers[-1] if numbers else ""


def answer_block(completion):
    """The text of the last answer block after the thinking, or None. Inside, it is a thought."""
    text = after_thinking(completion)
    blocks = ANSWER.findall(text, 0, text.rfind("</answer>") + 9)   # after it none is closed
    return blocks[-1].strip() if blocks else None


def after_thinking(completion):
    """What follows the thinking: all of a reply without any, "" if the thinking never ends."""
    thought, end, rest = completion.rpartition("</think>")
    return rest if end or "<think>" not in rest else ""


def boxed(text):
    """The text inside the last complete \\boxed{...}, whose braces may be nested, or None."""
    ends = []           # from the right: of the braces that no { has opened yet
    for brace in reversed([*re.finditer(r"(\\boxed\s*)?\{|\}", text)]):
        if brace[0] == "}":
            ends.append(brace.start())
        elif ends:
            end = ends.pop()
            if brace[1]:
                return text[brace.end():end].strip()
    return None


def same_answer(given, gold):
    """Compares as numbers if the gold answer is one, as text if it is words, else as mathematics.

    The gold answer may be a worked solution: GSM8K's answer follows ####, MATH's is boxed. An
    expression never equals a number: else repeating the question would be a right answer.
    """
    gold = str(gold).rpartition("####")[2].strip()
    gold = gold if boxed(gold) is None else boxed(gold)
    if not gold:
        raise UserError("the column answer is empty; give the gold answer, or leave the field out")
    number, gold_number = as_number(given), as_number(gold)
    if gold_number is not None:
        return number == gold_number
    words, gold_words = (TEXT.sub(r"\1", text).strip() for text in (given, gold))
    if words == gold_words or not given or WORDS.fullmatch(gold_words):
        return words == gold_words
    return same_mathematics(given, gold)


def as_number(text):
    text = AFTER_A_NUMBER.sub("", text.strip().removesuffix("$"))
    try:
        number = Decimal(WITHIN_A_NUMBER.sub("", text))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_mathematics(given, gold):
    """Whether two LaTeX expressions are equal, says math-verify; without it, spelled the same."""
    try:
        from math_verify import parse, verify
    except ImportError:
        warnings.warn("some gold answers are expressions, which only count if spelled the same; "
                      "run pip install 'math-verify[antlr4_13_2]'", stacklevel=2)
        return re.sub(r"[\s$]", "", given) == re.sub(r"[\s$]", "", gold)
    logging.getLogger("math_verify").setLevel("ERROR")      # it warns of having no limit of its own

    def are_equal():
        sides = [parse(f"${text.replace('$', '')}$", parsing_timeout=None)
                 for text in (gold, given)]
        return verify(*sides, timeout_seconds=None)

    try:
        return begin(are_equal).result(SECONDS)
    except TimeoutError:
        return False


def begin(function, /, *arguments, **keywords):
    """Calls the function in a thread of its own; returns its result, a Future.

    Alarms only work in the main thread. Nothing ends a thread that is late, but nobody waits.
    """
    result = Future()

    def call():
        try:
            result.set_result(function(*arguments, **keywords))
        except BaseException as error:      # SystemExit, too
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()      # it must not keep the program alive
    return result


def soft_overlong_reward(max_completion_length):
    """A reward function: DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Over the last fifth of max_completion_length it falls from 0 to -1. With a hard limit, a single
    token too many costs everything, without warning. Here the policy feels the limit coming.
    """
    cache = max(1, max_completion_length // 5)

    def soft_overlong(prompts, completions, completion_ids, **columns):
        return [max(-1.0, min(0.0, (max_completion_length - cache - len(ids)) / cache))
                for ids in completion_ids]

    return soft_overlong


def repetition_reward(prompts, completions, completion_ids, **columns):
    """-(1 - distinct n-grams / n-grams) of the token ids: 0 without repetition, near -1 in a loop.

    Token ids rather than words, so that it works for Chinese and other text without spaces.
    """
    rewards = []
    for ids in completion_ids:
        ngrams = [tuple(ids[i:i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards


def reasoning_gym_reward(prompts, completions, answer, metadata, **columns):
    """What the task's own judge gives the extracted answer, 0 to 1; 1 too if all of it is right."""
    from reasoning_gym import get_score_answer_fn
    judge_of = functools.cache(get_score_answer_fn)

    def score(text, gold, task):        # many a judge pays a share for any text with the answer
        judge = judge_of(task["source_dataset"])
        with suppress(Exception):       # or fails, in its own way, on one that it can't read
            return begin(judge, text, {"answer": gold, "metadata": task}).result(SECONDS)
        return 0.0

    return [None if row[1] is None else
            max(score(extract_answer(completion), *row), score(completion.strip(), *row) // 1)
            for completion, *row in zip(completions, answer, metadata)]


# By the names that --reward_funcs knows.
RULES = {"accuracy": accuracy_reward, "repetition": repetition_reward,
         "reasoning_gym": reasoning_gym_reward}
