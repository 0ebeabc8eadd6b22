"""Tools in the format of Qwen3 and of MiniMind-3: what is sampled, and what a finished chat is."""
import datetime
import sys
from copy import deepcopy
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from dataset.prompts import PromptCollator, asking_as_trained, read_row
from model import MiniMindConfig, MiniMindForCausalLM, fast, sampler
from reward.tools import Tool, tool_calls
from sampling import in_turns, state_of_tool
from support import turns

# What theirs write of these chats, but for a few words about tools. They differ in KEPT and OPENED.
TEMPLATE = (
    "{% set roles = messages | map(attribute='role') | list %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{{ '<|im_end|>\n' if loop.nextitem.role != 'tool' }}{% else %}<|im_start|>{{ m.role + '\n' }}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.role == 'assistant' and KEPT }}"
    "{{ m.content }}{{ tools if loop.first }}{% for call in m.tool_calls %}"
    "{{ '\n' if not loop.first }}{{ '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' + OPENED if add_generation_prompt }}")
NO, YES = "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n"
QWEN3, MINIMIND3, QWEN3_2507 = [
    TEMPLATE.replace("KEPT", kept).replace("OPENED", opened) for kept, opened in [
        ("'user' not in roles[loop.index:] and (loop.last or m.reasoning_content)",
         f"({NO!r} if enable_thinking is false else '')"),
        ("true", f"('<think>\n' if open_thinking else {NO!r})"), ("false", "''")]]
POW = {"name": "pow", "arguments": {"base": 2, "exp": 3}}
ASK = '<tool_call>\n{"name": "pow", "arguments": {"base": 2, "exp": 3}}\n</tool_call>'


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("template", [QWEN3, MINIMIND3, QWEN3_2507])
def test_chat_template_of_final_weights_asks_as_trained(template, thinking, tokenizer, tmp_path):
    tokenizer, chat = deepcopy(tokenizer), turns("2**3?")
    tokenizer.chat_template = template
    asks, other = (PromptCollator(tokenizer, 999, thinking=on) for on in (thinking, not thinking))
    trained = asks.render(chat)
    final = asking_as_trained(asking_as_trained(tokenizer, other.switches), asks.switches)
    final.save_pretrained(tmp_path)
    ask = partial(AutoTokenizer.from_pretrained(tmp_path).apply_chat_template, chat,
                  tokenize=False, add_generation_prompt=True)
    assert ask() == trained and tokenizer.chat_template == template
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert PromptCollator(saved, 999, thinking=None).render(chat) == trained        # in a chat
    for value in (True, False):         # a caller has the last word
        words = {"enable_thinking": value, "open_thinking": value}
        assert ask(**words) == PromptCollator(tokenizer, 999, thinking=value).render(chat)


# What the template and the policy write of thoughts; what of these the chat has in both replies.
@pytest.mark.parametrize("template, thinking, prefill, thought, kept", [
    (QWEN3, True, "", YES, [YES, YES]), (QWEN3, True, "", "", ["", NO]),
    (QWEN3, False, NO, "", ["", NO]), (QWEN3_2507, True, "", "", ["", ""]),
    (MINIMIND3, True, "<think>\n", YES[8:], [YES, YES]), (MINIMIND3, False, NO, "", [NO, NO])])
@pytest.mark.parametrize("module", [sampler, fast])
def test_turns_have_the_ids_of_the_finished_chat_but_for_empty_thoughts(
        module, template, thinking, prefill, thought, kept, tokenizer, one_thread, monkeypatch):
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    row = read_row({"conversations": [      # as in MiniMind's agent_rl.jsonl
        {"role": "system", "content": "", "tools": '[{"function": {"name": "pow"}}]'},
        {"role": "user", "content": "2**3?"}, {"role": "assistant", "content": ""}]}, "line 1")
    batch, messages = PromptCollator(tokenizer, 999, thinking=thinking)([row]), row["messages"]
    encode = partial(tokenizer.apply_chat_template, tools=messages[0]["tools"], return_dict=False)
    turn, expected = {"role": "assistant", "reasoning_content": thought and "hm"}, []
    for calls in (1, 2):
        chat = [*messages, turn | {"content": "", "tool_calls": [{"function": POW}] * calls},
                *[{"role": "tool", "content": "8"}] * calls, turn | {"content": "It is 8."}]
        finished = encode(chat, tokenize=False)
        sampled, *replies = finished.split("assistant\n")
        for reply, has, words in zip(replies, kept, ("\n".join([ASK] * calls), "It is 8.")):
            assert reply.startswith(has + words)
            sampled += "assistant\n" + prefill + thought + reply.removeprefix(has)
        expected.append(tokenizer(sampled)["input_ids"][:-1])       # without the last line break
        assert (encode(chat)[:-1] == expected[-1]) == (kept == [prefill + thought] * 2)
        later = encode([*chat, messages[1]], tokenize=False)
        assert later.startswith(finished) == (template != QWEN3)    # of before it has no thoughts

    def next_token(logits, *options):       # where a tool's token is due, this one is thrown away
        tokens = [script.pop(0) for script in scripts if script]
        return torch.tensor(tokens), torch.full((len(logits),), -1.0)

    monkeypatch.setattr(sampler, "next_token", next_token)
    prompt = batch["prompt_ids"][0].tolist()
    scripts = [ids[len(prompt):] for ids in expected]
    model = MiniMindForCausalLM(MiniMindConfig(len(tokenizer), 16, 16, 1))
    state = state_of_tool(model, tokenizer, ["--max_gen_len", "999"], module.sample)
    rollout = in_turns(Tool(tool_calls([pow]), tokenizer, 8), state, batch, torch.Generator(), 2,
                       greedy=False)
    assert [prompt + ids for ids in rollout.token_ids()] == expected and rollout.ended.all()
    assert {own for _, _, own in rollout.turns} == {thought + "It is 8."}


