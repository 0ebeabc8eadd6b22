"""The reward model retrained on a run, and the chain of runs: which pairs, from where, and what happens after a stop."""
import copy
import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dataset.arithmetic import flaw_pairs
from model import save_pretrained
from reward import iterate, load_reward_model, train_reward_model
from reward.reward_model import LikelihoodModel, reward_model_reward
from reward.train_reward_model import accuracy_by_kind, loss_of, pairs_of_runs

SHIPPED, POLICY = "reward/weights/reward_128", Path("model/weights/reason_128")


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
    chosen = []
    monkeypatch.setattr(train_reward_model, "optimize", lambda model, next_loss, **options: next_loss())
    monkeypatch.setattr(train_reward_model.RewardModel, "encode",
                        lambda model, chats: chosen.extend(chats) or model.pad(model.tokenize(chats)))
    monkeypatch.setattr(sys, "argv", ["train_reward_model.py", "--completions", str(path), "--replay", "0.25",
                                      "--init", SHIPPED, "--save", str(tmp_path / "new"), "--batch_size", "8"])
    train_reward_model.main()
    own = {row["prompt"] for row in completion_rows(60)}
    assert len(chosen) == 16 and sum(chat[0]["content"] in own for chat in chosen) == 12       # 6 of 8 pairs are the run's
    question = [{"role": "user", "content": "What is 7 + 3*7?"}, {"role": "assistant", "content": "28"}]
    assert load_reward_model(tmp_path / "new").get_score(question) == pytest.approx(
        load_reward_model(SHIPPED).get_score(question), abs=1e-5)                                  # no step was taken
    kept = [json.loads(line) for line in (tmp_path / "new/pairs.jsonl").read_text().splitlines()]
    assert len(kept) == 1000 and any(row["conversations"][0]["content"] in own for row in kept)
    assert "before training" in capsys.readouterr().out


def test_a_language_model_is_retrained_as_one_and_on_no_bare_answers_of_the_run(tmp_path, monkeypatch):
    path = write(tmp_path / "completions.jsonl", completion_rows(60))
    chosen = []
    monkeypatch.setattr(train_reward_model, "optimize", lambda model, next_loss, **options: next_loss())
    monkeypatch.setattr(train_reward_model.RewardModel, "encode",
                        lambda model, chats: chosen.extend(chats) or model.pad(model.tokenize(chats)))
    monkeypatch.setattr(sys, "argv", ["train_reward_model.py", "--completions", str(path), "--likelihood",
                                      "--init", str(POLICY), "--data", f"{SHIPPED}/pairs.jsonl",
                                      "--save", str(tmp_path / "new")])
    train_reward_model.main()
    own = {row["prompt"] for row in completion_rows(60)}
    texts = [chat[1]["content"] for chat in chosen if chat[0]["content"] in own]
    assert len(texts) == 2 * 29 and all("<think>" in text for text in texts)                    # 3 of 32 are replayed
    for reopened in (load_reward_model(tmp_path / "new"), train_reward_model.load_init(tmp_path / "new")):
        assert isinstance(reopened, LikelihoodModel)


def test_a_likelihood_model_scores_the_log_probability_of_the_last_turn_alone(tiny_policy, tmp_path):
    tokenizer, policy = tiny_policy
    question = [{"role": "user", "content": "What is 7 + 3*7?"}]
    talk = question + [{"role": "assistant", "content": "The answer is 28."}, {"role": "user", "content": "What?"}]
    chats = [before + [{"role": "assistant", "content": text}]
             for before, text in ((talk, "28"), (question, "7 + 3*7 is 28. " * 3), (question, ""))]
    save_pretrained(policy, tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match="not a language model"):       # unless it is said to be meant
        load_reward_model(tmp_path / "policy")
    LikelihoodModel(policy, tokenizer).save_pretrained(tmp_path / "judge")
    model, theirs = load_reward_model(tmp_path / "judge"), AutoModelForCausalLM.from_pretrained(tmp_path / "judge")
    for wrong in ({"answer_share": 0}, {"clip": 0}):
        with pytest.raises(ValueError, match="--reward_model_clip 0 --reward_model_answer_share 0"):
            reward_model_reward(model, **wrong)
    assert reward_model_reward(model, clip=0, answer_share=0)
    expected = []
    for chat in chats:
        asked = len(tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False))
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        p = theirs(torch.tensor([ids])).logits[0].double().softmax(-1)
        expected.append(sum(math.log(p[t - 1, ids[t]].item()) for t in range(asked, len(ids))))
    assert model.get_scores(chats) == pytest.approx(expected, abs=1e-3)
    assert [model.get_score(chat) for chat in chats] == pytest.approx(expected, abs=1e-3)


