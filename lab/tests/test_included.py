"""The included problems against their generator and plain arithmetic; the included reward model."""
import random
import re
import runpy
import sys
from itertools import islice

import pytest

from dataset import PromptDataset
from lab.tasks import arithmetic
from lab.tasks.pairs import sampled_pairs
from reward import load_reward_model
from reward.reward_model import with_reply
from support import POLICY, ROOT, jsonl


def canonical(expression):
    """A name that does not depend on the order of terms, of factors, or of operands in brackets."""
    terms = re.findall(r"(-?) ?([\d*]+)", expression)      # (7 + 3)*5 has the terms 7, 3 and *5
    return tuple(sorted((sign, *sorted(term.split("*"))) for sign, term in terms))


def expression_of(row):
    return row["conversations"][0]["content"].removeprefix("What is ").removesuffix("?")


TEMPLATES = ["N + N*N", "N*N - N", "(N + N)*N", "N + N - N + N", "N*N + N*N"]


@pytest.mark.parametrize("name, at_least", [("train.jsonl", 5000), ("heldout.jsonl", 1000)])
def test_arithmetic_problems_are_right_distinct_in_range_and_of_all_templates(name, at_least):
    rows = jsonl(ROOT / "dataset" / name)
    expressions = [expression_of(row) for row in rows]
    assert [row["answer"] for row in rows] == [str(eval(expression)) for expression in expressions]
    assert all(0 <= int(row["answer"]) <= 999 for row in rows)
    assert len({canonical(expression) for expression in expressions}) == len(rows) >= at_least
    shapes = [re.sub(r"\d+", "N", expression) for expression in expressions]
    assert all(shapes.count(template) > len(rows) / 20 for template in TEMPLATES)


def test_heldout_problem_is_never_trained_on_in_any_order_of_its_operands():
    def names(rows):
        expressions = map(expression_of, rows)      # without the drills, which have commas
        return {canonical(text) for text in expressions if "," not in text}

    heldout = [*jsonl(ROOT / "dataset/heldout.jsonl"),
               *arithmetic.flaw_pairs(random.Random(5), 3000, heldout=True)]
    for source in (jsonl(ROOT / "dataset/train.jsonl"),
                   arithmetic.finetuning_chats(random.Random(1), 2000, tags=True),
                   arithmetic.finetuning_chats(random.Random(2), 2000, tags=False),
                   arithmetic.flaw_pairs(random.Random(3), 3000, heldout=False),
                   arithmetic.pretraining_chats(random.Random(4), 2000)):
        assert not names(heldout) & names(source)


def test_arithmetic_files_are_what_the_generator_writes_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["arithmetic", "--out_dir", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "lab.tasks.arithmetic", raising=False)
    runpy.run_module("lab.tasks.arithmetic", run_name="__main__")
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "dataset" / name).read_bytes()


@pytest.mark.parametrize("style", arithmetic.STYLES)
def test_arithmetic_wrong_thoughts_never_arrive_at_the_right_answer(style):
    rng = random.Random(9)
    for expression, operations, answer, _ in islice(arithmetic.problems(rng, heldout=False), 300):
        assert answer == eval(expression) == arithmetic.think(style, operations)[1]
        assert arithmetic.think_wrongly(style, operations, rng)[1] != answer


@pytest.mark.usefixtures("one_thread")
def test_reward_model_orders_heldout_pairs():
    model = load_reward_model(ROOT / "reward/weights/reward_128", device="cpu")
    problems, rng = PromptDataset(ROOT / "dataset/heldout.jsonl")[:30], random.Random(1)
    pairs = list(sampled_pairs(POLICY, problems, rng))
    better, worse = (model.get_scores([with_reply(row["conversations"], row[side])
                                       for row in pairs]) for side in ("chosen", "rejected"))
    assert len(better) > 30
    assert sum(a > b for a, b in zip(better, worse)) >= 0.9 * len(better)
