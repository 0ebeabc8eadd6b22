import copy
import datetime
import gzip
import json
import math
import random
import re
import subprocess
import sys
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from numpy import float32
from tokenizers.processors import TemplateProcessing

from dataset import PromptCollator, PromptDataset
from dataset.prompts import read_prompts, read_row, rows_of_step, steps_per_epoch
from errors import UserError
from model import load_pretrained, train_sft
from model.train_sft import read_chats
from reward.train_reward_model import read_pairs
from run.loop import Loop
from support import POLICY, turns, write
from train_grpo import World, parse_args

USER, REPLY = turns("2+3?", "5")


def dataset_of(tmp_path, *lines):
    path = tmp_path / "some.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
             for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8", errors="surrogateescape")
    return PromptDataset(path)


@pytest.mark.parametrize("line, messages", [
    ({"conversations": [USER, REPLY, USER, REPLY]}, [USER, REPLY, USER]),
    ({"prompt": "2+3?"}, [USER]), ({"prompt": [USER, REPLY]}, [USER]),
    ({"messages": [USER, REPLY]}, [USER]),
    ({"question": "2+3?", "nums": [2, 3], "target": 5}, [USER]),
])
def test_all_forms_become_messages_without_the_last_reply(line, messages, tmp_path):
    own = {name: line[name] for name in ("nums", "target") if name in line}
    one = {"messages": messages, "answer": "5", "level": 3} | own
    data = dataset_of(tmp_path, line | {"answer": "5", "level": 3}, "", {"prompt": "2+3?"}, "  ")
    # What only some lines have is None in the others.
    assert data == [one, dict.fromkeys(one) | {"messages": [USER]}]


@pytest.mark.parametrize("line, gold", [
    ({"answer": ["1/2", "50%"]}, ["1/2", "50%"]), ({"reward_model": {"ground_truth": "5"}}, "5"),
    ({"ground_truth": 5}, 5), ({"final_answer": "5", "solution": "\\boxed{6}"}, "5"),
    ({"solution": "So \\fbox{5}."}, "So \\fbox{5}."), ({"solution": "It follows."}, None)])
def test_a_gold_answer_is_found_by_the_names_that_data_sets_have(line, gold, tmp_path):
    row, = dataset_of(tmp_path, line | {"prompt": "2+3?"})
    assert row.get("answer") == gold


NAN = float("nan")


@pytest.mark.parametrize("row, question, gold", [
    ({"conversations": None, "problem": "1+1?", "answer": NAN}, "1+1?", None),
    ({"question": "1+1?", "prompt": " ", "messages": None, "answer": float32(NAN)}, "1+1?", None),
    ({"messages": turns("1+1?"), "prompt": NAN, "answer": "\n", "final_answer": 2}, "1+1?", 2),
    ({"prompt": "1+1?", "answer": NAN, "reward_model": {"ground_truth": ""}, "ground_truth": None,
      "solution": "\\boxed{2}"}, "1+1?", "\\boxed{2}"),
    ({"prompt": "1+1?", "answer": Decimal("NaN"), "solution": "It follows."}, "1+1?", None),
    ({"prompt": "1+1?", "problem": "1+2?", "answer": 0, "tools": NAN}, "1+1?", 0)])
def test_null_nan_and_blank_are_missing_and_the_first_prompt_that_is_filled_is_read(
        row, question, gold):
    found = read_row(row, "row 1")
    assert found["messages"] == turns(question) and found["answer"] == gold


