"""The network for one more token, as fast.py samples: joined weights, packed, one cache for all."""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from .experts import all_experts
from .model import KVCache, MixtureOfExperts, RMSNorm, rotary_frequencies, rotary_tables, rotate

PACK_FROM = 95_000          # weights of a matrix; packing a smaller one does not pay


class Decoding:
    """The network for one more token of each row, without gradients and in half the operations.

    Completions of a prompt share a row, and its computation, until they part: see `branch`.
    Matrices that read the same input are joined, and the attention of one query is two plain
    products, where query heads that share a key head are rows of one matrix; in bfloat16 one fused
    operation.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_rows, max_new_tokens, *,
                 fixed_shapes=False):
        """Reads the prompts (B, P), a row each; `prompt_logits` (B, V) predict what follows.

        fixed_shapes: no shape of a step depends on the data, as graph.py wants it.
        """
        config, (B, P), device = model.config, prompt_ids.shape, prompt_ids.device
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.d = config.head_dim
        self.num_rows, self.length = B, P
        S = -(-(P + max_new_tokens) // 8) * 8       # CUDA's fused attention wants a bias in eights
        prompts = KVCache()
        logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=prompts)
        self.prompt_logits = logits[:, 0]
        torch.clear_autocast_cache()        # or copies would stay beside those that `linear` joins
        dtype = prompts.layers[0][1].dtype
        self.cache = torch.empty(                                   # (L, 2, max_rows, K, S, d)
            config.num_hidden_layers, 2, max_rows, self.K, S, self.d, dtype=dtype, device=device)
        for layer, keys_and_values in prompts.layers.items():
            self.cache[layer, :, :B, :, :P] = torch.stack([x.to(dtype) for x in keys_and_values])
        self.positions = torch.zeros(max_rows, dtype=torch.long, device=device)
        self.positions[:B] = prompt_mask.sum(1)                     # padding takes no position
        self.bias = None                                            # (max_rows, 1, S)
        if not prompt_mask.all():                                   # -inf at padding
            self.bias = torch.zeros(max_rows, 1, S, dtype=dtype, device=device)
            self.bias[:B, 0, :P].masked_fill_(prompt_mask == 0, float("-inf"))
        frequencies = rotary_frequencies(config, device)
        self.rotary = rotary_tables(torch.arange(S, device=device), frequencies)
        self.embedding, self.norm = model.model.embed_tokens, model.model.norm
        self.layers = [self.parts(layer, fixed_shapes) for layer in model.model.layers]
        autocast = torch.is_autocast_enabled(device.type)
        self.head = model.lm_head if autocast else linear(model.lm_head)    # float32 either way

    def parts(self, layer, fixed_shapes):
        """What `step` needs of a layer, in the order of use."""
        attention, head_norm = layer.self_attn, nn.Identity()
        if isinstance(attention.q_norm, RMSNorm):
            weights = [attention.q_norm.weight] * self.H + [attention.k_norm.weight] * self.K
            head_norm = RMSNorm(self.d, attention.q_norm.eps)
            head_norm.weight = nn.Parameter(torch.stack(weights), requires_grad=False)  # (H + K, d)
        return (layer.input_layernorm, linear(attention.q_proj, attention.k_proj, attention.v_proj),
                head_norm, linear(attention.o_proj), layer.post_attention_layernorm,
                feed_forward(layer.mlp, fixed_shapes))

    def branch(self, row, tokens):
        """Splits each row whose completions part: one row for each distinct next token.

        row, tokens (n,), each completion's row and next token -> its new row, (n,). The first
        continuation of a row stays in place; the others fill rows that nobody continues.
        """
        pairs, child = torch.unique(row * 2**32 + tokens, return_inverse=True)  # a pair, one number
        parents = pairs >> 32                                       # (num_rows,), sorted
        self.num_rows, S = len(parents), self.length
        first_child = parents.diff(prepend=parents.new_full((1,), -1)) > 0
        stays = first_child & (parents < self.num_rows)
        if not stays.all():
            free = torch.ones_like(stays).index_fill_(0, parents[stays], False).nonzero()[:, 0]
            moved, parents[~stays] = parents[~stays], free
            self.cache[:, :, free, :, :S] = self.cache[:, :, moved, :, :S]
            self.positions[free] = self.positions[moved]
            if self.bias is not None:
                self.bias[free] = self.bias[moved]
        return parents[child]

    def step(self, tokens):
        """Reads one more token of each row, (n,); returns the logits of the next, (n, V)."""
        S = self.length + 1
        bias = None if self.bias is None else self.bias[:len(tokens), :, :S]
        logits = self.read(tokens, self.cache[:, :, :len(tokens), :, :S], bias)
        self.length = S
        return logits

    def read(self, tokens, cache, bias):
        """A token of each row, (n,), to the last place of a cache (L, 2, n, K, S, d) -> (n, V).

        bias (n, 1, S): -inf at the places that nobody sees; None if there are none.
        """
        n, H, K, d = len(tokens), self.H, self.K, self.d
        rotary = [table[self.positions[:n]] for table in self.rotary]           # (n, 1, d)
        attention, latest = fused_attention, cache[..., -1, :]                  # (L, 2, n, K, d)
        if cache.dtype == torch.float32:
            attention = plain_attention
        elif bias is not None:
            bias = bias.expand(-1, K, -1).reshape(n * K, 1, 1, -1)
        x = self.embedding(tokens)                                              # (n, D)
        for parts, (keys, values), (k, v) in zip(self.layers, cache.flatten(2, 3), latest):
            attention_norm, qkv, head_norm, out, mlp_norm, mlp = parts
            heads = qkv(attention_norm(x)).view(n, H + 2 * K, d)
            qk = rotate(head_norm(heads[:, :H + K]), rotary)                    # (n, H + K, d)
            k.copy_(qk[:, H:])
            v.copy_(heads[:, H + K:])
            x = x + out(attention(qk[:, :H], keys, values, bias))
            x = x + mlp(mlp_norm(x))
        self.positions += 1
        return self.head(self.norm(x))


def plain_attention(q, keys, values, bias):
    """A query of each head, (n, H, d), to keys and values (n*K, S, d) -> (n, H*d)."""
    (n, H, d), (nK, S, _) = q.shape, keys.shape
    q = (q * d**-0.5).view(nK, n * H // nK, d)
    scores = torch.bmm(q, keys.transpose(1, 2))                                 # (n*K, H/K, S)
    if bias is not None:
        scores.view(n, H, S).add_(bias)
    return torch.bmm(scores.softmax(-1), values).view(n, H * d)


def fused_attention(q, keys, values, bias):
    """The same in bfloat16: the scores stay float32, which a product would round to 8 bits."""
    (n, H, d), nK = q.shape, len(keys)
    q = q.to(keys.dtype).reshape(nK, 1, n * H // nK, d)
    out = F.scaled_dot_product_attention(q, keys[:, None], values[:, None], attn_mask=bias)
    return out.reshape(n, H * d)


def feed_forward(mlp, fixed_shapes):
    if isinstance(mlp, MixtureOfExperts):
        return all_experts(mlp) if fixed_shapes else mlp
    gate_up, down = linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj)

    def function(x):
        gate, up = gate_up(x).chunk(2, -1)
        return down(F.silu(gate) * up)
    return function


def linear(*layers):
    """Linear layers that read the same input as one function, their outputs side by side.

    Joined where weights are copied anyway: converted under autocast, packed for oneDNN on a CPU.
    """
    device, dtype = layers[0].weight.device.type, layers[0].weight.dtype
    autocast, adapted = torch.is_autocast_enabled(device), hasattr(layers[0], "lora_A")
    stored, dtype = dtype, torch.get_autocast_dtype(device) if autocast else dtype
    if device != "cpu" and stored == dtype or adapted:      # with adapters nothing is copied
        return lambda x: torch.cat([layer(x) for layer in layers], -1)
    weights = [layer.weight.to(dtype) for layer in layers]          # one alone is not copied
    weight, bias = weights[0] if len(weights) == 1 else torch.cat(weights), None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.to(dtype) for layer in layers])
    # The packed product is private to PyTorch: where it is missing, weights stay as they are.
    packed = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if weight.numel() < PACK_FROM or device != "cpu" or dtype != torch.float32 or packed is None:
        return functools.partial(F.linear, weight=weight, bias=bias)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: packed(x, weight, bias, "none", [], "")
