"""Countdown: problems, texts and reward, all against plain arithmetic; the shipped files."""
import itertools
import json
import random
import re
import runpy
import zlib

import pytest
from transformers import AutoTokenizer

from conftest import ROOT, jsonl, write
from dataset import PromptDataset, countdown
from docs.experiments.__main__ import behaviour
from reward import countdown_reward


def values(nums, operators):
    """All whole results from 0 to 100 of left-to-right expressions, by Python's own arithmetic."""
    found = set()
    for order in itertools.permutations(nums):
        for signs in itertools.product(operators, repeat=len(nums) - 1):
            text, value = str(order[0]), order[0]
            for sign, number in zip(signs, order[1:]):
                text = f"({text}){sign}{number}"
                value = eval(text)
                if not (value == int(value) and 0 <= value <= 100):
                    break
            else:
                found.add(int(value))
    return found


@pytest.mark.parametrize("nums, operators", [
    ((9, 8, 6), "+-*"), ((10, 10, 3), "+-*"), ((7, 7, 7), "+-*"), ((8, 4, 3, 2), "+-*/")])
def test_the_tries_reach_what_can_be_reached_and_no_two_are_the_same(nums, operators):
    tries = countdown.tries(nums, operators)
    assert {countdown.results(*one)[-1] for one in tries} == values(nums, operators)
    texts = [countdown.expression(*one) for one in tries]
    assert len(set(texts)) == len(texts)
    for one, text in zip(tries, texts):
        assert eval(text) == countdown.results(*one)[-1] and sorted(one[0]) == sorted(nums)


def test_equal_expressions_are_tried_once():
    # a+b+c, a-b-c, a*b*c once each; three orders of a+b-c, (a+b)*c, (a-b)*c, a*b+c and a*b-c.
    texts = [countdown.expression(*one) for one in countdown.tries((5, 3, 2))]
    assert len(texts) == 3 + 5 * 3
    assert "5+3+2" in texts and "3+5+2" not in texts and "3+2+5" not in texts


