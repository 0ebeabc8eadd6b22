"""Files that a stranger wrote: each is read, or refused in one sentence, and none runs code.

Most are made from a valid file by one change: a list of nasty ones, and many drawn from a seed.
"""
import copy
import functools
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace

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
from report import Report, UserError, user_errors
from report.text import fold, printable, read_jsonl, to_line
from reward import load_reward_model
from reward.train_reward_model import read_pairs

if os.name == "nt":
    pytest.skip("pipes, links and alarms as Unix has them", allow_module_level=True)
pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:Detected pickle", "ignore:Initializing zero")]
GIT_LFS = b"version https://git-lfs.github.com/spec/v1"
NAN, INF = float("nan"), float("inf")
DEEP, DIGITS = b'{"a":' + b"[" * 100_000, b'{"a": ' + b"7" * 5000 + b"}"
BROKEN_JSON = [b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe{}", b"<html>", DEEP, DIGITS,
               b"\x00" * 20, b'{"a": "\xff"}', b"[" * 5]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(folder, function, *arguments):
    """The sentence that the function ends in, or None if it returns; the folder stays as it is.

    Any other exception fails the test, and so does half a minute of silence.
    """
    before, message = contents(folder), None
    try:
        with files.time_limit(30):
            function(*arguments)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000, message
        assert printable(message) == message
        assert str(folder) in message, message
        assert "Re-running" not in message      # torch's advice: to trust the file
        assert "30 seconds" not in message
    assert contents(folder) == before           # and no canary
    return message


def refused(folder, function, *arguments, words=""):
    message = refusal(folder, function, *arguments)
    assert message is not None, "it was accepted"
    assert all(word in message for word in words.split()), message


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


no_file = parametrize("make", [
    lambda path: None, Path.mkdir, os.mkfifo, functools.partial(os.symlink, "/dev/zero")])

# --- weights --------------------------------------------------------------------------------------


@pytest.fixture
def weights(tiny_policy, tmp_path):
    """A valid folder, to be damaged."""
    save_pretrained(tiny_policy[1], tiny_policy[0], tmp_path / "weights")
    return tmp_path / "weights"


VALUES = [-1, 0, 10**9, 10**30, 1e308, NAN, INF, None, True, "7", "\x1b[31m", [], [1], {},
          {"rope_type": "linear"}, {"a": {"b": [1]}}, 2.5, "a" * 10_000]
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "head_dim"]
FIELDS = [*SIZES, "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling",
          "rope_parameters", "max_position_embeddings", "tie_word_embeddings", "attention_bias",
          "num_experts", "mlp_only_layers", "decoder_sparse_step", "model_type", "eos_token_id",
          "pad_token_id", "layer_types", "use_sliding_window", "hidden_act",
          "partial_rotary_factor", "initializer_range"]


@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_value_in_config_json(field, weights):
    for value in VALUES:
        edit(weights / "config.json", **{field: value})
        message = refusal(weights, load_pretrained, weights)
        assert message or field not in SIZES or value is None, value


def length(number):
    """The first bytes of a safetensors file: how long its header is."""
    return struct.pack("<Q", number)


def header(name="model.norm.weight", **fields):
    """A damage to a safetensors file: one tensor has another name or other fields."""
    def change(data):
        end = 8 + struct.unpack("<Q", data[:8])[0]
        tensors = json.loads(data[8:end])
        tensors[name] = tensors.pop("model.norm.weight") | fields
        text = json.dumps(tensors).encode()
        return length(len(text)) + text + data[end:]
    return change


