import json
import random
import re
import runpy
import sys
import zlib
from itertools import islice

import pytest
import torch

from conftest import ROOT, jsonl, turns, write
from dataset import PromptCollator, PromptDataset, arithmetic
from dataset.prompts import rows_of_step, steps_per_epoch
from model import load_pretrained, train_sft
from model.storage.tokenizer import read_chats
from reward import format_reward, tag_reward

# --- jsonl -> prompts -----------------------------------------------------------------------------

USER, REPLY = turns("2+3?", "5")


def dataset_of(tmp_path, *lines):
    path = tmp_path / "some.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
             for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8", errors="surrogateescape")
    return PromptDataset(path)


@pytest.mark.parametrize("line, messages", [
    ({"conversations": [USER]}, [USER]), ({"conversations": [USER, REPLY]}, [USER]),
    ({"conversations": [USER, REPLY, USER]}, [USER, REPLY, USER]),
    ({"conversations": [USER, REPLY, USER, REPLY]}, [USER, REPLY, USER]),
    ({"prompt": "2+3?"}, [USER]), ({"prompt": [USER, REPLY]}, [USER]),
    ({"question": "一加一？"}, turns("一加一？")),
    ({"question": "2+3?", "nums": [2, 3], "target": 5}, [USER]),
])
def test_all_forms_become_messages_without_the_last_reply(line, messages, tmp_path):
    own = {name: line[name] for name in ("nums", "target") if name in line}
    one = {"messages": messages, "answer": "5", "level": 3} | own
    data = dataset_of(tmp_path, line | {"answer": "5", "level": 3}, "", {"prompt": "2+3?"}, "  ")
    assert data == [one, {"messages": [USER]}]


@pytest.mark.parametrize("line, named", [
    ("just words", "JSON"), ('{"prompt": "2+3?", "answer": "\udcff"}', "UTF-8"),
    ('["a list"]', "conversations"), ({"answer": "5"}, "conversations"),
    *(({"conversations": chat}, "conversations") for chat in (
        {"role": "user"}, ["2+3?"], [{"role": "user"}], [{"content": "2+3?"}], [], [REPLY],
        [{"role": "user", "content": 5}])),
    ({"prompt": 5}, "prompt"), ({"prompt": " "}, "prompt"), ({"question": None}, "question"),
    ({"prompt": "2+3?", "completions": 1}, "completions"),
    ({"prompt": "2+3?", "reward_weights": 1}, "reward_weights"),
    ({"prompt": "2+3?", "answer": " "}, "answer"),
    ({"question": "1+1?", "answer": "1+1=2\n#### "}, "answer"),
])
def test_a_broken_line_is_named_by_file_line_and_field(line, named, tmp_path):
    with pytest.raises(ValueError, match=rf"^{tmp_path}/some.jsonl, line 3: .*{named}.*\Z"):
        dataset_of(tmp_path, {"prompt": "2+3?"}, "", line)


def test_a_file_without_prompts_is_named(tmp_path):
    with pytest.raises(ValueError, match="some.jsonl: no such file"):
        PromptDataset(tmp_path / "some.jsonl")
    with pytest.raises(ValueError, match="some.jsonl: the file has no prompts"):
        dataset_of(tmp_path, "", "  ")


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "text"])
def test_tools_of_a_system_turn_reach_the_template(tools, tokenizer, tmp_path):
    data = dataset_of(tmp_path, {"conversations": [SYSTEM | {"tools": tools}, USER, REPLY]})
    template = tokenizer.chat_template
    with pytest.raises(ValueError, match="chat template.*tools"):       # ours knows none
        PromptCollator(tokenizer, 999).render(data[0]["messages"])
    tokenizer.chat_template = "{{ tools[0]['function']['name'] if tools }}" + template
    try:
        text = PromptCollator(tokenizer, 999).render(data[0]["messages"])
        plain = PromptCollator(tokenizer, 999).render([USER])
    finally:
        tokenizer.chat_template = template
    assert text.startswith("weather") and not plain.startswith("weather")


@pytest.mark.parametrize("chat, words", [
    ([USER, {"role": "assistant", "content": "", "tool_calls": [{}]}, USER], "tool_calls"),
    ([USER, {"role": "assistant", "tool_calls": [{}]}], "tool_calls"),
    ([USER, {"role": "tool", "content": "5"}, USER], "role tool"),
    *(([SYSTEM | {"tools": tools}, USER], words) for tools, words in (
        ("x", "tools: not valid JSON"), (5, "tools must be a list"), ("[1]", "tools must be"))),
])
def test_calls_of_tools_are_refused_by_name(chat, words, tmp_path):
    with pytest.raises(ValueError, match=f"some.jsonl, line 1: conversations.*{words}"):
        dataset_of(tmp_path, {"conversations": chat})


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