def results(tool, *calls):
    """The results of these calls in one completion, and whether the answer counts as an error."""
    text = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    ((answer, failed),) = tool([[f"{text}<|im_end|>"]], {"prompts": ["<|im_start|>assistant\n"]})
    assert type(answer) is str              # ranks exchange it, and an error may not be pickled
    begun, *found = answer.split("<tool_response>\n")
    assert begun == "\n<|im_start|>user\n"
    return [one.partition("\n</tool_response>")[0] for one in found], failed


def given(**arguments):
    return arguments


@pytest.mark.parametrize("arguments, expected", [
    ('', "{}"), (', "arguments": null', "{}"), (', "arguments": " "', "{}"),
    (', "arguments": {}', "{}"), (', "arguments": "null"', "{}"), (', "arguments": []', "{}"),
    (', "arguments": "{\\"a\\": [1]}"', '{"a": [1]}'),
    (', "arguments": {"a": "b\n\tc"}', '{"a": "b\\n\\tc"}')])
def test_tool_calls_may_lack_arguments_or_have_empty_text_or_raw_line_breaks(
        arguments, expected, tokenizer):
    tool = Tool(tool_calls([given]), tokenizer, 8)
    assert results(tool, '{"name": "given"%s}' % arguments) == ([expected], False)


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value, text", [
    ("a\n", "a\n"), (None, "null"), (True, "true"), ((1, "é"), '[1, "é"]'),
    (numpy.arange(3), "[0, 1, 2]"), (torch.tensor(0.5), "0.5"), (numpy.bool_(True), "true"),
    (datetime.time(9, 30), "09:30:00"), (Fraction(1, 3), "1/3"), (Path("a/b"), "a/b"),
    ({"at": datetime.date(2024, 2, 29), "n": numpy.int8(5)}, '{"at": "2024-02-29", "n": 5}'),
    ({(1, 2): "pair"}, "{(1, 2): 'pair'}"), ({5}, "{5}"), (LOOP, "[[...]]")])
def test_tool_results_of_any_type_are_text(value, text, tokenizer):
    def get():
        return value

    assert results(Tool(tool_calls([get]), tokenizer, 8), '{"name": "get"}') == ([text], False)


def test_tool_results_are_cut_one_by_one_and_what_spells_a_control_token_is_text(tokenizer):
    def page(number):
        return f"<|im_end|>{number}" + "word " * 2000 + f"{number}</answer><|im_<|im_end|>end|>"

    tool = Tool(tool_calls([page]), tokenizer, 8)
    calls = ['{"name": "page", "arguments": {"number": %d}}' % number for number in (1, 2)]
    texts, failed = results(tool, *calls)
    for number, text in zip("12", texts, strict=True):
        assert text.startswith(f"< |im_end|>{number}word ") and " characters left out] " in text
        assert text.endswith(f"word {number}< /answer><|im_< |im_end|>end|>") and len(text) < 4100
    call = f"<tool_call>{calls[0]}</tool_call>"
    ((answer, _),) = tool([[call]], {"prompts": ["<|im_start|>assistant\n"]})
    ids = tokenizer(answer)["input_ids"]
    own = [ids.count(tokenizer.convert_tokens_to_ids(token))
           for token in ("<|im_end|>", "<|im_start|>", "</answer>")]
    assert own == [1, 2, 0] and not failed


FAILING = {
    '{"name": "down"}': "ConnectionError: no < |im_end|>",
    '{"name": "leave", "arguments": {"code": 3}}': "SystemExit: 3",
    '{"name": "pow", "arguments": {"base": 2, "exp": "3"}}': "TypeError: ",
    '{"name": ': "JSONDecodeError: ", "[]": "TypeError: ",
    r'{"name": "str", "arguments": {"object": "\ud800"}}': "UnicodeEncodeError: ",
    '{"name": "up"}': "LookupError: no tool 'up'; choose from leave, down, str, pow",
}


def test_tool_calls_that_fail_say_why_and_each_type_of_error_is_one_warning(tokenizer, capsys):
    def leave(code):
        sys.exit(code)

    def down():
        raise ConnectionError("no <|im_end|>")

    tool = Tool(tool_calls([leave, down, str, pow]), tokenizer, 8)
    with pytest.warns(UserWarning) as told:
        for call, why in FAILING.items():
            (result,), failed = results(tool, call)
            assert failed and result.startswith(why), call
            found, failed = results(tool, call, '{"name": "str", "arguments": {"object": 5}}')
            assert failed and found == [result, "5"]            # the other call is answered
    for kind in {why.partition(":")[0] for why in FAILING.values()}:
        assert sum(kind in str(one.message) for one in told) == 1, kind
    assert capsys.readouterr().err.count("Traceback") == 2      # of our functions alone


def test_tool_calls_are_run_after_the_thoughts_alone():
    tool = tool_calls([pow])
    prompts = ["<|im_start|>assistant\n"] * 4
    histories = [[f"<think>{ASK}</think>8"], [ASK[:-1]], [ASK, "...", "8"],
                 [f"<think>8</think>{ASK}<|im_end|>"]]
    answer = ("\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n"
              "<|im_start|>assistant\n")
    assert tool(histories, prompts) == [None, None, None, answer]
