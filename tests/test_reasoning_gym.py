"""reasoning-gym's problems and judges; skipped where the package is missing."""
import importlib.util
import sys

import pytest

from dataset import PromptDataset, reasoning_gym
from reward.functions import reasoning_gym_reward

missing = importlib.util.find_spec("reasoning_gym") is None
real = pytest.mark.skipif(missing, reason="not installed: reasoning-gym")


def made(tmp_path, name, *flags):
    """The rows of the two files."""
    reasoning_gym.main([name, "--size", "6", "--heldout", "3", "--save",
                        str(tmp_path / f"{name}.jsonl"), *flags])
    return [PromptDataset(tmp_path / f"{name}{part}.jsonl") for part in ("", "_heldout")]


def columns(row, count):
    return {"answer": [row["answer"]] * count, "metadata": [row["metadata"]] * count}


@real
def test_problems_are_written_with_what_their_judge_needs(tmp_path, capsys):
    train, heldout = made(tmp_path, "chain_sum", "--config", "min_terms=2", "max_terms=2",
                          "min_digits=1", "max_digits=1")
    assert len(train) == 6 and len(heldout) == 3
    questions = [row["messages"][0]["content"] for row in train + heldout]
    assert len(set(questions)) == 9
    for row in train:
        a, sign, b = row["metadata"]["expression"].split()
        value = int(a) + int(b) if sign == "+" else int(a) - int(b)
        replies = [f"<think>\n{a}\n</think>\n<answer>\n{value}\n</answer>", f" {value}\n",
                   f"The answer is {value}.", f"<answer>{value + 1}</answer>",
                   f"<answer>{value}", "I don't know."]
        assert reasoning_gym_reward([], replies, **columns(row, 6)) == [1, 1, 1, 0, 0, 0]


@real
def test_a_text_that_has_the_answer_earns_no_share_and_a_judge_that_fails_none(tmp_path):
    row = made(tmp_path, "letter_jumble")[0][0]
    gold = row["answer"]
    replies = [f"<answer>{gold}</answer>", gold, f"<answer>It is {gold}</answer>", f"It is {gold}"]
    right, bare, within, sentence = reasoning_gym_reward([], replies, **columns(row, 4))
    assert right == bare == 1 and 0 <= within < 1 and sentence == 0
    factors = made(tmp_path, "prime_factorization")[0][0]
    assert reasoning_gym_reward([], ["<answer>[[</answer>"], **columns(factors, 1)) == [0]
    assert reasoning_gym_reward([], ["5"], answer=[5], metadata=[None]) == [None]


@real
@pytest.mark.parametrize("name, flags, message", [
    ("boxnet", [], "to some problems score below 1"), ("nothing_of_it", [], "nothing_of_it"),
    ("chain_sum", ["--config", "min_terms=two"], "Expecting value"),
    ("chain_sum", ["--config", "min_terms=9", "max_terms=3"], "max_terms"),
    ("chain_sum", ["--config", "max_terms=2", "max_digits=1", "--size", "500", "--heldout", "300"],
     "problems are distinct, too few for --heldout 300")])
def test_what_gives_no_problems_is_refused_in_a_sentence(name, flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        made(tmp_path, name, *flags)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_without_the_package_a_sentence_names_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SystemExit):
        made(tmp_path, "chain_sum")
    assert "pip install reasoning-gym" in capsys.readouterr().err
