"""Tokens that end a reply, or that a tokenizer calls special: what stops, and what rewards see."""
from copy import deepcopy

import pytest
import torch

from dataset import PromptCollator
from model import eos_token_ids
from model.load import decode
from reward.answers import TAGS
from reward.tools import Tool
from reward.turns import Turns
from run.rollout import Rollout
from support import turns
from train_grpo import completion_mask, format_reward, tag_reward

RIGHT = "<think>\n7+3=10\n</think>\n<answer>\n10\n</answer>"


@pytest.fixture
def tokenizer(tokenizer):
    return deepcopy(tokenizer)              # to be changed


def rollout_of(text, tokenizer):
    batch = PromptCollator(tokenizer, 99)([{"messages": turns("7+3?")}])
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    eos_ids = [tokenizer.eos_token_id]
    return Rollout.of(batch, ids, completion_mask(ids, eos_ids), torch.zeros(ids.shape), eos_ids,
                      tokenizer)


def test_tags_that_are_special_tokens_are_seen_by_rewards(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": list(TAGS)})     # as some do
    assert tokenizer.decode(tokenizer(RIGHT)["input_ids"], skip_special_tokens=True) != RIGHT
    rollout = rollout_of(RIGHT + tokenizer.eos_token, tokenizer)
    assert rollout.completions == [RIGHT]
    given = rollout.for_rewards()
    assert format_reward(**given) == [0.5] and tag_reward(**given) == [1.0]
    # The start of another turn stays: a reader sees that the reply went on.
    assert rollout_of("<|im_start|>x", tokenizer).completions == ["<|im_start|>x"]
    end = tokenizer.eos_token_id
    assert decode([tokenizer.pad_token_id, end], tokenizer, [end]) == ""


def test_eos_is_also_the_token_with_which_the_template_ends_a_turn(policy, tokenizer):
    end, = eos_token_ids(policy, tokenizer)
    tokenizer.eos_token = "<|endoftext|>"               # as base weights have it
    policy.config.eos_token_id, policy.generation_config = tokenizer.eos_token_id, {}
    assert eos_token_ids(policy, tokenizer) == sorted([end, tokenizer.eos_token_id])
    for template in (None, "{{ raise_exception('no') }}",
                     "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"):
        tokenizer.chat_template = template
        assert eos_token_ids(policy, tokenizer) == [tokenizer.eos_token_id]


def test_rewards_do_not_count_a_tools_words(tokenizer):
    reply = rollout_of(RIGHT, tokenizer)
    reply.turns = [["<think>\n7+3=", "10\n</think>\n<answer>\n10\n</answer>", ""]]
    drawn = len(tokenizer("<think>\n7+3=", add_special_tokens=False)["input_ids"])
    reply.loss_mask = reply.completion_mask.clone()
    reply.loss_mask[:, drawn:] = 0
    given = reply.for_rewards()
    assert format_reward(**given) == [0] and tag_reward(**given) == [0.25]
    assert given["own_ids"] == [reply.token_ids()[0][:drawn]]


def test_turns_that_wanted_to_ask_once_more_are_cut_off(tokenizer):
    def tool(histories, wants, **columns):
        asked.append(histories)
        return ["more" if want else None for want in wants]

    asked, tool.stop = [], tokenizer.eos_token
    batch = PromptCollator(tokenizer, 99)([
        {"messages": turns("7+3?"), "wants": want} for want in (True, False)])
    of_batch = Turns(Tool(tool, tokenizer, 0), batch, 1, torch.Generator())
    of_batch.begin(2)
    ends = torch.full((2,), tokenizer.eos_token_id)
    _, _, goes_on = of_batch.take(torch.arange(2), ends, torch.zeros(2).bool())
    assert goes_on.tolist() == [False, False] and of_batch.ended == [False, True]
    assert asked == [[[tokenizer.eos_token]] * 2] and of_batch.texts == [[], []]
