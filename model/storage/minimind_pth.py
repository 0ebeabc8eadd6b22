"""Reads MiniMind's own .pth files, which hold half-precision tensors and no configuration.

The configuration follows from the tensors' names and shapes. The names are those of transformers'
Llama and Qwen3, so nothing needs renaming. There are two generations:

                heads   q/k-norm   rms eps   experts                             we save it as
    MiniMind2     8     no         1e-5      none (those with MoE are refused)   Llama
    MiniMind-3    8     yes        1e-6      none, or top-1 of several           Qwen3, Qwen3-MoE

Both have 6,400 tokens, a RoPE base of 1e6, and tied embeddings.
Source: jingyaogong/minimind, model/model_minimind.py.
"""
import torch

from report import UserError

from ..model import MiniMindConfig
from .config import check_fields
from .files import check_tensors, explained, read_tensors

HEADS = 8       # in every MiniMind; without a q-norm, no tensor's shape gives the head size


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