# --- which rank reads which row at which step -----------------------------------------------------

def rows_by_step(steps, num_rows=22, prompts_per_rank=4, world_size=2, seed=0):
    """[step][rank] -> rows"""
    return [[rows_of_step(step, num_rows, prompts_per_rank, rank=rank, world_size=world_size,
                          seed=seed) for rank in range(world_size)] for step in steps]


def test_an_epoch_over_two_ranks_reads_every_row_once_and_its_last_step_is_shorter():
    assert steps_per_epoch(22, 4, 2) == 3
    for steps in ([1, 2, 3], [4, 5, 6]):
        epoch = rows_by_step(steps)
        assert [[len(rows) for rows in ranks] for ranks in epoch] == [[4, 4], [4, 4], [3, 3]]
        assert sorted(row for ranks in epoch for rows in ranks for row in rows) == list(range(22))


def test_the_order_is_reproducible_and_differs_between_epochs_and_seeds():
    first = rows_by_step([1, 2, 3])
    assert first == rows_by_step([1, 2, 3])
    assert first != rows_by_step([4, 5, 6]) and first != rows_by_step([1, 2, 3], seed=1)
    assert sum(first[0] + first[1] + first[2], []) != list(range(22))
    alone = rows_by_step([2], world_size=1)[0][0]
    assert rows_of_step(2, 22, 4) == alone and steps_per_epoch(22, 4) == 6  # by default of one rank


@pytest.mark.parametrize("num_rows, steps, last", [(9, 1, [4, 4]), (11, 2, [1, 1]), (8, 1, [4, 4])])
def test_rows_that_cannot_be_dealt_out_evenly_are_skipped(num_rows, steps, last):
    assert steps_per_epoch(num_rows, 4, 2) == steps and steps_per_epoch(3, 4, 1) == 1
    assert [len(rows) for rows in rows_by_step([steps], num_rows)[0]] == last


# --- the arithmetic task --------------------------------------------------------------------------

def canonical(expression):
    """A name that does not depend on the order of terms, of factors, or of operands in brackets."""
    terms = re.findall(r"(-?) ?([\d*]+)", expression)      # (7 + 3)*5 has the terms 7, 3 and *5
    return tuple(sorted((sign, *sorted(term.split("*"))) for sign, term in terms))


def expression_of(row):
    content = row["conversations"][0]["content"]
    assert content.startswith("What is ") and content.endswith("?")
    return content.removeprefix("What is ").removesuffix("?")


TEMPLATES = ["N + N*N", "N*N - N", "(N + N)*N", "N + N - N + N", "N*N + N*N"]


@pytest.mark.parametrize("name, at_least", [("train.jsonl", 5000), ("heldout.jsonl", 1000)])
def test_shipped_problems_are_right_distinct_in_range_and_of_all_templates(name, at_least):
    rows = jsonl(ROOT / "dataset" / name)
    expressions = [expression_of(row) for row in rows]
    assert [row["answer"] for row in rows] == [str(eval(expression)) for expression in expressions]
    assert all(0 <= int(row["answer"]) <= 999 for row in rows)
    assert len({canonical(expression) for expression in expressions}) == len(rows) >= at_least
    shapes = [re.sub(r"\d+", "N", expression) for expression in expressions]
    assert all(shapes.count(template) > len(rows) / 20 for template in TEMPLATES)


def test_no_heldout_problem_is_trained_on_in_any_order_of_its_operands():
    def names(rows):
        expressions = map(expression_of, rows)      # without the drills, which have commas
        return {canonical(text) for text in expressions if "," not in text}

    heldout = [*jsonl(ROOT / "dataset/heldout.jsonl"),
               *arithmetic.flaw_pairs(random.Random(5), 3000, heldout=True)]
    for source in (jsonl(ROOT / "dataset/train.jsonl"),
                   arithmetic.finetuning_chats(random.Random(1), 2000, tags=True),
                   arithmetic.finetuning_chats(random.Random(2), 2000, tags=False),
                   arithmetic.flaw_pairs(random.Random(3), 3000, heldout=False),
                   arithmetic.pretraining_chats(random.Random(4), 2000)):
        assert not names(heldout) & names(source)


