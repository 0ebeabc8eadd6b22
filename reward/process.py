"""Process supervision: rewards for the steps of the reasoning, not only for its outcome (DeepSeekMath, section 4.1.3)."""
import ast
import operator
import re
from bisect import bisect_left
from fractions import Fraction

import torch

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
EXPRESSION = r"(?<![-+*/().\d ])[-+*/(). ]*\d[-+*/().\d ]*"
# 27*6=120+42=162 and 27*6 is 162: a chain of expressions, each said to equal the next. An expression starts where a run of
# its characters starts, so that the search takes linear time on whatever a policy writes.
NOT_ARITHMETIC = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+|(?<=\d),(?=\d{3}(?!\d))")       # bullets, thousands separators
EQUATION = re.compile(rf"{EXPRESSION}(?:(?:=|\bis\b){EXPRESSION})+")


def process_advantages(step_rewards, step_ends, num_generations, mask, *, eps=1e-4):
    """Each token's advantage (N, R): what the steps that end at or after it add up to, in their group's standard deviations.

        A_t = sum over steps k of the completion with end_k >= t of (r_k - mean) / (std + eps)

    Mean and sample std (n-1) are those of all steps of all G completions of the group together. step_rewards[i] and
    step_ends[i] are of completion i: rewards, and the index of the token that each step ends at. 0 outside the mask (N, R)
    and behind the last step.
    """
    advantages = torch.zeros(mask.shape, device=mask.device)                            # (N, R)
    for start in range(0, len(mask), num_generations):
        group = range(start, start + num_generations)
        rewards = torch.tensor([reward for i in group for reward in step_rewards[i]], dtype=torch.float32)
        if len(rewards) < 2 or rewards.min() == rewards.max():
            continue                                                                    # nothing to compare
        mean, std = rewards.mean(), rewards.std()
        for i in group:
            for reward, end in zip(step_rewards[i], step_ends[i]):
                advantages[i, :end + 1] += (reward - mean) / (std + eps)
    return advantages * mask


def judge_steps(completions, completion_ids, tokenizer, outcomes):
    """The rewards of each completion's steps, and the token that each ends at: ([[float]], [[int]]).

    A line with arithmetic in it is a step: 1 if all its equations hold, 0 if one does not (so 1=1 earns a 1). The last
    step ends at the last token and carries the outcome, which should be of their scale; NaN, not judged: no steps at all.
    """
    rewards, ends = [], []
    for completion, ids, outcome in zip(completions, completion_ids, outcomes):
        lines = [] if outcome != outcome else judge_lines(completion)
        rewards.append([float(right) for _, right in lines] + [outcome] * (outcome == outcome))
        ends.append([token_at(end, ids, tokenizer) for end, _ in lines] + [len(ids) - 1] * (outcome == outcome))
    return rewards, ends


def judge_lines(completion):
    """[(index of the character that ends the line, are its equations right?)] of the lines that have any."""
    judged, end = [], 0
    for line in completion.splitlines(keepends=True):
        end += len(line)
        equations = EQUATION.findall(NOT_ARITHMETIC.sub("", line))
        if equations:
            judged.append((end, all(map(holds, equations))))
    return judged


def holds(equation):
    """Whether all sides of it are equal; one that can't be read is wrong."""
    values = {value_of(side) for side in re.split(r"=|\bis\b", equation)}
    return len(values) == 1 and None not in values


def value_of(expression):
    """The number that + - * / and brackets come to, exactly, or None."""
    def evaluate(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return -evaluate(node.operand) if isinstance(node.op, ast.USub) else evaluate(node.operand)
        return Fraction(str(node.value))

    try:
        return evaluate(ast.parse(expression.strip().rstrip("."), mode="eval").body)
    except (SyntaxError, ValueError, KeyError, AttributeError, ZeroDivisionError, RecursionError, MemoryError):
        return None     # not arithmetic, or too deep: a policy writes anything


def token_at(end, ids, tokenizer):
    """The index of the token with which the decoded text reaches `end` characters."""
    lengths = range(1, len(ids) + 1)
    return bisect_left(lengths, end, hi=len(ids) - 1, key=lambda k: len(tokenizer.decode(ids[:k], skip_special_tokens=True)))
