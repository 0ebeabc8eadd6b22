"""MiniMind's own .pth files: bare tensors, half precision, no configuration with them; what it was can be seen from them.

The tensors have the names of transformers' Llama and Qwen3, so nothing is renamed. Two generations are read:

                    heads   q/k-norm   rms eps   experts                          saved by us as
    MiniMind2         8        no       1e-5     none (its MoE is refused)        Llama
    MiniMind-3        8        yes      1e-6     none, or one of them per token   Qwen3, Qwen3-MoE

Both have 6,400 tokens, a rope base of 1e6, and one matrix for embedding and head. Source: jingyaogong/minimind,
model/model_minimind.py.
"""
import pickle

import torch

from .model import MiniMindConfig

HEADS = 8       # of every MiniMind; without a q-norm no tensor tells their size


def read_pth(path):
    """The configuration and the tensors of a MiniMind .pth; ValueError if it is something else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path}: not a file of tensors as torch.save writes them ({str(error).splitlines()[0]}); "
                         "give a folder with config.json, or a MiniMind .pth") from error
    check_names(state if isinstance(state, dict) else {}, path)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return infer_config(state, path), state


def check_names(state, path):
    """Refuses a .pth whose tensors are not those of a MiniMind that we build, and says which it is."""
    found = next((reason for part, reason in {
        "tok_embeddings": "a MiniMind from before April 2025, with other names and rotary positions; choose newer weights",
        "shared_experts": "MiniMind2's mixture with shared experts, which model/model.py does not build; "
                          "choose its dense weights, or MiniMind-3",
        "lora": "LoRA's additions to a model; merge them into it with MiniMind's scripts",
        "optimizer": "a MiniMind checkpoint to resume from; give the weights beside it, without _resume in their name",
    }.items() if any(part in name for name in state)), None)
    names = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]
    missing = [name for name in names if name not in state]
    if found or missing:
        raise ValueError(f"{path}: this is {found}" if found else f"{path}: there is no {missing[0]} in it, so it is "
                         "none of MiniMind's policies; give a folder with config.json, or a MiniMind .pth")


def infer_config(state, path):
    """The configuration that the tensors' names and shapes tell, and MiniMind's constants for the rest."""
    first = "model.layers.0."
    qk_norm = f"{first}self_attn.q_norm.weight" in state
    q_size, hidden_size = state[f"{first}self_attn.q_proj.weight"].shape
    head_dim = len(state[f"{first}self_attn.q_norm.weight"]) if qk_norm else q_size // HEADS
    router = state.get(f"{first}mlp.gate.weight")                                       # (experts, D), or none
    if router is not None and not qk_norm:
        raise ValueError(f"{path}: experts without q/k-norm, as in MiniMind2's mixtures, are something that model/model.py "
                         "does not build; choose dense weights, or MiniMind-3")
    feed_forward = len(state[f"{first}mlp.{'gate_proj' if router is None else 'experts.0.gate_proj'}.weight"])
    return MiniMindConfig(
        vocab_size=len(state["model.embed_tokens.weight"]), hidden_size=hidden_size, intermediate_size=feed_forward,
        num_hidden_layers=len({name.split(".")[2] for name in state if name.startswith("model.layers.")}),
        num_attention_heads=q_size // head_dim,
        num_key_value_heads=len(state[f"{first}self_attn.k_proj.weight"]) // head_dim, head_dim=head_dim,
        rms_norm_eps=1e-6 if qk_norm else 1e-5, rope_theta=1e6, max_position_embeddings=32768,
        tie_word_embeddings=torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]), qk_norm=qk_norm,
        num_experts=0 if router is None else len(router), num_experts_per_tok=1, moe_intermediate_size=feed_forward,
        norm_topk_prob=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
