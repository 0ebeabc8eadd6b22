"""Reads and writes weights, tokenizers and checkpoints.

On disk, weights are what transformers writes: a folder with config.json, model.safetensors and the
tokenizer's files. Where a function takes a path to weights, a hub id like Qwen/Qwen3-0.6B will do
too, as will one of MiniMind's .pth files (model/minimind_pth.py).
"""
import json
import os
import re
import reprlib
import shutil
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoTokenizer

from report import UserError, printable

from .files import (
    check_field,
    check_fields,
    check_template,
    check_tensors,
    explained,
    read_json,
    read_tensors,
    reason,
)
from .lora import adapters, load_adapter, merged_state, save_adapter
from .minimind_pth import read_pth
from .model import MiniMindConfig, MiniMindForCausalLM
from .shard import load_parts, part_of_optimizer

# model_type in config.json -> (class in transformers, our switches that build it, its own defaults
# for fields that config.json leaves out)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False}, {}),
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True}, {}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False},
              {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False},
                  {"num_experts_per_tok": 8, "moe_intermediate_size": 768,
                   "norm_topk_prob": False}),
}
MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
              "decoder_sparse_step", "mlp_only_layers")

# --- reading --------------------------------------------------------------------------------------


def load_pretrained(path, *, dtype=None, matrix_dtype=None, device=None):
    """Load a model from a folder, a hub id or a MiniMind .pth.

    dtype: None keeps the dtype that the weights were saved in. matrix_dtype: another one for the
    matrices in the layers, which are nearly all of a model. The model's config.eos_token_id
    combines those in config.json and in generation_config.json. Raises UserError if the weights
    are missing, broken, or of an architecture that model/model.py does not build.
    """
    path, generation = local_path(path), {}
    if path.is_file():
        config, state = read_pth(path)
    else:
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: no config.json there; give a folder with config.json and "
                            "model.safetensors, a hub id like Qwen/Qwen3-0.6B, or a MiniMind "
                            ".pth file")
        config, state = read_config(path), read_weights(path)
        if (path / "generation_config.json").is_file():
            generation = read_generation_config(path / "generation_config.json")
    eos = token_ids(config.eos_token_id, generation.get("eos_token_id"))
    config.eos_token_id = eos if len(eos) > 1 else next(iter(eos), None)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    dtype = dtype or getattr(state.get("model.norm.weight"), "dtype", None)
    model = build(MiniMindForCausalLM, config, state=state, path=path, dtype=dtype,
                  matrix_dtype=matrix_dtype, device=device)
    model.tie_weights()
    model.generation_config = generation
    return model


def local_path(path, *, weights="*.safetensors"):
    """The path itself; for a hub id like Qwen/Qwen3-0.6B, the folder it is downloaded to.

    weights: a pattern for the weight files to download; None downloads no weights.
    """
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return Path(path)
    from huggingface_hub import snapshot_download
    try:
        files = ["*.json", "*.jinja", "*.txt", "*.model"] + ([weights] if weights else [])
        return Path(snapshot_download(str(path), allow_patterns=files,
                                      ignore_patterns=["original/*"]))
    except Exception as error:      # many classes: no such name, network, permission, disk space
        raise UserError(f"{path}: no such folder on this machine, and downloading it from the hub "
                        f"failed ({type(error).__name__}); check the spelling, the network, and "
                        "whether it needs a login (hf auth login)") from error


def load_tokenizer(path, vocab_size, advice="give another with --tokenizer_path"):
    """Load the tokenizer from a folder or a hub id. Code that comes with it never runs.

    advice: what to do if there is none, if its chat template is missing or fails, or if it has more
    tokens than the weights, whose embedding has vocab_size rows: the end of the UserError.
    """
    path = local_path(path, weights=None)
    if path.is_file():
        raise UserError(f"{path}: a .pth file comes without a tokenizer; give the tokenizer's "
                        "folder with --tokenizer_path (MiniMind's is model/ in its repository)")
    if not path.is_dir():
        raise UserError(f"{path}: no such folder, so no tokenizer; {advice}")
    with explained(path, "no tokenizer could be read there", advice):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        count = max(tokenizer.get_vocab().values()) + 1     # an id may be larger than all others
    if tokenizer.chat_template is None:
        raise UserError(f"{path}: its tokenizer has no chat template to write prompts with; "
                        f"{advice}")
    # Fewer tokens than rows are common: embeddings are often padded to a round number.
    if count > vocab_size:
        raise UserError(f"{path}: its tokenizer has {count} tokens, but the weights know "
                        f"{vocab_size}; {advice}")
    check_template(tokenizer, path, advice)
    return tokenizer


