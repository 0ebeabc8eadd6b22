import importlib
import inspect
import math
import random
import sys
import threading
import time
import warnings
from decimal import Decimal

import numpy
import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

import train_grpo
from conftest import ROOT, jsonl, turns
from dataset import PromptDataset
from model import MiniMindConfig, MiniMindForCausalLM, load_pretrained, save_pretrained
from report import UserError, rollout_metrics
from reward import (
    accuracy_reward,
    combine_rewards,
    failures,
    format_reward,
    load_reward_funcs,
    load_reward_model,
    tag_reward,
)
from reward.combine import LIMIT, Judge
from reward.reward_model import RewardModel, reward_model_reward, with_reply
from reward.sample_pairs import pairs_of, replies

pytestmark = pytest.mark.usefixtures("one_thread")

# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion, form, tags", [
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>", 0.5, 1.0),
    # line breaks between the blocks: two, three, none
    ("<think>\n27*6=162\n</think>\n\n<answer>\n162\n</answer>", 0.5, 1.0),
    ("<think>\n27*6=162\n</think>\n\n\n<answer>\n162\n</answer>", 0.0, 1.0),
    ("<think>\n27*6=162\n</think><answer>\n162\n</answer>", 0.0, 1.0),
    # many lines in a block, or nothing: whether the answer is right is accuracy's business
    ("<think>\na\n\nb\nc\n</think>\n<answer>\n1\n2\n</answer>", 0.5, 1.0),
    ("<think>\n\n</think>\n<answer>\n162\n</answer>", 0.5, 1.0),
    ("<think>\n27*6\n</think>\n<answer>\n\n</answer>", 0.5, 1.0),
    # something after the blocks, or before them
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>\n", 0.0, 1.0),
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer> so there", 0.0, 1.0),
    ("Well. <think>\n27*6=162\n</think>\n<answer>\n162\n</answer>", 0.0, 1.0),
    # tags that share their line with text
    ("<think>27*6=162</think>\n<answer>162</answer>", 0.0, 1.0),
    # the wrong order
    ("<answer>\n162\n</answer>\n<think>\n27*6=162\n</think>", 0.0, 1.0),
    # a tag missing, one doubled, all nested
    ("<think>\n27*6=162\n<answer>\n162\n</answer>", 0.0, 0.75),
    ("<think>\n<think>\n27*6\n</think>\n<answer>\n162\n</answer>", 0.5, 0.75),
    ("<think>\n<think>\na\n</think>\n</think>\n<answer>\n<answer>\n1\n</answer>\n</answer>",
     0.5, 0.0),
    # cut off, or without any tags
    ("<think>\n27*6=162", 0.0, 0.25),
    ("162", 0.0, 0.0),
    ("", 0.0, 0.0),
])
def test_format_and_tag_rewards(completion, form, tags):
    assert format_reward([""], [completion]) == [form]
    assert tag_reward([""], [completion]) == [tags]


@pytest.mark.parametrize("completion, gold, expected", [
    ("<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>", "162", 1),
    ("<think>\n27*6=162\n</think>\n<answer>\n163\n</answer>", "162", 0),
    # an answer block inside the thinking does not count
    ("<think>\n<answer>162</answer>\n</think>\n<answer>\n7\n</answer>", "162", 0),
    ("<think>\n<answer>7</answer>\n</think>\n<answer>\n162\n</answer>", "162", 1),
    ("<think>\n<answer>162</answer>\n</think>\n", "162", 0),
    ("<think>\n<answer>162</answer>", "162", 0),
    # an answer block that is empty, never closed, or not there
    ("<think>\n162\n</think>\n<answer>\n\n</answer>", "162", 0),
    ("<think>\n162\n</think>\n<answer>\n162", "162", 0),
    ("<think>\n162\n</think>", "162", 0),
    # numbers in different notations; hedging is not a number
    ("<answer>\n1,234.50\n</answer>", "1234.5", 1),
    ("<answer>\n1234.5\n</answer>", "1,234.50", 1),
    ("<answer> $-7. </answer>", -7, 1),
    ("<answer>7 or 8</answer>", "8", 0),
    ("<answer>nan</answer>", "5", 0),
    ("<answer>Paris</answer>", "Paris", 1),
    ("<answer>London</answer>", "Paris", 0),
    # no tags: the last number
    ("27*6=120+42=162\nThe answer is 162.", "162", 1),
    ("162, or rather 163", "162", 0),
    ("It is 1,234.5.", "1234.5", 1),
    ("No idea.", "162", 0),
    ("<answer>162</answer>", None, None),
])
def test_accuracy_reward(completion, gold, expected):
    assert accuracy_reward([""], [completion], answer=[gold]) == [expected]


