"""Opens files that a stranger may have written: json, tensors, chat templates, config.json.

Such a file must never run code, fill the memory or end in a traceback. Whatever is wrong with it
becomes one UserError, a sentence: where, what is wrong, what to do.

config.json becomes a MiniMindConfig, and what no such model has, or model/model.py lacks, is
refused. transformers' own AutoConfig accepts sizes below 0 and NaN, and already takes memory for as
many layers as the file asks for.
"""
import json
import reprlib
import signal
import threading
import zipfile
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from jinja2 import Environment
from safetensors.torch import load_file

from report import UserError, printable, reason

from ..model import MiniMindConfig

MAX_JSON = 64 * 2**20           # bytes; the largest index files have a few
MAX_SECONDS = 10                # for a template to write a chat of one word
MAX_CHARACTERS = 100_000        # in what it writes; some begin with pages of instructions
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# model_type in config.json -> (class in transformers, our switches that build it, its own defaults
# for fields that config.json leaves out)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False}, {}),
    # Whatever its attention_bias says, q, k and v always have biases (qkv_bias), the output none.
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True, "attention_bias": False},
              {}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False},
              {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False},
                  {"num_experts_per_tok": 8, "moe_intermediate_size": 768,
                   "norm_topk_prob": False}),
}
ROPE_FIELDS = {     # rope_type -> what it needs
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}


@contextmanager
def explained(path, what, advice):
    """Turns any exception into that sentence: the path, what is wrong, the reason, the advice.

    A parser raises dozens of classes for a broken file, from KeyError to RecursionError, so it
    catches them all. A UserError that begins with the path is such a sentence already.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and str(error).startswith(str(path)):
            raise
        raise UserError(f"{path}: {what} ({reason(error)}); {advice}") from error


def read_json(path):
    """The object in a json file, as a dict."""
    path = Path(path)
    if not path.is_file():      # nor a pipe, which might never end
        raise UserError(f"{path}: no such file; copy it there")
    with explained(path, "not JSON", "download it again"):
        if path.stat().st_size > MAX_JSON:
            raise OverflowError(f"it has more than {MAX_JSON:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object, in braces; download it again")
    return content


def read_tensors(path):
    """The tensors of a safetensors file, or of one that torch.save wrote, by name.

    From a pickle torch builds tensors and plain containers, and refuses everything else. The
    tensors are the file itself, mapped, so that the ranks of a machine share one copy of it: copy
    those that you keep, since the disk can't drop the file before.
    """
    with explained(path, "truncated, a git-lfs pointer, or something other than tensors",
                   "download it again"):
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_stored(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("it does not hold tensors by name")
        return state


def is_stored(path):
    """Whether a file has its tensors byte by byte: torch's zip, unless it was compressed later."""
    if not zipfile.is_zipfile(path):        # torch.save's older format
        return False
    with zipfile.ZipFile(path) as file:
        return all(part.compress_type == zipfile.ZIP_STORED for part in file.infolist())


def check_tensors(state, path):
    """Raise UserError, naming a tensor, for one that cannot be a weight."""
    for name, tensor in state.items():
        with explained(path, f"{printable(name)} is no weight", "download it again"):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise TypeError(f"it is {kind}; weights are floating-point tensors")
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise TypeError("its shape is larger than its data")    # a few bytes, expanded
            # NaN and infinity both show in the extremes, which take a thirtieth of isfinite's time.
            if not all(extreme.isfinite() for extreme in tensor.aminmax()):
                raise ValueError("it has NaN or infinite values")


def check_promises(saved, folder):
    """UserError for a config.json that asks for more than is in the folder.

    transformers would take memory for tensors that are not there, and download and run an
    implementation of attention that has a hub id.
    """
    for name, value in saved.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise UserError(f"its {name} is code from elsewhere")
    size = sum(file.stat().st_size for file in folder.iterdir())
    width = saved.get("hidden_size") or 1
    for name in ("vocab_size", "intermediate_size", "num_hidden_layers", "num_labels"):
        count = saved.get(name) or 1
        if type(width) is not int or type(count) is not int or width * count > size:
            raise UserError(f"its {name} or its hidden_size is no number that fits its files")
    if isinstance(saved.get("text_config"), dict):      # of a model that also sees
        check_promises(saved["text_config"], folder)


def check_template(tokenizer, path, advice):
    """Raise UserError unless the chat template writes a chat of one word as a short text.

    A template is a program. transformers runs it in Jinja's sandbox, from where it reaches neither
    files nor Python's insides, but it may still fail, loop or write gigabytes.
    """
    chat = [{"role": "user", "content": "a"}]
    with explained(path, "its chat template fails on a chat of one word", advice):
        tokens = Environment().lex(tokenizer.get_chat_template())
        if any((kind, text) == ("operator", "**") for _, kind, text in tokens):
            raise ValueError("it computes a power")     # 9**9**9**9, which no alarm interrupts
        with time_limit(MAX_SECONDS):
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS or not text.strip():
            raise ValueError(f"it writes {len(text):,} characters")
        tokenizer(text, add_special_tokens=False)


