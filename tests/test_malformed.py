"""Files that a stranger wrote: each is read, or refused in one sentence, and none runs code.

Most are made from a valid file by one change: a list of nasty ones, and many drawn from a seed.
"""
import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import SecurityError, UndefinedError
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import train_grpo
from conftest import Canary, edit
from dataset import PromptCollator, PromptDataset, prompts
from model import (
    chat,
    load_checkpoint,
    load_pretrained,
    load_tokenizer,
    save_checkpoint,
    save_pretrained,
)
from model.storage import files
from model.storage.tokenizer import read_chats
from report import Report, UserError, user_errors
from report.text import fold, printable, read_jsonl, to_line
from reward import load_reward_model
from reward.train_reward_model import read_pairs

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:Detected pickle", "ignore:Initializing zero")]
DEEP, DIGITS = b'{"a":' + b"[" * 100_000, b'{"a": ' + b"7" * 5000 + b"}"
BROKEN_JSON = [b"", b"{", b"[]", b"null", b"5", b'"text"', b"\xff\xfe{}", b"<html>", DEEP, DIGITS,
               b"\x00" * 20, b'{"a": "\xff"}', b"[" * 5]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(folder, function, *arguments):
    """The sentence that the function ends in, or None if it returns; the folder stays as it is.

    Any other exception fails the test, and so does half a minute of silence.
    """
    def too_long(*_):
        pytest.fail("it hangs")

    before, signal_before = contents(folder), signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    try:
        function(*arguments)
        message = None
    except ValueError as error:
        message = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal_before)
    assert contents(folder) == before       # and no canary
    if message is not None:
        assert "\n" not in message and len(message) < 1000, message
        assert printable(message) == message
        assert str(folder) in message, message
        assert "Re-running" not in message      # torch's advice: to trust the file
    return message


def refused(folder, function, *arguments, words=""):
    message = refusal(folder, function, *arguments)
    assert message is not None, "it was accepted"
    assert all(word in message for word in words.split()), message


# --- weights --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny_policy, tmp_path_factory):
    tokenizer, policy = tiny_policy
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(policy, tokenizer, folder)
    (folder / "optimizer.pt").write_bytes(b"")
    return folder


@pytest.fixture
def weights(saved, tmp_path):
    """A folder of its own, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "weights"))


VALUES = [-1, 0, 10**9, 10**30, 1e308, float("nan"), float("inf"), None, True, "7", "\x1b[31m", [],
          [1], {}, {"rope_type": "linear"}, {"a": {"b": [1]}}, 2.5, "a" * 10_000]
FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
          "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta",
          "rope_scaling", "rope_parameters", "max_position_embeddings", "tie_word_embeddings",
          "attention_bias", "num_experts", "mlp_only_layers", "decoder_sparse_step", "model_type",
          "eos_token_id", "pad_token_id", "layer_types", "use_sliding_window", "hidden_act",
          "partial_rotary_factor", "initializer_range"]
SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "head_dim"]


@pytest.mark.parametrize("number", range(0, len(FIELDS) * len(VALUES), 4))
def test_a_wrong_value_in_config_json(number, weights):
    field, value = FIELDS[number % len(FIELDS)], VALUES[number // len(FIELDS)]
    edit(weights / "config.json", **{field: value})
    refusal(weights, load_pretrained, weights)


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [-1, 0, 10**9, 10**30, float("nan"), "7", [1], {"a": 1}, True])
def test_a_wrong_size_in_config_json_is_refused(field, value, weights):
    edit(weights / "config.json", **{field: value})
    refused(weights, load_pretrained, weights)


@pytest.mark.parametrize("changes, words", [
    ({"num_attention_heads": 3}, "num_attention_heads num_key_value_heads"),
    ({"head_dim": 7}, "head_dim odd"), ({"hidden_size": None}, "hidden_size"),
    ({"eos_token_id": "2"}, "eos_token_id '2'"), ({"eos_token_id": [2, "3"]}, "eos_token_id"),
    ({"pad_token_id": True}, "pad_token_id True"),
    ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2'"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor nan"),
    ({"rope_scaling": {"type": ["linear"]}}, "config.json"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "'dynamic'"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                       "high_freq_factor": 4}}, "low_freq_factor high_freq_factor"),
    ({"model_type": ["qwen3"]}, "config.json"), ({"model_type": "mamba"}, "'mamba'"),
    ({"model_type": "\x1b]0;spoofed\x07"}, "config.json"),
    ({"model_type": "qwen3_moe", "num_experts": 10**8}, "num_experts"),
    ({"model_type": "qwen3_moe", "num_experts": 1}, "num_experts_per_tok"),
    # what model/model.py does not build
    ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"), ({"mlp_bias": True}, "mlp_bias"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    # a tensor that is missing, unexpected, of another shape
    ({"num_hidden_layers": 3}, "model.layers.2."), ({"num_hidden_layers": 1}, "model.layers.1."),
    ({"intermediate_size": 40}, "model.layers.0.mlp.down_proj.weight"),
    ({"model_type": "llama"}, "model.layers.0.self_attn.k_norm.weight"),
])
def test_config_json_is_refused_by_the_field_or_tensor_at_fault(changes, words, weights):
    edit(weights / "config.json", **changes)
    refused(weights, load_pretrained, weights, words=words)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", BROKEN_JSON, ids=range(len(BROKEN_JSON)))
def test_a_file_that_is_not_a_json_object(name, content, weights):
    (weights / name).write_bytes(content)
    refused(weights, load_pretrained, weights, words=name)


def mutated(data, rng):
    """The bytes with a piece removed, repeated or replaced, once or a few times."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(data))
        end = start + rng.choice((1, 2, 7))
        piece = rng.choice((b"", data[start:end] * 2, rng.randbytes(2), b'"', b"{", b"\\ud800",
                            b"9" * 50, b"-", b"null", b"\x1b", b"e99", b"\n"))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("eos", ["2", [1, [2]], 10**30, {"a": 1}, 2.5])