@pytest.mark.parametrize("line, named", [
    ("just words", "JSON"), ('{"a":' + "[" * 100_000, "JSON"), ('{"prompt": NaN}', "JSON"),
    (r'{"prompt": "\ud800"}', "JSON"), ({"prompt": [{"role": ["user"], "content": "a"}]}, "role"),
    (r'{"prompt": "C:\Users\me"}', "JSON.* a backslash is written as two"),
    ('{"prompt": "2+3?", "answer": "\udcff"}', "UTF-8"),
    ('["a list"]', "conversations"), ({"answer": "5"}, "conversations"),
    ({"conversations": [{"role": "user"}]}, "conversations"), ({"prompt": " "}, "prompt"),
    ({"question": None}, "question"), ({"prompt": "2+3?", "answer": [["5"]]}, "answer"),
    ({"question": "1+1?", "answer": "1+1=2\n#### "}, "answer"),
    ({"prompt": "2?", "reward_model": {"ground_truth": {}}}, "reward_model.ground_truth must be"),
    ({"conversations": [USER, {"role": "tool", "content": "5"}, USER]}, "user or assistant"),
    ({"conversations": [USER, REPLY | {"tool_calls": [{}]}]}, "tool_calls"),
    ({"conversations": [{"role": "system", "content": "", "tools": 5}, USER]}, "tools"),
    ({"conversations": [{"from": "human", "value": "hi"}]}, "rename from to role"),
    ({"conversations": [USER, REPLY | {"role": "Assistant"}]}, "role, system, user or assistant,"),
    ({"prompt": "2+3?", "answer": True}, "answer must be"),
    ({"prompt": "2+3?", "reward_weights": 1}, "field name reward_weights is reserved"),
    ({"prompt": "2+3?", "messages": []}, "field name messages is reserved"),
    ({"prompt": "2+3?", "tools": {"a": 1}}, "tools must"),
    ({"messages": [USER | {"content": [{"type": "text", "text": "2"}]}]}, "turn..content.. = "),
])
def test_broken_line_is_named_by_file_line_and_field(line, named, tmp_path):
    with pytest.raises(ValueError, match=rf"^{tmp_path}/some.jsonl, line 3: .*{named}.*\Z"):
        dataset_of(tmp_path, {"prompt": "2+3?"}, "", line)
    with pytest.raises(ValueError, match="some.jsonl: there are no prompts"):
        dataset_of(tmp_path, "", "  ")


def test_byte_order_mark_line_ends_of_windows_and_nul_are_read(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\u0000"}\r\n\r\n{"prompt": "b"}\r\n')
    assert PromptDataset(file) == [{"messages": turns(text)} for text in ("a\0", "b")]


UTF_16 = "utf-16", "utf-16-le", "utf-16-be"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "text"])
@pytest.mark.parametrize("place", ["turn", "column"])
def test_tools_of_a_system_turn_or_a_column_reach_the_template(place, tools, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    system = {"role": "system", "content": "Be brief.", "tools": tools}
    row = {"messages": [USER], "tools": tools}
    if place == "turn":
        row = {"conversations": [system, USER, REPLY]}
    messages = dataset_of(tmp_path, row)[0]["messages"]
    with pytest.raises(ValueError, match="chat template.*tools"):       # ours knows none
        PromptCollator(tokenizer, 999).render(messages)
    tokenizer.chat_template = "{{ tools[0].function.name if tools }}" + tokenizer.chat_template
    assert PromptCollator(tokenizer, 999).render(messages).startswith("weather")
    assert PromptCollator(tokenizer, 999, "Be brief.").render(messages).startswith("weather")
    assert not PromptCollator(tokenizer, 999).render([USER]).startswith("weather")


def test_parameters_that_only_other_tools_have_are_left_out_and_a_default_of_null_is_kept():
    def tool(name, **properties):
        return {"function": {"name": name, "description": None, "parameters": {
            "type": "object", "properties": properties}}}

    count = {"type": "integer", "enum": [1, None], "default": None, "items": None}
    tools = [tool("draw", count=count, default=None), tool("stop", count=None, default={})]
    found = read_row({"prompt": "Draw.", "tools": tools}, "row 1")["messages"][0]["tools"]
    draw, stop = (one["function"]["parameters"]["properties"] for one in found)
    assert draw == {"count": {"type": "integer", "enum": [1, None], "default": None}}
    assert stop == {"default": {}} and "description" not in found[0]["function"]


# How a turn ends, what precedes a reply, and whether the policy would have to write that itself.
@pytest.mark.parametrize("template, is_told", [
    ("{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}", True),
    ("{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
     " {{ m.content }}</s>{% endif %}{% endfor %}", False),
    ("{% for m in messages %}{{ m.content }}\n{% endfor %}", False),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
     "{{ 'assistant: ' if add_generation_prompt }}", False),
    ("{{ messages[0].content if messages | length == 1 else 1 / 0 }}", False)])
