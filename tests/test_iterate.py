"""Retraining the reward model on a run."""
import copy
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from errors import UserError
from reward import load_reward_model, train_reward_model
from reward.reward_model import LikelihoodModel, RewardModel, reward_model_reward
from reward.train_reward_model import loss_of, pairs_of_run
from support import jsonl, turns, write

SHIPPED, POLICY = "reward/weights/reward_128", Path("model/weights/reason_128")


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


@pytest.mark.parametrize("flags, kind, own", [
    (["--init", SHIPPED, "--replay", "0.25", "--batch_size", "8"], RewardModel, 6),
    (["--init", str(POLICY), "--likelihood"], LikelihoodModel, 29)])        # of 32 pairs
def test_retraining_starts_from_a_model_and_replays_pairs(flags, kind, own, tmp_path, monkeypatch):
    rows, batches = list(completion_rows(60)), []

    def encode(model, chats):       # the first batch
        batches.append(chats)
        return model.pad(model.tokenize(chats))

    path = write(tmp_path / "completions.jsonl", rows)
    monkeypatch.setattr(train_reward_model, "optimize", lambda model, loss, **options: loss())
    monkeypatch.setattr(RewardModel, "encode", encode)
    monkeypatch.setattr(sys, "argv", [
        "", "--completions", str(path), "--data", f"{SHIPPED}/pairs.jsonl",
        "--save", str(tmp_path / "new"), *flags])
    train_reward_model.main()
    prompts, (batch,) = {row["prompt"] for row in rows}, batches
    replies = [chat[1]["content"] for chat in batch if chat[0]["content"] in prompts]
    assert len(replies) == 2 * own
    if kind is LikelihoodModel:         # to which bare answers are merely unlikely
        assert all("<think>" in text for text in replies)
    else:                               # nothing was learnt
        chats = [turns("What is 7 + 3*7?", "28")]
        before, after = (load_reward_model(path).get_scores(chats)
                         for path in (SHIPPED, tmp_path / "new"))
        assert after == pytest.approx(before, abs=1e-5)
    assert type(load_reward_model(tmp_path / "new")) is kind
    kept = jsonl(tmp_path / "new/pairs.jsonl")
    assert len(kept) == 1000 and any("<think>\n0\n</think>" in row["chosen"] for row in kept)
    assert not any(train_reward_model.held_out(row["conversations"]) for row in kept)


PLAIN = ("{% for turn in messages %}{{ turn['role'] }}:{{ turn['content'] }}\n{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}")


@pytest.mark.parametrize("template, opening", [
    (None, "<|im_end|>\n<|im_start|>assistant\n"), (PLAIN, "\nassistant:")])
def test_a_likelihood_model_scores_the_log_probability_of_the_last_turn(
        template, opening, tiny_policy, tmp_path):
    tokenizer, policy = copy.deepcopy(tiny_policy)
    tokenizer.chat_template = template or tokenizer.chat_template
    chats = [turns("What is 7 + 3*7?", *texts) for texts in (
        ("The answer is 28.", "What?", "28"), ("7 + 3*7 is 28. " * 3,), ("",),
        (f"The answer is 7.{opening}28",))]             # a reply that spells what opens another
    LikelihoodModel(policy, tokenizer).save_pretrained(tmp_path / "judge")
    model = load_reward_model(tmp_path / "judge")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "judge")
    expected = []
    for chat, ids in zip(chats, model.tokenize(chats)):
        prompt = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_dict=False)
        p = theirs(torch.tensor([ids])).logits[0].double().softmax(-1)
        reply = range(len(prompt), len(ids))
        expected.append(sum(math.log(p[t - 1, ids[t]].item()) for t in reply))
    for max_tokens in (None, 1):
        assert model.get_scores(chats, max_tokens) == pytest.approx(expected, abs=1e-3)


def test_a_likelihood_is_not_clipped_and_needs_a_template_that_shows_where_a_reply_begins(
        tiny_policy):
    tokenizer, policy = copy.deepcopy(tiny_policy)
    model = LikelihoodModel(policy, tokenizer)
    for wrong in ({"answer_share": 0}, {"clip": 0}):
        with pytest.raises(UserError, match="--reward_model_clip 0 --reward_model_answer_share 0"):
            reward_model_reward(model, **wrong)
    for template in (PLAIN.partition("{% if")[0], PLAIN.replace("assistant:", "hm assistant:")):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="where a reply begins"):
            LikelihoodModel(policy, tokenizer)


def test_only_differences_of_likelihoods_are_trained(tiny_policy):
    tokenizer, policy = tiny_policy
    model = LikelihoodModel(policy, tokenizer)
    ids, ends = model.encode([turns("7?", text) for text in ("is 28", "is 72")])
    better, worse = model(ids)
    first, end = int((better != worse).nonzero()[0]), int(ends[0])      # first digit, last token
    losses = -torch.nn.functional.logsigmoid(better - worse)
    expected = losses[first:end].mean() + losses[end]
    assert loss_of(model, ids, ends).item() == pytest.approx(expected.item(), abs=1e-5)
