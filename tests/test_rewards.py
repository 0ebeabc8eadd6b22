import importlib
import inspect
import json
import math
import sys
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace

import numpy
import pytest
import torch

import reward.load
import train_grpo
from errors import UserError
from model import load_pretrained
from reward import functions, llm_judge, load_reward_funcs, process_rewards, tools
from reward.functions import accuracy_reward
from reward.load import RewardFunction
from reward.reward_model import reward_model_reward
from run.metrics import rollout_metrics
from support import jsonl, turns
from train_grpo import format_reward, tag_reward

KNOWN = {"format": format_reward, "tag": tag_reward}       # the script hands these over

pytestmark = pytest.mark.usefixtures("one_thread")

# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion, form, tags", [
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>", 0.5, 1.0),
    # two line breaks between the blocks are fine, three are not
    ("<think>\n27*6=162\n</think>\n\n<answer>\n162\n</answer>", 0.5, 1.0),
    ("<think>\n27*6=162\n</think>\n\n\n<answer>\n162\n</answer>", 0.0, 1.0),
    ("<think>\na\n\nb\nc\n</think>\n<answer>\n\n</answer>", 0.5, 1.0),
    # something after the blocks, or before them; tags that share their line with text
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>\n", 0.0, 1.0),
    ("Well. <think>\n27*6=162\n</think>\n<answer>\n162\n</answer>", 0.0, 1.0),
    ("<think>27*6=162</think>\n<answer>162</answer>", 0.0, 1.0),
    # a tag doubled; cut off
    ("<think>\n<think>\n27*6\n</think>\n<answer>\n162\n</answer>", 0.5, 0.75),
    ("<think>\n27*6=162", 0.0, 0.25),
])
def test_format_and_tag_rewards(completion, form, tags):
    assert format_reward([""], [completion]) == [form]
    assert tag_reward([""], [completion]) == [tags]


@pytest.mark.parametrize("completion, gold, expected", [
    ("<think>\n27*6=162\n</think>\n<answer>\n163\n</answer>", "162", 0),
    ("<think>\nx\n</think>\n<answer>\n7\n</answer>\n<answer>\n162\n</answer>", "162", 1),
    # an answer block inside the thinking does not count
    ("<think>\n<answer>162</answer>\n</think>\n<answer>\n7\n</answer>", "162", 0),
    ("<think>\n<answer>162</answer>", "162", 0),
    ("<think>\n162\n</think>\n<answer>\n162", "162", 0),          # never closed
    ("<answer>7 or 8</answer>", "8", 0), ("<answer>162</answer>", None, None),
    # no tags: the last number
    ("27*6=120+42=162\nThe answer is 162.", "162", 1), ("No idea.", "162", 0),
])
def test_accuracy_reward(completion, gold, expected):
    assert accuracy_reward([""], [completion], answer=[gold]) == [expected]
    assert accuracy_reward([""], [completion]) == [None]


def test_no_column_is_an_option_of_a_rule():
    """Whatever the columns of a dataset are called, a rule reads those that it is for."""
    ids = [[1, 2, 3, 4] * 3]
    known = {"prompts": ["p"], "completions": ["a"], "completion_ids": ids, "own_ids": ids,
             "answer": [None], "nums": [None], "target": [None], "words": [None],
             "secret": [None], "own_words": ["a"]}
    names = {*KNOWN, *functions.RULES, "overlong"} - {"reasoning_gym"}     # it may be missing
    for judge in load_reward_funcs(names, known=KNOWN, max_completion_length=10):
        options = inspect.signature(judge.function).parameters
        named = {name: ["x"] for name in ("n", "cache", *options) if name != "columns"}
        assert judge.function(**named | known) == judge.function(**known)


# --- the reward model's score as a reward ---------------------------------------------------------

THOUGHT = "<think>\n<answer>1</answer>\n</think>\n<answer>\n28\n</answer>"
SCORES = {"long": 5.0, "short": -20.0, THOUGHT: 2.0, "28": -8.0, "1": 3.0}


class KnownScores:
    """Looks up a chat's score by its last turn, and records the calls."""

    def __init__(self):
        self.calls = []

    def get_scores(self, chats):
        self.calls.append(chats)
        return [SCORES[chat[-1]["content"]] for chat in chats]


