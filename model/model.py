"""The policy: one decoder-only transformer, from scratch.

It has RMSNorm, rotary position embeddings, grouped-query attention and SwiGLU. Three settings
decide which of four model families it implements:

    qk_norm   qkv_bias   num_experts      the same network as transformers'
       yes       no           0           Qwen3        (the included weights)
       no        yes          0           Qwen2, Qwen2.5
       no        no           0           Llama
       yes       no          > 0          Qwen3-MoE

Parameter names and results are the same as in transformers, so state dicts can be exchanged without
renaming. In shapes, N is the number of sequences, T of new tokens, S of cached and new tokens, H of
query heads, K of key/value heads; D is the hidden size, d the size of a head.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class MiniMindConfig:
    """The model's settings. The defaults fit the included weights, except for vocab_size."""
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None    # {"rope_type": "linear" or "llama3", ...}
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qk_norm: bool = True
    qkv_bias: bool = False
    attention_bias: bool = False        # a bias in all four projections, as in some Llama and Qwen3
    num_experts: int = 0                # 0: every layer has a dense feed-forward
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 176
    norm_topk_prob: bool = True         # the chosen experts' weights add up to 1
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
        if x.is_cuda:       # one kernel instead of six; autocast would return float32
            return self.weight * F.rms_norm(x, x.shape[-1:], None, self.eps).to(x.dtype)
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * scale).to(x.dtype)


def rotary_frequencies(config, device=None):
    """Returns the rotary frequencies theta^(-2i/d), in radians per position: (d/2,) float32.

    Models extended to longer contexts use lower frequencies. "linear" divides all frequencies by
    `factor`. "llama3" (Llama 3.1) does so only for frequencies with fewer than low_freq_factor
    turns in the original context length. It keeps frequencies with more than high_freq_factor
    turns, and interpolates in between.
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
    """Returns (cos, sin) of position * frequency, each (..., 1, d) in float32.

    Each of the d/2 angles appears twice, to fill the d columns. The first half of sin is negated.
    """
    angles = positions[..., None, None].float() * frequencies                   # (..., 1, d/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x, rotary):
    """Applies rotary position embeddings to queries or keys: rotates the pairs (x_i, x_{i+d/2})."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)   # roll swaps the halves


class KVCache:
    """Stores each layer's keys and values for all tokens so far, (N, K, S, d) each."""

    def __init__(self):
        self.layers, self.length = {}, 0

    def append(self, layer, k, v):
        """Appends keys and values of new tokens, (N, K, T, d); returns those of all tokens."""
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (k, v)))
        self.layers[layer], self.length = (k, v), k.shape[2]
        return k, v

    def select(self, rows):
        """Keeps only the given rows of the cache, in the given order. A row may be repeated."""
        self.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in self.layers.items()}


class Attention(nn.Module):
    """Multi-head attention with rotary positions. Several query heads may share one key head."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        D, d = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * d, config.num_key_value_heads * d
        qkv_bias = config.qkv_bias or config.attention_bias
        self.q_proj = nn.Linear(D, q_size, bias=qkv_bias)
        self.k_proj = nn.Linear(D, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(D, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(q_size, D, bias=config.attention_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, rotary, mask=None, cache=None, attend=None):
        """Maps x (N, T, D) to (N, T, D). mask: (N, 1, T, S), or None for causal attention."""
        # Queries are (..., H, d), keys and values (..., K, d). Queries and keys then get positions.
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k = rotate(q, rotary), rotate(k, rotary)
        if attend is not None:                  # model/fast has its own attention
            return self.o_proj(attend(q, k, v))
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))                # (N, H or K, T, d)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)                               # (N, K, S, d)
        # Each key head serves H/K query heads.
        k, v = (heads.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for heads in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Weighted sum of the num_experts_per_tok experts that the router chooses for each token."""

    def __init__(self, config):
        super().__init__()
        self.config, numbers = config, range(config.num_experts)
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config, config.moe_intermediate_size) for _ in numbers)

    def forward(self, x):
        # The weights and numbers of each token's k = num_experts_per_tok experts, (..., k).
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        number, order = chosen.flatten().sort(stable=True)      # (n*k,), grouped by expert
        first = torch.searchsorted(number, torch.arange(len(self.experts) + 1, device=x.device))
        parts = x.flatten(0, -2).index_select(0, order // chosen.shape[-1])     # (n*k, D)
        parts = parts.split(first.diff().tolist())      # the only place that waits for a GPU
        out = torch.cat([expert(part) for expert, part in zip(self.experts, parts)])
        out = out.index_select(0, order.argsort()).unflatten(0, chosen.shape)   # (..., k, D)
        return (out * weights[..., None]).sum(-2).to(x.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = config.num_experts == 0
        self.mlp = SwiGLU(config, config.intermediate_size) if dense else MixtureOfExperts(config)

    def forward(self, x, rotary, mask=None, cache=None, attend=None):
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask, cache, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The transformer without a head: maps token ids to the hidden states after the last norm."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False     # True: the backward pass recomputes activations
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, attention_mask=None, cache=None):
        """Returns hidden states, (N, T, D). attention_mask (N, S) also covers cached tokens."""
        N, T = input_ids.shape
        past = 0 if cache is None else cache.length
        causal = attention_mask is None and past == 0       # without padding, no mask is needed
        if attention_mask is None:
            attention_mask = input_ids.new_ones(N, past + T)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, past:]      # padding needs none
        rotary = rotary_tables(positions, rotary_frequencies(self.config, input_ids.device))
        mask = None if causal else visible(attention_mask, T)
        return self.read(input_ids, rotary, mask, cache)

    def read(self, tokens, rotary, mask=None, cache=None, attend=None):
        """Returns the tokens' hidden states. `rotary` holds the tables for their positions."""
        x = self.embed_tokens(tokens)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                x = checkpoint(layer, x, rotary, mask, cache, attend, use_reentrant=False)
            else:
                x = layer(x, rotary, mask, cache, attend)
        return self.norm(x)


def visible(attention_mask, T):
    """Returns a causal mask, (N, 1, T, S), for the last T of S tokens, that also hides padding."""
    S, device = attention_mask.shape[1], attention_mask.device
    row, column = torch.arange(S - T, S, device=device)[:, None], torch.arange(S, device=device)
    # A padding token sees itself, because a softmax over nothing is NaN, and NaNs spread.
    return (attention_mask.bool()[:, None, None, :] & (column <= row)) | (column == row)


class Head(nn.Linear):
    """The language-model head: a linear layer that computes in float32 even under autocast.

    In bfloat16, rounding could change a logit of 20 by up to 0.06.
    """

    def forward(self, hidden):
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(hidden)
        bias = None if self.bias is None else self.bias.float()     # Phi and GPT-J have a bias
        with torch.autocast(device, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), bias)


class MiniMindForCausalLM(nn.Module):
    new_cache = KVCache     # a sampler fills it; AnyModel has a cache of its own

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.generation_config = {}     # for inference servers: read, and saved unchanged
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.tie_weights()

    def tie_weights(self):
        """Makes the head share the embedding's weight if config.tie_word_embeddings is set."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids, attention_mask=None, *, logits_to_keep=0, cache=None):
        """Returns logits, (N, T, V), or only those of the last `logits_to_keep` positions."""
        hidden = self.model(input_ids, attention_mask, cache)
        return self.lm_head(hidden[:, -logits_to_keep:])        # -0: all of them
