"""The policy: one decoder-only transformer, from scratch.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, and three switches that make it one of four families:

    qk_norm   qkv_bias   num_experts      the network is transformers'
       yes       no           0           Qwen3        (the weights that we ship)
       no        yes          0           Qwen2, Qwen2.5
       no        no           0           Llama
       yes       no          > 0          Qwen3-MoE

Parameter names and numerics are those of transformers' classes, so a state dict moves either way without renaming.
Only attention sees sequences with padding, and each group of similar length by itself; all that works on tokens one by one
gets the real ones alone.
Letters in the shapes: N sequences, T new tokens, n of these N*T real ones, S tokens attended to, m sequences and r real
tokens of a group, D hidden size, H heads, K key/value heads, d head size, V vocabulary.
"""
import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class MiniMindConfig:
    """Sizes and switches. The defaults are those of the weights that we ship, but for the vocabulary."""
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None    # {"rope_type": "linear" or "llama3", ...}: see rotary_frequencies
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qk_norm: bool = True
    qkv_bias: bool = False
    attention_bias: bool = False        # a bias in all four projections; some Llama and Qwen3 weights have it
    num_experts: int = 0                # 0: a dense feed-forward in every layer
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 176
    norm_topk_prob: bool = True         # the chosen experts' weights add up to 1
    decoder_sparse_step: int = 1        # every so many layers one has experts,
    mlp_only_layers: list[int] = field(default_factory=list)    # but none of these
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        x32 = x.float()     # the mean of squares overflows in half precision
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_frequencies(config, device=None):
    """Angle per position of each of the d/2 pairs, theta^(-2i/d); (d/2,) float32.

    Weights that were stretched to longer texts turn more slowly, by `factor`: with "linear" every pair does, with "llama3"
    (Llama 3.1) one that turns less than low_freq_factor times in the original context; one that turns more than
    high_freq_factor times keeps its speed, and the speeds between go over from one to the other.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequencies = config.rope_theta ** -exponents
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        turns = frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / scaling["factor"])
    return frequencies


def rotary_tables(positions, frequencies):
    """cos and sin of position * frequency, (n, 1, d), the d/2 angles twice in a row, sin first negated; float32."""
    angles = positions[:, None, None].float() * frequencies                             # (n, 1, d/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x, rotary):
    """Turns each pair (x_i, x_{i+d/2}) by its angle, so that q.k depends only on the distance of two tokens."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)               # roll: the halves change places


@dataclass
class Group:
    """Sequences that attention takes together. They are of similar length: its work grows with the longest of them."""
    rows: torch.Tensor              # (m,) which of the N sequences they are
    T: int                          # the length of the longest
    real: torch.Tensor | None       # (r,) which of the m * T tokens are real, or None: all of them
    mask: torch.Tensor | None       # (m, 1, T, S): see visible; None: each token sees all up to itself

    @property
    def num_tokens(self):
        return len(self.rows) * self.T if self.real is None else len(self.real)

    def pad(self, x):
        """(r, ...) -> (m, T, ...), zeros where padding stands"""
        if self.real is not None:
            x = x.new_zeros(len(self.rows) * self.T, *x.shape[1:]).index_copy_(0, self.real, x)
        return x.unflatten(0, (-1, self.T))

    def unpad(self, x):
        """(m, T, ...) -> (r, ...)"""
        x = x.flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)


def groups_of(input_ids, attention_mask, *, together):
    """All sequences (N, T) as one group, in their order; or groups in which lengths differ by a factor of 1.4 at most."""
    (N, T), device = input_ids.shape, input_ids.device
    if attention_mask is None:
        return [Group(torch.arange(N, device=device), T, None, None)]
    past, new = attention_mask.shape[1] - T, attention_mask[:, -T:].cpu()       # at once: a GPU waits at each look at it
    # The length of a sequence is that up to its last real token: padding on the left counts.
    lengths = torch.full((N,), T) if together else (new * torch.arange(1, T + 1)).amax(1).clamp(min=1)
    classes, groups = (2 * (T / lengths).log2()).floor(), []
    for rows in ((classes == number).nonzero()[:, 0] for number in classes.unique()):
        longest = int(lengths[rows].max())
        real = new[rows, :longest].flatten().nonzero()[:, 0]
        real = None if len(real) == len(rows) * longest else real.to(device)
        rows = rows.to(device)
        plain = real is None and past == 0
        groups.append(Group(rows, longest, real, None if plain else visible(attention_mask[rows, :past + longest], longest)))
    return groups


def visible(attention_mask, T):
    """Which of the S tokens each of the last T may see, (N, 1, T, S) bool: the real ones, no later than itself."""
    real, S = attention_mask.bool()[:, None, None, :], attention_mask.shape[1]          # (N, 1, 1, S)
    row = torch.arange(S - T, S, device=attention_mask.device)[:, None]                 # (T, 1)
    column = torch.arange(S, device=attention_mask.device)                              # (S,)
    # A padding token sees itself: a softmax over nothing would be NaN, and NaN spreads.
    return (real & (column <= row)) | (column == row)


