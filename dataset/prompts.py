"""jsonl -> prompts: the chats that the policy completes, with the columns that its rewards need."""
import json
import re
import warnings
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch.utils.data import DataLoader, Dataset


PROMPT_FIELDS = ("conversations", "prompt", "question", "problem")
# What rewards are called with besides the columns of the file.
RESERVED = {"prompts", "completions", "messages", "completion_ids", "reward_funcs", "reward_weights"}
# --system_prompt r1: asks for what format_reward and tag_reward reward.
R1_SYSTEM_PROMPT = (
    "Think before you answer. Write your reasoning between <think> and </think>, then only the final answer between "
    "<answer> and </answer>, each tag on a line of its own, and nothing else:\n"
    "<think>\nyour reasoning\n</think>\n<answer>\nthe final answer\n</answer>")


class PromptDataset(Dataset):
    """The lines of a jsonl file. These forms may be mixed; without an answer only rewards that need none judge:

        {"conversations": [{"role": "user", "content": "..."}, ...], "answer": "42"}    a last assistant turn is dropped
        {"prompt": "..." or a list of turns, "answer": "42"}
        {"question": "...", "answer": "... #### 42"}                                    GSM8K
        {"problem": "...", "solution": "... \\boxed{42}"}                               MATH, with or without an answer

    An item is {"messages": [...], **the other fields of its line}. ValueError names the file, line and field at fault.
    """

    def __init__(self, path):
        self.rows = []
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file; --data_path and --eval_data_path want a jsonl file of prompts")
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self.rows.append(read_row(line, f"{path}, line {number}"))
        if not self.rows:
            raise ValueError(f"{path}: the file holds no prompts; give one with a JSON object on each line")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def read_row(line, where):
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); write one object a line") from None
    fields = [name for name in PROMPT_FIELDS if isinstance(row, dict) and name in row]
    if not fields:
        raise ValueError(f"{where}: no field {', '.join(PROMPT_FIELDS)}; one of them must hold the prompt")
    if taken := sorted(RESERVED & row.keys()):
        raise ValueError(f"{where}: rewards get something else by the name {taken[0]}; rename that field")
    if row.get("answer") is None and "\\boxed" in str(row.get("solution")):
        row["answer"] = row["solution"]
    if row.get("answer") is not None and not str(row["answer"]).rpartition("####")[2].strip():
        raise ValueError(f"{where}: the field answer is empty; give the right answer, or leave the field out")
    field = fields[0]
    messages = row.pop(field)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
            for turn in messages):
        raise ValueError(f"{where}: {field} must be a text or a list of turns, each with a role and a content")
    if messages and messages[-1]["role"] == "assistant":    # the reply of a demonstration: ours is to be sampled
        messages = messages[:-1]
    if not messages or not messages[-1]["content"].strip():
        raise ValueError(f"{where}: {field} holds nothing to reply to; it needs at least one turn of a user")
    return {"messages": messages, **row}


class PromptCollator:
    """Items -> one batch: {"prompts", "prompt_ids", "prompt_mask", "opened", "columns"}, by the tokenizer's chat template.

    A system prompt ("r1": the built-in one) goes before chats that have none of their own. Only the policy reads it: the
    chats in columns["messages"], which a reward model judges, stay as they are in the file.
    """

    def __init__(self, tokenizer, max_seq_len, system_prompt=None):
        self.tokenizer, self.max_seq_len = tokenizer, max_seq_len
        self.system_prompt = R1_SYSTEM_PROMPT if system_prompt == "r1" else system_prompt

    def render(self, messages):
        """The prompt as a text. Templates with a switch for thinking (Qwen3's) have it on; others do not look at it."""
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                      enable_thinking=True)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses the roles {[turn['role'] for turn in messages]}: "
                             f"{error}; leave --system_prompt out, or write the prompts without that role") from None

    def encode(self, texts):
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def __call__(self, items):
        """prompt_ids and prompt_mask are (B, P), padded on the left; of a longer prompt the last max_seq_len tokens stay.

        "opened" is what the template itself has written of each reply: `<think>\\n`, or nothing with most templates.
        """
        texts = [self.render(item["messages"]) for item in items]
        ids = self.encode(texts)
        if max(map(len, ids)) > self.max_seq_len:
            warnings.warn(f"prompts longer than --max_seq_len {self.max_seq_len} tokens lose their beginning, the system "
                          "prompt first; raise it, or say --overlong_prompts drop", stacklevel=2)
        ids = [row[-self.max_seq_len:] for row in ids]
        P = max(map(len, ids))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        names = {name for item in items for name in item}
        return {
            "prompts": texts,
            "prompt_ids": torch.tensor([[pad] * (P - len(row)) + row for row in ids]),
            "prompt_mask": torch.tensor([[0] * (P - len(row)) + [1] * len(row) for row in ids]),
            "opened": [re.search(r"(?:<think>\s*)?\Z", text)[0] for text in texts],
            "columns": {name: [item.get(name) for item in items] for name in sorted(names)},
        }

    def without_overlong(self, rows, path):
        """The rows whose prompts are max_seq_len tokens long at most; a warning counts the others."""
        fitting = [row for row in rows if len(self.encode([self.render(row["messages"])])[0]) <= self.max_seq_len]
        count = len(rows) - len(fitting)
        dropped = f"{count} of {len(rows)} prompts are longer than --max_seq_len {self.max_seq_len} tokens"
        if rows and not fitting:
            raise ValueError(f"{path}: {dropped}; raise it, or say --overlong_prompts cut")
        if count:
            warnings.warn(f"{path}: {dropped} and were dropped", stacklevel=2)
        return fitting


def rows_of_step(step, num_rows, prompts_per_rank, *, rank=0, world_size=1, seed=0):
    """The rows that a rank reads at a step (from 1): a new order every epoch, known from (seed, step) alone.

    A step takes `prompts_per_rank` rows for each rank, the last one of an epoch what is left. Nothing depends on the
    steps before, so that a resumed run reads what it would have read without the stop.
    """
    per_step = prompts_per_rank * world_size
    epoch, position = divmod(step - 1, steps_per_epoch(num_rows, prompts_per_rank, world_size))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch)).tolist()
    rows = order[position * per_step:(position + 1) * per_step]
    return rows[:len(rows) // world_size * world_size][rank::world_size]    # as many for every rank


def steps_per_epoch(num_rows, prompts_per_rank, world_size=1):
    """Steps that read the file once; a rest too small to give every rank a prompt makes no step."""
    full, rest = divmod(num_rows, prompts_per_rank * world_size)
    return full + (rest >= world_size)


def read_heldout(path, most):
    """The first problems of a file that have an answer, `most` at most."""
    problems = [row for row in PromptDataset(path) if row.get("answer") is not None][:most]
    if not problems:
        raise ValueError(f"--eval_data_path {path}: no line has an answer to compare with; add the field, "
                         "or train with --eval_interval 0")
    return problems


def batches_of_steps(problems, collate, steps, *, num_workers=0, **which):
    """The batch of one rank at each of these steps; `which` is what rows_of_step asks for."""
    rows = (rows_of_step(step, len(problems), **which) for step in steps)
    return DataLoader(problems, batch_sampler=rows, collate_fn=collate, num_workers=num_workers)