def ending(number):
    """A damage to a safetensors file: its last weight is this number."""
    return lambda data: data[:-4] + struct.pack("<f", number)


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}
BROKEN_WEIGHTS = {"config.json": [
    ("config.json", *BROKEN_JSON),
    *((list(change)[0], change) for change in (         # the first of these fields is named
        {"hidden_size": None}, {"eos_token_id": "2"}, {"eos_token_id": [2, "3"]},
        {"pad_token_id": True}, {"rope_theta": -1.0, "rope_parameters": None},
        {"num_experts": 10**8, "model_type": "qwen3_moe"},
        # what model/model.py does not build
        {"use_sliding_window": True, "max_window_layers": 1}, {"mlp_bias": True},
        {"layer_types": ["full_attention", "sliding_attention"]}, {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5}, {"final_logit_softcapping": 30.0},
        {"quantization_config": {"quant_method": "fp8"}})),
    ("num_attention_heads num_key_value_heads", {"num_attention_heads": 3}),
    ("head_dim odd", {"head_dim": 7}), ("transformers policy", {"model_type": "mamba"}),
    ("num_experts_per_tok", {"model_type": "qwen3_moe", "num_experts": 1}),
    ("factor '2'", {"rope_scaling": {"type": "linear", "factor": "2"}}),
    ("factor nan", {"rope_scaling": {"type": "linear", "factor": NAN}}),
    ("config.json", {"rope_scaling": {"type": ["linear"]}}),
    ("'yarn'", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("'dynamic'", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    ("factor", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}),
    ("low_freq_factor high_freq_factor", {"rope_scaling": LLAMA3}),
    ("config.json", {"model_type": ["qwen3"]}), ("policy", {"model_type": "\x1b]0;spoofed\x07"}),
    # a tensor that is missing, unexpected, of another shape
    ("model.layers.2.", {"num_hidden_layers": 3}), ("model.layers.1.", {"num_hidden_layers": 1}),
    ("model.layers.0.mlp.down_proj.weight", {"intermediate_size": 40}),
    ("model.layers.0.self_attn.k_norm.weight", {"model_type": "llama"}),
], "generation_config.json": [
    ("generation_config.json", *BROKEN_JSON),
    ("generation_config.json eos_token_id", *(
        {"eos_token_id": eos} for eos in ("2", [1, [2]], 10**30, {"a": 1}, 2.5))),
], "model.safetensors.index.json": [        # wrong, or it leads out of the folder
    ("", b"{}", *(json.dumps({"weight_map": files}).encode() for files in (
        [], {}, {"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": ""},
        {"a": ".."}, {"a": "missing.safetensors"}))),
], "model.safetensors": [
    ("", b"", Canary, GIT_LFS, length(2) + b"{}", length(100_000) + b"[" * 100_000,
     lambda data: length(2**40) + data[8:], lambda data: length(2**63) + data[8:],
     lambda data: length(10) + data[8:], lambda data: length(2) + b"[]" + data[8:],
     lambda data: data[:8], lambda data: data[:len(data) // 2], lambda data: data[:-1],
     header(dtype="I32"), header(dtype="F99"), header(dtype="F64"),
     header(dtype="U8", shape=[128]), header(shape=[10**12]), header(shape=[-32]),
     header(shape="32"), header(name="\x1b[2Jname"),
     *(header(data_offsets=pair) for pair in ([0, 10**12], [128, 0], [-128, 0], [0, 128]))),
    ("model.norm.weight NaN", *map(ending, (NAN, INF, -INF))),
]}


@cases(BROKEN_WEIGHTS)
def test_broken_weights_are_refused_by_the_field_or_tensor_at_fault(name, change, words, weights):
    shutil.copy(weights / "model.safetensors", weights.parent)      # where an index may lead
    damage(weights / name, change)
    refused(weights, load_pretrained, weights, words=words)


def test_a_json_file_of_gigabytes_is_not_read(weights, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON", 100)
    refused(weights, load_pretrained, weights, words="config.json bytes")


def mutated(data, rng):
    """The bytes with a piece removed, repeated or replaced, once or a few times."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data))
        end = start + rng.choice((1, 2, 7))
        piece = rng.choice((b"", data[start:end] * 2, rng.randbytes(2), b'"', b"{", b"\\ud800",
                            b"9" * 50, b"-", b"null", b"\x1b", b"e99", b"\n"))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "some.pth"])
def test_a_file_with_bytes_at_random(name, seed, weights):
    torch.save(load_file(weights / "model.safetensors"), weights / "some.pth")
    file, end = weights / name, None if name.endswith("json") else 3000     # not among the numbers
    data = file.read_bytes()
    file.write_bytes(mutated(data[:end], random.Random(seed)) + data[len(data[:end]):])
    refusal(weights, load_pretrained, file if name == "some.pth" else weights)
    refusal(weights, load_tokenizer, weights, 512)


@no_file
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_weights_that_are_no_file_are_named(name, make, weights):
    (weights / name).unlink()
    make(weights / name)
    refused(weights, load_pretrained, weights, words=name)


# --- pickles --------------------------------------------------------------------------------------


def by_torch(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def hostile_pickles(state, canary):
    """The bytes of files, made of a model's tensors and a command."""
    whole = by_torch(state)
    yield from (b"", bytes(1000), b"a" * 257 + b"ustar" + bytes(600), GIT_LFS,
                whole[:20_000], whole[-5_000:], pickle.dumps(canary),
                by_torch({"a": canary}, _use_new_zipfile_serialization=False))
    lacking = [{name: state[name] for name in state if part not in name}
               for part in ("k_proj", "mlp.gate_proj")]
    for content in (canary, {"a": canary}, state | {"a": canary}, torch.nn.Linear(2, 2), [1],
                    torch.ones(1), dict(enumerate(state.values())), {}, *lacking):
        yield by_torch(content)
    for change in (lambda tensor: "a", lambda tensor: state, lambda tensor: tensor.long(),
                   lambda tensor: torch.ones(1).expand(tensor.shape), lambda tensor: tensor * NAN,
                   lambda tensor: torch.tensor(1.0), lambda tensor: torch.ones(0, 0),
                   lambda tensor: tensor.to_sparse(), lambda tensor: tensor.to("meta")):
        yield by_torch({name: change(tensor) for name, tensor in state.items()})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "some.pth"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, weights):
    state = load_file(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    for number, content in enumerate(hostile_pickles(state, Canary(weights))):
        print("pickle", number)
        (weights / name).write_bytes(content)
        refused(weights, load_pretrained, weights / name if name == "some.pth" else weights)


def test_the_command_in_these_files_would_run_if_they_were_trusted(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path)))
    assert (tmp_path / "canary").exists()


def test_a_pth_that_cannot_be_mapped_is_read_too(tmp_path):
    state, deflated = {"a": torch.arange(1e4)}, tmp_path / "deflated.pth"
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        with zipfile.ZipFile(io.BytesIO(by_torch(state))) as stored:
            for name in stored.namelist():
                archive.writestr(name, stored.read(name))
    (tmp_path / "old.pth").write_bytes(by_torch(state, _use_new_zipfile_serialization=False))
    for name in ("deflated.pth", "old.pth"):
        assert torch.equal(files.read_tensors(tmp_path / name)["a"], state["a"]), name


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


TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ joiner.__init__.__globals__ }}", "{{ lipsum.__globals__['os'].popen('touch CANARY') }}",
    "{{ raise_exception.__globals__.os }}", "{{ messages.append(1) }}", "{{ messages[0].clear() }}",
    "{% include 'CANARY' %}", "{% import 'CANARY' as a %}", "{{ 1/0 }}", "{{ 'a' + 1 }}",
    "{{ range(10**9) }}", "{{ [1][5].a }}", "{{ raise_exception('\x1b[2J\nno') }}",
    "{{ nothing.at.all }}", "{{ 10.0**400 }}", "{{ 9**(9**9) }}", "{{ 'a' * 10**15 }}",
    "{{ 'a' * 30000000 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{% if", "{{",
    "{{ " + "(" * 3000 + ")" * 3000 + " }}", "", "  \n", "{# nothing #}", "{{ '' }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
]