class SharedPrompts:
    """Keys and values of prompts read once, for sequences that begin with them. Gradients flow through it.

    A model fills an empty one: layers[number] has keys and values, (N, K, P, d) each. for_rows(rows) is what it reads the
    rest of the sequences with, for which it needs an attention mask.
    """

    def __init__(self):
        self.length, self.layers, self.rows = 0, {}, None

    def for_rows(self, rows):
        """rows (N,): which of the prompts each sequence begins with."""
        cache = SharedPrompts()     # with a dict of its own: gradient checkpointing fills the first one again
        cache.length, cache.layers, cache.rows = self.length, dict(self.layers), rows
        return cache

    def append(self, layer, k, v, rows):
        """Keys and values of the prompts and of what follows, k and v (m, K, T, d), for these of the sequences."""
        if self.rows is None:
            self.layers[layer] = k, v
            return k, v
        prompts = (x.index_select(0, self.rows[rows]) for x in self.layers[layer])
        return tuple(torch.cat(pair, 2) for pair in zip(prompts, (k, v)))


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        qkv_bias = config.qkv_bias or config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rotary, groups, cache):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))              # (n, H, d)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))              # (n, K, d)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))                           # (n, K, d)
        num_tokens = [group.num_tokens for group in groups]
        parts = zip(groups, *(x.split(num_tokens) for x in (rotate(q, rotary), rotate(k, rotary), v)))
        return self.o_proj(torch.cat([self.attend(*part, cache) for part in parts]))    # (n, D)

    def attend(self, group, q, k, v, cache):
        """Attention among the tokens of a group and to the prompts in the cache: q (r, H, d), k, v (r, K, d) -> (r, H*d)."""
        q, k, v = (group.pad(x).transpose(1, 2) for x in (q, k, v))                     # (m, H or K, T, d)
        if cache is not None:
            k, v = cache.append(self.layer, k, v, group.rows)                           # (m, K, S, d)
        if q.is_cuda and (group.mask is not None or v.dtype == torch.float32):  # then only a GPU's slow kernel shares keys
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))   # (m, H, S, d)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.mask is None,
                                           enable_gqa=q.shape[1] != k.shape[1])
        return group.unpad(x.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Each token goes through its `num_experts_per_tok` best experts, weighted by the router's softmax."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config, config.moe_intermediate_size) for _ in range(config.num_experts))

    def forward(self, x):
        return self.mix(self.gate, self.experts, x)

    def mix(self, gate, experts, x):
        """gate and experts: these modules, or functions that do the same."""
        weights, chosen = gate(x).float().softmax(-1).topk(self.top_k)                  # (n, k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(experts):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        sparse = (layer + 1) % config.decoder_sparse_step == 0 and layer not in config.mlp_only_layers
        self.mlp = MixtureOfExperts(config) if config.num_experts and sparse else SwiGLU(config, config.intermediate_size)

    def forward(self, x, *context):
        x = x + self.self_attn(self.input_layernorm(x), *context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids -> final-norm hidden states: what a language-model head or a reward head reads."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False     # True: backward computes a layer's activations anew instead of keeping them
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, attention_mask=None, cache=None):
        """input_ids (N, T); attention_mask (N, S) 0/1 over the cached tokens and the new ones; -> (N, T, D)."""
        (N, T), past, device = input_ids.shape, cache.length if cache is not None else 0, input_ids.device
        if attention_mask is None:
            positions = torch.arange(past, past + T, device=device).expand(N, T)
        else:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, past:]          # (N, T): padding takes no position
        groups = groups_of(input_ids, attention_mask, together=cache is not None and cache.rows is None)
        index = torch.arange(N * T, device=device).view(N, T)
        order = torch.cat([group.unpad(index[group.rows, :group.T]) for group in groups])   # (n,): one group after the other
        rotary = rotary_tables(positions.reshape(-1)[order], rotary_frequencies(self.config, device))
        x = self.embed_tokens(input_ids.reshape(-1)[order])                             # (n, D)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        context = (rotary, groups, cache)
        for layer in self.layers:
            x = checkpoint(layer, x, *context, use_reentrant=False) if recompute else layer(x, *context)
        if cache is not None:
            cache.length += T
        x = self.norm(x)
        return x.new_zeros(N * T, x.shape[1]).index_copy_(0, order, x).unflatten(0, (N, T))


class MiniMindForCausalLM(nn.Module):
    autocast = nullcontext      # see in_precision

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.generation_config = {}     # what generation_config.json held: not for us, but for who serves the weights
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.tie_weights()

    def tie_weights(self):
        """Makes the head one matrix with the embedding, where the configuration says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids, attention_mask=None, *, logits_to_keep=0, cache=None):
        """Logits (N, T, V), or (N, k, V) of the last k = logits_to_keep positions: the head is the dearest matrix.

        logits_to_keep may also be a mask (N, T): the logits at the positions where it is not 0, one after the other.
        """
        hidden = self.model(input_ids, attention_mask, cache)
        if isinstance(logits_to_keep, torch.Tensor):
            return self.lm_head(hidden[logits_to_keep.bool()])
        return self.lm_head(hidden[:, -logits_to_keep:])


def in_precision(model, dtype, device):
    """Lets every forward of the model, whoever calls it, make its matrix products in bfloat16 where --dtype asks for it."""
    made_for_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" or dtype == "auto" and made_for_it:
        model.autocast = functools.partial(torch.autocast, device.type, torch.bfloat16)
        model.forward = model.autocast()(model.forward)
    return model