def test_a_template_without_the_header_of_a_reply_is_a_warning(
        template, is_told, tokenizer, tmp_path, recwarn):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    path = write(tmp_path / "some.jsonl", [{"prompt": "1+1?"}])
    read_prompts(parse_args(["--data_path", str(path), "--max_seq_len", "99"]), tokenizer)
    told = [one for one in recwarn if "ignores add_generation_prompt" in str(one.message)]
    assert len(told) == is_told


ARRAY = json.dumps([{"prompt": "1+1?"}], indent=1).encode()


@pytest.mark.parametrize("content, line", [
    (gzip.compress(b"{}", mtime=0), "gunzip -k FILE"), (ARRAY, "python -c"),
    ('{"prompt": "小明"}'.encode("gbk"), "iconv -f GB18030 -t UTF-8 FILE > new.jsonl"),
    *(('{"prompt": "1+1?"}'.encode(name), "it is UTF-16, not UTF-8") for name in UTF_16)])
@pytest.mark.parametrize("read", [PromptDataset, read_chats, lambda path: read_pairs([path])])
def test_other_files_are_named_with_the_line_that_converts_them(read, content, line, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"^{file}[:,]") as error:
        read(file)
    assert line.replace("FILE", str(file)) in str(error.value)
    if "python -c" in str(error.value):
        command = str(error.value).partition("file: ")[2]
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert PromptDataset(tmp_path / "new.jsonl") == [{"messages": turns("1+1?")}]


def test_parquet_is_read_by_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "some.parquet").write_bytes(b"PAR1...PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)       # not installed
    with pytest.raises(UserError, match="some.parquet: .*parquet.*; pip install pyarrow"):
        PromptDataset(tmp_path / "some.parquet")
    rows = [{"question": "1+1?", "answer": "#### 2", "day": datetime.date(2026, 1, 2)}]
    stand_in = SimpleNamespace(ParquetFile=lambda file: SimpleNamespace(
        read=lambda: SimpleNamespace(to_pylist=lambda: rows)))
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=stand_in))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", stand_in)
    assert PromptDataset(tmp_path / "some.parquet") == [
        {"messages": turns("1+1?"), "answer": "#### 2", "day": "2026-01-02"}]


def test_prompts_are_padded_on_the_left_and_a_long_one_keeps_its_end(tokenizer):
    items = [{"messages": turns(content), "answer": "1", **extra}
             for content, extra in [("7", {}), ("What is 12 + 34*5?", {"level": 2})]]
    prompts = [f"<|im_start|>user\n{item['messages'][0]['content']}<|im_end|>\n"
               "<|im_start|>assistant\n" for item in items]
    short, long = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    limit = len(short) + 2
    batch = PromptCollator(tokenizer, limit)(items)
    assert batch["prompt_ids"].tolist() == [[tokenizer.pad_token_id] * 2 + short, long[-limit:]]
    assert batch["prompt_mask"].tolist() == [[0] * 2 + [1] * len(short), [1] * limit]
    assert batch["columns"]["answer"] == ["1", "1"] and batch["columns"]["level"] == [None, 2]
    assert batch["columns"]["messages"] == [item["messages"] for item in items]
    # What is shown and judged is what the policy reads.
    assert batch["prompts"] == [prompts[0], tokenizer.decode(long[-limit:])]


def rows_by_step(steps, num_rows=22, prompts_per_rank=4, world_size=2, **options):
    """[step][rank] -> rows"""
    return [[rows_of_step(step, num_rows, prompts_per_rank, rank=rank, world_size=world_size,
                          **options) for rank in range(world_size)] for step in steps]


def test_a_prompt_has_the_templates_tokens_alone_where_the_tokenizer_would_add_some(tokenizer):
    items = [{"messages": turns("2+3?")}]
    expected = PromptCollator(tokenizer, 99).encode(items)[1]
    other = copy.deepcopy(tokenizer)            # as Llama's, which begins each text with a BOS
    other.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", tokenizer.eos_token_id)])
    assert other("2")["input_ids"][0] == tokenizer.eos_token_id
    assert PromptCollator(other, 99).encode(items)[1] == expected


