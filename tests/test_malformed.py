"""Files that a stranger wrote: each is read, or refused in one sentence, and none runs code."""
import copy
import io
import itertools
import os
import pickle
import re
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dataset import PromptCollator
from errors import UserError, printable
from model import load
from model.load import load_pretrained, load_tokenizer
from model.lora import adapter_state, with_adapters
from model.save import save_adapter, save_pretrained
from reward import load_reward_model
from run.checkpoint import load_adapter, load_checkpoint, save_checkpoint
from support import edit

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
GIT_LFS = b"version https://git-lfs.github.com/spec/v1"
DEEP = b'{"a":' + b"[" * 100_000


class Canary:
    """As a pickle: a command that leaves a file, a canary, in the folder."""

    def __init__(self, folder):
        self.command = f"touch {folder}/canary"

    def __reduce__(self):
        return os.system, (self.command,)


def refused(folder, function, *arguments, words=""):
    """The function ends in one sentence with these words, and no code in the folder runs."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000 and printable(message) == message, message
    assert str(folder) in message and all(word in message for word in words.split()), message
    assert not (folder / "canary").exists()


def damage(file, change):
    """Change fields of a JSON file, or write text, bytes, a function of the bytes, a command."""
    if isinstance(change, dict):
        edit(file, **change)
    elif change is Canary:
        file.write_bytes(pickle.dumps(Canary(file.parent)))
    else:
        file.write_bytes(change(file.read_bytes()) if callable(change) else change)


def cases(damages):
    """Parametrizes by {a file's name: [(words of its refusal, one damage or several), ...]}."""
    return pytest.mark.parametrize("name, change, words", [
        (name, change, words) for name, rows in damages.items()
        for words, *changes in rows for change in changes], ids=itertools.count())


# --- weights --------------------------------------------------------------------------------------


@pytest.fixture
def weights(tiny_policy, tmp_path):
    """A valid folder, to be damaged."""
    save_pretrained(tiny_policy[1], tiny_policy[0], tmp_path / "weights")
    return tmp_path / "weights"


@cases({"config.json": [
    ("config.json", b"", b"\xff\xfe{}", DEEP, {"hidden_size": "32"}),
    ("config.json code", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
    ("attn_implementation elsewhere",
     {"text_config": {"attn_implementation": {"": "somebody/kernel"}}}),
    ("quantized", {"quantization_config": {"quant_method": "fp8"}}),
    # a tensor that is missing, unexpected, of another shape
    ("model.layers.2.", {"num_hidden_layers": 3}), ("model.layers.1.", {"num_hidden_layers": 1}),
    ("model.layers.0.mlp.gate_proj.weight", {"intermediate_size": 40}),
], "generation_config.json": [("generation_config.json", b"{", {"eos_token_id": "two"})],
    "model.safetensors": [("model.safetensors", b"", Canary, GIT_LFS, lambda data: data[:-1])],
})
def test_broken_weights_are_refused_by_the_field_or_tensor_at_fault(name, change, words, weights):
    (weights / "mine.py").write_text(f"open('{weights}/canary', 'w')")
    damage(weights / name, change)
    refused(weights, load_pretrained, weights, words=words)


def by_torch(content, **options):
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "some.pth"])
def test_a_hostile_pickle_is_refused_and_runs_nothing(name, weights):
    canary, state = Canary(weights), load_file(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    for content in (b"", GIT_LFS, by_torch(state)[:20_000], pickle.dumps(canary), by_torch(canary),
                    by_torch(state | {"a": canary}), by_torch([1]), by_torch(dict.fromkeys(state)),
                    by_torch({"a": canary}, _use_new_zipfile_serialization=False)):
        (weights / name).write_bytes(content)
        refused(weights, load_pretrained, weights / name if name == "some.pth" else weights)


def moments(policy, optimizer):
    return by_torch(get_optimizer_state_dict(policy, optimizer)["state"])


def test_a_checkpoint_may_be_replaced_while_it_is_read_and_a_broken_one_is_one_sentence(
        tiny_policy, tmp_path):
    tokenizer, policy = tiny_policy
    optimizer, another = (torch.optim.AdamW(policy.parameters()) for _ in range(2))
    for parameter in policy.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    save_checkpoint(tmp_path / "checkpoint", policy, tokenizer,
                    get_optimizer_state_dict(policy, optimizer), step=1, num_tokens=2, reads={})
    file, expected = tmp_path / "checkpoint/optimizer.pt", moments(policy, optimizer)
    mapped = load.read_tensors(file)
    optimizer.step()
    save_checkpoint(tmp_path / "checkpoint", policy, tokenizer,
                    get_optimizer_state_dict(policy, optimizer), step=9, num_tokens=8, reads={})
    assert by_torch(mapped["optimizer"]["state"]) == expected != moments(policy, optimizer)
    optimizer.zero_grad()
    assert load_checkpoint(tmp_path / "checkpoint", policy, another) == (9, 8)
    assert moments(policy, another) == moments(policy, optimizer)
    for words, content in (("optimizer.pt", b""), ("optimizer.pt", Canary),
                           ("--resume", by_torch({"optimizer": {}, "step": "x"}))):
        damage(file, content)
        refused(file.parent, load_checkpoint, file.parent, policy, optimizer, words=words)


@cases({"adapter_model.safetensors": [("or not tensors", Canary)]})
def test_a_hostile_adapter(name, change, words, tiny_policy, tmp_path):
    policy = with_adapters(copy.deepcopy(tiny_policy[1]), rank=2, alpha=4)
    save_adapter(policy, tmp_path)
    load_adapter(policy, tmp_path)
    damage(tmp_path / name, change)
    before = by_torch(adapter_state(policy))
    refused(tmp_path, load_adapter, policy, tmp_path, words=words)
    assert by_torch(adapter_state(policy)) == before


# --- tokenizers and chat templates ----------------------------------------------------------------


def too_many_tokens(data):
    """A damage to tokenizer.json: the EOS is beyond the embedding, though the tokens are few."""
    data = re.sub(rb'"<\|im_end\|>": \d+', b'"<|im_end|>": 10000', data)
    return re.sub(rb'"id": \d+,(\s+"content": "<\|im_end\|>")', rb'"id": 10000,\1', data)


@cases({"tokenizer.json": [
    ("no tokenizer", b"", DEEP), ("<|im_end|> 512 --tokenizer_path", too_many_tokens),
], "tokenizer_config.json": [("no tokenizer", b"["), ("no chat template", b"{}")]})
def test_a_broken_tokenizer_is_refused(name, change, words, weights):
    damage(weights / name, change)
    if name == "tokenizer_config.json":     # where an old one has its template
        (weights / "chat_template.jinja").unlink()
    refused(weights, load_tokenizer, weights, 512, words=words)
    for file in weights.glob("tokenizer*"):
        file.unlink()
    refused(weights, load_tokenizer, weights, 512, words="no tokenizer could be read there")


def test_a_tokenizers_own_code_is_not_run_nor_asked_about(weights, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked a question"))
    (weights / "mine.py").write_text(f"open('{weights}/canary', 'w')")
    edit(weights / "tokenizer_config.json", tokenizer_class="Mine",
         auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
    with suppress(UserError):
        load_tokenizer(weights, 512)
    assert not (weights / "canary").exists()


@pytest.mark.parametrize("template", [
    "{{ 1 / (messages[0].content | length - 4) }}",
    "{{ cycler.__init__.__globals__.os.system('exit') }}"])
def test_a_template_that_fails_is_one_sentence(template, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(UserError, match="chat template") as error:
        PromptCollator(other, 66).render([{"role": "user", "content": "2+3?"}])
    assert "\n" not in str(error.value)


# --- reward models --------------------------------------------------------------------------------


@cases({"config.json": [
    ("", {"hidden_size": "16"}, {"num_labels": 3},
     {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
    ("code", {"attn_implementation": "somebody/kernel"})],
        "model.safetensors": [("", bytes(9))], "pytorch_model.bin": [("", Canary)]})
def test_a_broken_reward_model(name, change, words, weights):
    edit(weights / "config.json", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    state = load_file(weights / "model.safetensors") | {"score.weight": torch.ones(1, 32)}
    save_file(state, weights / "model.safetensors", {"format": "pt"})
    load_reward_model(weights)
    damage(weights / name, change)
    if name == "pytorch_model.bin":         # read only if there is no better one
        (weights / "model.safetensors").unlink()
    refused(weights, load_reward_model, weights, words=words)


# --- what is shown --------------------------------------------------------------------------------

def test_hostile_text_reaches_a_terminal_only_as_dots():
    hostile = "red \x1b[31m\x9b2J\r\x07 \u202etxt.exe\u2066 \ud800\u2028 \x7f end"
    assert printable(hostile) == "red ·[31m·2J·· ·txt.exe· ·· · end"
    friendly = "小明　有3个🙂 naïve\n\té 👨\u200d👩"
    assert printable(friendly) == friendly
