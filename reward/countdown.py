"""The reward of Countdown: does the expression in the answer use each number once and hit?"""
import ast
import operator
import re
from fractions import Fraction

from .rules import extract_answer

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv}


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
    if not re.fullmatch(r"[\d+\-*/() ]{1,100}", text):
        return False
    used = []
    try:
        value = evaluate(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


def evaluate(node, used):
    """The node's value; the numbers in it are appended to `used`. UserError for anything else."""
    if isinstance(node, ast.Constant):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, used), evaluate(node.right, used)
        return OPERATORS[type(node.op)](left, right)
    raise ValueError("neither a number nor + - * /")
