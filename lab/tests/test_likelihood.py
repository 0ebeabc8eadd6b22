"""A likelihood as a reward, against transformers and by hand."""
import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from errors import UserError
from lab.likelihood import LikelihoodModel, likelihood, load, main
from model import load_pretrained, load_tokenizer
from reward.train_reward_model import loss_of
from support import jsonl, turns, write

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
    model = load(tmp_path / "judge")
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


def test_it_needs_a_template_that_shows_where_a_reply_begins(tiny_policy):
    tokenizer, policy = copy.deepcopy(tiny_policy)
    for template in (PLAIN.partition("{% if")[0], PLAIN.replace("assistant:", "hm assistant:")):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match="where a reply begins"):
            LikelihoodModel(policy, tokenizer)


def test_only_differences_of_likelihoods_are_trained(tiny_policy):
    tokenizer, policy = tiny_policy
    model = LikelihoodModel(policy, tokenizer)
    ids, ends = model.pad(model.tokenize([turns("7?", text) for text in ("is 28", "is 72")]))
    better, worse = model(ids)
    first, end = int((better != worse).nonzero()[0]), int(ends[0])      # first digit, last token
    losses = -torch.nn.functional.logsigmoid(better - worse)
    expected = losses[first:end].mean() + losses[end]
    assert loss_of(model, ids, ends).item() == pytest.approx(expected.item(), abs=1e-5)


def test_the_likelihood_of_any_language_model_is_a_mean_per_token(monkeypatch):
    folder, chats = "model/weights/full_sft_128", []
    for reply in ("162", "The answer is 162."):
        chats.append(turns("What is 27*6?", reply))
    monkeypatch.setenv("MINIGRPO_JUDGE", folder)
    scores = likelihood(None, [chat[1]["content"] for chat in chats], [chat[:1] for chat in chats])
    model, tokenizer = load_pretrained(folder, dtype=torch.float32), load_tokenizer(folder, 10**9)
    for chat, score in zip(chats, scores):
        whole = tokenizer.apply_chat_template(chat, return_dict=False)
        start = len(tokenizer.apply_chat_template(chat[:1], return_dict=False,
                                                  add_generation_prompt=True))
        with torch.no_grad():
            logps = model(torch.tensor([whole])).log_softmax(-1)[0]
        mean = sum(float(logps[t - 1, whole[t]]) for t in range(start, len(whole)))
        assert score == pytest.approx(mean / (len(whole) - start), abs=1e-4)


def test_a_judge_that_was_trained_takes_the_sum(tmp_path):
    rows = [row for row in jsonl(Path("reward/weights/reward_128/pairs.jsonl"))
            if row["kind"] == "reply"][:40]
    pairs = write(tmp_path / "pairs.jsonl", rows)
    main(["--init", "model/weights/reason_128", "--data", str(pairs), "--heldout", str(pairs),
          "--steps", "1", "--batch_size", "4", "--save", str(tmp_path / "judge")])
    of_mean, of_sum = load("model/weights/reason_128"), load(tmp_path / "judge")
    assert of_mean.per_token and not of_sum.per_token
    kept = jsonl(tmp_path / "judge/pairs.jsonl")
    assert len(kept) == 40 and all(row["kind"] != "answer" for row in kept)
