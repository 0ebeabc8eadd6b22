"""Sampling for a CPU, and for what CUDA graphs don't cover: completions share cache rows."""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from .. import sampler
from ..lora import LoRALinear
from ..model import (
    Head,
    KVCache,
    MixtureOfExperts,
    RMSNorm,
    rotary_frequencies,
    rotary_tables,
    rotate,
)

PACK_FROM = 95_000          # weights in the smallest matrix that is worth packing


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, **options):
    """Like `sample` in model/sampler.py, but completions share a cache row until they diverge.

    With the same seed, both functions return the same completions.
    """
    rows = len(prompt_ids) * num_generations
    with torch.inference_mode():
        decoding = Decoding(model, prompt_ids, prompt_mask, rows, max_new_tokens)
        found = sampler.sample(decoding, prompt_ids, prompt_mask, num_generations=num_generations,
                               max_new_tokens=max_new_tokens, **options)
    return tuple(x.clone() for x in found)      # autograd can't use tensors from inference mode


class Decoding:
    """Replaces the model and its KV cache while `sampler.sample` runs. Computes no gradients.

    Completions of a prompt share a cache row until they diverge (see `branch`). In each layer,
    queries and keys are normalized and rotated together, which halves the number of operations.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_rows, max_new_tokens):
        """Runs the model on the prompts, (B, P), and keeps the logits of the next token."""
        config, (B, P), device = model.config, prompt_ids.shape, prompt_ids.device
        self.num_rows, self.length, S = B, P, P + max_new_tokens
        self.row = torch.arange(B, device=device)       # of each prompt, then of each completion
        prompts = KVCache()
        self.prompt_logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=prompts)
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.d = config.head_dim
        self.cache = torch.empty(                                   # (L, 2, max_rows, K, S, d)
            config.num_hidden_layers, 2, max_rows, self.K, S, self.d,
            dtype=prompts.layers[0][1].dtype, device=device)
        for layer, (keys, values) in prompts.layers.items():
            self.cache[layer, 0, :B, :, :P], self.cache[layer, 1, :B, :, :P] = keys, values
        self.padding = torch.zeros(max_rows, 1, dtype=torch.long, device=device)
        self.padding[:B, 0] = P - prompt_mask.sum(1)                # padding gets no position
        self.places = torch.arange(S, device=device)                # columns of the cache
        self.rotary = rotary_tables(self.places, rotary_frequencies(config, device))
        self.embedding, self.norm = model.model.embed_tokens, model.model.norm
        self.layers = [self.parts(layer) for layer in model.model.layers]
        self.head = linear(model.lm_head)

    def new_cache(self):
        return self

    def select(self, completions):
        self.row = self.row[completions]

    def __call__(self, tokens, mask, *, logits_to_keep, cache):
        """Returns the next token's logits: (B, 1, V) after prompts, (n, 1, V) after new tokens."""
        if mask.shape[1] == self.length:            # the prompts have already been read
            return self.prompt_logits
        tokens = tokens.squeeze(1)
        self.row = self.branch(self.row, tokens)
        of_rows = tokens.new_zeros(self.num_rows).index_copy_(0, self.row, tokens)
        return self.step(of_rows)[self.row, None]                               # (n, 1, V)

    def parts(self, layer):
        """Returns the modules of a layer as a tuple, in the order in which `step` uses them."""
        attention, mlp, head_norm = layer.self_attn, layer.mlp, nn.Identity()
        if isinstance(attention.q_norm, RMSNorm):       # one norm for queries and keys together
            weights = [attention.q_norm.weight] * self.H + [attention.k_norm.weight] * self.K
            head_norm = RMSNorm(self.d, attention.q_norm.eps)
            head_norm.weight = nn.Parameter(torch.stack(weights))               # (H + K, d)
        qkv = [linear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return (layer.input_layernorm, qkv, head_norm, linear(attention.o_proj),
                layer.post_attention_layernorm, feed_forward(mlp))

    def branch(self, row, tokens):
        """Splits cache rows whose completions have different next tokens into several rows.

        row and tokens, (n,): each completion's cache row and next token. Returns each completion's
        new row, (n,). Completions with equal prefixes still share a row.
        """
        # Each pair becomes one small number, because some devices sort only the lower 32 bits.
        distinct, rank = tokens.unique(return_inverse=True)
        pairs, child = torch.unique(row * len(distinct) + rank, return_inverse=True)
        parents = pairs // len(distinct)                            # (num_rows,), sorted
        self.num_rows, S = len(parents), self.length
        first_child = parents.diff(prepend=parents.new_full((1,), -1)) > 0
        stays = first_child & (parents < self.num_rows)
        if not stays.all():
            is_free = torch.ones_like(stays).index_fill_(0, parents[stays], False)
            free, moved = is_free.nonzero().squeeze(1), parents[~stays]
            parents[~stays] = free
            self.cache[:, :, free, :, :S] = self.cache[:, :, moved, :, :S]
            self.padding[free] = self.padding[moved]
        return parents[child]

    def step(self, tokens):
        """Runs the model on each row's next token, (n,), and returns the logits, (n, V)."""
        padding = self.padding[:len(tokens)]                                    # (n, 1)
        rotary = [table[self.length - padding.squeeze(1)] for table in self.rotary]  # (n, 1, d)
        self.length += 1
        n, H, K, d = len(tokens), self.H, self.K, self.d
        bias = padding.new_zeros(n, 1, self.length, dtype=self.cache.dtype)
        bias.masked_fill_((self.places[:self.length] < padding)[:, None], float("-inf"))
        attention = plain_attention
        if self.cache.dtype != torch.float32:
            attention = fused_attention
            bias = bias.expand(-1, K, -1).reshape(n * K, 1, 1, -1)
        cache = self.cache[:, :, :n, :, :self.length].flatten(2, 3)             # (L, 2, n*K, S, d)
        x = self.embedding(tokens)                                              # (n, D)
        for parts, (keys, values) in zip(self.layers, cache):
            attention_norm, qkv, head_norm, out, mlp_norm, mlp = parts
            normed = attention_norm(x)
            heads = torch.cat([part(normed) for part in qkv], -1).view(n, H + 2 * K, d)
            qk = rotate(head_norm(heads[:, :H + K]), rotary)                    # (n, H + K, d)
            keys[:, -1] = qk[:, H:].flatten(0, 1)
            values[:, -1] = heads[:, H + K:].flatten(0, 1)
            x = x + out(attention(qk[:, :H], keys, values, bias))
            x = x + mlp(mlp_norm(x))
        return self.head(self.norm(x))


def plain_attention(q, keys, values, bias):
    """Returns the attention output, (n, H*d). q is (n, H, d), and keys, values are (n*K, S, d)."""
    (n, H, d), (nK, S, _) = q.shape, keys.shape
    q = (q * d**-0.5).view(nK, n * H // nK, d)
    scores = torch.bmm(q, keys.transpose(1, 2))                                 # (n*K, H/K, S)
    scores.view(n, H, S).add_(bias)
    return torch.bmm(scores.softmax(-1), values).view(n, H * d)


def fused_attention(q, keys, values, bias):
    """Like plain_attention, but for bfloat16: the scores are float32, which bmm would round."""
    (n, H, d), nK = q.shape, len(keys)
    q = q.to(keys.dtype).reshape(nK, 1, n * H // nK, d)
    out = F.scaled_dot_product_attention(q, keys[:, None], values[:, None], attn_mask=bias)
    return out.reshape(n, H * d)


def feed_forward(mlp):
    if isinstance(mlp, MixtureOfExperts):
        return mlp
    gate, up, down = linear(mlp.gate_proj), linear(mlp.up_proj), linear(mlp.down_proj)
    return lambda x: down(F.silu(gate(x)) * up(x))


def linear(layer):
    """Returns a function that computes a linear layer, with its weight cast and packed in advance.

    The weight is cast to autocast's dtype and, on a CPU, packed for oneDNN. An adapter is merged
    into float32 weights, but not into bfloat16 weights, where it would be rounded away.
    """
    base, adapter = layer, None
    if isinstance(layer, LoRALinear):
        base, adapter = layer.base, layer
    weight, bias, device = base.weight, base.bias, base.weight.device
    dtype = products_dtype(device, weight.dtype)
    if torch.is_autocast_enabled(device.type):
        if isinstance(layer, Head):
            dtype = torch.float32
    elif adapter is not None:
        weight, adapter = adapter.merged(), None
    weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    if weight.numel() >= PACK_FROM and can_pack(dtype, device):
        weight = torch.ops.mkldnn._reorder_linear_weight(weight)

        def product(x):
            return torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")
    elif isinstance(layer, Head):
        product = layer         # a Head switches autocast off by itself
    else:
        product = functools.partial(F.linear, weight=weight, bias=bias)
    if adapter is None:
        return product
    A, B = adapter.lora_A.to(dtype), (adapter.scale * adapter.lora_B).to(dtype)
    return lambda x: product(x) + F.linear(F.linear(x, A), B)


def products_dtype(device, dtype):
    """Returns the dtype of matrix products: autocast's dtype, or `dtype` if autocast is off."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def can_pack(dtype, device):
    """Returns True if oneDNN is available on this device and supports this dtype."""
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32
