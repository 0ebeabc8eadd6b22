"""Countdown: problems, texts and reward, all against plain arithmetic; the shipped files."""
import functools
import itertools
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch

from dataset import PromptCollator, PromptDataset
from lab.experiments import pass_at_k
from lab.experiments.__main__ import behaviour
from lab.tasks import countdown
from lab.tasks.countdown import countdown_reward
from model import load_pretrained, load_tokenizer, rng_of
from support import ROOT


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


@pytest.fixture
def few_problems(monkeypatch):
    """Of all numbers that a problem may have, every eighth choice: to find what can be reached from
    four takes long."""
    def choices(numbers, count):
        return itertools.islice(itertools.combinations_with_replacement(numbers, count), 3, None, 8)

    monkeypatch.setattr(countdown, "itertools", SimpleNamespace(
        **vars(itertools) | {"combinations_with_replacement": choices}))
    monkeypatch.setattr(countdown, "problems", functools.cache(countdown.problems.__wrapped__))


@pytest.mark.parametrize("in_order", [True, False])
def test_the_texts_compute_and_compare_rightly_and_their_answers_are_right(in_order, few_problems):
    chats = countdown.searches(random.Random(1), in_order=in_order, most=18, give_up=0.3)
    gave_up = 0
    for chat in itertools.islice(chats, 100):
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
        assert not in_order or row["repeats"] == 0
        assert not countdown.is_heldout(nums, int(target))
        gave_up += 1 - right
    assert 20 < gave_up < 80


def test_the_first_texts_are_comparisons_and_searches_some_of_which_must_hit_soon(few_problems):
    chats = list(countdown.pretraining_chats(random.Random(1), 1000))
    replies = [chat["conversations"][1]["content"] for chat in chats]
    tries = [reply.count(" no\n") + reply.count(" yes\n") for reply in replies if reply[0] == "<"]
    assert min(tries) == 1 and max(tries) == 18 and sum(n <= 3 for n in tries) > len(tries) / 3
    pairs = [pair for reply in replies for pair in re.findall(r"^=(\d+) (\d+) (\w+)$", reply, re.M)]
    assert all((a == b) == (verdict == "yes") for a, b, verdict in pairs)
    assert sum(a == b for a, b, _ in pairs) / len(pairs) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("answer, right", [
    ("8*6+9", 1), ("9 + 6 * 8", 1), ("8*6+9 = 57", 1), ("(8*6)+9", 1),
    ("9-8+6", 0),                                       # each number once, but 7
    ("8*6+8", 0), ("8*6+9+0", 0), ("57", 0), ("8*6", 0), ("none", 0), ("", 0), ("+8*6+9", 0),
    ("8*6- -9", 0), ("8*6+9)", 0), ("9**6", 0), ("8(6)+9", 0), ("9/0+8*6", 0),
    ("(" * 60 + "8*6+9" + ")" * 60, 0)])
def test_the_reward_of_countdown(answer, right):
    reply = f"<think>\n8*6=48+9=57 57 yes\n</think>\n<answer>\n{answer}\n</answer>"
    assert countdown_reward([""], [reply], nums=[[9, 8, 6]], target=[57]) == [right]
    assert countdown_reward([""], [reply], nums=[None], target=[None]) == [None]
    division = "<answer>6/(1-3/4)</answer>"         # by floating point it is not 24
    assert countdown_reward([""], [division], nums=[[1, 3, 4, 6]], target=[24]) == [1]


def test_what_a_reply_does_is_read_off_it():
    lines = ["9+8=17+6=23 57 no", "9*6=54+8=61 57 no", "9+8=17+6=23 57 no", "8*6=48+9=57 57 no"]
    reply = "<think>\n" + "\n".join(lines) + "\n</think>\n<answer>\nnone\n</answer>"
    row = behaviour({"completion": reply, "length": 50, "ended": True, "reward": 0.0})
    assert row["tries"] == 4 and row["repeats"] == 1 / 4 and row["gave_up"] == 1
    assert row["length/wrong"] == 50 and "length/right" not in row


def test_who_may_not_give_up_tries_on_after_a_no_and_else_is_the_same_policy(one_thread):
    """Its log-probs are those of the policy where no token is forbidden, and elsewhere those given
    that none of the forbidden ones comes: worked out here from the text so far."""
    weights = ROOT / "model/weights/countdown_128"
    policy = load_pretrained(weights, dtype=torch.float32)
    tokenizer = load_tokenizer(weights, math.inf)
    words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    batch = PromptCollator(tokenizer, 66)(PromptDataset(ROOT / "dataset/countdown_hard.jsonl")[:2])
    ids, logps = pass_at_k.persistent_sample(
        policy, batch["prompt_ids"], batch["prompt_mask"], tokenizer=tokenizer, num_generations=12,
        max_new_tokens=100, eos_token_id=[2], pad_token_id=0, generator=rng_of(1))
    everything = torch.cat((batch["prompt_ids"].repeat_interleave(12, 0), ids), 1)
    mask = torch.cat((batch["prompt_mask"].repeat_interleave(12, 0), torch.ones_like(ids)), 1)
    with torch.no_grad():
        probs = policy(everything, mask).softmax(-1)[:, -ids.shape[1] - 1:-1]       # (N, R, V)
    would_end = []
    for row, row_logps, row_probs in zip(ids.tolist(), logps.tolist(), probs):
        text = ""
        for token, logp, p in zip(row, row_logps, row_probs):
            allowed = torch.ones(len(words), dtype=bool)
            if text.rfind(" no") > text.rfind(" yes"):
                for end in "</think>", "<answer>", "</answer>", "<|im_end|>":
                    allowed[words.index(end)] = False
                if text.endswith("\n"):
                    allowed &= torch.tensor([word.isdecimal() for word in words])
                would_end.append(p[words.index("</think>")].item())
            assert allowed[token], text + words[token]
            assert logp == pytest.approx(math.log(p[token] / p[allowed].sum()), abs=1e-4)
            text += words[token]
            if token == 2:
                break
    assert sum(p > 0.2 for p in would_end) > 20     # it often wants to