@contextmanager
def time_limit(seconds):
    """TimeoutError after so many seconds. On Windows and in threads, where no alarm rings, none."""
    def stop(*_):
        raise TimeoutError(f"more than {seconds} seconds")

    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def read_config(path):
    """The folder's config.json as a MiniMindConfig; UserError naming the field at fault."""
    path = Path(path) / "config.json"
    with explained(path, "a field is wrong", "download the file again"):
        saved = read_json(path)
        if saved.get("model_type") not in FAMILIES:
            raise UserError(f"{path}: model/model.py does not build model_type "
                            f"{reprlib.repr(saved.get('model_type'))}; choose weights with one of "
                            f"{', '.join(FAMILIES)}")
        _, switches, defaults = FAMILIES[saved["model_type"]]
        # A field left out has the default of transformers, which differs from MiniMindConfig's.
        saved = without_nulls({"tie_word_embeddings": False} | defaults | saved)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads"):
            check_field(name, saved.get(name), int, path)
        heads, experts = saved["num_attention_heads"], saved.get("num_local_experts", 0)
        saved = {"head_dim": saved["hidden_size"] // heads, "num_key_value_heads": heads,
                 "num_experts": experts} | saved | switches | read_rope(saved, path)
        return check_fields(MiniMindConfig(**{field.name: saved[field.name] for field in
                                              fields(MiniMindConfig) if field.name in saved}), path)


def without_nulls(content):
    return {name: value for name, value in content.items() if value is not None}


def read_rope(saved, path):
    """rope_theta and rope_scaling, as transformers 4 writes them; 5 has both in rope_parameters."""
    parameters = saved.get("rope_parameters") or {}
    rope = without_nulls(saved.get("rope_scaling") or parameters)
    kind = rope.get("rope_type") or rope.get("type", "default")
    found = saved | without_nulls(parameters) | rope | {"rope_type": kind}
    check_is_built(found, path)
    found.setdefault("original_max_position_embeddings", saved.get("max_position_embeddings", 2048))
    scaling = {name: found.get(name) for name in ROPE_FIELDS[kind]}
    for name, value in scaling.items():
        check_field(name, value, float, path)
    return {"rope_theta": found.get("rope_theta", 10000.0),
            "rope_scaling": {"rope_type": kind} | scaling if scaling else None}


def check_is_built(saved, path):
    """UserError for an option that model/model.py lacks: without it the numbers would be others."""
    first_sliding = 0 if saved["model_type"] == "qwen3_moe" else saved.get("max_window_layers", 28)
    refused = {
        "rope_type": saved["rope_type"] not in ROPE_FIELDS,
        "use_sliding_window": (saved.get("use_sliding_window")
                               and first_sliding < saved["num_hidden_layers"]),
        "layer_types": set(saved.get("layer_types", [])) - {"full_attention"},
        "partial_rotary_factor": saved.get("partial_rotary_factor", 1) != 1,
        "hidden_act": saved.get("hidden_act", "silu") not in ("silu", "swish"),
        **{name: saved.get(name) for name in (
            "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping",
            "quantization_config", "per_layer_config")},
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UserError(f"{path}: model/model.py does not build {name} "
                            f"{reprlib.repr(saved[name])}; choose weights without it")


def check_fields(config, path):
    """The config itself; UserError, naming a field, if one has a wrong type or is out of range."""
    for field in fields(config):
        check_field(field.name, getattr(config, field.name), field.type, path)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    experts, chosen = config.num_experts, config.num_experts_per_tok
    scaling = config.rope_scaling or {}
    for is_wrong, what in (
        (heads % kv_heads,
         f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"),
        (config.head_dim % 2, f"head_dim {config.head_dim} is odd, and rotation needs pairs"),
        (0 < experts < chosen, f"num_experts_per_tok {chosen} is more than num_experts {experts}"),
        (scaling.get("low_freq_factor", 0) >= scaling.get("high_freq_factor", 1),
         "low_freq_factor must be below high_freq_factor"),
    ):
        if is_wrong:
            raise UserError(f"{path}: {what}; download the file again")
    return config


def check_field(name, value, kind, path):
    """Raise UserError unless the value is of this kind, a field's type in MiniMindConfig."""
    def whole(least, *numbers):
        return all(type(number) is int and least <= number < 2**31 for number in numbers)

    least, items = int(name != "num_experts"), value if isinstance(value, list) else [value]
    fits, wanted = {
        bool: (isinstance(value, bool), "true or false"),
        int: (whole(least, value), f"a whole number from {least} to {2**31 - 1:,}"),
        float: (type(value) in (int, float) and 0 < value < 1e30, "a number above 0"),
        list[int]: (items is value and whole(0, *items), "a list of whole numbers"),
        dict | None: (value is None or isinstance(value, dict), "an object"),
        int | None: (value is None or whole(-1, value), "a token id"),
        int | list[int] | None: (value is None or whole(-1, *items),
                                 "a token id, or a list of them"),
    }[kind]
    if not fits:
        raise UserError(f"{path}: {name} is {reprlib.repr(value)}, and must be {wanted}; "
                        "download the file again")


def eos_token_ids(model, tokenizer):
    """Every id that ends a reply, sorted. Each of the places has none, one, or a list of them."""
    places = (tokenizer.eos_token_id, model.config.eos_token_id,
              model.generation_config.get("eos_token_id"))
    return sorted({eos for place in places if place is not None
                   for eos in (place if isinstance(place, list) else [place])})