def test_accuracy_reward_without_gold_answers_judges_nothing_and_an_empty_one_is_an_error():
    assert accuracy_reward(["", ""], ["1", "2"]) == [None, None]
    with pytest.raises(ValueError, match="answer"):
        accuracy_reward([""], ["<answer></answer>"], answer=[" "])


# --- the reward model's score as a reward ---------------------------------------------------------

class KnownScores:
    """Looks up a chat's score by its last turn, and records the calls."""

    def __init__(self, table):
        self.table, self.calls = table, []

    def get_scores(self, chats):
        self.calls.append(chats)
        return [self.table[chat[-1]["content"]] for chat in chats]


def test_reward_model_reward_mixes_the_scores_of_the_reply_and_of_its_answer_each_clipped():
    good = "<think>\na\n</think>\n<answer>\n12\n</answer>"
    wild = "<think>\nb\n</think>\n<answer>\n13\n</answer>"
    bare = "just 14"
    model = KnownScores({good: 1.0, "12": 2.0, wild: 7.0, "13": -50.0, bare: -4.0})
    question = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    chats = [question, question[1:], question]
    reward = reward_model_reward(model, reasoning=True)
    rewards = reward(prompts=["p"] * 3, completions=[good, wild, bare], messages=chats,
                     answer=["12"] * 3)
    assert rewards == pytest.approx([0.4 * 1 + 0.6 * 2, 0.4 * 3 - 0.6 * 3, -3.0])

    call, = model.calls                                     # everything in one call
    assert all(turns[-1]["role"] == "assistant" for turns in call)
    asked = sorted((len(turns), turns[-2]["content"], turns[-1]["content"]) for turns in call)
    assert asked == sorted([(3, "q", good), (2, "q", wild), (3, "q", bare), (3, "q", "12"),
                            (2, "q", "13")])
    # the caller's chats are not modified
    assert question == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]


THOUGHT = "<think>\n<answer>1</answer>\n</think>\n<answer>\n28\n</answer>"


@pytest.mark.parametrize("reply, options, expected", [
    ("long", {}, 3), ("short", {}, -3), ("long", dict(scale=0.5), 2.5),     # scale, then clip
    ("short", dict(scale=0.5), -3), ("long", dict(clip=0), 5), ("short", dict(clip=0), -20),
    ("short", dict(clip=math.inf), -20), (THOUGHT, dict(reasoning=False), 2),
    (THOUGHT, {}, 0.4 * 2 - 0.6 * 1), (THOUGHT, dict(answer_share=0.25), 0.75 * 2 - 0.25 * 1),
])
def test_a_score_is_scaled_clipped_and_mixed_with_that_of_the_answer(reply, options, expected):
    model = KnownScores({"long": 5.0, "short": -20.0, THOUGHT: 2.0, "28": -1.0, "1": 3.0})
    reward = reward_model_reward(model, **options)
    assert reward(["p"], [reply], [[]]) == pytest.approx([expected])


# --- several rewards, one number ------------------------------------------------------------------

