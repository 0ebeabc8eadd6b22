"""Retraining the reward model on a run."""
import random
import sys

import pytest

from errors import UserError
from reward import load_reward_model, train_reward_model
from reward.reward_model import RewardModel
from reward.train_reward_model import pairs_of_run
from support import jsonl, turns, write

SHIPPED = "reward/weights/reward_128"


def completion_rows(num_prompts, step=1):
    """For each prompt a group of four: two right, one wrong, one without an answer."""
    for i in range(num_prompts):
        prompt, answers = f"What is {i} + 5?", (i + 5, i + 5, i + 6, "")
        for number, answer in enumerate(answers):
            yield {"step": step, "prompt": prompt,
                   "columns": {"answer": str(i + 5), "messages": turns(prompt)},
                   "completion": f"<think>\n{number}\n</think>\n<answer>\n{answer}\n</answer>"}


def test_pairs_are_right_against_wrong_within_a_group_and_hold_out_whole_prompts(tmp_path):
    rows = [*completion_rows(60), *completion_rows(60, step=2)]
    path = write(tmp_path / "completions.jsonl", rows)
    sides = pairs_of_run(path, random.Random(0))
    assert sum(map(len, sides)) == 2 * 60 * 2 and 4 <= len(sides[1]) <= 60
    for chosen, rejected, kind in sides[0] + sides[1]:
        assert chosen[0] == rejected[0] and kind == "reply"
        end = f"\n{int(chosen[0]['content'].split()[2]) + 5}\n</answer>"
        assert end in chosen[1]["content"] and end not in rejected[1]["content"]
    train, heldout = ({chosen[0]["content"] for chosen, _, _ in pairs} for pairs in sides)
    assert not train & heldout
    with pytest.raises(UserError, match="longer run"):
        pairs_of_run(write(tmp_path / "short.jsonl", rows[:1]), random.Random(0))


def test_retraining_starts_from_a_model_and_keeps_pairs_of_the_run_and_of_its_data(
        tmp_path, monkeypatch, one_thread):
    rows, seen, tokenize = list(completion_rows(60)), [], RewardModel.tokenize
    monkeypatch.setattr(RewardModel, "tokenize", lambda model, chats: (
        seen.append(chats) or tokenize(model, chats)))
    path = write(tmp_path / "completions.jsonl", rows)
    monkeypatch.setattr(sys, "argv", [
        "", "--completions", str(path), "--data", f"{SHIPPED}/pairs.jsonl", "--init", SHIPPED,
        "--save", str(tmp_path / "new"), "--steps", "1", "--learning_rate", "1e-12",
        "--replay", "0.25", "--batch_size", "8"])
    train_reward_model.main()
    prompts, (batch,) = {row["prompt"] for row in rows}, [x for x in seen if len(x) == 16]
    assert sum(chat[0]["content"] in prompts for chat in batch) == 2 * 6        # of 8 pairs
    chats = [turns("What is 7 + 3*7?", "28")]
    before, after = (load_reward_model(path).get_scores(chats)
                     for path in (SHIPPED, tmp_path / "new"))
    assert after == pytest.approx(before, abs=1e-5)
    kept = jsonl(tmp_path / "new/pairs.jsonl")
    assert len(kept) == 1000 and any("<think>\n0\n</think>" in row["chosen"] for row in kept)
    assert not any(train_reward_model.held_out(row["conversations"]) for row in kept)