def test_the_shipped_files_are_what_the_generator_writes_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["arithmetic", "--out_dir", str(tmp_path)])
    monkeypatch.delitem(sys.modules, "dataset.arithmetic")
    runpy.run_module("dataset.arithmetic", run_name="__main__")
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (ROOT / "dataset" / name).read_bytes()


def texts(source):
    return [(expression_of(row), row["conversations"][1]["content"]) for row in source]


def test_every_link_of_every_worked_chain_is_right():
    rng = random.Random(6)
    chats = [*arithmetic.finetuning_chats(rng, 1500, tags=True),
             *arithmetic.finetuning_chats(rng, 500, tags=False),
             *arithmetic.pretraining_chats(rng, 1000)]
    lines = [line for _, text in texts(chats) for line in text.splitlines()]
    chains = [re.split("=| is ", line) for line in lines if re.match(r"\d+[-+*]", line)]
    for links in chains:
        assert len({eval(link) for link in links}) == 1, links
        assert re.fullmatch(r"-?\d+", links[-1]), links
    assert sum(len(links) == 2 for links in chains) > 500
    assert sum(len(links) > 2 for links in chains) > 2000       # with steps in between


def test_well_formed_replies_end_in_the_right_answer_and_malformed_ones_lack_a_tag():
    tagged = texts(arithmetic.finetuning_chats(random.Random(7), 1000, tags=True))
    whole = [(expression, text) for expression, text in tagged if tag_reward([""], [text]) == [1.0]]
    assert 840 < len(whole) < 920                               # 88% of 1000, +- 4 sigma
    for expression, text in whole:
        assert format_reward([""], [text]) == [0.5]
        assert text.endswith(f"<answer>\n{eval(expression)}\n</answer>")
    for expression, text in texts(arithmetic.finetuning_chats(random.Random(8), 300, tags=False)):
        assert text.endswith(f"The answer is {eval(expression)}.")
        assert tag_reward([""], [text]) == [0.0]


@pytest.mark.parametrize("style", arithmetic.STYLES)
def test_wrong_thoughts_never_arrive_at_the_right_answer(style):
    rng = random.Random(9)
    for expression, operations, answer, _ in islice(arithmetic.problems(rng, heldout=False), 300):
        assert answer == eval(expression) == arithmetic.think(style, operations)[1]
        assert arithmetic.think_wrongly(style, operations, rng)[1] != answer


OPERATIONS = [(27, "*", 6), (arithmetic.FIRST, "+", 34)]
WORKED = "27*6=120+42=160+2=162\n162+34=192+4=196"


def test_each_style_says_what_it_should():
    thoughts = {"steps": WORKED, "wordy": "let me think\n" * 3 + WORKED, "empty": "",
                "operations": "27*6 is 162\n162+34 is 196", "guess": "I guess 196."}
    for style, thought in thoughts.items():
        assert arithmetic.think(style, OPERATIONS) == (thought, 196)
    assert arithmetic.chain(5, "+", 1204) == ("5+1204=1005+204=1205+4=1209", 1209)
    assert arithmetic.plain("", 196) == "The answer is 196."
    assert arithmetic.plain(WORKED, 196) == WORKED + "\nThe answer is 196."


@pytest.mark.parametrize("chats, checksum", [
    (arithmetic.pretraining_chats(random.Random(2), 4000), 840693881),
    (arithmetic.finetuning_chats(random.Random(3), 1000, tags=False), 819674021),
    (arithmetic.finetuning_chats(random.Random(4), 1000, tags=True), 1814792081),
    (arithmetic.finetuning_chats(random.Random(7), 1000, tags=True, malformed_share=0.0,
                                 styles=arithmetic.REDUNDANT_STYLES), 4212541350),
    (arithmetic.flaw_pairs(random.Random(5), 4000, heldout=False), 2902691815),
])
def test_the_same_seed_gives_the_same_texts(chats, checksum, tmp_path):
    arithmetic.write(tmp_path / "texts.jsonl", chats)
    assert zlib.crc32((tmp_path / "texts.jsonl").read_bytes()) == checksum


