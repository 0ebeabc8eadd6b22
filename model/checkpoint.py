"""Weights on disk, as transformers lays them out: a folder with config.json, model.safetensors, the tokenizer's files."""
import json
import shutil
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .model import MiniMindConfig, MiniMindForCausalLM

# model_type in config.json -> (transformers' class, what tells it from the others)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False}),
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False}),
}


def load_pretrained(path, *, dtype=None, device=None):
    """The model in a folder; dtype None keeps the type that the weights were saved in. ValueError if it can't be ours."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json there; give a folder that holds config.json and model.safetensors")
    model = MiniMindForCausalLM(read_config(path))
    state = read_weights(path)
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    load_state(model, state, path)
    return model.to(device=device, dtype=dtype or state["model.norm.weight"].dtype)


def load_state(model, state, path):
    """Puts the tensors into the model; ValueError names one that is missing, left over or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} should have shape {expected.get(wrong[0])} by config.json and has "
                         f"{found.get(wrong[0])} in the weights ({len(wrong)} such tensors); "
                         "the two files do not belong together")
    model.load_state_dict(state)


def read_weights(path):
    """All tensors of a folder, from one file or from the shards that an index lists."""
    index, files = path / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    state = {}
    for name in files:
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name} is missing; copy it next to config.json")
        state.update(load_file(path / name))
    return state


def read_config(path):
    """config.json as a MiniMindConfig, by transformers 4 (which writes rope_theta) or 5 (rope_parameters)."""
    saved = json.loads((Path(path) / "config.json").read_text())
    if saved.get("model_type") not in FAMILIES:
        raise ValueError(f"{path}/config.json: model_type {saved.get('model_type')!r} is none of {', '.join(FAMILIES)}, "
                         "the architectures that model/model.py builds; choose weights of one of these")
    rope = saved.get("rope_parameters") or saved.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"{path}/config.json: rope scaling {rope!r} is not supported; choose weights without it")
    saved.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    saved.setdefault("tie_word_embeddings", False)                                  # transformers' default, not ours
    saved.setdefault("num_experts", saved.get("num_local_experts", 0))              # two names for one number
    if saved.get("head_dim") is None:
        saved["head_dim"] = saved["hidden_size"] // saved["num_attention_heads"]
    saved.update(FAMILIES[saved["model_type"]][1])
    return MiniMindConfig(**{field.name: saved[field.name] for field in fields(MiniMindConfig) if field.name in saved})


def save_pretrained(model, tokenizer, path):
    """Writes a folder that load_pretrained, transformers and the serving stacks load."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(hub_config(model), indent=2) + "\n")
    save_tokenizer(tokenizer, path)


def save_tokenizer(tokenizer, path):
    """The tokenizer's files, under the class name that transformers 4 knows too: to 5 it is the same class."""
    tokenizer.save_pretrained(path)
    config = Path(path) / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    config.write_text(text, encoding="utf-8")


def hub_config(model):
    """What config.json holds: our fields under transformers' names, the rope base in its old and its new place."""
    ours = vars(model.config).copy()
    switches = {name: ours.pop(name) for name in ("qk_norm", "qkv_bias")}
    if model.config.num_experts:
        model_type = "qwen3_moe"
    else:
        model_type = next(kind for kind, (_, family) in FAMILIES.items() if family == switches)
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            del ours[name]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[model_type][0]],
        "model_type": model_type,
        **ours,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.config.rope_theta},
        "dtype": dtype,
        "torch_dtype": dtype,           # the same, by the name that transformers 4 looks for
    }


def save_checkpoint(folder, model, tokenizer, optimizer, reference=None, **progress):
    """Everything that a resume needs; `reference` if it moves. The old checkpoint stays whole until the new one is."""
    new, old = folder.with_suffix(".new"), folder.with_suffix(".old")
    shutil.rmtree(new, ignore_errors=True)
    save_pretrained(model, tokenizer, new)
    moved = {"reference": reference.state_dict()} if reference is not None else {}
    torch.save({"optimizer": optimizer.state_dict(), **moved, **progress}, new / "optimizer.pt")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder, model, optimizer, reference=None):
    """Puts weights, optimizer and reference back to what they were; returns the steps done and the tokens sampled so far."""
    if not folder.exists():                                 # a crash between the two renames leaves the old one
        folder = folder.with_suffix(".old")
    if not (folder / "optimizer.pt").is_file():
        raise ValueError(f"--resume: no checkpoint in {folder}; start the run without --resume, or name it with --run_name")
    model.load_state_dict(load_pretrained(folder).state_dict())
    saved = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    if "reference" in saved and reference is not None:
        reference.load_state_dict(saved["reference"])
    return saved["step"], saved["num_tokens"]


def discard_checkpoint(folder):
    """A new run by an old name starts over: what it might resume from is its own."""
    for path in (folder, folder.with_suffix(".old")):
        shutil.rmtree(path, ignore_errors=True)
