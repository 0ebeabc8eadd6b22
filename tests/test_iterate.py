"""The reward model retrained on a run, and the chain of runs: which pairs, from where, and what happens after a stop."""
import json
import random
import sys
from pathlib import Path

import pytest

from reward import iterate, load_reward_model, train_reward_model
from reward.train_reward_model import pairs_of_runs

SHIPPED = "reward/weights/reward_128"


def completion_rows(num_prompts, step=1):
    """For each prompt a group of four: two right, one wrong, one that comes to nothing."""
    for i in range(num_prompts):
        prompt, answers = f"What is {i} + 5?", (i + 5, i + 5, i + 6, "")
        for number, answer in enumerate(answers):
            yield {"step": step, "prompt": prompt, "messages": [{"role": "user", "content": prompt}], "answer": str(i + 5),
                   "completion": f"<think>\n{number}\n</think>\n<answer>\n{answer}\n</answer>"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_are_right_against_wrong_within_a_group_and_hold_out_whole_prompts(tmp_path):
    path = write(tmp_path / "completions.jsonl", [*completion_rows(60), *completion_rows(60, step=2)])
    train, heldout = pairs_of_runs([path], random.Random(0))
    assert len(train) + len(heldout) == 2 * 60 * 2 and 4 <= len(heldout) <= 60
    for chosen, rejected, kind in train + heldout:
        assert chosen[0] == rejected[0] and kind == "reply"
        right = str(int(chosen[0]["content"].split()[2]) + 5)
        assert f"\n{right}\n</answer>" in chosen[1]["content"] and f"\n{right}\n</answer>" not in rejected[1]["content"]
    assert not {pair[0][0]["content"] for pair in train} & {pair[0][0]["content"] for pair in heldout}
    with pytest.raises(ValueError, match="longer run"):
        pairs_of_runs([write(tmp_path / "none.jsonl", list(completion_rows(60))[:1])], random.Random(0))


def test_retraining_starts_from_the_reward_model_and_replays_its_earlier_pairs(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "completions.jsonl", completion_rows(60))
    batches = []
    monkeypatch.setattr(train_reward_model, "optimize", lambda model, next_loss, **options: batches.append(next_loss().item()))
    chosen = []
    monkeypatch.setattr(train_reward_model.RewardModel, "encode", lambda model, chats: chosen.extend(chats) or model.pad(model.tokenize(chats)))
    monkeypatch.setattr(sys, "argv", ["train_reward_model.py", "--completions", str(path), "--replay", "0.25", "--init", SHIPPED,
                                      "--save", str(tmp_path / "new"), "--batch_size", "8"])
    train_reward_model.main()
    own = {row["prompt"] for row in completion_rows(60)}
    assert len(chosen) == 16 and sum(chat[0]["content"] in own for chat in chosen) == 12           # 6 of 8 pairs are the run's
    question = [{"role": "user", "content": "What is 7 + 3*7?"}, {"role": "assistant", "content": "28"}]
    assert load_reward_model(tmp_path / "new").get_score(question) == pytest.approx(
        load_reward_model(SHIPPED).get_score(question), abs=1e-5)                                  # no step was taken
    kept = [json.loads(line) for line in (tmp_path / "new/pairs.jsonl").read_text().splitlines()]
    assert len(kept) == 1000 and any(row["conversations"][0]["content"] in own for row in kept)
    assert "before training" in capsys.readouterr().out


def test_the_chain_hands_on_policy_and_reward_model_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    calls = []

    def call(*command):
        command = list(map(str, command))
        calls.append(command)
        value = dict(zip(command, command[1:]))
        if command[0] == "train_grpo.py":
            final = tmp_path / value["--run_name"] / "final"
            final.mkdir(parents=True)
            (final / "config.json").touch()
            write(tmp_path / value["--run_name"] / "completions.jsonl", completion_rows(60))
        else:
            if len(calls) == 2:                                     # the first retraining is cut off
                raise KeyboardInterrupt
            load_reward_model(value["--init"])
            train_reward_model.load_init(Path(value["--init"])).save_pretrained(value["--save"])
            (tmp_path / value["--save"] / "pairs.jsonl").touch()

    monkeypatch.setattr(iterate, "call", call)
    monkeypatch.setattr(sys, "argv", ["iterate.py", "--run_name", "t", "--out_dir", str(tmp_path), "--", "--max_steps", "1"])
    with pytest.raises(KeyboardInterrupt):
        iterate.main()
    iterate.main()
    values = [dict(zip(command, command[1:])) for command in calls]
    assert [command[0] for command in calls] == ["train_grpo.py", "-m", "-m", "train_grpo.py", "-m"]
    assert "--model_path" not in values[0] and values[0]["--reward_model_path"].endswith(SHIPPED) and values[0]["--max_steps"] == "1"
    assert values[2]["--save"] == values[3]["--reward_model_path"] == values[4]["--init"] == str(tmp_path / "reward_t_1")
    assert values[3]["--model_path"] == str(tmp_path / "t_1/final") and "--resume" not in calls[3]
    (tmp_path / "t_2/final/config.json").unlink()
    (tmp_path / "t_2/checkpoint").mkdir()
    (tmp_path / "t_2/final").rmdir()
    calls.clear()
    iterate.main()
    assert len(calls) == 1 and "--resume" in calls[0]