def too_many_tokens(data):
    """A damage to tokenizer.json: an id is beyond the embedding, though the tokens are few."""
    return re.sub(rb'"!": \d+', b'"!": 10000', data)


@cases({"tokenizer.json": [
    ("", b"", b"{", b"{}", b"\xff\x00", DEEP,
     b'{"model": {"type": "BPE", "vocab": 5, "merges": []}}'),
    ("10001 512 --tokenizer_path", too_many_tokens),
], "tokenizer_config.json": [
    ("", b"{", b"[]", DEEP, b"\xff", b'{"tokenizer_class": 5}', b'{"chat_template": 5}'),
], "chat_template.jinja": [("", b"\xff\xfe"), ("chat template --tokenizer_path", *TEMPLATES)]})
def test_a_hostile_tokenizer_or_chat_template_is_refused_and_runs_nothing(
        name, change, words, weights, monkeypatch):
    monkeypatch.setattr(files, "MAX_SECONDS", 0.3)
    damage(weights / name, change)
    if name == "tokenizer_config.json":     # where an old one has its template
        (weights / "chat_template.jinja").unlink()
    refused(weights, load_tokenizer, weights, 512, words=words)


@pytest.mark.parametrize("tokenizer_class", ["Mine", "PreTrainedTokenizerFast"])
def test_a_tokenizers_own_code_is_not_run_nor_asked_about(tokenizer_class, weights, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked a question"))
    damage(weights / "mine.py", "import os\nos.system('touch CANARY')\n")
    edit(weights / "tokenizer_config.json", tokenizer_class=tokenizer_class,
         auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoConfig": "mine.Config"})
    edit(weights / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    refusal(weights, load_tokenizer, weights, 512)


@pytest.mark.parametrize("template, words", [
    ("{{ messages[1].content }}", "['user']"), ("{{ 1 / (messages[0].content | length - 4) }}", ""),
    ("{{ '\\ud800' }}", "template"), (" ", "nothing"), ("{{ messages[0].x.y.z }}", "template")])
def test_a_template_that_fails_on_some_prompts_is_one_sentence(template, words, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(ValueError, match="chat template") as error:
        PromptCollator(other, 66).render([{"role": "user", "content": "2+3?"}])
    assert words in str(error.value) and "\n" not in str(error.value)


# --- data -----------------------------------------------------------------------------------------


LINE = {"conversations": [{"role": "user", "content": "小明 2+3?"}], "answer": "5", "level": [1]}
READERS = [PromptDataset, read_chats, lambda path: read_pairs([path])]


@parametrize("line", [
    b"{", b"[]", b"null", b"5", DEEP, DIGITS, b'{"prompt": "\xff"}', b'{"prompt": "a\x1b[2J"}',
    b"\xff\xfe{\x00}\x00", b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a", "level": NaN}',
    b'{"prompt": "a", "level": -Infinity}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "\\udfff": 1}',
    b'{"prompt": [{"role": "\\udc80", "content": "a"}]}', b'{"prompt": "a", "self": 1}',
    b'{"prompt": "a", "prompts": 1}', b'{"prompt": "a", "completion_ids": 1}',
    b'{"prompt": "a", "messages": []}', b'{"prompt": "a", "answer": ["5"]}',
    b'{"prompt": "a", "answer": {"a": 1}}', b'{"prompt": "a", "answer": []}', b"\x00" * 50,
    b'{"nums": 5, "target": 5}', b'{"prompt": {"role": "user"}}', b'{"prompt": [[[]]]}',
    b'{"prompt": [{"role": ["user"], "content": "a"}]}', b'{"prompt": "\\u0000 \\n"} x',
])
def test_a_line_of_data_that_is_refused_by_its_number(line, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\u0000"}\r\n\n' + line + b"\n")
    refused(tmp_path, PromptDataset, file, words=f"{file}, line 3:")
    refused(tmp_path, read_pairs, [file], words="line 1")


@pytest.mark.parametrize("seed", range(80))
def test_a_line_of_data_with_bytes_at_random(seed, tmp_path):
    file, line = tmp_path / "some.jsonl", json.dumps(LINE, ensure_ascii=seed % 2 == 0).encode()
    file.write_bytes(line + b"\n" + mutated(line, random.Random(seed)))
    for read in (PromptDataset, read_chats):
        message = refusal(tmp_path, read, file)
        assert message is None or "some.jsonl, line " in message
    refused(tmp_path, read_pairs, [file], words="line 1")


@no_file
@parametrize("read", READERS)
def test_data_that_is_no_file(read, make, tmp_path):
    make(tmp_path / "some.jsonl")
    refused(tmp_path, read, tmp_path / "some.jsonl", words="some.jsonl")


# --- reward models --------------------------------------------------------------------------------


@pytest.fixture
def reward(weights):
    """The weights as those of a classifier, with code that nobody may run."""
    edit(weights / "config.json", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    state = load_file(weights / "model.safetensors") | {"score.weight": torch.ones(1, 32)}
    save_file(state, weights / "model.safetensors", {"format": "pt"})
    damage(weights / "mine.py", "open('CANARY', 'w')")
    assert refusal(weights, load_reward_model, weights) is None
    return weights


INTERNLM2 = {"architectures": ["InternLM2ForRewardModel"]}


@cases({"config.json": [
    ("", {"hidden_size": "16"}, {"vocab_size": None}, {"num_hidden_layers": [1]}, {"head_dim": 0},
     {"architectures": "x"}, {"architectures": [5]}, {"architectures": None}, {"num_labels": -1},
     {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, {"model_type": 5}, DEEP,
     {"score": "likelihood"}, {"score": "likelihood", "hidden_size": 10**9}, INTERNLM2,
     INTERNLM2 | {"hidden_size": 10**9}, INTERNLM2 | {"num_attention_heads": 0}),
    # asks for more than is there
    *((f"{name} fits files", {name: 10**9})
      for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_labels")),
    *((f"{name} code", {name: "somebody/kernel"})
      for name in ("attn_implementation", "_attn_implementation")),
], "model.safetensors": [("", bytes(9), lambda data: data[:2000]), ("NaN", ending(NAN))],
   "chat_template.jinja": [("", "", "{{ 1/0 }}")], "pytorch_model.bin": [("", Canary)]})
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
    edit(reward / "tokenizer_config.json", added_tokens_decoder={"x": 5})
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
    ("--max_steps", ["1e99", str(10**30), "nan", "-1", "", "٣" * 20]),
    ("--num_generations", [str(10**30), "7" * 5000]), ("--seed", [str(10**30)]),
    ("--num_workers", ["1000000"]), ("--learning_rate", ["inf", "nan", "1e99", "0", ""]),
    ("--reward_weights", ["nan", "inf", "-inf", "1e7"]), ("--delta", ["nan", "inf"]),
    ("--eval_threshold", ["nan", "-inf"]), ("--reward_timeout", ["inf"]),
    ("--run_name", ["", ".", "..", "../x", "/tmp/x", "a/b", "a/", "a\x1b[2J", "a\nb", "\ud800"]),
])
def test_a_flag_that_is_out_of_bounds(flag, values, capsys, tmp_path):
    for value in values:
        assert flag in fails(capsys, "--out_dir", str(tmp_path), f"{flag}={value}")
    assert not list(tmp_path.iterdir())


@parametrize("content, words", [
    (b"\xff", "@self"), (b"--run_name 'a", "@self quotes"), (b"--run_name ../x", "--run_name"),
    (b"@self", "@self"), (b"--no_such_flag", "--no_such_flag"),
])
def test_a_broken_file_of_flags(content, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("self").write_bytes(content)
    line = fails(capsys, "@self")
    assert all(word in line for word in words.split()), line
    assert [path.name for path in tmp_path.iterdir()] == ["self"]


@parametrize("make", [lambda path: None, Path.mkdir])
def test_a_file_of_flags_that_is_none(make, capsys, tmp_path):
    make(tmp_path / "flags")
    assert f"@{tmp_path}/flags" in fails(capsys, f"@{tmp_path}/flags")


def test_out_dir_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").write_text("precious")
    assert "--out_dir" in fails(capsys, "--out_dir", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "precious"


@cases({"config.json": [("config.json", DEEP, b"[]")],
        "model.safetensors": [("model.safetensors", bytes(9))],
        "tokenizer.json": [("no tokenizer", b"{}"), ("know 284", too_many_tokens)],
        "chat_template.jinja": [
            ("template", "{{ 1/0 }}", "{{ 1 / (messages[0].content | length - 3) }}x")],
        "data.jsonl": [("data.jsonl, line 1", b'{"prompt": "\\ud800"}', DEEP), ("no prompts", b""),
                       ("self is reserved", b'{"prompt": "a", "self": 1}')]})
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
    assert fold(HOSTILE, 80) == printable(HOSTILE)


def test_a_users_error_is_one_line_that_cannot_spoof(capsys):
    @user_errors("some.py")
    def main():
        raise UserError(f"a reward said:\n{HOSTILE}")

    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == f"some.py: error: a reward said: {printable(HOSTILE)}\n"


def test_lines_of_json_cannot_spoof_either_and_read_back_the_same(tmp_path):
    row = {"step": 1, "completion": HOSTILE + FRIENDLY, HOSTILE: 1}
    line = to_line(row)
    assert printable(line) == line and "小明" in line and "🙂" in line
    (tmp_path / "some.jsonl").write_text(line, encoding="utf-8")
    assert read_jsonl(tmp_path / "some.jsonl") == [row] == [json.loads(line)]


def test_a_run_writes_and_tracks_hostile_completions_safely(tmp_path):
    report, texts = Report(tmp_path, None, total_steps=1), []
    report.swanlab = SimpleNamespace(
        Text=lambda text, caption: texts.append(text), log=lambda *_, **__: None)
    row = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0, "advantage": 0.0, "rewards": {}}
    report.group(1, [row])
    assert texts == [printable(f"{HOSTILE}\n\n{HOSTILE}")]


def test_a_streamed_reply_is_shown_with_dots(monkeypatch, capsys):
    turns = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    monkeypatch.setattr(chat, "stream", lambda *_, **__: iter(["a\x1b[2J", "小明\n"]))
    chat.chat(None, None)
    assert capsys.readouterr().out == "a·[2J小明\n\n"
