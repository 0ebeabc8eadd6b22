"""Files, answers and chat templates as people publish them.

GSM8K, MATH, RLAIF; templates that open the thinking.
"""
import copy
import dataclasses

import pytest
import torch

import train_grpo
from dataset import PromptCollator, PromptDataset, read_prompts
from dataset.prompts import asking_as_trained
from errors import UserError
from model import load_pretrained, load_tokenizer
from reward import accuracy_reward, load_reward_model
from reward.load import RewardFunction
from run.rollout import Rollout
from support import POLICY, ROOT, SMALL, jsonl, turns, write
from train_grpo import GRPO, completion_mask, format_reward, tag_reward

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_rlaif_file_without_answers_trains_on_the_reward_model_alone(tmp_path):
    chat = turns("请用一句话介绍北京。", "")
    chats = [chat, [{"role": "system", "content": "Be brief."}, *chat], chat * 2]
    chats = [{"conversations": chat} for chat in chats]
    train_grpo.main([
        *SMALL, "--max_steps", "2", "--max_gen_len", "16", "--epochs", "2",
        "--data_path", str(write(tmp_path / "rlaif.jsonl", chats * 2)),
        "--out_dir", str(tmp_path), "--run_name", "rlaif", "--reasoning", "0",
        "--reward_funcs", "rm", "accuracy", "--reward_model_clip", "0",
        "--reward_weights", "10", "1", "--system_prompt", "r1", "--max_seq_len", "400"])
    metrics = jsonl(tmp_path / "rlaif/metrics.jsonl")
    assert [line["rewards/accuracy_reward/mean"] for line in metrics] == [None, None]
    assert not (tmp_path / "rlaif/eval.jsonl").exists()     # nothing has an answer to compare with
    done = jsonl(tmp_path / "rlaif/completions.jsonl")
    scores = load_reward_model(ROOT / "reward/weights/reward_128").get_scores(
        [[*row["columns"]["messages"], {"role": "assistant", "content": row["completion"]}]
         for row in done])
    assert [row["reward"] / 10 for row in done] == pytest.approx(scores, abs=1e-4)
    # Where a chat has no system prompt of its own, the policy reads ours, the reward model none.
    for row in done:
        assert row["prompt"].count("<|im_start|>system") == 1
        assert ("<answer>" in row["prompt"]) == (row["columns"]["messages"][0]["role"] == "user")


def test_where_accuracy_evaluates_only_problems_with_answers_count(tokenizer, tmp_path):
    rows = [{"prompt": "1+1?"}, {"prompt": "1+2?", "answer": "3"}, {"prompt": "1+3?", "answer": 4}]
    path = write(tmp_path / "heldout.jsonl", rows)
    for rewards in (["accuracy"], ["tag", "accuracy"]):
        args = train_grpo.parse_args(["--eval_data_path", str(path), "--eval_samples", "1",
                                      "--eval_reward_funcs", *rewards])
        assert [row["answer"] for row in read_prompts(args, tokenizer)[2]] == ["3"]
    write(path, rows[:1])
    with pytest.raises(ValueError, match="heldout.jsonl: no line has an answer"):
        read_prompts(args, tokenizer)


HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}")
ITEMS = [{"messages": turns(question), "answer": "162"}
         for question in ("27*6?", "What is 27*6 + 0?")]


