"""Opens files that a stranger may have written: json, tensors, config.json.

Code that comes with weights never runs. Any other file that a library refuses ends in one
sentence, which `explained` makes: where, what could not be read, the library's reason, what to do.

transformers reads config.json. What model/model.py builds of it becomes a MiniMindConfig; the rest
is for any_model.py.
"""
import json
import zipfile
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from errors import UserError, explained

from ..model import MiniMindConfig

# model_type in config.json -> (class in transformers, our switches that build it)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False, "num_experts": 0}),
    # Whatever its attention_bias says, q, k and v always have biases (qkv_bias), the output none.
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True, "attention_bias": False,
                                   "num_experts": 0}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False, "num_experts": 0}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False}),
}
ROPE_FIELDS = {     # rope_type -> what it needs
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}


AGAIN = "download it again"


def read_json(path, advice=AGAIN):
    """The object in a json file, as a dict."""
    if not Path(path).exists():
        raise UserError(f"{path}: no such file; {advice}")
    with explained(path, "not a JSON object", advice):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def read_tensors(path):
    """The tensors of a safetensors file, or of one that torch.save wrote, by name.

    From a pickle torch builds tensors and plain containers, nothing else. The tensors are the file
    itself, mapped, so that the ranks of a machine share one copy of it: copy those that you keep.
    """
    with explained(path, "truncated, a git-lfs pointer, or something other than tensors", AGAIN):
        if path.suffix == ".safetensors":
            return load_file(path)
        # Before version 1.6 torch wrote no zip, and such a file can't be mapped.
        return dict(torch.load(path, map_location="cpu", weights_only=True,
                               mmap=zipfile.is_zipfile(path)))


def refuse_code(saved, path):
    """UserError if a config.json, as a dict, names code that transformers would download and run.

    Remote classes need trust_remote_code, which we never give. But an implementation of attention
    with a hub id, such as somebody/kernel, needs none.
    """
    for name, value in saved.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise UserError(f"{path}: its {name} is code from elsewhere; choose other weights, or "
                            "remove the field")
        if isinstance(value, dict):         # text_config, of a model that also sees
            refuse_code(value, path)


def read_hub_config(path):
    """The folder's config.json as a configuration of transformers."""
    file = Path(path) / "config.json"
    if not file.exists():
        raise UserError(f"{path}: no config.json there; give a folder with config.json and "
                        "model.safetensors, a hub id like Qwen/Qwen3-0.6B, or a MiniMind .pth file")
    saved = read_json(file)
    refuse_code(saved, file)
    if saved.get("quantization_config"):
        raise UserError(f"{file}: its weights are quantized (quantization_config), and can't be "
                        "trained; choose those that are not")
    with explained(file, "transformers can't read it", "choose other weights"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def unbuilt(config):
    """What model/model.py lacks for a configuration of transformers, in words; "" if nothing."""
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type}"
    rope = config.rope_parameters
    options = {         # name -> its value, and those that are built
        "hidden_act": (config.hidden_act, "silu", "swish"),
        "rope_type": (rope["rope_type"], *ROPE_FIELDS),
        "partial_rotary_factor": (rope.get("partial_rotary_factor"), None, 1.0),
        "mlp_bias": (getattr(config, "mlp_bias", False), False),
        "sliding_window": (getattr(config, "sliding_window", None), None),
    }
    for name, (value, *built) in options.items():
        if value not in built:
            return f"{name} {value}"
    return ""


def read_config(path):
    """The folder's config.json as a MiniMindConfig; UserError if model/model.py lacks an option."""
    file, config = Path(path) / "config.json", read_hub_config(path)
    with explained(file, "a field is wrong", AGAIN):
        lacking = unbuilt(config)
        if lacking:
            raise UserError(f"{file}: model/model.py does not build {lacking}; choose weights "
                            f"without it, of one of the families {', '.join(FAMILIES)}")
        _, switches = FAMILIES[config.model_type]
        rope = config.rope_parameters
        scaling = {name: rope[name] for name in ROPE_FIELDS[rope["rope_type"]]}
        found = {field.name: getattr(config, field.name) for field in fields(MiniMindConfig)
                 if hasattr(config, field.name)}
        found["head_dim"] = (getattr(config, "head_dim", None)
                             or config.hidden_size // config.num_attention_heads)
        found["rope_theta"] = rope["rope_theta"]
        found["rope_scaling"] = {"rope_type": rope["rope_type"], **scaling} if scaling else None
        return MiniMindConfig(**found | switches)


def as_ids(value):
    """The ids in a field that has none, one, or a list of them."""
    if isinstance(value, list):
        return [int(item) for item in value]
    return [] if value is None else [int(value)]


def eos_token_ids(model, tokenizer):
    """Every id that ends a reply, sorted."""
    places = (tokenizer.eos_token_id, model.config.eos_token_id,
              model.generation_config.get("eos_token_id"))
    return sorted({eos for place in places for eos in as_ids(place)})
