"""Files that a stranger wrote: each is read, or refused in one sentence, and none runs code."""
import copy
import io
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import train_grpo
from conftest import Canary, edit
from dataset import PromptCollator, PromptDataset
from model import chat
from model.lora import adapter_state, with_adapters
from model.processes.saver import load_adapter, load_checkpoint, save_checkpoint
from model.storage import files
from model.storage.read import load_pretrained, load_tokenizer
from model.storage.tokenizer import read_chats
from model.storage.write import save_adapter, save_pretrained
from report import UserError, user_errors
from report.text import printable
from reward import load_reward_model
from reward.train_reward_model import read_pairs

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
GIT_LFS = b"version https://git-lfs.github.com/spec/v1"
DEEP = b'{"a":' + b"[" * 100_000


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(folder, function, *arguments, words=""):
    """The function ends in one sentence with these words; the folder stays as it is: no canary."""
    before = contents(folder)
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000 and printable(message) == message, message
    assert str(folder) in message and all(word in message for word in words.split()), message
    assert "Re-running" not in message          # torch's advice: to trust the file
    assert contents(folder) == before
    return message


def damage(file, change):
    """Change fields of a JSON file, or write text, bytes, a function of the bytes, a command."""
    if isinstance(change, dict):
        edit(file, **change)
    elif isinstance(change, str):
        file.write_text(change.replace("CANARY", f"{file.parent}/canary"))
    elif change is Canary:
        file.write_bytes(pickle.dumps(Canary(file.parent)))
    else:
        file.write_bytes(change(file.read_bytes()) if callable(change) else change)


def parametrize(names, values):
    """With numbers for names of the tests: some values are long."""
    return pytest.mark.parametrize(names, values, ids=itertools.count())


def cases(damages):
    """Parametrizes by {a file's name: [(words of its refusal, one damage or several), ...]}."""
    return parametrize("name, change, words", [
        (name, change, words) for name, rows in damages.items()
        for words, *changes in rows for change in changes])


# --- weights --------------------------------------------------------------------------------------


@pytest.fixture
def weights(tiny_policy, tmp_path):
    """A valid folder, to be damaged."""
    save_pretrained(tiny_policy[1], tiny_policy[0], tmp_path / "weights")
    return tmp_path / "weights"


KERNEL = "somebody/kernel"


