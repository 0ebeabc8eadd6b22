"""A tool that answers while a completion is sampled: what is read, what is chosen, what is learned.

The policy is the shipped one, whose every line of arithmetic ends with the token that asks.
"""
import re
from copy import deepcopy

import pytest
import torch

import train_grpo
from dataset import PromptCollator
from errors import UserError
from model import fast, sampler
from model.fast import graphs
from model.sampler import in_slices
from reward import accuracy_reward
from reward.tools import Tool
from sampling import in_turns, rollout_of, state_of_tool
from support import ROOT, jsonl, turns

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_game(first, second):
    assert first.turns == second.turns and {1, 3, 5} <= set(map(len, first.turns))
    for name in ("completion_ids", "completion_mask", "loss_mask", "ended"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("most", [99, 12])
def test_turns_are_the_same_with_both_samplers_which_know_what_they_drew(policy, tokenizer, most):
    plain, fast_one = (rollout_of(in_slices(own, most), policy, tokenizer)
                       for own in (sampler.sample, fast.sample))
    assert_same_game(plain, fast_one)
    assert plain.completions == fast_one.completions
    assert_drawn_and_told_apart(plain, policy, tokenizer)


@pytest.mark.parametrize("most", [0, 12])
def test_turns_are_the_same_with_graphs_where_nothing_is_random(policy, tokenizer, most):
    own = graphs.Graphs(most)
    assert_same_game(*(rollout_of(sample, policy, tokenizer, greedy=True)
                       for sample in (fast.sample, own)))
    rollout = rollout_of(own, policy, tokenizer)
    assert {1, 3, 5} <= set(map(len, rollout.turns))
    assert_drawn_and_told_apart(rollout, policy, tokenizer)


def assert_drawn_and_told_apart(rollout, policy, tokenizer):
    """Every text is there, once, as it was said; log-probs are of the policy's own words."""
    for ids, turn, mask in zip(rollout.token_ids(), rollout.turns, rollout.loss_mask):
        assert tokenizer.decode(ids).removesuffix("<|im_end|>") == "".join(turn)
        forced = [tokenizer(text)["input_ids"] for text in turn[1::2]]
        assert len(ids) - mask.sum() == sum(map(len, forced))
    chosen = rollout.loss_mask.bool()
    assert not rollout.sampling_logps[~chosen].any()
    state = state_of_tool(policy, tokenizer)
    trained = state.compute_logps(state.policy, rollout)
    torch.testing.assert_close(trained * chosen, rollout.sampling_logps, atol=1e-5, rtol=1e-5)
    assert trained[rollout.completion_mask.bool() & ~chosen].all()      # read, but not learned


def test_the_gradient_is_that_of_a_loop_that_skips_the_tools_words(policy, tokenizer):
    """-1/N sum over completions of A / length sum over chosen tokens of log pi, in float64."""
    rollout = rollout_of(sampler.sample, policy, tokenizer, count=1)
    assert (rollout.completion_mask != rollout.loss_mask).any()
    rollout.rewards, rollout.advantages = torch.arange(6.0), torch.randn(6)
    before = deepcopy(policy).double()
    flags = ["--beta", "0", "--grad_clip", "1e9", "--micro_batch_size", "4"]
    state_of_tool(policy, tokenizer, flags, reader=fast.token_logps).update_policy(rollout)
    loss = 0
    for i, ids in enumerate(rollout.token_ids()):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i].bool()].tolist()
        logps = before(torch.tensor([prompt + ids]))[0].log_softmax(-1)
        chosen = rollout.loss_mask[i].nonzero().flatten().tolist()
        terms = [logps[len(prompt) + t - 1, ids[t]] for t in chosen]
        loss = loss - rollout.advantages[i].double() * sum(terms) / len(terms) / 6
    loss.backward()
    for old, new in zip(before.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(old - new, old.grad, atol=2e-6, rtol=1e-3, check_dtype=False)


# A reply of at most ten tokens; what the tool says in it is in ( ). It answers at most twice.
@pytest.mark.parametrize("stop, answers, drawn, ended", [
    ("=", ["5"], "1+4=(5)<|im_end|>", True),
    ("=", [None], "1+4=5<|im_end|>", True),             # nothing follows, and the row goes on
    ("=", ["5", "6"], "=(5)=(6)=7<|im_end|>", True),    # the third is not answered any more
    ("=", ["<|im_end|>"], "=(<|im_end|>)3<|im_end|>", True),
    ("<|im_end|>", ["\n2", None], "1<|im_end|>(\n2)3<|im_end|>", True),
    ("=", ["1234567"], "1+4=(123456)", False),          # does not fit
    ("<|im_end|>", ["5"], "123456789<|im_end|>", False),     # there is no room for any of it
    ("<|im_end|>", [None], "123456789<|im_end|>", True),
])
def test_turns_of_a_scripted_reply(monkeypatch, policy, tokenizer, stop, answers, drawn, ended):
    left = iter(answers)
    script, is_drawn = [], []
    for i, part in enumerate(drawn.replace(")", "(").split("(")):
        ids = tokenizer(part)["input_ids"]
        script += ids
        is_drawn += [1 - i % 2] * len(ids)
    draws = iter(token if own else 99 for token, own in zip(script, is_drawn))   # 99: thrown away
    monkeypatch.setattr(sampler, "next_token", lambda logits, *_: (
        torch.tensor([next(draws)]), torch.tensor([-1.0])))

    def function(histories, **columns):
        assert histories[0][-1].endswith(stop)
        return [next(left)]

    function.stop = stop
    batch = PromptCollator(tokenizer, 99)([{"messages": turns("?")}])
    rollout = in_turns(Tool(function, tokenizer, 2),
                       state_of_tool(policy, tokenizer, ["--max_gen_len", "10"]), batch,
                       torch.Generator(), 1, greedy=False)
    assert rollout.token_ids() == [script] and rollout.ended.tolist() == [ended]
    assert rollout.loss_mask[0, :len(script)].tolist() == is_drawn and next(draws, None) is None
    assert rollout.sampling_logps[0, :len(script)].tolist() == [-1.0 * own for own in is_drawn]
    said = "".join(rollout.turns[0]).removesuffix("<|im_end|>")
    assert said == re.sub("[()]", "", drawn).removesuffix("<|im_end|>")


def test_tool_that_fails_says_why_and_the_other_rows_go_on(policy, tokenizer, capsys):
    def broken(histories, answer, seeds, messages, **columns):
        messages.clear()
        raise KeyError("no such city")

    broken.stop = "\n"
    with pytest.warns(UserWarning, match="the tool broken raised .KeyError: 'no such city'."):
        rollout = rollout_of(fast.sample, policy, tokenizer, broken)
    assert capsys.readouterr().err.count("Traceback") == 1      # the first time, its own
    asked = [turn for turn in rollout.turns if len(turn) > 1]
    assert asked and {turn[1] for turn in asked} == {"KeyError: 'no such city'"}
    assert rollout.failed_calls == [len(turn) // 2 for turn in rollout.turns]
    assert all(rollout.columns["messages"])                 # those of the run are whole


def test_tool_that_exits_or_answers_with_no_text_counts_as_failed(tokenizer):
    def half(histories, columns, **others):
        if "no\n" in columns:
            exit()
        return [None if column == "none" else column for column in columns]

    half.stop = "\n"
    with pytest.warns(UserWarning, match="the tool half raised .SystemExit"):
        *answers, (no_text, _) = Tool(half, tokenizer, 1)(
            [["a\n"]] * 5, {"columns": ["yes", "no\n", "none", 3, "\ud800"]})
    assert answers == [("yes", False), ("SystemExit: None", True), (None, False),
                       ("TypeError: an answer must be a text or None, not 3", True)]
    assert no_text.startswith("UnicodeEncodeError: ")


@pytest.mark.parametrize("stop", ["", "no"])
def test_tool_whose_stop_is_not_one_token_is_refused(stop, tokenizer):
    def guess(histories, **columns):
        return histories

    guess.stop = stop
    with pytest.raises(UserError, match=f"--tool guess: .*{stop!r}.* guess.stop"):
        Tool(guess, tokenizer, 1)


def test_tools_of_the_page_answer(tokenizer):
    page = (ROOT / "docs/turns.md").read_text(encoding="utf-8")
    search, chat = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names = {}
    exec(search, names)
    histories = [["Let me see.\nFrance?"], ["x?", " not found\n", "Kenya?"], ["Mars?"]]
    answers = Tool(names["search"], tokenizer, 1)(histories, {"prompts": [""] * 3})
    assert answers == [(" Paris\n", False), (" Nairobi\n", False), (" not found\n", False)]
    exec(chat, names)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>'
    ((answer, _),) = Tool(names["tool"], tokenizer, 1)([[call]], {"prompts": [""]})
    assert "<tool_response>\n5\n</tool_response>" in answer


def test_turns_tell_rewards_own_words_from_the_tools(policy, tokenizer):
    assert accuracy_reward(["?"], ["3 high 5"], answer=["5"], own_words=["3 "]) == [0.0]
    rollout = rollout_of(fast.sample, policy, tokenizer)
    assert rollout.own_words == ["".join(turn[::2]) for turn in rollout.turns]


def test_resume_with_a_tool_ends_where_an_unbroken_run_does(tmp_path, own_module):
    own_module("my_tool", "import sampling\nroll = sampling.dice\n")
    flags = ["--batch_size", "2", "--num_generations", "2", "--eval_interval", "0", "--tool",
             "my_tool:roll", "--max_gen_len", "24", "--num_minibatches", "2", "--out_dir",
             str(tmp_path), "--warmup_steps", "3"]      # of any length, a run begins with the same
    train_grpo.main([*flags, "--run_name", "whole", "--max_steps", "3"])
    train_grpo.main([*flags, "--run_name", "parts", "--max_steps", "2", "--save_interval", "2"])
    train_grpo.main([*flags, "--run_name", "parts", "--max_steps", "3", "--resume"])
    rows, of_parts = (jsonl(tmp_path / f"{name}/completions.jsonl") for name in ("whole", "parts"))
    assert rows == of_parts and len(rows) == 3 * 4
    metrics, *_ = jsonl(tmp_path / "whole/metrics.jsonl")
    assert metrics["tools/call_frequency"] == sum(len(row["turns"]) // 2 for row in rows[:4]) / 4
    assert metrics["tools/call_frequency"] > 0 == metrics["tools/failure_frequency"]
    assert metrics["num_tokens"] == sum(row["length"] + row["tool_tokens"] for row in rows[:4])
