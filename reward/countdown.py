"""The reward of Countdown: does the expression in the answer use each number once and hit?"""
import re

from .rules import extract_answer, value_of


def countdown_reward(prompts, completions, nums=None, target=None, **columns):
    """1 if the answer is an expression in `nums`, each used once, that equals `target`, else 0.

    None for rows without these two columns. The expression may have whole numbers, + - * / and
    brackets, and is evaluated in fractions. It may end in `= 57`, which is ignored. For the usual
    0.1 for the format alone: `--reward_funcs countdown format --reward_weights 0.9 0.2`.
    """
    missing = [None] * len(completions)
    return [None if numbers is None or goal is None else
            float(is_solution(extract_answer(completion), numbers, goal))
            for completion, numbers, goal in zip(completions, nums or missing, target or missing)]


def is_solution(text, numbers, target):
    text = text.partition("=")[0].strip()
    # A model writes this text: a short one, of these characters only, before Python parses it.
    # A sign in front of a number is no operator.
    if not re.fullmatch(r"[\d+\-*/() ]{1,100}", text) or re.search(r"(^|[-+*/(]) *[-+]", text):
        return False
    used = [int(number) for number in re.findall(r"\d+", text)]
    return value_of(text) == target and sorted(used) == sorted(numbers)
