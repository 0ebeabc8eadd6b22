"""Process supervision and penalties, against numbers computed by hand."""
import math

import pytest
import torch

from reward.functions import repetition_reward, soft_overlong_reward
from reward.process_rewards import judge_lines, judge_steps, process_advantages

RIGHT = "<think>\n29+30=59\n59*7=350+63=413\n</think>\n<answer>\n413\n</answer>"
WRONG = "<think>\n29+30 is 59\n59*7 is 393\n</think>\n<answer>\n393\n</answer>"


def test_process_advantages_by_hand():
    # Steps 1, 0 and 1, 1, 0.5: mean 0.7, squared deviations 0.09 + 0.49 + 0.09 + 0.09 + 0.04 = 0.8
    std = math.sqrt(0.8 / 4) + 1e-4
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    advantages = process_advantages([[1.0, 0.0], [1.0, 1.0, 0.5]], [[1, 3], [0, 2, 4]], 2, mask)
    first = [(0.3 - 0.7) / std] * 2 + [-0.7 / std] * 2 + [0, 0]
    # 0 after the last step
    second = [(0.3 + 0.3 - 0.2) / std] + [(0.3 - 0.2) / std] * 2 + [-0.2 / std] * 2 + [0]
    assert advantages.tolist() == [pytest.approx(first, abs=1e-5), pytest.approx(second, abs=1e-5)]


def test_process_advantages_stay_in_their_group_and_in_the_mask():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]])
    advantages = process_advantages([[1.0], [0.0], [5.0], []], [[2], [0], [2], []], 2, mask)
    up = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert advantages[0].tolist() == pytest.approx([up, up, 0])
    assert advantages[1].tolist() == pytest.approx([-up, 0, 0])
    assert not advantages[2:].any()                             # a group with a single step


@pytest.mark.parametrize("line, right", [
    ("27*6=120+42=160+2=162", True), ("27*6=120+42=160+2=163", False), ("27*6=120+41=162", False),
    ("29+30 is 59", True), ("She pays 3 + 4 = 7 dollars, 2*7=14 in all.", True),
    ("48/2 = 24", True), ("(2+3)*4=20", True), ("-3+4=1", True), ("1/0=1", False), ("2+=2", False),
    ("9**9=1", False), ("1. 3+4=7", True), ("1) 3+4=7", True), ("- 3+4=7", True),
    ("12,000+1=12,001", True), ("I guess 162.", None), ("What is 3 + 4?", None),
])
def test_a_line_is_a_step_if_it_has_equations_and_right_if_they_hold(line, right):
    assert judge_lines(line) == ([] if right is None else [(len(line), right)])


def test_steps_end_at_their_line_and_the_outcome_at_the_last_token(tokenizer):
    eos = [tokenizer.eos_token_id]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + eos
           for text in (RIGHT, WRONG, RIGHT)]
    rewards, ends = judge_steps([RIGHT, WRONG, RIGHT], ids, tokenizer, eos, [1.25, -0.5, math.nan])
    assert rewards == [[1.0, 1.0, 1.25], [1.0, 0.0, -0.5], []] and ends[2] == []
    for row, text, (first, second, last) in zip(ids, (RIGHT, WRONG), ends):
        thought = text[:text.index("</think>")]
        assert tokenizer.decode(row[:second + 1]) == thought and last == len(row) - 1
        assert tokenizer.decode(row[:first + 1]) == thought[:thought.index("59*7")]
    # Cut off within its last line; and the text has nothing of a pad token that it began with.
    cut_off = [tokenizer.pad_token_id, *tokenizer("29+30=59\n59*7=413")["input_ids"]]
    _, ((first, *ends),) = judge_steps(["29+30=59\n59*7=413"], [cut_off], tokenizer, eos, [0.0])
    assert tokenizer.decode(cut_off[1:first + 1]) == "29+30=59\n"
    assert ends == [len(cut_off) - 1] * 2


def test_soft_overlong_falls_from_0_to_minus_1():
    reward = soft_overlong_reward(100)
    assert reward(None, None, [[7] * n for n in (1, 80, 85, 100, 130)]) == [0, 0, -0.25, -1, -1]
    assert soft_overlong_reward(4)(None, None, [[7] * n for n in (3, 4)]) == [0, -1]    # one token


def test_repetition_counts_ngrams_of_ids():
    # The 4-grams of 1 2 1 2 1 2 are 1212, 2121, 1212: two of three are distinct.
    ids = [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5], [1, 2, 3], []]
    assert repetition_reward(None, None, ids) == pytest.approx([-1 / 3, 0, 0, 0])
