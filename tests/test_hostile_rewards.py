"""Replies, data and functions of other people that could slow, bend or end a run in silence."""
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from errors import UserError
from reward import functions, llm_judge, process_rewards, tools
from reward.load import RewardFunction

LONG = [start + piece * 50_000 + end for start, piece, end in [
    ("<answer>", ".", "x</answer>"), ("", "<answer>", ""), ("", "\\boxed{", ""), ("", "7", "x"),
    ("<think>\n", "\n</think>\n<answer>\n", ""), ("", "<tool_call>", ""), ("", "7", "")]]
LONG.append("+".join(f"1/{7**60 + i}" for i in range(400)))


def test_the_longest_reply_is_read_in_linear_time():
    columns = {"answer": ["162"], "completion_ids": [[1, 2] * 50_000]}
    began = time.process_time()
    for text in LONG:
        for name, rule in functions.RULES.items():
            if name != "reasoning_gym":         # whose judges are not ours
                rule(prompts=[""], completions=[text], own_words=[text], **columns)
        tools.tool_calls([pow])([[text]], ["<|im_start|>assistant\n"])
        process_rewards.judge_lines(text)
        assert time.process_time() - began < 4, text[:30]       # 1 on a slow machine


def test_each_thread_gets_the_answers_to_its_own_expressions():
    def is_right(k):
        return functions.accuracy_reward([""], [f"<answer>2x+{k}</answer>"],
                                         answer=[f"x+{k - k % 3 % 2}+x"])[0]

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(is_right, range(24))] == [float(k % 3 != 1) for k in range(24)]


def ask(judge, completion="a", **columns):
    return judge(prompts=["p"], completions=[completion], own_words=["a"], messages=[[]], **columns)


def needs_secret(prompts, completions, secret, **columns):
    return [0.0]


@pytest.mark.parametrize("columns, message", [
    ({}, "has the columns none$"), ({"a": [1], "b": [2]}, "'secret'; the data .* a, b$")])
def test_a_column_that_is_missing_is_one_sentence(columns, message, capsys):
    with pytest.raises(UserError, match=f"^reward function needs_secret: .*{message}"):
        ask(RewardFunction(needs_secret), **columns)
    assert capsys.readouterr().err == ""


def tool_of(function, tokenizer):
    function.stop = "="
    return tools.Tool(function, tokenizer, 1)


def test_a_tools_column_and_a_users_mistake_in_a_later_call(tokenizer, capsys):
    tool = tool_of(lambda texts, secret, **columns: [None], tokenizer)
    with pytest.raises(UserError, match="--tool <lambda>: .*'secret'; .* level$"):
        tool([["="]], {"prompts": [""], "level": [1]})
    judge = RewardFunction(functions.accuracy_reward)
    ask(judge, answer=["a"])
    with pytest.warns(UserWarning, match="UserError: the column answer is empty"):
        assert math.isnan(ask(judge, answer=[" "])[0])
    assert judge.failed == {"UserError": 1} and capsys.readouterr().err == ""


def test_no_escape_code_of_a_reply_is_printed_and_no_header_ends_a_judge(capsys, monkeypatch):
    def busy(text, *chat, **columns):
        error = OSError(text)
        error.headers = {"Retry-After": "²"}        # isdigit, and no int
        raise error

    with pytest.raises(UserError, match="its traceback is above"):
        ask(RewardFunction(lambda completions, **columns: busy(*completions)), "\x1b[2J")
    assert "\nOSError: ·[2J\n" in capsys.readouterr().err
    monkeypatch.setattr(llm_judge, "ask", busy)
    monkeypatch.setattr(llm_judge, "PAUSE", 0)
    assert isinstance(llm_judge.score("", ""), OSError)
