"""Weights on disk, as transformers lays them out: a folder with config.json, model.safetensors, the tokenizer's files.

A path to weights is such a folder, a hub id like Qwen/Qwen3-0.6B, or one of MiniMind's .pth files (model/minimind_pth.py).
"""
import json
import pickle
import re
import shutil
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from .minimind_pth import read_pth
from .model import MiniMindConfig, MiniMindForCausalLM

# model_type in config.json -> (transformers' class, what tells it from the others, what it takes for a field left out)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False}, {}),
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}, {}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False}, {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False},
                  {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}),
}
MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
              "mlp_only_layers")

# --- reading ----------------------------------------------------------------------------------------------------------


def load_pretrained(path, *, dtype=None, device=None):
    """The model in a folder, of a hub id, or in a MiniMind .pth; ValueError if it can't be ours.

    dtype None keeps the type that the weights were saved in. config.eos_token_id has the ids of config.json and those of
    generation_config.json.
    """
    path, generation = local_path(path), {}
    if path.is_file():
        config, state = read_pth(path)
    else:
        if not (path / "config.json").is_file():
            raise ValueError(f"{path}: no config.json there; give a folder that holds config.json and model.safetensors, "
                             "a hub id like Qwen/Qwen3-0.6B, or a MiniMind .pth file")
        config, state = read_config(path), read_weights(path)
        if (path / "generation_config.json").is_file():
            generation = read_json(path / "generation_config.json")
    eos = token_ids(config.eos_token_id, generation.get("eos_token_id"))
    config.eos_token_id = eos if len(eos) > 1 else next(iter(eos), None)
    with torch.device("meta"):                          # drawing numbers that are overwritten takes a minute at 4B
        model = MiniMindForCausalLM(config)
    model.to_empty(device="cpu").tie_weights()
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    load_state(model, state, path)
    model.generation_config = generation
    return model.to(device=device, dtype=dtype or state["model.norm.weight"].dtype)


def local_path(path, *, weights="*.safetensors"):
    """The path itself, or the folder that a hub id like Qwen/Qwen3-0.6B was downloaded to, with these weights or without."""
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return Path(path)
    from huggingface_hub import snapshot_download
    try:
        files = ["*.json", "*.jinja", "*.txt", "*.model"] + ([weights] if weights else [])
        return Path(snapshot_download(str(path), allow_patterns=files, ignore_patterns=["original/*"]))
    except Exception as error:      # a dozen classes: no such name, no network, no permission, no space
        raise ValueError(f"{path}: no such folder here, and the hub did not give anything of this name "
                         f"({type(error).__name__}); check the spelling, the network, and whether it asks for a login "
                         "(hf auth login)") from error


def load_tokenizer(path, vocab_size):
    """The tokenizer of a folder or a hub id; ValueError if there is none, none for a chat, or one with too many tokens."""
    path = local_path(path, weights=None)
    if path.is_file():
        raise ValueError(f"{path}: a .pth file has no tokenizer with it; give its folder with --tokenizer_path "
                         "(MiniMind's is the folder model/ of its repository)")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder, so no tokenizer; give one with --tokenizer_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:      # transformers has no class of its own for it
        raise ValueError(f"{path}: no tokenizer could be read there ({type(error).__name__}: "
                         f"{str(error).strip().splitlines()[0]}); give its folder with --tokenizer_path") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"{path}: its tokenizer has no chat template to write a prompt with; "
                         "give that of an instruct model with --tokenizer_path")
    if len(tokenizer) > vocab_size:                     # fewer are common: embeddings are padded to a round number
        raise ValueError(f"{path}: its tokenizer has {len(tokenizer)} tokens, the weights know {vocab_size}; "
                         "give the tokenizer of these weights with --tokenizer_path")
    return tokenizer


def load_state(model, state, path):
    """Puts the tensors into the model; ValueError names one that is missing, left over or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} should have shape {expected.get(wrong[0])} by the configuration and has "
                         f"{found.get(wrong[0])} in the weights ({len(wrong)} such tensors); "
                         "the two do not belong together")
    model.load_state_dict(state)


def read_weights(path):
    """All tensors of a folder, from one file or the shards that an index lists: safetensors, or else PyTorch's own files."""
    pickled = list(path.glob("pytorch_model*.bin")) and not list(path.glob("*.safetensors"))
    name = "pytorch_model.bin" if pickled else "model.safetensors"
    index, files = path / f"{name}.index.json", [name]
    if index.is_file():
        files = sorted(set(read_json(index)["weight_map"].values()))
    state = {}
    for name in files:
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path}: {name} is missing; copy it next to config.json")
        try:
            state.update(torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file))
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(f"{file}: broken off, git-lfs's note about a file, or something other than tensors "
                             f"({str(error).splitlines()[0]}); download it again") from error
    # Llama 2's files also hold the rope frequencies, which follow from the configuration.
    return {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}


def read_json(path):
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); download it again") from error


