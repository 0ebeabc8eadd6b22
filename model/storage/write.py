"""Writes weights, tokenizers, adapters and checkpoints, for read.py and for transformers."""
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from report import UserError

from ..lora import adapter_state, adapters, merged_state
from .config import FAMILIES, eos_token_ids
from .files import read_json, reason

MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
              "decoder_sparse_step", "mlp_only_layers")


def save_pretrained(model, tokenizer, path):
    """Write a folder that load_pretrained, transformers and inference servers can load.

    Adapters (model/lora.py) are merged into the weights.
    """
    path, state = Path(path), merged_state(model)
    path.mkdir(parents=True, exist_ok=True)
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_tensors(state, path / "model.safetensors")
    generation = model.generation_config | {"eos_token_id": eos_token_ids(model, tokenizer)}
    if tokenizer.pad_token_id is not None:
        generation["pad_token_id"] = tokenizer.pad_token_id
    write_json(hub_config(model), path / "config.json")
    write_json(generation, path / "generation_config.json")
    save_tokenizer(tokenizer, path)


def save_tensors(state, path):
    """Write a safetensors file. The library would let only its owner read it, and no server."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}, path,
              metadata={"format": "pt"})
    path.chmod(mode)


def write_json(content, path):
    path.write_text(json.dumps(content, indent=2) + "\n")


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
    write_json(config, file)


def hub_config(model):
    """The content of config.json, as a dict; RoPE and dtype are in it for transformers 4 and 5."""
    ours = vars(model.config).copy()
    model_type = "qwen3_moe" if model.config.num_experts else next(
        kind for kind, (_, switches, _) in FAMILIES.items() if switches.items() <= ours.items())
    scaling = ours.pop("rope_scaling")
    for name in ("qk_norm", "qkv_bias", *(() if model.config.num_experts else MOE_FIELDS)):
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


def save_adapter(model, path):
    """Write adapter_config.json and adapter_model.safetensors, for PEFT and load_adapter."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(adapter_state(model), path / "adapter_model.safetensors")
    write_json({"peft_type": "LORA", "task_type": "CAUSAL_LM", **model.lora, "lora_dropout": 0.0,
                "bias": "none", "fan_in_fan_out": False, "inference_mode": True},
               path / "adapter_config.json")


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
        torch.save({"optimizer": optimizer_state, **moved, **progress}, new / "optimizer.pt")


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
    folders = Path(path).absolute().parents
    return shutil.disk_usage(next(folder for folder in folders if folder.is_dir())).free


def sync(path):
    """Wait until a file or a folder's list of names is on the disk, not only in memory."""
    if os.name == "nt" and path.is_dir():
        return                              # Windows has no such thing for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