def test_the_chosen_reply_of_a_pair_is_right_and_the_rejected_one_is_flawed():
    rows = list(arithmetic.flaw_pairs(random.Random(10), 1000, heldout=True))
    for row in rows:
        chosen, rejected = (int(re.findall(r"-?\d+", row[side])[-1])
                            for side in ("chosen", "rejected"))
        assert chosen == eval(expression_of(row))
        if row["kind"] == "form":
            assert tag_reward([""], [row["chosen"]]) == [1.0]
            assert tag_reward([""], [row["rejected"]])[0] < 1
        else:
            assert rejected != chosen
    assert {row["kind"] for row in rows} == {"form", "slip"}


# --- train_sft ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 70])
def test_batches_hold_every_example_once_an_epoch(count):
    source = train_sft.batches([([i], [i]) for i in range(count)], 2, random.Random(0))
    epochs = []
    for _ in range(3):
        seen = []
        while len(seen) < count:
            batch = next(source)
            assert 1 <= len(batch) <= 2
            seen += [ids[0] for ids, _ in batch]
        epochs.append(seen)
    assert all(sorted(seen) == list(range(count)) for seen in epochs)
    assert count < 5 or epochs[0] != epochs[1] != epochs[2]


def test_fine_tuning_on_a_handful_of_chats(tmp_path, monkeypatch, capsys):
    """It holds out a tenth, saves, and prints the mean loss since it last did."""
    chats = [arithmetic.chat("一加一", "2")] * 19 + [arithmetic.chat("2 + 2", "4 5 6 7 8")]
    path, save = tmp_path / "chats.jsonl", tmp_path / "weights"
    arithmetic.write(path, chats)
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    losses, loss_of = iter([1.0, 2.0, 6.0]), train_sft.loss_of

    def loss(model, batch, num_tokens, device):
        real = loss_of(model, batch, num_tokens, device)
        return real if not real.requires_grad else real - real.detach() + next(losses)

    monkeypatch.setattr(train_sft, "loss_of", loss)
    monkeypatch.setattr(sys, "argv", [
        "train_sft", "--data", str(path), "--save", str(save), "--steps", "3",
        "--init", str(ROOT / "model/weights/reason_128"), "--batch_size", "4"])
    train_sft.main()
    printed = capsys.readouterr().out
    assert "18 chats" in printed and "2 held out" in printed
    assert re.search(r"step 3/3  loss 3\.0000  held-out \d", printed), printed
    assert load_pretrained(save).config.hidden_size == 128


def test_fine_tuning_saves_every_100_steps_and_at_the_end():
    model, taken, at = torch.nn.Linear(1, 1), [], []

    def next_loss():
        taken.append(1)
        return model(torch.ones(1, 1)).sum()

    train_sft.optimize(model, next_loss, steps=203, learning_rate=1e-3, warmup_steps=0,
                       progress=lambda: at.append(len(taken)) or "")
    assert at == [100, 200, 203]


def test_a_prompt_and_its_answer_are_a_chat_to_learn_from(tmp_path):
    user, reply = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
    write(tmp_path / "some.jsonl", [
        {"conversations": [user, reply], "answer": "6"}, {"conversations": [user], "answer": "5"},
        {"question": "2+3?", "answer": 5},
        {"prompt": [user, {"role": "assistant", "content": "4"}], "answer": "5", "metadata": {}}])
    assert read_chats(tmp_path / "some.jsonl") == [[user, reply]] * 4


CHAT = '{"conversations": [{"role": "assistant", "content": "2"}]}\n'


@pytest.mark.parametrize("text, words", [
    ('{"conversations": []}', "line 1: no turn by the role assistant"),
    ('{"messages": []}', "line 1: no turn by the role"),
    ('{"answer": "5"}', "line 1: no prompt found"), (CHAT + "{", "line 2: not valid JSON"),
    ("", "empty"), (None, "some.jsonl"), (CHAT, "--tokenizer")])
def test_mistakes_in_fine_tuning_are_one_sentence(text, words, tmp_path, monkeypatch, capsys):
    path, init = tmp_path / "some.jsonl", ["--init", str(ROOT / "model/weights/reason_128")]
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["train_sft.py", "--data", str(path), "--save", str(tmp_path),
                                      *init * (words != "--tokenizer")])
    monkeypatch.delitem(sys.modules, "model.train_sft")
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("model.train_sft", run_name="__main__")
    code, printed = exit.value.code, capsys.readouterr().err
    # Python prints a code that is no number, and makes it a 1.
    message = code if isinstance(code, str) else printed.strip().splitlines()[-1]
    assert code and "error: " in message and words in message and "\n" not in message