def read_config(path):
    """config.json as a MiniMindConfig, by transformers 4 (which writes rope_theta) or 5 (rope_parameters)."""
    path = Path(path) / "config.json"
    saved = read_json(path)
    if saved.get("model_type") not in FAMILIES:
        raise ValueError(f"{path}: model_type {saved.get('model_type')!r} is none of {', '.join(FAMILIES)}, "
                         "the architectures that model/model.py builds; choose weights of one of these")
    _, switches, defaults = FAMILIES[saved["model_type"]]
    saved = {"tie_word_embeddings": False} | defaults | saved                           # transformers' default, not ours
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if name not in saved:
            raise ValueError(f"{path}: {name} is missing; download the file again")
    check_config(saved, path)
    if saved.get("head_dim") is None:
        saved["head_dim"] = saved["hidden_size"] // saved["num_attention_heads"]
    if saved.get("num_key_value_heads") is None:
        saved["num_key_value_heads"] = saved["num_attention_heads"]
    saved.setdefault("num_experts", saved.get("num_local_experts", 0))                  # two names for one number
    saved["mlp_only_layers"] = saved.get("mlp_only_layers") or []
    saved |= switches | read_rope(saved, path)
    if saved["model_type"] == "qwen2":
        saved["attention_bias"] = False                                                 # it always has its own three
    return MiniMindConfig(**{field.name: saved[field.name] for field in fields(MiniMindConfig) if field.name in saved})


def read_rope(saved, path):
    """{"rope_theta", "rope_scaling"}, wherever config.json keeps them; ValueError for a scaling that we don't have."""
    rope = dict(saved.get("rope_scaling") or saved.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None) or saved.get("rope_theta", 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", "default")
    needed = {"default": [], "linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in needed:
        raise ValueError(f"{path}: rope scaling {kind!r} is none of {', '.join(needed)}, those that model/model.py has; "
                         "choose weights without it")
    for name in needed[kind]:
        if name not in rope:
            raise ValueError(f"{path}: rope scaling {kind!r} without its {name}; download the file again")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {"rope_type": kind, **{name: rope[name] for name in needed[kind]}}
    if kind == "llama3":
        scaling["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", saved.get("max_position_embeddings", 2048))
    return {"rope_theta": theta, "rope_scaling": scaling}


def check_config(saved, path):
    """Refuses, by its name, what these families can also have and model/model.py does not build: ignored, it would give
    other numbers without a word."""
    rope = saved.get("rope_scaling") or saved.get("rope_parameters") or {}
    first_sliding = 0 if saved["model_type"] == "qwen3_moe" else saved.get("max_window_layers", 28)
    sliding = saved.get("use_sliding_window") and first_sliding < saved["num_hidden_layers"]
    partial = saved.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    refused = {
        "use_sliding_window": sliding,
        "layer_types": set(saved.get("layer_types") or []) - {"full_attention"},
        "partial_rotary_factor": partial not in (None, 1, 1.0),
        "hidden_act": saved.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": saved.get("mlp_bias"),
        "attn_logit_softcapping": saved.get("attn_logit_softcapping"),
        "final_logit_softcapping": saved.get("final_logit_softcapping"),
        "quantization_config": saved.get("quantization_config"),
    }
    for name, is_refused in refused.items():
        if is_refused:
            value = partial if name == "partial_rotary_factor" else saved[name]
            raise ValueError(f"{path}: {name} {value!r} is something that model/model.py does not build; "
                             "choose weights without it")


def token_ids(*sources):
    """The ids in the sources, each an id, a list of them or None; sorted, each once."""
    return sorted({i for source in sources if source is not None for i in ([source] if isinstance(source, int) else source)})


def eos_token_ids(model, tokenizer):
    """Every token that ends a reply: the tokenizer's, and those that the weights' configuration names."""
    return token_ids(tokenizer.eos_token_id, model.config.eos_token_id)


# --- writing ----------------------------------------------------------------------------------------------------------


def save_pretrained(model, tokenizer, path):
    """Writes a folder that load_pretrained, transformers and the serving stacks load."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    generation = model.generation_config | {"eos_token_id": eos_token_ids(model, tokenizer)}
    if tokenizer.pad_token_id is not None:
        generation["pad_token_id"] = tokenizer.pad_token_id
    for name, content in (("config.json", hub_config(model)), ("generation_config.json", generation)):
        (path / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(tokenizer, path)


def save_tokenizer(tokenizer, path):
    """The tokenizer's files, in words that transformers 4 knows too: to 5 they mean the same."""
    tokenizer.save_pretrained(path)
    file = Path(path) / "tokenizer_config.json"
    config = read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hub_config(model):
    """What config.json holds: our fields under transformers' names, the rope base in its old and its new place."""
    ours = vars(model.config).copy()
    switches, scaling = {name: ours.pop(name) for name in ("qk_norm", "qkv_bias")}, ours.pop("rope_scaling")
    if model.config.num_experts:
        model_type = "qwen3_moe"
    else:
        model_type = next(kind for kind, (_, family, _) in FAMILIES.items() if family == switches)
        for name in MOE_FIELDS:
            del ours[name]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[model_type][0]],
        "model_type": model_type,
        **ours,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **({"rope_scaling": scaling} if scaling else {}),
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": model.config.rope_theta},
        "dtype": dtype,
        "torch_dtype": dtype,           # the same, by the name that transformers 4 looks for
    }


def find_weights(name, *folders):
    """The first weights of this name, a folder or a .pth; the path in the last folder if there are none, for the error."""
    paths = [Path(folder) / file for folder in folders for file in (name, f"{name}.pth")]
    return next((path for path in paths if path.is_file() or (path / "config.json").is_file()), paths[-2])


# --- checkpoints ------------------------------------------------------------------------------------------------------


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