def lengths(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def gold(prompts, completions, answer, **columns):
    return answer


def test_rewards_are_weighted_and_a_none_adds_nothing_to_the_sum():
    rewards, per_function = combine_rewards(["p"] * 3, ["a", "bbb", ""], [lengths, gold],
                                            [2.0, 0.5], answer=[4.0, None, 6.0])
    assert rewards.dtype == torch.float32 and rewards.tolist() == [2 * 1 + 0.5 * 4, 2 * 3, 0.5 * 6]
    assert list(per_function) == ["lengths", "gold"]
    assert per_function["lengths"].tolist() == [1, 3, 0]
    expected = torch.tensor([4.0, math.nan, 6.0])
    torch.testing.assert_close(per_function["gold"], expected, equal_nan=True)


def test_a_row_that_no_function_judged_has_no_reward():
    rewards, _ = combine_rewards(["p"] * 2, ["a", "b"], [gold, gold_again], [1.0, 1.0],
                                 answer=[None, 0.0])
    assert rewards[0].isnan() and rewards[1] == 0


def gold_again(**columns):
    return gold(**columns)


def test_two_functions_of_the_same_name_are_both_counted():
    def named_alike(weight):
        def reward(prompts, completions, **columns):
            return [weight] * len(completions)
        return reward

    funcs = [named_alike(1.0), named_alike(20.0)]
    rewards, per_function = combine_rewards(["p"], ["a"], funcs, [1.0, 1.0])
    assert rewards.tolist() == [21.0] and len(per_function) == 2
    funcs[0].__name__ = "reward_2"
    rewards, per_function = combine_rewards(["p"], ["a"], [*funcs, funcs[1]], [1.0] * 3)
    assert rewards.tolist() == [41.0] and len(per_function) == 3


def test_reward_functions_are_found_by_name_and_by_module(own_module):
    own_module("my_rewards", "def short(prompts, completions, **columns):\n"
                             "    return [-len(completion) for completion in completions]\n")
    funcs = load_reward_funcs(["format", "tag", "accuracy", "my_rewards:short"])
    assert [inspect.unwrap(f) for f in funcs[:3]] == [format_reward, tag_reward, accuracy_reward]
    assert combine_rewards([""], ["abc"], funcs[3:], [1.0])[0].tolist() == [-3]


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text("one = lambda completions, **columns: [1]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    assert load_reward_funcs(["my_own:one"])[0](completions=[""]) == [1]


@pytest.mark.parametrize("text, line", [
    ("x = 1\ndef short(:\n", 2), ("import math\n\nmath.nothing()\n", 3),
    ("import sys\nsys.exit()\n", 2)])
def test_a_module_that_cannot_be_imported_is_named_with_its_line(text, line, own_module):
    own_module("my_mistake", text)
    with pytest.raises(ValueError, match=rf"my_mistake:short: .*my_mistake\.py, line {line}\b"):
        load_reward_funcs(["my_mistake:short"])


def test_a_function_that_fails_at_first_stops_the_run_and_later_is_a_warning(own_module):
    own_module("my_service",
               "import json\n\ndown = True\n\n\n"
               "def judge(prompts, completions, **columns):\n"
               "    text = '{' if down else '1'\n"
               "    return [json.loads(text)] * len(completions)\n")
    import my_service
    for timeout in (0, 60):
        my_service.down = True
        funcs = load_reward_funcs(["my_service:judge"], timeout=timeout)
        where = r"my_service\.py, line 8\b"       # not json's own line
        with pytest.raises(ValueError, match=f"judge failed in its first call: .*{where}"):
            combine_rewards([""], ["a"], funcs, [1.0])
        my_service.down = False
        assert combine_rewards([""], ["a"], funcs, [1.0])[0].tolist() == [1]
        my_service.down = True
        with pytest.warns(UserWarning, match=f"judge failed and judged nothing.*{where}"):
            assert combine_rewards([""], ["a"], funcs, [1.0])[0].isnan().all()


@pytest.mark.parametrize("name, says", [
    ("one", r"1 rewards for 2.*my_count\.py, line 1\b"),
    ("nothing", r"returned a NoneType.*my_count\.py, line 2\b"),
    ("closed", r"answer.*\*\*columns.*my_count\.py, line 3\b")])
def test_a_wrong_number_of_rewards_at_first_stops_the_run_too(name, says, own_module):
    own_module("my_count", "def one(prompts, completions, **columns): return [1]\n"
                           "def nothing(prompts, completions, **columns): pass\n"
                           "def closed(prompts, completions): return [1] * 2\n")
    with pytest.raises(ValueError, match=f"{name} failed in its first call: .*{says}"):
        combine_rewards([""] * 2, ["a", "b"], load_reward_funcs([f"my_count:{name}"]), [1.0],
                        answer=["1", "2"])


@pytest.mark.parametrize("name", ["formatt", "no_such_module_here:f", "math:no_such_function"])
def test_an_unknown_reward_is_named(name):
    with pytest.raises(ValueError, match=name):
        load_reward_funcs(["format", name])


# --- a reward function must never harm a run ------------------------------------------------------


def ask(judge, completions=("a", "b"), **columns):
    """One call through combine_rewards: the rewards, and the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")        # as in a run, where Python drops repeated ones
        rewards, _ = combine_rewards(["p"] * len(completions), list(completions), [judge], [1.0],
                                     **columns)
    return rewards.tolist(), [str(warning.message) for warning in caught]


def returning(*values):
    def judge(prompts, completions, **columns):
        return list(values)
    return Judge(judge)


@pytest.mark.parametrize("value, kind", [
    (math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite"), (1e38, "too large"),
    (-2e12, "too large"), (10**400, "too large"), (torch.tensor(1e38), "too large"),
    ("1", "not a number"), (b"1", "not a number"), (1j, "not a number"), ([1.0], "not a number"),
    ({}, "not a number"), (object(), "not a number"), (torch.ones(2), "not a number"),
])
def test_a_value_that_is_of_no_use_is_counted_and_treated_as_none(value, kind):
    judge = returning(value, 1)
    rewards, (text,) = ask(judge)
    assert math.isnan(rewards[0]) and rewards[1] == 1 and judge.failed == {kind: 1}
    assert text.startswith("reward function judge returned ") and f"({kind}), treated as" in text


@pytest.mark.parametrize("value", [
    1, True, -1e12, Decimal("0.5"), numpy.float32(0.5), numpy.int64(3), numpy.bool_(True),
    torch.tensor(0.5), torch.tensor(True), None])
def test_numbers_of_all_kinds_are_rewards_and_none_is_no_failure(value):
    judge = returning(value, 1)
    rewards, texts = ask(judge)
    assert math.isnan(rewards[0]) if value is None else rewards[0] == pytest.approx(float(value))
    assert not texts and not judge.failed


def test_each_kind_is_a_warning_once_for_each_function_and_run():
    def judge(prompts, completions, answer, **columns):
        if answer == ["raise"] * 2:
            raise RuntimeError("no\x1b[31m such\nluck" + "!" * 5000)
        return answer

    ours = Judge(judge, proven=True)
    texts = [ask(ours, answer=answer)[1] for answer in (
        [math.inf, -math.inf], [-math.inf, 1], ["x\x1b" * 5000, 1], ["raise"] * 2,
        ["raise"] * 2, [math.inf, "y"])]
    assert [len(of_call) for of_call in texts] == [1, 0, 1, 1, 0, 0]
    assert "returned inf (infinite)" in texts[0][0]
    assert "judged nothing in this step: RuntimeError: no·[31m such luck!" in texts[3][0]
    assert all(text.isprintable() and len(text) < 700 for (text,) in filter(None, texts))
    assert ours.failed == {"infinite": 4, "not a number": 2, "RuntimeError": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):      # two runs in one process
            Judge(judge)(prompts=[""], completions=["a"], answer=[math.inf])
    assert len(caught) == 2


def test_the_sum_is_finite_or_nan():
    rewards, _ = combine_rewards(["p"] * 2, ["a", ""], [lengths], [3e38])
    assert rewards[0] == torch.tensor(3e38) and rewards[1] == 0
    assert combine_rewards(["p"], ["a" * 9], [lengths], [3e38])[0].isnan().all()


@pytest.mark.parametrize("timeout", [0, 60])
def test_exit_is_a_failure_and_ctrl_c_is_not(timeout):
    def judge(prompts, completions, raising, **columns):
        raise raising

    for leave in (SystemExit(0), GeneratorExit()):
        ours = Judge(judge, timeout=timeout)
        with pytest.raises(UserError, match="judge failed in its first call"):
            ask(ours, raising=leave)
        ours = Judge(judge, timeout=timeout, proven=True)
        rewards, (text,) = ask(ours, raising=leave)
        assert all(map(math.isnan, rewards)) and ours.failed.total() == 1
    assert "called exit" in ask(Judge(judge, proven=True), raising=SystemExit(3))[1][0]
    with pytest.raises(KeyboardInterrupt):
        ask(Judge(judge, timeout=timeout), raising=KeyboardInterrupt())


def test_what_fails_or_is_no_list_of_the_right_length_judges_nothing():
    def endless(prompts, completions, **columns):
        while True:
            yield 1.0

    for function, says in (
            (endless, "more than 2 rewards"), (lambda **columns: {1.0, 2.0}, "returned a set"),
            (lambda **columns: "12", "returned a str"), (lambda **columns: [], "0 rewards"),
            (lambda **columns: 1 / 0, "ZeroDivisionError: division by zero")):
        rewards, (text,) = ask(function)
        assert all(map(math.isnan, rewards)) and says in text


def test_a_function_that_changes_its_arguments_harms_nobody():
    def vandal(prompts, completions, messages, **columns):
        messages[0].append("mine")
        for values in (prompts, completions, messages, *columns.values()):
            values.clear()
        return [1.0, 1.0]

    def columns():
        return {"messages": [["hello"], ["hello"]], "self": [1, 2], "function": [3, None],
                "name": ["x", "y"], "value": [lambda: 0] * 2}

    for names in ({"messages", "self", "function", "name"}, {"messages", "value"}):
        given = {name: values for name, values in columns().items() if name in names}
        before = {name: [*map(repr, values)] for name, values in given.items()}
        rewards, _ = combine_rewards(["p"] * 2, ["a", "bb"], [vandal, lengths], [1.0, 1.0], **given)
        assert rewards.tolist() == [2, 3]
        assert {name: [*map(repr, values)] for name, values in given.items()} == before


def test_only_a_users_function_gets_copies():
    completions, seen = ["a"], []

    def judge(prompts, completions, **columns):
        seen.append(completions)
        return [0.0]

    for ours in (True, False):
        Judge(judge, ours=ours)(prompts=[""], completions=completions)
    assert seen == [["a"], ["a"]] and [given is completions for given in seen] == [True, False]
    judges = load_reward_funcs(["tag", "test_rewards:lengths"], timeout=7)
    assert [(judge.ours, judge.timeout) for judge in judges] == [(True, 7), (False, 7)]


def test_a_flood_is_cut_and_cannot_control_the_terminal(capsys):
    def judge(prompts, completions, **columns):
        print("begin\tof\x1b[2J\r")
        print("an error", file=sys.stderr)
        for _ in range(3000):
            print("flood")
        sys.stdout.writelines(["flood"] * 9)
        sys.stdout.close()
        return [1.0, 1.0]

    ours, before = Judge(judge), (sys.stdout, sys.stderr)
    texts = [ask(ours) for _ in range(2)]
    assert (sys.stdout, sys.stderr) == before
    assert [len(warned) for _, warned in texts] == [1, 0] and "4,000 characters" in texts[0][1][0]
    assert all(rewards == [1, 1] for rewards, _ in texts) and ours.failed == {"printed too much": 2}
    out, err = capsys.readouterr()
    assert len(out) == 2 * LIMIT and err == "an error\n" * 2
    assert out.startswith("begin\tof·[2J·\nflood\n")
    print("afterwards")
    assert capsys.readouterr().out == "afterwards\n"


@pytest.fixture
def let_go():
    """An event that a hanging function waits for: set after the test, whatever happens."""
    event = threading.Event()
    yield event
    event.set()


def test_while_a_call_hangs_it_is_not_called_again_and_what_it_prints_is_dropped(capsys, let_go):
    calls, shouts, bar, before = [], [], tqdm(total=1), (sys.stdout, sys.stderr)

    def shout():
        while not let_go.wait(0.001):
            print("late " * 1000)
            shouts.append(threading.current_thread())

    def judge(prompts, completions, **columns):
        calls.append(threading.current_thread())
        if not let_go.is_set():
            threading.Thread(target=shout, daemon=True).start()     # a helper, as pools have
            shout()
        return [1.0, 1.0]

    def talker(prompts, completions, **columns):
        print("talk")
        return [1.0, 1.0]

    ours, other = Judge(judge, timeout=2), Judge(talker, timeout=60)
    start = time.monotonic()
    rewards, texts = ask(ours)
    assert time.monotonic() - start < 12
    assert all(map(math.isnan, rewards)) and len(texts) == 2 and "TimeoutError" in texts[0]
    assert len(capsys.readouterr().out) <= LIMIT
    threads = threading.active_count()
    for expected in (1, 0, 0):
        rewards, texts = ask(ours)
        assert all(map(math.isnan, rewards)) and len(texts) == expected
        shouts.clear()
        while len(set(shouts)) < 2:         # both threads go on
            time.sleep(0.001)
        assert ask(other) == ([1, 1], [])
        print("\rour own")
    assert len(calls) == 1 and threading.active_count() == threads
    assert ours.failed == {"TimeoutError": 1, "printed too much": 1, "still running": 3}
    assert capsys.readouterr().out == "talk\n\rour own\n" * 3
    assert bar.fp == sys.stderr     # tqdm.write clears the bar's line if this is so
    let_go.set()
    for thread in {*calls, *shouts}:
        thread.join(60)
    assert ask(ours) == ([1, 1], []) and len(calls) == 2
    assert (sys.stdout, sys.stderr) == before


def test_failures_of_all_ranks_are_counted_and_give_the_reason():
    def judge(prompts, completions, answer, **columns):
        return answer

    ranks = [[Judge(judge), Judge(judge), Judge(lengths)] for _ in range(2)]
    for judges, answer in zip(ranks, ([math.inf, math.inf], [1.0, "x"])):
        ask(judges[1], answer=answer)
    told = [row for judges in ranks for row in failures(judges)]
    assert [row[:2] for row in told] == [("judge_1", 2), ("judge_1", 1)]
    row = {"length": 1, "ended": True, "rewards": {"judge": 0.5, "judge_1": math.nan}}
    metrics = rollout_metrics([row | {"reward": 0.5}, row | {"reward": math.nan}], 2, told)
    assert metrics["rewards/judge_1/failed"] == 3 and "rewards/judge/failed" not in metrics
    with pytest.raises(ValueError, match=r"judge_1 returned inf .*; judge_1 returned 'x' .*check"):
        rollout_metrics([row | {"reward": math.nan}] * 2, 2, told)
    ask(ranks[0][1], answer=[1.0, 1.0])         # no failure any more: no reason
    assert failures(ranks[0])[0][1:] == (2, None)


NASTY = """
import sys
import threading

let_go, calls = threading.Event(), {}

def exits(prompts, completions, **columns):
    sys.exit()

def hangs(prompts, completions, **columns):
    let_go.wait()

def is_wild(prompts, completions, **columns):       # in groups of four: one judged, two, none
    some = [1.0, "x", float("nan"), float("inf"), 0.0, 1.0, 1e38, None]
    return some + [10**400] * (len(completions) - 8)

def changes(prompts, completions, completion_ids, messages, **columns):
    for value in (prompts, completions, completion_ids, messages):
        value[:] = [None] * 99
    return []

def floods(prompts, completions, **columns):
    print("flood " * 10000)
    raise RuntimeError("flood " * 10000)

def is_none(prompts, completions, **columns):
    return [None] * len(completions)

def judge(name, *nasty):
    def function(prompts, completions, **columns):
        calls[name] = calls.get(name, 0) + 1
        if calls[name] > 1:
            return nasty[calls[name] - 2](prompts, completions, **columns)
        return [len(completion) / 10 for completion in completions]
    function.__name__ = name
    return function

one, two, three, none = (judge("one", is_wild, exits), judge("two", changes, hangs),
                         judge("three", floods, is_wild), judge("none", is_none))
"""
RUN = ["--batch_size", "4", "--num_generations", "4", "--max_gen_len", "16", "--max_steps", "3",
       "--eval_interval", "0"]


@pytest.fixture
def nasty(own_module):
    own_module("my_nasty", NASTY)
    module = importlib.import_module("my_nasty")
    yield module
    module.let_go.set()


@pytest.mark.parametrize("flags", [
    [], ["--supervision", "process"], ["--kl_in_reward", "--oversample", "2", "--scale_rewards",
                                       "batch", "--advantage_estimator", "rloo"],
])
def test_a_run_outlives_its_rewards(flags, nasty, tmp_path, capsys):
    with warnings.catch_warnings(record=True):
        train_grpo.main([*RUN, *flags, "--reward_funcs", "my_nasty:one", "my_nasty:two",
                         "my_nasty:three", "--reward_timeout", "4", "--out_dir", str(tmp_path)])
    assert 0 < capsys.readouterr().out.count("flood") < LIMIT
    folder = tmp_path / "grpo_reason_128"
    first, *lines = jsonl(folder / "metrics.jsonl")
    assert not [name for name in first if name.endswith("/failed")]
    wild = len(jsonl(folder / "completions.jsonl")) // 3 - 4
    failed = [[line[f"rewards/{name}/failed"] for name in ("one", "two", "three")]
              for line in lines]
    assert failed == [[wild, 1, 2], [wild + 1, 2, 2 + wild]]
    assert [line["reward"] for line in lines] == pytest.approx([2 / 3] * 2)
    weights = load_pretrained(folder / "final").state_dict()
    assert all(weight.isfinite().all() for weight in weights.values())


def test_a_run_whose_rewards_all_fail_stops_with_the_reasons(nasty, tmp_path, capsys):
    with pytest.warns(UserWarning), pytest.raises(SystemExit):
        train_grpo.main([*RUN, "--reward_funcs", "my_nasty:two", "my_nasty:three", "my_nasty:none",
                         "--out_dir", str(tmp_path)])
    error = capsys.readouterr().err
    assert "no completion of this step has a reward" in error and "Traceback" not in error
    assert "two failed" in error and "0 rewards for 16" in error and "my_nasty.py, line" in error
    assert "three failed and judged nothing in this step: RuntimeError" in error
    assert len(jsonl(tmp_path / "grpo_reason_128/metrics.jsonl")) == 1


# --- reward models --------------------------------------------------------------------------------

CHATS = [turns(f"What is {i} + {i}?", "7 " * i + str(i)) for i in (1, 9, 3, 30, 2)]


@pytest.fixture(scope="module")
def random_model(tokenizer):
    """Random weights, large enough that every token moves the score."""
    torch.manual_seed(0)
    model = RewardModel(MiniMindConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id), tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model.eval()


def test_a_chat_is_read_once_however_often_it_occurs(random_model):
    read, chats = [], [CHATS[i] for i in (1, 0, 1, 1)]
    hook = random_model.register_forward_pre_hook(lambda _, inputs: read.append(len(inputs[0])))
    scores = random_model.get_scores(chats)
    hook.remove()
    assert sum(read) == 2
    assert scores == pytest.approx(random_model.get_scores(chats, max_tokens=1), abs=1e-5)


@torch.no_grad()
def test_scores_are_those_of_transformers_for_what_we_saved(random_model, tokenizer, tmp_path):
    random_model.save_pretrained(tmp_path)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]

    def encode(texts, **options):
        return tokenizer(texts, add_special_tokens=False, return_tensors="pt",
                         return_token_type_ids=False, **options)

    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    expected = [theirs(**encode(text)).logits.item() for text in texts]
    batch = encode(texts, padding=True, padding_side="right")
    assert theirs(**batch).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    # far enough apart that a chat in the wrong row would show
    assert min(abs(a - b) for a in expected for b in expected if a is not b) > 0.01
    for model in (random_model, load_reward_model(tmp_path)):
        for max_tokens in (None, 60, 1):        # in one batch, in several, alone
            assert model.get_scores(CHATS, max_tokens) == pytest.approx(expected, abs=1e-5)
        assert model.get_score(CHATS[0]) == pytest.approx(expected[0], abs=1e-5)


def test_folders_without_a_reward_model_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="--reward_model_path .*nowhere"):
        load_reward_model(tmp_path / "nowhere", device="cpu")
    policy = MiniMindForCausalLM(MiniMindConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8))
    save_pretrained(policy, tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match="policy.*not a language model"):
        load_reward_model(tmp_path / "policy", device="cpu")


def test_the_shipped_reward_model_orders_heldout_pairs():
    model = load_reward_model(ROOT / "reward/weights/reward_128", device="cpu")
    problems, rng = PromptDataset(ROOT / "dataset/heldout.jsonl")[:100], random.Random(1)
    groups = replies(ROOT / "model/weights/reason_128", problems, num_generations=8, seed=1)
    pairs = [(with_reply(problem["messages"], text) for text in pair)
             for problem, group in zip(problems, groups) for pair in pairs_of(group, rng, most=2)]
    better, worse = (model.get_scores(chats) for chats in zip(*pairs))
    assert len(better) > 100
    assert sum(a > b for a, b in zip(better, worse)) >= 0.9 * len(better)