@pytest.fixture
def opening(tokenizer):
    """A tokenizer whose template opens the thinking, if asked for it, as some hybrid models' do."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = HYBRID
    return changed


@pytest.mark.parametrize("switch", ["enable_thinking", "open_thinking", "thinking"])
def test_thinking_is_switched_on_and_what_the_template_opens_is_told(opening, tokenizer, switch):
    opening.chat_template = HYBRID.replace("enable_thinking", switch)
    for reasoning, opened in (("1", "<think>\n"), ("0", "")):
        args = train_grpo.parse_args(["--reasoning", reasoning, "--max_seq_len", "99"])
        assert read_prompts(args, opening)[0](ITEMS)["prefills"] == [opened] * 2
    items = [{"messages": turns("What does <think>\n")}]
    assert PromptCollator(tokenizer, 99)(items)["prefills"] == [""]


def test_switches_of_any_name_are_set_and_are_those_of_the_final_template(opening):
    opening.chat_template = HYBRID.replace("enable_thinking", "deep")
    ask = ["--max_seq_len", "99", "--chat_template_kwargs"]
    collate = read_prompts(train_grpo.parse_args([*ask, '{"deep": true}']), opening)[0]
    asked = collate(ITEMS)
    assert asked["prefills"] == ["<think>\n"] * 2
    final = asking_as_trained(opening, collate.switches)
    assert PromptCollator(final, 99, thinking=None)(ITEMS)["prompts"] == asked["prompts"]
    final = asking_as_trained(final, {"thinking": True})
    assert PromptCollator(final, 99)(ITEMS)["prefills"] == [""] * 2
    with pytest.raises(UserError, match="_kwargs: the chat template does not use deeep"):
        read_prompts(train_grpo.parse_args([*ask, '{"deeep": true}']), opening)


def test_a_token_without_a_row_is_refused_where_a_prompt_holds_it(tokenizer, tmp_path):
    rows, config = len(tokenizer), load_pretrained(POLICY).config
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<picture>"])
    more.save_pretrained(tmp_path)
    more, config = load_tokenizer(tmp_path, rows), dataclasses.replace(config, vocab_size=rows)
    path = write(tmp_path / "some.jsonl", [{"prompt": "1+1?"}, {"prompt": "What is <picture>?"}])
    args = train_grpo.parse_args(["--data_path", str(path), "--max_seq_len", "99"])
    with pytest.raises(UserError, match=f"some.jsonl, line 2: the token <picture> .* id {rows}"):
        read_prompts(args, more, config)
    write(path, [{"prompt": "1+1?"}])
    assert read_prompts(args, more, config)[1]
    more.pad_token = "<picture>"
    more.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"id of its token <picture> is beyond the {rows} tokens"):
        load_tokenizer(tmp_path, rows)


def test_where_the_template_opens_the_thinking_rewards_see_the_whole_reply(opening):
    batch, seen = PromptCollator(opening, 99)(ITEMS), []

    def spy(prompts, completions, completion_ids, answer, **columns):
        assert prompts == batch["prompts"] and answer == ["162", "162"]
        assert completion_ids == rollout.token_ids()
        seen.extend(completions)
        return [None] * len(completions)

    # The second one is still thinking.
    texts = ["27*6=162\n</think>\n<answer>\n162\n</answer>", "27*6=162"]
    ids = opening([text + opening.eos_token for text in texts], padding=True,
                  padding_side="right", return_tensors="pt")["input_ids"]
    mask, eos_ids = completion_mask(ids, opening.eos_token_id), [opening.eos_token_id]
    rollout = Rollout.of(batch, ids, mask, torch.zeros(mask.shape), eos_ids, opening)
    judges = [RewardFunction(one) for one in (format_reward, tag_reward, accuracy_reward, spy)]
    rewards, per_function = GRPO.compute_rewards(None, rollout, judges, [1.0, 2.0, 1.0, 1.0])
    assert rollout.completions == texts and seen == ["<think>\n" + text for text in texts]
    values = [values.tolist() for values in per_function.values()]
    assert values[:3] == [[0.5, 0.0], [1.0, 0.25], [1.0, 0.0]] and rewards.tolist() == [3.5, 0.5]


def test_overlong_prompts_are_refused_with_the_length_that_they_need(tokenizer, tmp_path):
    rows = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "1+1? " * 40, "answer": "2"},
            {"prompt": "1+1? " * 30, "answer": "2"}]
    short, long = (write(tmp_path / name, rows[:count])
                   for name, count in (("short.jsonl", 1), ("long.jsonl", 3)))

    def read(train, heldout, *flags):
        return read_prompts(train_grpo.parse_args([
            "--data_path", str(train), "--eval_data_path", str(heldout), *flags]), tokenizer)

    collate = read(short, short)[0]
    needed = len(collate.encode(PromptDataset(long))[1][1])
    for files in ((short, long), (long, short)):
        with pytest.raises(ValueError, match=rf"long.jsonl, line 2: .*--max_seq_len to {needed}"):
            read(*files)
    assert len(read(long, short, "--max_seq_len", str(needed))[1]) == 3
    with pytest.warns(UserWarning, match="2 of 3 prompts .*lose their beginning"):
        assert len(read(long, short, "--overlong_prompts", "cut")[1]) == 3
    with pytest.warns(UserWarning, match="2 of 3 prompts .*dropped"):
        assert read(long, short, "--overlong_prompts", "drop")[1] == PromptDataset(short)
    write(long, rows[1:])
    with pytest.raises(ValueError, match="long.jsonl, line 1: .* 2 of 2 .*--overlong_prompts cut$"):
        read(long, short, "--overlong_prompts", "drop")
    with pytest.warns(UserWarning, match="2 of 2 prompts .*lose their beginning"):
        assert len(read(long, short, "--overlong_prompts", "cut")[1]) == 2