def test_generation_config_json_with_eos_ids_that_are_none(eos, weights):
    edit(weights / "generation_config.json", eos_token_id=eos)
    refused(weights, load_pretrained, weights, words="generation_config.json eos_token_id")


def test_a_json_file_of_gigabytes_is_not_read(weights, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON", 100)
    refused(weights, load_pretrained, weights, words="config.json bytes")


@pytest.mark.parametrize("index", [
    {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../model.safetensors"}},
    {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": ""}}, {"weight_map": {"a": ".."}},
    {"weight_map": {"a": "missing.safetensors"}}, {"weight_map": {}}])
def test_an_index_that_is_wrong_or_leads_out_of_the_folder(index, weights):
    shutil.copy(weights / "model.safetensors", weights.parent)
    (weights / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(weights, load_pretrained, weights)


def with_header(change):
    """A damage to a safetensors file: `change` gets the header as a dict."""
    def damage(data):
        length, = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length:]
    return damage


NORM = "model.norm.weight"
HEADERS = {
    "longer than the file": lambda data: struct.pack("<Q", 2**40) + data[8:],
    "of gigantic length": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "too short": lambda data: struct.pack("<Q", 10) + data[8:],
    "no data": lambda data: data[:8],
    "nothing": lambda data: b"", "no tensors": lambda data: struct.pack("<Q", 2) + b"{}",
    "half": lambda data: data[:len(data) // 2], "a byte less": lambda data: data[:-1],
    "a git-lfs pointer": lambda data: b"version https://git-lfs.github.com/spec/v1",
    "a list": lambda data: struct.pack("<Q", 2) + b"[]" + data[8:],
    "deep": lambda data: struct.pack("<Q", 100_000) + b"[" * 100_000,
    "whole numbers": with_header(lambda h: h[NORM].update(dtype="I32")),
    "an unknown dtype": with_header(lambda h: h[NORM].update(dtype="F99")),
    "another dtype": with_header(lambda h: h[NORM].update(dtype="F64")),
    "a smaller dtype": with_header(lambda h: h[NORM].update(dtype="U8", shape=[128])),
    "offsets beyond": with_header(lambda h: h[NORM].update(data_offsets=[0, 10**12])),
    "offsets backwards": with_header(lambda h: h[NORM].update(data_offsets=[128, 0])),
    "negative offsets": with_header(lambda h: h[NORM].update(data_offsets=[-128, 0])),
    "overlapping": with_header(lambda h: h[NORM].update(data_offsets=[0, 128])),
    "a gigantic shape": with_header(lambda h: h[NORM].update(shape=[10**12])),
    "a negative shape": with_header(lambda h: h[NORM].update(shape=[-32])),
    "a shape of text": with_header(lambda h: h[NORM].update(shape="32")),
    "another name": with_header(lambda h: h.update({"\x1b[2Jname": h.pop(NORM)})),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_damaged_safetensors_header(kind, weights):
    file = weights / "model.safetensors"
    file.write_bytes(HEADERS[kind](file.read_bytes()))
    refused(weights, load_pretrained, weights)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "some.pth"])
def test_a_file_with_bytes_at_random(name, seed, weights):
    torch.save(load_file(weights / "model.safetensors"), weights / "some.pth")
    file, end = weights / name, None if name.endswith("json") else 3000     # not among the numbers
    data = file.read_bytes()
    file.write_bytes(mutated(data[:end], random.Random(seed)) + data[len(data[:end]):])
    refusal(weights, load_pretrained, file if name == "some.pth" else weights)
    refusal(weights, load_tokenizer, weights, 512)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_named(value, weights):
    state = load_file(weights / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(state, weights / "model.safetensors")
    refused(weights, load_pretrained, weights, words="model.layers.1.mlp.up_proj.weight NaN")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_and_a_pipe_or_a_folder_in_its_place_are_named(name, weights):
    (weights / name).unlink()
    refused(weights, load_pretrained, weights, words=name)
    os.mkfifo(weights / name)
    refused(weights, load_pretrained, weights, words=name)
    (weights / name).unlink()
    (weights / name).mkdir()
    refused(weights, load_pretrained, weights, words=name)


# --- pickles --------------------------------------------------------------------------------------


def by_torch(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def zipped(pickled):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3")
    return file.getvalue()


# What a file is -> its bytes, made of a model's tensors and a command.
PICKLES = {
    "a command": lambda state, canary: by_torch({NORM: canary}),
    "a command among weights": lambda state, canary: by_torch(state | {NORM: canary}),
    "a command in the old form": lambda state, canary: by_torch(
        {NORM: canary}, _use_new_zipfile_serialization=False),
    "a bare command": lambda state, canary: pickle.dumps(canary),
    "a command in a zip": lambda state, canary: zipped(pickle.dumps(canary, 2)),
    "a whole model": lambda state, canary: by_torch(torch.nn.Linear(2, 2)),
    "half a zip": lambda state, canary: by_torch(state)[:20_000],
    "the end of a zip": lambda state, canary: by_torch(state)[-5_000:],
    "nothing": lambda state, canary: b"",
    "zeros": lambda state, canary: b"\x00" * 1000,
    "a tar": lambda state, canary: b"a" * 257 + b"ustar" + b"\x00" * 600,
    "a list": lambda state, canary: by_torch([1]),
    "a tensor": lambda state, canary: by_torch(torch.ones(1)),
    "numbered": lambda state, canary: by_torch(dict(enumerate(state.values()))),
    "empty": lambda state, canary: by_torch({}),
    "text": lambda state, canary: by_torch({name: "a" for name in state}),
    "nested": lambda state, canary: by_torch({name: state for name in state}),
    "whole numbers": lambda state, canary: by_torch({n: t.long() for n, t in state.items()}),
    "expanded": lambda state, canary: by_torch(
        {name: torch.ones(1).expand(tensor.shape) for name, tensor in state.items()}),
    "scalars": lambda state, canary: by_torch({name: torch.tensor(1.0) for name in state}),
    "NaN": lambda state, canary: by_torch({n: t * float("nan") for n, t in state.items()}),
    "empty tensors": lambda state, canary: by_torch({name: torch.ones(0, 0) for name in state}),
    "sparse": lambda state, canary: by_torch({n: t.to_sparse() for n, t in state.items()}),
    "on no device": lambda state, canary: by_torch({n: t.to("meta") for n, t in state.items()}),
}


@pytest.mark.parametrize("kind", PICKLES)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "some.pth"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, kind, weights):
    state = load_file(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    (weights / name).write_bytes(PICKLES[kind](state, Canary(weights)))
    refused(weights, load_pretrained, weights / name if name == "some.pth" else weights)


def test_the_command_in_these_files_would_run_if_they_were_trusted(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path)))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("without", ["k_proj", "mlp.gate_proj", "layers.1."])
def test_a_pth_that_lacks_tensors(without, weights):
    state = load_file(weights / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if without not in name}
    torch.save(state, weights / "some.pth")
    message = refusal(weights, load_pretrained, weights / "some.pth")
    assert message or without == "layers.1."       # a MiniMind of one layer


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
    another = torch.optim.AdamW(policy.parameters())
    save_checkpoint(folder, policy, tokenizer, another.state_dict(), step=9, num_tokens=9)
    assert by_torch(mapped["optimizer"]) == expected
    os.replace(folder, tmp_path / "later")
    del mapped
    save_checkpoint(folder, policy, tokenizer, optimizer.state_dict(), step=1, num_tokens=2)
    assert load_checkpoint(folder, policy, optimizer) == (1, 2)
    assert by_torch(optimizer.state_dict()) == expected
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_broken_checkpoint_is_one_sentence(weights, tiny_policy):
    policy = tiny_policy[1]
    optimizer = torch.optim.AdamW(policy.parameters())
    for content in (b"", pickle.dumps(Canary(weights))):
        (weights / "optimizer.pt").write_bytes(content)
        refused(weights, load_checkpoint, weights, policy, optimizer, words="optimizer.pt")
    torch.save({"optimizer": {}, "step": "x"}, weights / "optimizer.pt")
    refused(weights, load_checkpoint, weights, policy, optimizer, words="--resume")


# --- tokenizers and chat templates ----------------------------------------------------------------


@pytest.mark.parametrize("name, content", [
    ("tokenizer.json", b""), ("tokenizer.json", b"{"), ("tokenizer.json", b"{}"),
    ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": 5, "merges": []}}'),
    ("tokenizer.json", b"\xff\x00"), ("tokenizer.json", DEEP),
    ("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]"),
    ("tokenizer_config.json", DEEP), ("tokenizer_config.json", b"\xff"),
    ("tokenizer_config.json", b'{"tokenizer_class": 5}'),
    ("tokenizer_config.json", b'{"chat_template": 5}'),
    ("chat_template.jinja", b"\xff\xfe"),
])
def test_a_broken_tokenizer_is_one_sentence(name, content, weights):
    if name == "tokenizer_config.json":
        (weights / "chat_template.jinja").unlink()
    (weights / name).write_bytes(content)
    refused(weights, load_tokenizer, weights, 512)


@pytest.mark.parametrize("tokenizer_class", ["Mine", "PreTrainedTokenizerFast"])
def test_a_tokenizers_own_code_is_not_run_nor_asked_about(tokenizer_class, weights, monkeypatch):
    def asked(*_):
        pytest.fail("it asked a question")

    monkeypatch.setattr("builtins.input", asked)
    (weights / "mine.py").write_text(f"import os\nos.system('touch {weights}/canary')\n")
    edit(weights / "tokenizer_config.json", tokenizer_class=tokenizer_class,
         auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"], "AutoConfig": "mine.Config"})
    edit(weights / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    refusal(weights, load_tokenizer, weights, 512)


def test_an_id_beyond_the_embedding_is_refused_though_the_tokens_are_few(weights):
    content = json.loads((weights / "tokenizer.json").read_text())
    content["model"]["vocab"]["!"] = 10_000
    (weights / "tokenizer.json").write_text(json.dumps(content))
    refused(weights, load_tokenizer, weights, 512, words="10001 512 --tokenizer_path")


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


def test_jinjas_sandbox_is_what_stops_a_template(tokenizer, tmp_path):
    for template in TEMPLATES[:8]:
        template = template.replace("CANARY", str(tmp_path / "canary"))
        with pytest.raises((SecurityError, UndefinedError)):
            tokenizer.apply_chat_template([LINE["conversations"][0]], chat_template=template,
                                          tokenize=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_hostile_chat_template_is_refused_and_runs_nothing(template, weights, monkeypatch):
    monkeypatch.setattr(files, "MAX_SECONDS", 0.3)
    template = template.replace("CANARY", str(weights / "canary"))
    (weights / "chat_template.jinja").write_text(template)
    refused(weights, load_tokenizer, weights, 512, words="chat template --tokenizer_path")


@pytest.mark.parametrize("template, words", [
    ("{{ messages[1].content }}", "['user']"), ("{{ 1 / (messages[0].content | length - 4) }}", ""),
    ("{{ '\\ud800' }}", "template"), (" ", "nothing"), ("{{ messages[0].x.y.z }}", "template")])
def test_a_template_that_fails_on_some_prompts_is_one_sentence(template, words, tokenizer):
    class Other:
        pad_token_id = 0

        def apply_chat_template(self, messages, **options):
            return type(tokenizer).apply_chat_template(
                tokenizer, messages, **options, chat_template=template)

    with pytest.raises(ValueError, match="chat template") as error:
        PromptCollator(Other(), 66).render([{"role": "user", "content": "2+3?"}])
    assert all(word in str(error.value) for word in words.split())
    assert "\n" not in str(error.value)


# --- data -----------------------------------------------------------------------------------------


LINE = {"conversations": [{"role": "user", "content": "小明 2+3?"}], "answer": "5", "level": [1]}
LINES = [
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
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
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
    with pytest.raises(ValueError, match="line 1"):
        read_pairs([file])


@pytest.mark.parametrize("read", [PromptDataset, read_chats, lambda path: read_pairs([path])])
def test_a_line_that_never_ends_and_what_is_no_file_at_all(read, tmp_path, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_LINE", 1000)
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'{"prompt": "' + b"a" * 5000)
    refused(tmp_path, read, file, words="line 1 1,000 bytes")
    file.unlink()
    for make in (Path.mkdir, os.mkfifo):
        make(file)
        refused(tmp_path, read, file, words="some.jsonl")
        file.rmdir() if file.is_dir() else file.unlink()
    for device in ("/dev/zero", "/dev/tty"):
        with pytest.raises(ValueError, match=device):
            read(device)


# --- reward models --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                         head_dim=8, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def reward(classifier, tmp_path):
    """A folder of its own, to be damaged."""
    return Path(shutil.copytree(classifier, tmp_path / "reward"))


INTERNLM2 = {"architectures": ["InternLM2ForRewardModel"]}


@pytest.mark.parametrize("changes, words", [(changes, "") for changes in [
    {"hidden_size": "16"}, {"vocab_size": None}, {"num_hidden_layers": [1]}, {"head_dim": 0},
    {"architectures": "x"}, {"architectures": [5]}, {"architectures": None}, {"num_labels": -1},
    {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, {"model_type": 5},
    {"score": "likelihood"}, {"score": "likelihood", "hidden_size": 10**9}, INTERNLM2,
    INTERNLM2 | {"hidden_size": 10**9}, INTERNLM2 | {"num_attention_heads": 0},
]] + [  # asks for more than is there
    ({"hidden_size": 10**9}, "fits its files"), ({"vocab_size": 10**9}, "vocab_size fits files"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers fits files"),
    ({"num_labels": 10**9}, "num_labels fits files"),
    ({"attn_implementation": "somebody/kernel"}, "attn_implementation code"),
    ({"_attn_implementation": "somebody/kernel"}, "_attn_implementation code"),
])
def test_a_reward_model_with_a_wrong_configuration(changes, words, reward):
    (reward / "mine.py").write_text(f"open('{reward}/canary', 'w')")
    edit(reward / "config.json", **changes)
    refused(reward, load_reward_model, reward, words=f"--reward_model_path {words}")


@pytest.mark.parametrize("name, content", [
    ("config.json", DEEP), ("model.safetensors", b"\x00" * 9), ("chat_template.jinja", b""),
    ("chat_template.jinja", b"{{ 1/0 }}")])
def test_a_reward_model_with_a_broken_file(name, content, reward):
    (reward / name).write_bytes(content)
    refused(reward, load_reward_model, reward, words="--reward_model_path")


def test_a_reward_model_of_nan_cut_off_or_with_a_command(reward):
    file = reward / "model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file,
              {"format": "pt"})
    refused(reward, load_reward_model, reward, words="--reward_model_path NaN")
    file.write_bytes(file.read_bytes()[:2000])
    refused(reward, load_reward_model, reward, words="--reward_model_path")
    file.unlink()
    (reward / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(reward)))
    refused(reward, load_reward_model, reward, words="--reward_model_path")


@pytest.mark.parametrize("pieces", [b"\xff" * 100, b""])
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
        line = fails(capsys, "--out_dir", str(tmp_path), f"{flag}={value}")
        assert flag in line and "\x1b" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content, words", [
    (b"\x7fELF\x00\x01\xff", "UTF-8"), (b"--seed 1\n--seed \x1b[2J", "line 2"),
    (b"--run_name 'a", "line 1 quotes"), (b"--run_name ../x", "--run_name"),
    (b"--reward_weights nan", "--reward_weights"), (b"@self", "@self"), (b"\xff", "UTF-8"),
    (b"--run_name a\xc2\x9bb", "line 1"), (b"--run_name \xe2\x80\xaea", "line 1"),
    (b"--seed 1\n" * 200_000, "too large"), (b"--no_such_flag", "--no_such_flag"),
])
def test_a_broken_file_of_flags(content, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("self").write_bytes(content)
    line = fails(capsys, "@self")
    assert all(word in line for word in words.split()), line
    assert [path.name for path in tmp_path.iterdir()] == ["self"]


def test_a_file_of_flags_that_is_none(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nowhere", "/dev/zero"):
        assert f"@{path}" in fails(capsys, f"@{path}")


def test_out_dir_that_is_a_file(capsys, tmp_path):
    (tmp_path / "out").write_text("precious")
    assert "--out_dir" in fails(capsys, "--out_dir", str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "precious"


@pytest.mark.parametrize("damage, words", [
    (("config.json", DEEP), "config.json"), (("config.json", b"[]"), "config.json"),
    (("model.safetensors", b"\x00" * 9), "model.safetensors"),
    (("tokenizer.json", b"{}"), "no tokenizer"),
    (("chat_template.jinja", b"{{ 1/0 }}"), "template"),
    (("data.jsonl", b'{"prompt": "\\ud800"}'), "data.jsonl, line 1"),
    (("data.jsonl", b'{"prompt": "a", "self": 1}'), "self is reserved"),
    (("data.jsonl", b""), "no prompts"), (("data.jsonl", DEEP), "data.jsonl, line 1"),
    (("chat_template.jinja", b"{{ 1 / (messages[0].content | length - 3) }}x"), "template"),
])
def test_a_run_on_a_broken_file_ends_in_a_sentence_and_writes_nothing(
        damage, words, weights, capsys, tmp_path):
    (weights / "data.jsonl").write_text('{"prompt": "aaa"}\n')
    (weights / damage[0]).write_bytes(damage[1])
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
    assert fold(HOSTILE, 80, 3) == [printable(HOSTILE)]


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
    class SwanLab:
        texts = []

        def Text(self, text, caption):
            self.texts.append(text)

        def log(self, *_, **__):
            pass

    report = Report(tmp_path, None, total_steps=1)
    row = {"prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0, "advantage": 0.0, "rewards": {}}
    report.swanlab = SwanLab()
    report.group(1, [row])
    assert SwanLab.texts == [printable(f"{HOSTILE}\n\n{HOSTILE}")]


def test_a_streamed_reply_is_shown_with_dots(monkeypatch, capsys):
    turns = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    monkeypatch.setattr(chat, "stream", lambda *_, **__: iter(["a\x1b[2J", "小明\n"]))
    chat.chat(None, None)
    assert capsys.readouterr().out == "a·[2J小明\n\n"