@cases({"config.json": [
    ("config.json", b"", b"{", b"[]", b"\xff\xfe{}", b"<html>", DEEP),
    ("config.json", {"hidden_size": "32"}, {"eos_token_id": "2"}, {"model_type": ["qwen3"]},
     {"model_type": "somebodys"}),
    ("config.json code", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
    ("attn_implementation elsewhere", {"attn_implementation": KERNEL},
     {"_attn_implementation": KERNEL}, {"text_config": {"attn_implementation": {"": KERNEL}}}),
    ("quantized", {"quantization_config": {"quant_method": "fp8"}}),
    # a tensor that is missing, unexpected, of another shape
    ("model.layers.2.", {"num_hidden_layers": 3}), ("model.layers.1.", {"num_hidden_layers": 1}),
    ("model.layers.0.mlp.down_proj.weight", {"intermediate_size": 40}),
    ("model.layers.0.self_attn.o_proj.weight", {"num_attention_heads": 0}),
    ("model.layers.0.self_attn.k_norm.weight", {"model_type": "llama"}),
], "generation_config.json": [
    ("generation_config.json", b"{", b"[]", {"eos_token_id": "two"}, {"eos_token_id": [1, [2]]}),
], "model.safetensors": [
    ("model.safetensors", b"", Canary, GIT_LFS, lambda data: data[:-1], lambda data: data[:100]),
]})
def test_broken_weights_are_refused_by_the_field_or_tensor_at_fault(name, change, words, weights):
    damage(weights / "mine.py", "open('CANARY', 'w')")
    damage(weights / name, change)
    refused(weights, load_pretrained, weights, words=words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_weights_that_are_not_there_are_named(name, weights):
    (weights / name).unlink()
    refused(weights, load_pretrained, weights, words=name)


def by_torch(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "some.pth"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, weights):
    canary, state = Canary(weights), load_file(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    for content in (b"", GIT_LFS, by_torch(state)[:20_000], pickle.dumps(canary), by_torch(canary),
                    by_torch({"a": canary}), by_torch(state | {"a": canary}), by_torch([1]),
                    by_torch({"a": canary}, _use_new_zipfile_serialization=False),
                    by_torch(torch.nn.Linear(2, 2)), by_torch({}), by_torch(dict.fromkeys(state))):
        (weights / name).write_bytes(content)
        refused(weights, load_pretrained, weights / name if name == "some.pth" else weights)
    pickle.loads(pickle.dumps(canary))
    assert (weights / "canary").exists()        # it would run if these files were trusted


def test_a_pth_from_before_torch_1_6_is_read_too(tmp_path):
    old = by_torch({"a": torch.arange(9)}, _use_new_zipfile_serialization=False)
    (tmp_path / "old.pth").write_bytes(old)
    assert torch.equal(files.read_tensors(tmp_path / "old.pth")["a"], torch.arange(9))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks there for what is mapped")
def test_a_checkpoint_is_mapped_while_it_is_read_and_may_be_replaced(tiny_policy, tmp_path):
    tokenizer, policy = tiny_policy
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    folder, file = tmp_path / "checkpoint", tmp_path / "checkpoint/optimizer.pt"
    save_checkpoint(folder, policy, tokenizer, optimizer.state_dict(), step=1, num_tokens=2)
    mapped, expected = files.read_tensors(file), by_torch(optimizer.state_dict())
    assert str(file) in Path("/proc/self/maps").read_text()
    optimizer.step()
    save_checkpoint(folder, policy, tokenizer, optimizer.state_dict(), step=9, num_tokens=8)
    assert by_torch(mapped["optimizer"]) == expected != by_torch(optimizer.state_dict())
    del mapped
    another = torch.optim.AdamW(policy.parameters())
    assert load_checkpoint(folder, policy, another) == (9, 8)
    assert by_torch(another.state_dict()) == by_torch(optimizer.state_dict())
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_broken_checkpoint_is_one_sentence(weights, tiny_policy):
    optimizer = torch.optim.AdamW(tiny_policy[1].parameters())
    for words, content in (("optimizer.pt", b""), ("optimizer.pt", Canary),
                           ("--resume", by_torch({"optimizer": {}, "step": "x"}))):
        damage(weights / "optimizer.pt", content)
        refused(weights, load_checkpoint, weights, tiny_policy[1], optimizer, words=words)


@cases({"adapter_config.json": [("r 4", {"r": 4}), ("lora_alpha 7", {"lora_alpha": 7}), ("", b"[")],
        "adapter_model.safetensors": [("other than tensors", Canary),
                                      ("other names", save({"a": torch.zeros(1)}))]})
def test_a_wrong_or_hostile_adapter(name, change, words, tiny_policy, tmp_path):
    policy = with_adapters(copy.deepcopy(tiny_policy[1]), rank=2, alpha=4)
    save_adapter(policy, tmp_path)
    load_adapter(policy, tmp_path)
    damage(tmp_path / name, change)
    before = by_torch(adapter_state(policy))
    refused(tmp_path, load_adapter, policy, tmp_path, words=words)
    assert by_torch(adapter_state(policy)) == before


# --- tokenizers and chat templates ----------------------------------------------------------------


def too_many_tokens(data):
    """A damage to tokenizer.json: an id is beyond the embedding, though the tokens are few."""
    return re.sub(rb'"!": \d+', b'"!": 10000', data)


@cases({"tokenizer.json": [
    ("no tokenizer", b"", b"{}", DEEP), ("10001 512 --tokenizer_path", too_many_tokens),
], "tokenizer_config.json": [("no tokenizer", b"{", b"[]"), ("no chat template", b"{}")]})
def test_a_broken_tokenizer_is_refused(name, change, words, weights):
    damage(weights / name, change)
    if name == "tokenizer_config.json":     # where an old one has its template
        (weights / "chat_template.jinja").unlink()
    refused(weights, load_tokenizer, weights, 512, words=words)


def test_a_tokenizers_own_code_is_not_run_nor_asked_about(weights, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked a question"))
    damage(weights / "mine.py", "import os\nos.system('touch CANARY')\n")
    edit(weights / "tokenizer_config.json", tokenizer_class="Mine",
         auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
    edit(weights / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    before = contents(weights)
    try:
        load_tokenizer(weights, 512)
    except UserError as error:
        assert str(weights) in str(error)
    assert contents(weights) == before


@pytest.mark.parametrize("template, words", [
    ("{{ messages[1].content }}", "['user']"), ("{{ 1 / (messages[0].content | length - 4) }}", ""),
    ("{{ cycler.__init__.__globals__.os.system('exit') }}", "unsafe"), ("{% if", "template")])
def test_a_template_that_fails_is_one_sentence(template, words, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(UserError, match="chat template") as error:
        PromptCollator(other, 66).render([{"role": "user", "content": "2+3?"}])
    assert words in str(error.value) and "\n" not in str(error.value)


# --- data -----------------------------------------------------------------------------------------


@parametrize("line", [
    b"{", b"5", DEEP, b'{"prompt": "\xff"}', b'{"prompt": "a", "level": NaN}',
    b'{"prompt": "\\ud800"}', b'{"prompt": "a", "answer": ["5"]}', b'{"prompt": {"role": "user"}}',
    b'{"prompt": [{"role": ["user"], "content": "a"}]}',
])
def test_a_line_of_data_that_is_refused_by_its_number(line, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\u0000"}\r\n\n' + line + b"\n")
    refused(tmp_path, PromptDataset, file, words=f"{file}, line 3:")
    refused(tmp_path, read_pairs, [file], words="line 1")


@parametrize("read", [PromptDataset, read_chats, lambda path: read_pairs([path])])
def test_data_that_is_no_file(read, tmp_path):
    refused(tmp_path, read, tmp_path / "some.jsonl", words="some.jsonl")


# --- reward models --------------------------------------------------------------------------------


@pytest.fixture
def reward(weights):
    """The weights as those of a classifier."""
    edit(weights / "config.json", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    state = load_file(weights / "model.safetensors") | {"score.weight": torch.ones(1, 32)}
    save_file(state, weights / "model.safetensors", {"format": "pt"})
    load_reward_model(weights)
    return weights


INTERNLM2 = {"architectures": ["InternLM2ForRewardModel"]}


@cases({"config.json": [
    ("", {"hidden_size": "16"}, {"num_labels": 3}, DEEP,
     {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, {"score": "likelihood"},
     INTERNLM2, INTERNLM2 | {"num_attention_heads": 0}),
    ("code", {"attn_implementation": KERNEL})],
        "model.safetensors": [("", bytes(9))], "pytorch_model.bin": [("", Canary)]})
def test_a_broken_reward_model(name, change, words, reward):
    damage(reward / name, change)
    if name == "pytorch_model.bin":         # read only if there is no better one
        (reward / "model.safetensors").unlink()
    refused(reward, load_reward_model, reward, words=f"--reward_model_path {words}")


@pytest.mark.parametrize("pieces", [b"\xff" * 100, b""], ids=len)
def test_a_broken_tokenizer_of_internlm2(pieces, reward):
    pytest.importorskip("sentencepiece")
    edit(reward / "config.json", **INTERNLM2)
    (reward / "tokenizer.model").write_bytes(pieces)
    refused(reward, load_reward_model, reward, words="--reward_model_path")


# --- flags, and whole runs ------------------------------------------------------------------------


def fails(capsys, *flags):
    """The line that train_grpo.main prints before it exits with code 2."""
    with pytest.raises(SystemExit) as exit:
        train_grpo.main(list(flags))
    printed = capsys.readouterr().err
    assert exit.value.code == 2 and "Traceback" not in printed and printable(printed) == printed
    line = printed.splitlines()[-1]
    assert line.startswith(("train_grpo.py: error: ", "pytest: error: ", "__main__.py: error: "))
    return line


@pytest.mark.parametrize("flag, values", [
    ("--max_steps", ["1e99", str(10**30), "-1", ""]), ("--learning_rate", ["inf", "nan", "0"]),
    ("--reward_weights", ["nan", "1e7"]), ("--run_name", ["", "..", "../x", "a/b", "a\x1b[2J"]),
])
def test_a_flag_that_is_out_of_bounds(flag, values, capsys, tmp_path):
    for value in values:
        assert flag in fails(capsys, "--out_dir", str(tmp_path), f"{flag}={value}")
    assert not list(tmp_path.iterdir())


@parametrize("content, words", [
    (b"--run_name 'a", "quotation"), (b"--run_name ../x", "--run_name"),
    (b"--no_such_flag", "--no_such_flag"), (None, "No such file or directory: 'flags'"),
])
def test_a_broken_file_of_flags(content, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content:
        Path("flags").write_bytes(content)
    assert words in fails(capsys, "@flags")


def test_out_dir_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").write_text("precious")
    assert str(tmp_path / "out") in fails(capsys, "--out_dir", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "precious"


@cases({"config.json": [("config.json", DEEP)],
        "model.safetensors": [("model.safetensors", bytes(9))],
        "tokenizer.json": [("no tokenizer", b"{}"), ("know 284", too_many_tokens)],
        "chat_template.jinja": [("template", "{{ 1/0 }}")],
        "data.jsonl": [("data.jsonl, line 1", b'{"prompt": "\\ud800"}'), ("no prompts", b"")]})
def test_a_run_on_a_broken_file_ends_in_a_sentence_and_writes_nothing(
        name, change, words, weights, capsys, tmp_path):
    (weights / "data.jsonl").write_text('{"prompt": "aaa"}\n')
    damage(weights / name, change)
    line = fails(capsys, "--model_path", str(weights), "--data_path", str(weights / "data.jsonl"),
                 "--reward_funcs", "format", "--out_dir", str(tmp_path / "out"), "--device", "cpu",
                 "--overlong_prompts", "drop")
    assert words in line and not (tmp_path / "out").exists()


# --- what is shown --------------------------------------------------------------------------------

HOSTILE = "red \x1b[31m\x9b2J\r\x07 \u202etxt.exe\u2066 \ud800\u2028 \x7f end"
FRIENDLY = "小明　有3个🙂 naïve\n\té 👨\u200d👩"


def test_hostile_text_reaches_a_terminal_only_as_dots():
    assert printable(HOSTILE) == "red ·[31m·2J·· ·txt.exe· ·· · end"
    assert printable(FRIENDLY) == FRIENDLY


def test_a_users_error_is_one_line_that_cannot_spoof(capsys):
    @user_errors("some.py")
    def main():
        raise UserError(f"a reward said:\n{HOSTILE}")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"some.py: error: a reward said: {printable(HOSTILE)}\n"


def test_a_streamed_reply_is_shown_with_dots(monkeypatch, capsys):
    turns = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    monkeypatch.setattr(chat, "stream", lambda *_, **__: iter(["a\x1b[2J", "小明\n"]))
    chat.chat(None, None)
    assert capsys.readouterr().out == "a·[2J小明\n\n"