@pytest.mark.parametrize("options, expected", [
    ({}, [3, -3, 0.4 * 2 - 0.6 * 3]), ({"clip": 0}, [5, -20, 0.4 * 2 - 0.6 * 8]),
    ({"reasoning": False}, [3, -3, 2]), ({"answer_share": 0.25}, [3, -3, 0.75 * 2 - 0.25 * 3]),
])
def test_a_score_is_clipped_and_mixed_with_that_of_the_answer(options, expected):
    model, chats = KnownScores(), [turns("p"), turns("q", "r", "s"), turns("t")]
    rewards = reward_model_reward(model, **options)(["p"] * 3, ["long", "short", THOUGHT], chats)
    assert rewards == pytest.approx(expected)
    answers = [turns("t", "28")] if options.get("reasoning", True) else []
    assert model.calls == [[turns("p", "long"), turns("q", "r", "s", "short"), turns("t", THOUGHT),
                            *answers]]


# --- several rewards, one number ------------------------------------------------------------------

def lengths(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def gold(prompts, completions, answer, **columns):
    return answer


def judge_of(returned):
    def judge(**arguments):
        return returned
    return judge


def combined(functions, weights, completions, **columns):
    given = {"prompts": ["p"] * len(completions), "completions": completions, **columns}
    judges = [one if isinstance(one, RewardFunction) else RewardFunction(one) for one in functions]
    return train_grpo.GRPO.compute_rewards(
        None, SimpleNamespace(for_rewards=lambda: given), judges, weights)


def test_rewards_are_weighted_and_what_was_not_judged_adds_nothing():
    rewards, values = combined([lengths, gold], [2.0, 0.5], ["a", "bbb", ""],
                               answer=[4.0, None, 6.0])
    assert rewards.dtype == torch.float32 and rewards.tolist() == [2 * 1 + 0.5 * 4, 2 * 3, 0.5 * 6]
    assert values["lengths"].tolist() == [1, 3, 0]
    assert values["gold"].nan_to_num(-1).tolist() == [4, -1, 6]
    rewards, _ = combined([gold], [1.0], ["a", "b"], answer=[None, 0.0])
    assert rewards[0].isnan() and rewards[1] == 0
    # One of weight 0 judges nothing; of those where all have it, any does.
    for weights, expected in (([1, 0], [4, math.nan]), ([0, 0], [0, 0])):
        rewards, _ = combined([gold, lengths], weights, ["a", "bbb"], answer=[4.0, None])
        assert rewards.tolist() == pytest.approx(expected, nan_ok=True)
    rewards, _ = combined([lengths], [3e38], ["a", "", "a" * 9])        # the sum is finite or NaN
    assert rewards[0] == torch.tensor(3e38) and rewards[1] == 0 and rewards[2].isnan()


def test_reward_functions_are_called_as_the_user_typed_them_and_awaited(own_module):
    own_module("first_judges", textwrap.dedent("""
        import functools
        class Judge:
            def __init__(self, value):
                self.value = value
            def __call__(self, completions, **columns):
                return [self.value] * len(completions)
        one, two, third = Judge(1.0), Judge(2.0), functools.partial(Judge(3.0))
        def same(completions, **columns):
            return [4.0] * len(completions)
        async def slow(completions, **columns):
            return [5.0] * len(completions)
        """))
    own_module("other_judges", "def same(completions, **columns):\n    return [6.0]\n")
    names = [f"first_judges:{name}" for name in ("one", "two", "third", "same", "slow")]
    args = train_grpo.parse_args(["--reward_funcs", *names, "other_judges:same"])
    judges, _ = reward.load.load_for_run(args, "cpu", known=KNOWN)
    assert [judge.__name__ for judge in judges] == [
        "one", "two", "third", "first_judges:same", "slow", "other_judges:same"]
    assert [judge(prompts=[""], completions=["a"])[0] for judge in judges] == [1, 2, 3, 4, 5, 6]


def test_reward_functions_are_found_in_the_current_folder_and_count_failures_each(
        tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text("one = lambda completions, **columns: [1]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    of_training, of_evaluation = load_reward_funcs(["my_own:one"] * 2)
    of_evaluation.failed["late"] += 1
    assert of_training(completions=[""]) == [1] and not of_training.failed


@pytest.mark.parametrize("name, shown", [
    ("formatt", ""), ("no_such_module_here:f", ""), ("math:no_such_function", ""),
    ("my_mistake:short", 'my_mistake.py", line 3')])
def test_an_unknown_or_broken_reward_is_named_and_only_its_own_mistake_shown(
        name, shown, own_module, capsys):
    own_module("my_mistake", "import math\n\nmath.nothing()\n")
    with pytest.raises(UserError, match=name):
        load_reward_funcs(["format", name], known=KNOWN)
    error = capsys.readouterr().err
    assert shown in error and bool(shown) == bool(error)


# --- a reward function must never harm a run ------------------------------------------------------

def ask(judge, completions=("a", "b"), **columns):
    """One call through compute_rewards: the rewards, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")        # as in a run, where Python drops repeated ones
        rewards, _ = combined([judge], [1.0], list(completions), **columns)
    return rewards.tolist(), [str(warning.message) for warning in caught]


def test_a_function_that_fails_at_first_stops_the_run_and_later_is_a_warning(capsys):
    text = "{"

    def service(completions, **columns):
        return [json.loads(text)] * len(completions)

    judge = RewardFunction(service)
    with pytest.raises(UserError, match="service failed in its first call: JSONDecodeError: "):
        ask(judge, function=[1, 2])     # a column may have any name
    shown = capsys.readouterr().err
    assert "in service\n    return [json.loads(text)]" in shown and "load.py" not in shown
    text = "1"
    assert ask(judge) == ([1, 1], [])
    text = "{"
    for count in (1, 0):
        rewards, texts = ask(judge)
        assert all(map(math.isnan, rewards)) and len(texts) == count
    assert "scored nothing in this step: JSONDecodeError: " in judge.reason
    assert judge.failed == {"JSONDecodeError": 2} and capsys.readouterr().err == ""


@pytest.mark.parametrize("returned", [[1], None, "12"])
def test_what_is_no_list_of_rewards_is_an_error(returned, capsys):
    with pytest.raises(UserError, match="failed in its first call: .* instead of a list of 2"):
        ask(RewardFunction(judge_of(returned)))
    assert capsys.readouterr().err == ""        # all frames are ours: none is shown


@pytest.mark.parametrize("value", [
    math.nan, math.inf, -2e12, torch.tensor(1e38), "right", [1.0], torch.ones(2)])
def test_a_value_that_is_of_no_use_is_a_warning_once_and_treated_as_none(value):
    judge = RewardFunction(judge_of([value, 1]))
    for count in (1, 0):
        (reward, one), texts = ask(judge)
        assert math.isnan(reward) and one == 1 and len(texts) == count
    assert judge.failed == {"no number": 2} and "counts as None" in judge.reason


def test_numbers_of_all_kinds_are_rewards_and_none_is_no_failure():
    values = [True, -1e12, Decimal("0.5"), numpy.float32(0.5), torch.tensor(0.5), None]
    assert ask(RewardFunction(judge_of(values)), "abcdef") == (
        pytest.approx([1, -1e12, 0.5, 0.5, 0.5, math.nan], nan_ok=True), [])
    assert ask(RewardFunction(judge_of(torch.tensor([0.25, 1.0])))) == ([0.25, 1], [])


def test_a_service_that_is_slow_to_start_is_no_reason_to_stop():
    def judge(completions, **columns):
        calls.append(0)
        if len(calls) < 3:
            raise TimeoutError("no answer yet")
        return [1.0] * len(completions)

    calls, ours = [], RewardFunction(judge)
    for count in (1, 0):
        rewards, texts = ask(ours)
        assert all(map(math.isnan, rewards)) and len(texts) == count
    assert ask(ours) == ([1, 1], []) and ours.failed == {"TimeoutError": 2}


def test_failures_of_all_ranks_are_counted_and_have_a_reason():
    ranks = [[RewardFunction(gold), RewardFunction(lengths)] for _ in range(2)]
    ask(ranks[0][0], answer=[math.inf, math.inf])
    ask(ranks[1][0], answer=[1.0, "1"])
    told = [(judge.__name__, judge.failed.total(), judge.reason)
            for judge in ranks[0] + ranks[1] if judge.failed]
    row = {"length": 1, "ended": True, "rewards": {"gold": math.nan, "lengths": 0.5}}
    metrics = rollout_metrics([row | {"reward": 0.5}, row | {"reward": math.nan}], 2, told)
    assert metrics["rewards/gold/failed"] == 3 and "rewards/lengths/failed" not in metrics
    assert [reason[:12] for _, _, reason in told] == ["returned inf", "returned '1'"]
    ask(ranks[0][0], answer=[1.0, 1.0])         # no failure any more: no reason
    assert ranks[0][0].failed.total() == 2 and ranks[0][0].reason is None


NASTY = """
calls = []

def wild(prompts, completions, **columns):
    calls.append(0)
    if len(calls) == 1:
        return [len(completion) / 10 for completion in completions]
    # in groups of four: one judged, two, none
    return [1.0, "x", float("nan"), 1e38, 0.0, 1.0, 1e38, None] + [10**400] * (len(completions) - 8)
"""
RUN = ("--batch_size 4 --num_generations 4 --max_gen_len 16 --max_steps 2 --eval_interval 0 "
       "--reward_funcs my_nasty:wild ")


@pytest.mark.parametrize("flags, failed, reward", [
    ("--supervision process", 16 - 4, 2 / 3), ("--kl_in_reward --oversample 2 --scale_rewards "
     "batch --advantage_estimator rloo", 16 - 4 + 12 - 4, 3 / 5)])      # two rounds, 16 and 12
def test_a_run_outlives_its_rewards(flags, failed, reward, own_module, tmp_path):
    own_module("my_nasty", NASTY)
    with pytest.warns(UserWarning, match="wild"):
        train_grpo.main([*(RUN + flags).split(), "--out_dir", str(tmp_path), "--run_name", "run"])
    _, line = jsonl(tmp_path / "run/metrics.jsonl")
    assert line["rewards/wild/failed"] == failed and line["reward"] == pytest.approx(reward)
    weights = load_pretrained(tmp_path / "run/final").parameters()
    assert all(weight.isfinite().all() for weight in weights)


# --- replies, data and functions that could slow, bend or end a run in silence --------------------

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
        return accuracy_reward([""], [f"<answer>2x+{k}</answer>"],
                                         answer=[f"x+{k - k % 3 % 2}+x"])[0]

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(is_right, range(24))] == [float(k % 3 != 1) for k in range(24)]


def call(judge, completion="a", **columns):
    return judge(prompts=["p"], completions=[completion], own_words=["a"], messages=[[]], **columns)


def needs_secret(prompts, completions, secret, **columns):
    return [0.0]


@pytest.mark.parametrize("columns, message", [
    ({}, "has the columns none$"), ({"a": [1], "b": [2]}, "'secret'; the data .* a, b$")])
def test_a_column_that_is_missing_is_one_sentence(columns, message, capsys):
    with pytest.raises(UserError, match=f"^reward function needs_secret: .*{message}"):
        call(RewardFunction(needs_secret), **columns)
    assert capsys.readouterr().err == ""


def tool_of(function, tokenizer):
    function.stop = "="
    return tools.Tool(function, tokenizer, 1)


def test_a_tools_column_and_a_users_mistake_in_a_later_call(tokenizer, capsys):
    tool = tool_of(lambda texts, secret, **columns: [None], tokenizer)
    with pytest.raises(UserError, match="--tool <lambda>: .*'secret'; .* level$"):
        tool([["="]], {"prompts": [""], "level": [1]})
    judge = RewardFunction(accuracy_reward)
    call(judge, answer=["a"])
    with pytest.warns(UserWarning, match="UserError: the column answer is empty"):
        assert math.isnan(call(judge, answer=[" "])[0])
    assert judge.failed == {"UserError": 1} and capsys.readouterr().err == ""


def test_no_escape_code_of_a_reply_is_printed_and_no_header_ends_a_judge(capsys, monkeypatch):
    def busy(text, *chat, **columns):
        error = OSError(text)
        error.headers = {"Retry-After": "²"}        # isdigit, and no int
        raise error

    with pytest.raises(UserError, match="its traceback is above"):
        call(RewardFunction(lambda completions, **columns: busy(*completions)), "\x1b[2J")
    assert "\nOSError: ·[2J\n" in capsys.readouterr().err
    monkeypatch.setattr(llm_judge, "ask", busy)
    monkeypatch.setattr(llm_judge, "PAUSE", 0)
    assert isinstance(llm_judge.score("", ""), OSError)
