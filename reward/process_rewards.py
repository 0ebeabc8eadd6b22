"""Process supervision: a reward for each reasoning step (DeepSeekMath, section 4.1.3)."""
import ast
import math
import operator
import re
from bisect import bisect_left
from fractions import Fraction

import torch

from model.load import decode

LONGEST = 1000          # characters of an expression, whose value may have as many digits
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.UAdd: operator.pos, ast.USub: operator.neg}
# An equation is a chain of expressions, each said to equal the next: `27*6=120+42=162` or
# `27*6 is 162`. An expression can only start where a run of its characters starts, so that the
# search takes linear time whatever a policy writes.
EXPRESSION = r"(?<![-+*/().\d ])[-+*/(). ]*\d[-+*/().\d ]*"
EQUATION = re.compile(rf"{EXPRESSION}(?:(?:=|\bis\b){EXPRESSION})+")
NOT_ARITHMETIC = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+"          # bullets
                            r"|(?<=\d),(?=\d{3}(?!\d))")        # thousands separators


def process_advantages(step_rewards, step_ends, num_generations, mask, *, eps=1e-4):
    """Returns advantages (N, R). For token t, the advantage sums over steps that end at t or later:

        A_t = sum over all steps k with end_k >= t of (r_k - mean) / (std + eps)

    The mean and sample std (n-1) are those of all step rewards in the group. step_rewards[i] lists
    the rewards of completion i's steps, and step_ends[i] lists the index of each step's last token.
    Advantages are 0 where the mask (N, R) is 0.
    """
    advantages = torch.zeros(mask.shape, device=mask.device)                    # (N, R)
    for start in range(0, len(mask), num_generations):
        group = range(start, start + num_generations)
        rewards = torch.tensor([reward for i in group for reward in step_rewards[i]],
                               dtype=torch.float32)
        if len(rewards) < 2 or rewards.min() == rewards.max():
            continue                                                            # nothing to compare
        mean, std = rewards.mean(), rewards.std()
        for i in group:
            for reward, end in zip(step_rewards[i], step_ends[i]):
                advantages[i, :end + 1] += (reward - mean) / (std + eps)
    return advantages * mask


def judge_steps(completions, completion_ids, tokenizer, eos_ids, outcomes):
    """Returns (step_rewards, step_ends), the first two arguments of process_advantages.

    Each line that contains equations is a step. Its reward is 1 if all its equations are true, and
    otherwise 0. One more step ends at the completion's last token, and its reward is the reward of
    the completion in `outcomes`. A completion whose outcome is NaN has no steps.
    """
    rewards, ends = [], []
    for completion, ids, outcome in zip(completions, completion_ids, outcomes):
        if math.isnan(outcome):
            rewards.append([])
            ends.append([])
            continue
        lines = judge_lines(completion)
        rewards.append([*(float(right) for _, right in lines), outcome])
        ends.append([*(token_at(end, ids, tokenizer, eos_ids) for end, _ in lines), len(ids) - 1])
    return rewards, ends


def judge_lines(completion):
    """Returns a list of (end of the line in characters, is_right) for all lines with equations."""
    judged, end = [], 0
    for line in completion.splitlines(keepends=True):
        end += len(line)
        equations = EQUATION.findall(NOT_ARITHMETIC.sub("", line))
        if equations:
            judged.append((end, all(map(holds, equations))))
    return judged


def holds(equation):
    """Returns True if all sides of the equation can be computed and have the same value."""
    values = {value_of(side) for side in re.split(r"=|\bis\b", equation)}
    return len(values) == 1 and None not in values


def token_at(end, ids, tokenizer, eos_ids):
    """Returns the index of the first token up to which the text has at least `end` characters."""
    return bisect_left(range(1, len(ids) + 1), end,
                       key=lambda k: len(decode(ids[:k], tokenizer, eos_ids)))


def value_of(expression):
    """Returns the exact value of an arithmetic expression, or None if it can't be computed."""
    def evaluate(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](evaluate(node.operand))
        return Fraction(str(node.value))

    try:
        tree = ast.parse(expression.strip().rstrip("."), mode="eval")
        return evaluate(tree.body) if len(expression) <= LONGEST else None
    except Exception:
        return None     # a policy may write anything, e.g. no arithmetic, or too many brackets