def test_a_likelihood_wants_a_template_that_says_where_a_reply_begins(tiny_policy):
    tokenizer, policy = tiny_policy
    tokenizer = copy.deepcopy(tokenizer)
    for template in ("{% for turn in messages %}{{ turn['content'] }}{% endfor %}", tokenizer.chat_template.replace(
            "{% if add_generation_prompt %}", "{% if add_generation_prompt %}hm ")):
        assert template != tokenizer.chat_template
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="where it begins"):
            LikelihoodModel(policy, tokenizer)


def test_the_chain_names_a_reward_model_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["iterate.py", "--reward_model_path", str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="nowhere: no config.json there"):
        iterate.main()


def test_of_likelihoods_only_the_differences_are_trained(tiny_policy):
    tokenizer, policy = tiny_policy
    model = LikelihoodModel(policy, tokenizer)
    chats = [[{"role": "user", "content": "7?"}, {"role": "assistant", "content": text}] for text in ("is 28", "is 72")]
    (better, worse), ends = model(model.encode(chats)[0]), model.encode(chats)[1]
    first, end = int((better != worse).nonzero()[0]), int(ends[0])      # the first digit, the last token
    along = -torch.nn.functional.logsigmoid((better - worse)[first:end]).mean()
    at_the_end = -torch.nn.functional.logsigmoid((better - worse)[end])
    assert loss_of(model, *model.encode(chats)).item() == pytest.approx((along + at_the_end).item(), abs=1e-5)


def test_a_language_model_sees_slips_that_the_shipped_classifier_does_not():
    rng, models = random.Random(0), (load_reward_model(SHIPPED), train_reward_model.load_init(POLICY, likelihood=True))
    rows = [row for row in flaw_pairs(rng, 400, heldout=True) if row["kind"] == "slip" and "<think>" in row["chosen"]]
    pairs = [tuple(row["conversations"] + [{"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected"))
             + ("slip",) for row in rows]
    blind, seeing = (accuracy_by_kind(model, pairs)["slip"] for model in models)
    assert len(pairs) > 100 and blind < 0.75 and seeing > 0.85


def test_the_chain_hands_on_policy_and_reward_model_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    calls = []

    def call(*command):
        command = list(map(str, command))
        calls.append(command)
        value = dict(zip(command, command[1:]))
        if command[0] == "train_grpo.py":
            shutil.copytree(POLICY, tmp_path / value["--run_name"] / "final")
            write(tmp_path / value["--run_name"] / "completions.jsonl", completion_rows(60))
        else:
            if len(calls) == 2:                                     # the first retraining is cut off
                raise KeyboardInterrupt
            train_reward_model.load_init(Path(value["--init"]), likelihood=True).save_pretrained(value["--save"])
            (tmp_path / value["--save"] / "pairs.jsonl").touch()

    monkeypatch.setattr(iterate, "call", call)
    monkeypatch.setattr(sys, "argv", ["iterate.py", "--run_name", "t", "--out_dir", str(tmp_path), "--", "--max_steps", "1"])
    with pytest.raises(KeyboardInterrupt):
        iterate.main()
    iterate.main()
    values = [dict(zip(command, command[1:])) for command in calls]
    assert [command[0] for command in calls] == ["train_grpo.py", "-m", "-m", "train_grpo.py", "-m"]
    assert "--model_path" not in values[0] and values[0]["--max_steps"] == "1"
    assert values[0]["--reward_model_path"].endswith(SHIPPED)
    assert values[2]["--save"] == values[3]["--reward_model_path"] == values[4]["--init"] == str(tmp_path / "reward_t_1")
    assert values[2]["--init"] == values[3]["--model_path"] and values[2]["--data"].endswith(f"{SHIPPED}/pairs.jsonl")
    assert values[4]["--data"] == str(tmp_path / "reward_t_1/pairs.jsonl") and "--likelihood" in calls[2] + calls[4]
    assert "--reward_model_clip" not in values[0] and values[3]["--reward_model_clip"] == "0"
    assert values[3]["--reward_model_answer_share"] == "0"
    assert values[3]["--model_path"] == str(tmp_path / "t_1/final") and "--resume" not in calls[3]
    (tmp_path / "t_2/checkpoint").mkdir()
    shutil.rmtree(tmp_path / "t_2/final")
    calls.clear()
    iterate.main()
    assert len(calls) == 1 and "--resume" in calls[0]