def build(model_class, config, *more, state, path, **where):
    """model_class(config, *more) with the tensors in `state`; UserError if they don't fit.

    On the meta device a model takes no memory, and no time: at 4B parameters, drawing random
    weights only to overwrite them takes a minute. So a config.json that asks for more than the
    weights have is refused before anything is allocated.
    """
    if config.num_hidden_layers * max(1, config.num_experts) > 10 * len(state):
        raise UserError(f"{path}: num_hidden_layers {config.num_hidden_layers} and num_experts "
                        f"{config.num_experts} do not belong to weights of {len(state)} tensors; "
                        "check that both are of the same model")
    with explained(path, "no model has this configuration", "download its config.json again"):
        with torch.device("meta"):
            model = model_class(config, *more)
    load_state(model, state, path, **where)
    return model


def load_state(model, state, path, *, dtype=torch.float32, matrix_dtype=None, device=None):
    """Give the model, which is on the meta device, copies of the tensors.

    Raises UserError, naming a tensor, if any is missing, unexpected or of the wrong shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in expected.keys() | found.keys()
                   if expected.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(f"{path}: {printable(name)} should have shape {expected.get(name)} "
                        f"according to the configuration, but has {found.get(name)} in the weights "
                        f"({len(wrong)} such tensors); check that both are of the same model")

    def copy(name, tensor):         # one by one: there is never a second model, in another dtype
        is_matrix = ".layers." in name and tensor.dim() == 2
        return tensor.to(device, is_matrix and matrix_dtype or dtype, copy=True)

    model.load_state_dict({name: copy(name, tensor) for name, tensor in state.items()},
                          assign=True)


def read_weights(path):
    """All tensors in a folder, by name, from one file or from the shards that its index lists.

    Reads safetensors, or PyTorch's pytorch_model*.bin if there are only those.
    """
    pickled = list(path.glob("pytorch_model*.bin")) and not list(path.glob("*.safetensors"))
    name = "pytorch_model.bin" if pickled else "model.safetensors"
    index, files = path / f"{name}.index.json", [name]
    if index.is_file():
        with explained(index, "its weight_map does not say where the tensors are",
                       "download it again"):
            files = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    state = {}
    for name in files:
        file = path / name
        if file.name != name:       # ../elsewhere/model.safetensors
            raise UserError(f"{index}: it names {reprlib.repr(name)}, which is not in this "
                            "folder; download the index again")
        if not file.is_file():
            raise UserError(f"{path}: {name} is missing; copy it next to config.json")
        # Llama 2's files also hold the RoPE frequencies, which the model computes from its config.
        tensors = {name: tensor for name, tensor in read_tensors(file).items()
                   if not name.endswith("rotary_emb.inv_freq")}
        check_tensors(tensors, file)
        state |= tensors
    return state


def read_generation_config(path):
    generation = read_json(path)
    check_field("eos_token_id", generation.get("eos_token_id"), int | list[int] | None, path)
    return generation


def read_config(path):
    """The folder's config.json as a MiniMindConfig.

    Raises UserError if a field is missing, has a value that no such model has, or asks for
    something that model/model.py does not build.
    """
    path = Path(path) / "config.json"
    with explained(path, "a field is wrong", "download the file again"):
        return check_fields(to_config(read_json(path), path), path)


def to_config(saved, path):
    if saved.get("model_type") not in FAMILIES:
        raise UserError(f"{path}: model/model.py does not build model_type "
                        f"{reprlib.repr(saved.get('model_type'))}; choose weights with one of "
                        f"{', '.join(FAMILIES)}")
    _, switches, defaults = FAMILIES[saved["model_type"]]
    # A field left out has the default of transformers, which differs from MiniMindConfig's.
    saved = {"tie_word_embeddings": False} | defaults | saved
    saved = {name: value for name, value in saved.items() if value is not None}
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads"):
        if name not in saved:
            raise UserError(f"{path}: {name} is missing; download the file again")
        check_field(name, saved[name], int, path)
    check_config(saved, path)
    saved.setdefault("head_dim", saved["hidden_size"] // saved["num_attention_heads"])
    saved.setdefault("num_key_value_heads", saved["num_attention_heads"])
    saved.setdefault("num_experts", saved.get("num_local_experts", 0))      # it has two names
    saved |= switches | read_rope(saved, path)
    if saved["model_type"] == "qwen2":
        # Qwen2 always has biases on q, k and v (qkv_bias) and none on the output.
        saved["attention_bias"] = False
    names = [field.name for field in fields(MiniMindConfig)]
    return MiniMindConfig(**{name: saved[name] for name in names if name in saved})


def read_rope(saved, path):
    """rope_theta and rope_scaling, as a dict, from wherever config.json has them.

    transformers 4 writes rope_theta and rope_scaling; 5 writes both into rope_parameters.
    Raises UserError for a kind of scaling that model/model.py does not build.
    """
    rope = saved.get("rope_scaling") or saved.get("rope_parameters") or {}
    places = (rope, saved.get("rope_parameters") or {}, saved)
    theta = next((place["rope_theta"] for place in places if place.get("rope_theta")), 10000.0)
    kind = rope.get("rope_type") or rope.get("type", "default")
    needed = {"default": [], "linear": ["factor"],
              "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in needed:
        raise UserError(f"{path}: model/model.py does not build rope scaling {kind!r}; "
                        f"choose weights with one of {', '.join(needed)}")
    for name in needed[kind]:
        if name not in rope:
            raise UserError(f"{path}: rope scaling {kind!r} lacks its {name}; "
                            "download the file again")
        check_field(name, rope[name], float, path)
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    scaling = {"rope_type": kind, **{name: rope[name] for name in needed[kind]}}
    if kind == "llama3":
        name = "original_max_position_embeddings"
        scaling[name] = rope.get(name, saved.get("max_position_embeddings", 2048))
        check_field(name, scaling[name], float, path)
        if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise UserError(f"{path}: low_freq_factor must be below high_freq_factor; download "
                            "the file again")
    return {"rope_theta": theta, "rope_scaling": scaling}


def check_config(saved, path):
    """Raise UserError for an option of these families that model/model.py does not build.

    Ignoring it would silently compute something else.
    """
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
            raise UserError(f"{path}: model/model.py does not build {name} "
                            f"{reprlib.repr(value)}; choose weights without it")


def token_ids(*sources):
    """The distinct ids in all sources, sorted; a source is an id, a list of ids or None."""
    ids = set()
    for source in sources:
        if source is not None:
            ids.update([source] if isinstance(source, int) else source)
    return sorted(ids)


def eos_token_ids(model, tokenizer):
    """Every token id that ends a reply, according to the tokenizer or the model's config."""
    return token_ids(tokenizer.eos_token_id, model.config.eos_token_id)


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def written_whole(path):
    """A new folder to write into. It takes the place of `path` once all of it is on the disk.

    A crash or a full disk before that leaves `path` as it was; a crash between the two renames
    leaves it as `path`.old. UserError if the disk refuses a file.
    """
    path = Path(path)
    new, old = path.with_suffix(".new"), path.with_suffix(".old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for name in (*new.iterdir(), new):      # the folder last: it holds the files' names
            sync(name)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    except BaseException as error:
        is_full = free_space(path) < 1e6
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        # For a full disk torch.save raises RuntimeError, without a reason.
        if not isinstance(error, (OSError, SafetensorError, RuntimeError)):
            raise
        why = "the disk is full" if is_full else reason(error)
        raise UserError(f"{path} could not be written ({why}); "
                        f"{free_space(path) / 1e6:,.0f} MB are free without it: make room, or "
                        "choose another --out_dir") from error
    shutil.rmtree(old, ignore_errors=True)


def free_space(path):
    """Free bytes on the disk of a file or folder, which need not exist yet."""
    path = Path(path).absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents)
                                  if folder.is_dir())).free


