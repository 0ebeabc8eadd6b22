"""Reads weights and tokenizers, whoever wrote them.

MiniMind's own .pth files hold half-precision tensors and no configuration, which follows from the
tensors' names and shapes. The names are those of transformers' Llama and Qwen3. Two generations:

                heads   q/k-norm   rms eps   experts                             we save it as
    MiniMind2     8     no         1e-5      none (those with MoE are refused)   Llama
    MiniMind-3    8     yes        1e-6      none, or top-1 of several           Qwen3, Qwen3-MoE

Both have 6,400 tokens, a RoPE base of 1e6, and tied embeddings.
Source: jingyaogong/minimind, model/model_minimind.py.
"""
import re
import reprlib
from pathlib import Path

import torch
from transformers import AutoTokenizer

from report import UserError, printable

from ..model import MiniMindConfig, MiniMindForCausalLM
from . import any_model
from .files import (
    FAMILIES,
    check_field,
    check_fields,
    check_template,
    check_tensors,
    explained,
    read_config,
    read_json,
    read_tensors,
)

HEADS = 8       # in every MiniMind; without a q-norm, no tensor's shape gives the head size


def load_pretrained(path, *, dtype=None, matrix_dtype=None, device=None):
    """Load a model from a folder, a hub id or a MiniMind .pth; an AnyModel, if need be.

    dtype: None keeps the dtype that the weights were saved in. matrix_dtype: another one for the
    matrices in the layers, which are nearly all of a model. device "meta": nothing is copied yet,
    and the attribute `mapped` of each parameter is its tensor in the file; an AnyModel is loaded.
    Raises UserError if the weights are missing, broken, or of an architecture that neither
    model/model.py nor transformers builds.
    """
    path, generation = local_path(path), {}
    if path.is_file():
        config, state = read_pth(path)
    else:
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: no config.json there; give a folder with config.json and "
                            "model.safetensors, a hub id like Qwen/Qwen3-0.6B, or a MiniMind "
                            ".pth file")
        if (file := path / "generation_config.json").is_file():
            generation, kind = read_json(file), int | list[int] | None
            check_field("eos_token_id", generation.get("eos_token_id"), kind, file)
        kind = read_json(path / "config.json").get("model_type")
        if isinstance(kind, str) and kind not in FAMILIES:
            model = any_model.load(path, dtype=dtype, matrix_dtype=matrix_dtype,
                                   device=None if device == "meta" else device)
            model.generation_config = generation
            return model
        config, state = read_config(path), read_weights(path)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    dtype = dtype or getattr(state.get("model.norm.weight"), "dtype", None)
    model = build(MiniMindForCausalLM, config, state=state, path=path, dtype=dtype,
                  matrix_dtype=matrix_dtype, device=device)
    model.tie_weights()
    for name, weight in model.named_parameters() if device == "meta" else ():
        weight.mapped = state[name]
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


def build(model_class, config, *more, state, path, dtype=torch.float32, matrix_dtype=None,
          device=None):
    """model_class(config, *more) with copies of the tensors in `state`. UserError: they don't fit.

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
    expected, found = shapes(model.state_dict()), shapes(state)
    if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
        name = wrong[0]
        raise UserError(f"{path}: {printable(name)} should have shape {expected.get(name)} "
                        f"according to the configuration, but has {found.get(name)} in the weights "
                        f"({len(wrong)} such tensors); check that both are of the same model")

    def copy(name, tensor):         # one by one: there is never a second model, in another dtype
        is_matrix = ".layers." in name and tensor.dim() == 2
        return tensor.to(device, is_matrix and matrix_dtype or dtype, copy=True)

    model.load_state_dict({name: copy(name, tensor) for name, tensor in state.items()},
                          assign=True)
    return model


def shapes(state):
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


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


def find_weights(name, *folders):
    """The path of the first weights with this name, a folder or a .pth, in any of the folders.

    If there are none, the path they would have in the last folder, for the error message.
    """
    paths = [Path(folder) / file for folder in folders for file in (name, f"{name}.pth")]
    return next((path for path in paths if path.is_file() or (path / "config.json").is_file()),
                Path(folders[-1]) / name)


def read_pth(path):
    """The configuration and the tensors of a MiniMind .pth; UserError if it is something else."""
    state = read_tensors(path)
    check_names(state, path)
    check_tensors(state, path)
    with explained(path, "no MiniMind has tensors of these names and shapes",
                   "give a folder with config.json, or a MiniMind .pth"):
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        return check_fields(infer_config(state, path), path), state


def check_names(state, path):
    """Raise UserError, which says what the file is instead, as far as its tensors' names tell."""
    others = {      # part of a tensor's name -> what such a file is, and what to do
        "tok_embeddings": "a MiniMind from before April 2025, which has other names and other "
                          "rotary positions; choose newer weights",
        "shared_experts": "a MiniMind2 MoE with shared experts, which model/model.py does not "
                          "build; choose its dense weights, or MiniMind-3",
        "lora": "LoRA weights, to be added to a model; merge them into it with MiniMind's scripts",
        "optimizer": "a MiniMind checkpoint for resuming; give the weights next to it, whose name "
                     "lacks _resume",
    }
    for part, what in others.items():
        if any(part in name for name in state):
            raise UserError(f"{path}: this is {what}")


def infer_config(state, path):
    """The configuration that the names and shapes imply, with MiniMind's constants for the rest."""
    first = "model.layers.0."
    qk_norm = f"{first}self_attn.q_norm.weight" in state
    q_size, hidden_size = state[f"{first}self_attn.q_proj.weight"].shape
    head_dim = len(state[f"{first}self_attn.q_norm.weight"]) if qk_norm else q_size // HEADS
    router = state.get(f"{first}mlp.gate.weight")       # (experts, D), or None in a dense model
    if router is not None and not qk_norm:
        raise UserError(f"{path}: experts without q/k-norm, as in MiniMind2's MoE, are something "
                        "model/model.py does not build; choose dense weights, or MiniMind-3")
    gate_proj = "gate_proj" if router is None else "experts.0.gate_proj"
    feed_forward = len(state[f"{first}mlp.{gate_proj}.weight"])
    layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    embedding = state["model.embed_tokens.weight"]      # (V, D)
    return MiniMindConfig(
        vocab_size=len(embedding), hidden_size=hidden_size, intermediate_size=feed_forward,
        num_hidden_layers=len(layers), num_attention_heads=q_size // head_dim,
        num_key_value_heads=len(state[f"{first}self_attn.k_proj.weight"]) // head_dim,
        head_dim=head_dim, qk_norm=qk_norm, rms_norm_eps=1e-6 if qk_norm else 1e-5,
        rope_theta=1e6, max_position_embeddings=32768,
        tie_word_embeddings=torch.equal(state["lm_head.weight"], embedding),
        num_experts=0 if router is None else len(router), num_experts_per_tok=1,
        moe_intermediate_size=feed_forward, norm_topk_prob=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