def test_an_epoch_over_two_ranks_reads_every_row_once_in_an_order_of_its_own():
    assert steps_per_epoch(22, 4, 2) == 3
    first, second = rows_by_step([1, 2, 3]), rows_by_step([4, 5, 6])
    for epoch in (first, second):           # the last step is shorter
        assert [[len(rows) for rows in ranks] for ranks in epoch] == [[4, 4], [4, 4], [3, 3]]
        assert sorted(row for ranks in epoch for rows in ranks for row in rows) == list(range(22))
    assert first == rows_by_step([1, 2, 3]) != second and first != rows_by_step([1, 2, 3], seed=1)
    assert first[0][0] + first[0][1] != [*range(8)]
    assert rows_by_step([1, 3, 4], shuffle=False) == [
        [[0, 2, 4, 6], [1, 3, 5, 7]], [[16, 18, 20], [17, 19, 21]], [[0, 2, 4, 6], [1, 3, 5, 7]]]


def test_shuffle_0_takes_the_rows_of_a_step_in_their_order():
    loop = SimpleNamespace(args=parse_args(["--shuffle", "0"]), world=World("cpu"), collate=list,
                           problems="abcde", grpo=SimpleNamespace(num_prompts=2))
    assert Loop.batch(loop, 2) == ["c", "d"]


@pytest.mark.parametrize("num_rows, steps, last", [(9, 1, [4, 4]), (11, 2, [1, 1])])
def test_rows_that_cannot_be_dealt_out_evenly_are_skipped(num_rows, steps, last):
    assert steps_per_epoch(num_rows, 4, 2) == steps and steps_per_epoch(3, 4, 1) == 1
    assert [len(rows) for rows in rows_by_step([steps], num_rows)[0]] == last


# --- fine-tuning ----------------------------------------------------------------------------------

def test_batches_hold_every_example_once_an_epoch():
    source = train_sft.batches([([i], [i]) for i in range(70)], 2, random.Random(0))
    first, second = ([ids[0] for _ in range(35) for ids, _ in next(source)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(70)) and first != second


def test_fine_tuning_holds_out_a_tenth_and_saves(tmp_path, monkeypatch, capsys):
    chats = [turns("一加一", "2")] * 19 + [turns("2 + 2", "4 5 6 7 8")]
    data = write(tmp_path / "chats.jsonl", [{"conversations": chat} for chat in chats])
    monkeypatch.setattr(sys, "argv", [
        "train_sft", "--data", str(data), "--save", str(tmp_path / "weights"),
        "--init", str(POLICY), "--steps", "3", "--batch_size", "4"])
    train_sft.main()
    printed = capsys.readouterr().out
    assert "18 chats" in printed and "2 held out" in printed
    assert re.search(r"step 3/3  loss \d+\.\d+  held-out \d", printed), printed
    assert load_pretrained(tmp_path / "weights").config.hidden_size == 128


def test_fine_tuning_follows_its_schedule_and_prints_means_since_the_last(monkeypatch, capsys):
    """The gradient is always 1, so that a step of AdamW is as long as the learning rate."""
    model, at = torch.nn.Linear(1, 1, bias=False), []
    model.weight.data.zero_()

    def next_loss():
        at.append(model.weight.item())
        return model.weight.sum() - model.weight.item() + len(at)       # 1, 2, 3, ...

    train_sft.optimize(model, next_loss, steps=203, learning_rate=1e-3, warmup_steps=4,
                       progress=lambda: f" {len(at)}")
    rates = [1e-3 * min(1, (step + 1) / 4) * (0.505 + 0.495 * math.cos(math.pi * step / 203))
             for step in range(202)]
    assert [a - b for a, b in zip(at, at[1:])] == pytest.approx(rates, rel=1e-2, abs=2e-7)
    lines = [line.rsplit("  ", 1)[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 100/203  loss 50.5000 100", "step 200/203  loss 150.5000 200",
                     "step 203/203  loss 202.0000 203"]


def test_a_prompt_and_its_answer_are_a_chat_to_learn_from(tmp_path):
    write(tmp_path / "some.jsonl", [
        {"conversations": [USER, REPLY], "answer": "6"}, {"conversations": [USER], "answer": "5"},
        {"question": "2+3?", "answer": 5}, {"messages": [USER, REPLY]},
        {"conversations": None, "messages": [USER, REPLY]},
        {"prompt": [USER, REPLY | {"content": "4"}], "answer": "5", "metadata": {}}])
    assert read_chats(tmp_path / "some.jsonl") == [[USER, REPLY]] * 6