def test_the_shipped_problems_are_those_of_the_script_and_apart():
    train, heldout, hard = (
        [(tuple(row["nums"]), row["target"])
         for row in PromptDataset(ROOT / f"dataset/countdown_{name}.jsonl")]
        for name in ("train", "heldout", "hard"))
    for file, is_heldout in ((train, False), (heldout, True)):
        assert file == countdown.problems(*countdown.KINDS["easy"], heldout=is_heldout)
    keys = [{(tuple(sorted(nums)), target) for nums, target in file} for file in (train, heldout)]
    assert not keys[0] & keys[1] and len(hard) == 500 and {len(nums) for nums, _ in hard} == {4}
    assert all(countdown.is_heldout(*problem) for problem in hard)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_hard_problems_to_train_on_are_not_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["", "--hard", str(tmp_path)])
    runpy.run_module("dataset.countdown", run_name="__main__")
    rows = jsonl(tmp_path / "countdown_hard_train.jsonl")
    assert len(rows) == 5000 and {len(row["nums"]) for row in rows} == {4}
    assert not any(countdown.is_heldout(row["nums"], row["target"]) for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["countdown_hard_train.jsonl"]


@pytest.mark.parametrize("order", ["methodical", "random"])
def test_the_texts_compute_and_compare_rightly_and_their_answers_are_right(order):
    chats = countdown.searches(random.Random(1), order=order, most=18, give_up=0.3)
    gave_up = 0
    for chat in itertools.islice(chats, 300):
        prompt, reply = (turn["content"] for turn in chat["conversations"])
        numbers, target = prompt.removeprefix("Use ").removesuffix(".").split(" to make ")
        nums = [int(number) for number in numbers.split(", ")]
        right, = countdown_reward([prompt], [reply], nums=[nums], target=[int(target)])
        row = behaviour({"completion": reply, "reward": right, "length": 0, "ended": True})
        assert row["gave_up"] == 1 - right
        for left, value, goal, verdict in re.findall(r"(.*)=(\d+) (\d+) (yes|no)\n", reply):
            assert (value == goal) == (verdict == "yes") and goal == target
            parts = f"{left}={value}".split("=")        # 8*6, 48+9, 57
            for part, following in zip(parts, parts[1:]):
                assert eval(part) == int(re.match(r"\d+", following)[0])
        assert order == "random" or row["repeats"] == 0
        assert not countdown.is_heldout(nums, int(target))
        gave_up += 1 - right
    assert 60 < gave_up < 240


def test_the_first_texts_are_comparisons_and_searches_some_of_which_must_hit_soon(tmp_path):
    chats = list(countdown.pretraining_chats(random.Random(1), 1000, "methodical"))
    replies = [chat["conversations"][1]["content"] for chat in chats]
    drills = [reply for reply in replies if reply[0] == "="]
    tries = [reply.count(" no\n") + reply.count(" yes\n") for reply in replies if reply[0] == "<"]
    assert min(tries) == 1 and max(tries) == 18 and sum(n <= 3 for n in tries) > len(tries) / 3
    pairs = [re.fullmatch(r"=(\d+) (\d+) (yes|no)", line).groups()
             for line in "\n".join(drills).splitlines()]
    assert all((a == b) == (verdict == "yes") for a, b, verdict in pairs)
    hard = [chat for chat in chats if chat["conversations"][0]["content"].count(",") == 3]
    assert sum(a == b for a, b, _ in pairs) / len(pairs) == pytest.approx(0.5, abs=0.05)
    assert len(hard) / len(tries) == pytest.approx(0.2, abs=0.06)
    # The same seed gives the same texts.
    write(tmp_path / "texts.jsonl", chats)
    assert zlib.crc32((tmp_path / "texts.jsonl").read_bytes()) == 3057125990


@pytest.mark.parametrize("answer, right", [
    ("8*6+9", 1), ("9 + 6 * 8", 1), ("8*6+9 = 57", 1), ("(8*6)+9", 1),
    ("9-8+6", 0), ("9*8*6", 0),                         # each number once, but 7 and 432
    ("8*6+8", 0), ("8*6+9+0", 0), ("57", 0), ("48+9", 0), ("8*6", 0), ("none", 0), ("", 0),
    ("8*6+9+9-9", 0), ("+8*6+9", 0), ("8*6- -9", 0), ("9+(-8*-6)", 0), ("8*6+9)", 0), ("9**6", 0),
    ("8(6)+9", 0), ("[9*6+8-5][0]", 0), ("9/0+8*6", 0), ("(" * 60 + "8*6+9" + ")" * 60, 0)])
def test_the_reward_of_countdown(answer, right):
    reply = f"<think>\n8*6=48+9=57 57 yes\n</think>\n<answer>\n{answer}\n</answer>"
    assert countdown_reward([""], [reply], nums=[[9, 8, 6]], target=[57]) == [right]


def test_the_reward_of_countdown_divides_exactly_and_leaves_other_rows_alone():
    replies = ["<answer>6/(1-3/4)</answer>", "<answer>1</answer>"]
    assert countdown_reward(["", ""], replies, nums=[[1, 3, 4, 6], None],
                            target=[24, None]) == [1.0, None]
    assert countdown_reward([""], ["<answer>1</answer>"], answer=["1"]) == [None]


def test_what_a_reply_does_is_read_off_it():
    def of(lines, answer, **fields):
        reply = "<think>\n" + "\n".join(lines) + f"\n</think>\n<answer>\n{answer}\n</answer>"
        return behaviour({"completion": reply, "length": 50, "ended": True, "reward": 0.0} | fields)

    lines = ["9+8=17+6=23 57 no", "9*6=54+8=61 57 no", "9+8=17+6=23 57 no", "8*6=48+9=57 57 no"]
    row = of(lines, "none")
    assert row["tries"] == 4 and row["repeats"] == 1 / 4 and row["gave_up"] == 1
    assert row["length/wrong"] == 50 and row["length/right"] is None
    row = of(["8/2=4*9=36 36 yes"], "8/2*9", reward=1.0)
    assert row["gave_up"] == 0 and row["length/right"] == 50
    assert of(["27*6=120+42=162"], "162")["tries"] is None
    assert behaviour({"completion": "<think>\n1+1=2+1=3 9 no\n1+", "length": 9, "ended": False,
                      "reward": None})["cut_off"] == 1


def test_each_number_of_the_shipped_tokenizer_is_one_token():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model/weights/countdown_128")
    assert all(len(tokenizer(str(number))["input_ids"]) == 1 for number in range(101))
    assert len(tokenizer("8*6=48+9=57 57 yes\n")["input_ids"]) == 13
    config = json.loads((ROOT / "model/weights/countdown_128/config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