def sync(path):
    """Wait until a file or a folder's list of names is on the disk, not only in memory."""
    if os.name == "nt" and path.is_dir():
        return                              # Windows has no such thing for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_pretrained(model, tokenizer, path):
    """Write a folder that load_pretrained, transformers and inference servers can load.

    Adapters (lora.py) are merged into the weights.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().contiguous().cpu()
             for name, tensor in merged_state(model).items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    generation = model.generation_config | {"eos_token_id": eos_token_ids(model, tokenizer)}
    if tokenizer.pad_token_id is not None:
        generation["pad_token_id"] = tokenizer.pad_token_id
    contents = {"config.json": hub_config(model), "generation_config.json": generation}
    for name, content in contents.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")
    # safetensors makes files that only their owner may read; a server may be somebody else.
    shutil.copymode(path / "config.json", path / "model.safetensors")
    save_tokenizer(tokenizer, path)


def save_tokenizer(tokenizer, path):
    """Write the tokenizer's files so that transformers 4 can read them as well as 5.

    transformers 5 writes two things that 4 does not understand, but still reads their old form.
    """
    tokenizer.save_pretrained(path)
    file = Path(path) / "tokenizer_config.json"
    config = read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hub_config(model):
    """The content of config.json, as a dict; RoPE and dtype are in it for transformers 4 and 5."""
    ours = vars(model.config).copy()
    switches = {name: ours.pop(name) for name in ("qk_norm", "qkv_bias")}
    scaling = ours.pop("rope_scaling")
    if model.config.num_experts:
        model_type = "qwen3_moe"
    else:
        model_type = next(kind for kind, (_, family, _) in FAMILIES.items() if family == switches)
        for name in MOE_FIELDS:
            del ours[name]
    merged = [layer.weight.dtype for layer in adapters(model).values()]
    dtype = str((merged or [next(model.parameters()).dtype])[0]).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[model_type][0]],
        "model_type": model_type,
        **ours,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **({"rope_scaling": scaling} if scaling else {}),                       # transformers 4
        "rope_parameters": {**(scaling or {"rope_type": "default"}),            # transformers 5
                            "rope_theta": model.config.rope_theta},
        "dtype": dtype,                                                         # transformers 5
        "torch_dtype": dtype,                                                   # transformers 4
    }


def find_weights(name, *folders):
    """The path of the first weights with this name, a folder or a .pth, in any of the folders.

    If there are none, the path they would have in the last folder, for the error message.
    """
    for folder in folders:
        for path in (Path(folder) / name, Path(folder) / f"{name}.pth"):
            if path.is_file() or (path / "config.json").is_file():
                return path
    return Path(folders[-1]) / name


# --- checkpoints ----------------------------------------------------------------------------------


def save_checkpoint(folder, model, tokenizer, optimizer_state, reference=None, **progress):
    """Write all that a resume needs: weights, tokenizer, optimizer, progress (step, num_tokens).

    Of a model with adapters only these: the base stays as it was loaded. reference: give it only if
    it changes during training.
    """
    moved = {"reference": reference.state_dict()} if reference is not None else {}
    with written_whole(folder) as new:
        if adapters(model):
            save_adapter(model, new)
        else:
            save_pretrained(model, tokenizer, new)
        torch.save({"optimizer": optimizer_state, **moved, **progress},
                   new / "optimizer.pt")


def load_checkpoint(folder, model, optimizer, reference=None):
    """Restore weights, optimizer and reference in place; returns (steps done, tokens sampled).

    What is saved is whole, and of sharded models each rank takes its part.
    """
    # A crash between the two renames in written_whole leaves only the previous checkpoint.
    found = next((path for path in (folder, folder.with_suffix(".old"))
                  if (path / "optimizer.pt").is_file()), None)
    if found is None:
        raise UserError(f"--resume: no checkpoint in {folder}; start without --resume, "
                        "or name the run to resume with --run_name")
    saved_with = (found / "adapter_config.json").is_file()
    if saved_with != bool(adapters(model)):
        raise UserError(f"--resume: {found} was saved {'with' if saved_with else 'without'} "
                        "--lora_rank; resume it the same way")
    with explained(found, "its checkpoint is broken, or of another model",
                   "start without --resume"):
        if adapters(model):
            load_adapter(model, found)
        else:
            load_parts(model, load_pretrained(found).state_dict())
        saved = read_tensors(found / "optimizer.pt")
        optimizer.load_state_dict(part_of_optimizer(saved["optimizer"], optimizer))
        if "reference" in saved and reference is not None:
            load_parts(reference, saved["reference"])
        return int(saved["step"]), int(saved["num_tokens"])
