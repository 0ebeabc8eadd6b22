"""`sample` again, where completions that agree so far are one row of the batch."""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from ..model import (
    Head,
    KVCache,
    MixtureOfExperts,
    RMSNorm,
    rotary_frequencies,
    rotary_tables,
    rotate,
)
from ..sampler import next_token

PACK_FROM = 95_000          # weights of a matrix; packing a smaller one does not pay


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
           eos_token_id, pad_token_id, generator=None, greedy=False):
    """The `sample` of model/sampler.py; the same seed gives the same completions."""
    N, device = len(prompt_ids) * num_generations, prompt_ids.device
    eos_ids = prompt_ids.new_tensor(eos_token_id)
    # Created outside of inference mode, so that a loss can use them.
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)
    with torch.inference_mode():
        decoding = Decoding(model, prompt_ids, prompt_mask, N, max_new_tokens)
        unfinished = torch.arange(N, device=device)     # the completions that go on
        row = unfinished // num_generations             # the row of each
        logits = decoding.prompt_logits[row]                                            # (n, V)
        for t in range(max_new_tokens):
            tokens, token_logps = next_token(logits, temperature, generator, greedy)    # (n,)
            completion_ids[unfinished, t], logps[unfinished, t] = tokens, token_logps
            alive = ~torch.isin(tokens, eos_ids)
            if t + 1 == max_new_tokens or not alive.any():
                break
            unfinished, row, tokens = unfinished[alive], row[alive], tokens[alive]
            row = decoding.branch(row, tokens)
            of_rows = tokens.new_zeros(decoding.num_rows).index_copy_(0, row, tokens)
            logits = decoding.step(of_rows)[row]
    return completion_ids[:, :t + 1], logps[:, :t + 1]


class Decoding:
    """The network for one more token of each row, without gradients.

    Completions of a prompt share a row, and its computation, until they part: see `branch`. The
    layers are those of model.py in half the operations: queries and keys are normalised and turned
    as one, and the attention of one query is two plain products, where query heads that share a key
    head are rows of one matrix; in bfloat16 one fused operation.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_rows, max_new_tokens):
        """Reads the prompts (B, P), a row each; `prompt_logits` (B, V) predict what follows."""
        config, (B, P), device = model.config, prompt_ids.shape, prompt_ids.device
        self.num_rows, self.length, S = B, P, P + max_new_tokens
        prompts = KVCache()
        logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=prompts)
        self.prompt_logits = logits[:, 0]
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.d = config.head_dim
        self.cache = torch.empty(                                   # (L, 2, max_rows, K, S, d)
            config.num_hidden_layers, 2, max_rows, self.K, S, self.d,
            dtype=prompts.layers[0][1].dtype, device=device)
        for layer, (keys, values) in prompts.layers.items():
            self.cache[layer, 0, :B, :, :P], self.cache[layer, 1, :B, :, :P] = keys, values
        self.padding = torch.zeros(max_rows, 1, dtype=torch.long, device=device)
        self.padding[:B, 0] = P - prompt_mask.sum(1)                # it takes no position
        self.places = torch.arange(S, device=device)                # of the cache
        self.rotary = rotary_tables(self.places, rotary_frequencies(config, device))
        self.embedding, self.norm = model.model.embed_tokens, model.model.norm
        self.layers = [self.parts(layer) for layer in model.model.layers]
        self.head = linear(model.lm_head)

    def parts(self, layer):
        """What `step` needs of a layer, in the order of use."""
        attention, mlp, head_norm = layer.self_attn, layer.mlp, nn.Identity()
        if isinstance(attention.q_norm, RMSNorm):       # of queries and keys in one
            weights = [attention.q_norm.weight] * self.H + [attention.k_norm.weight] * self.K
            head_norm = RMSNorm(self.d, attention.q_norm.eps)
            head_norm.weight = nn.Parameter(torch.stack(weights), requires_grad=False)  # (H + K, d)
        qkv = [linear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return (layer.input_layernorm, qkv, head_norm, linear(attention.o_proj),
                layer.post_attention_layernorm, feed_forward(mlp))

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
            self.padding[free] = self.padding[moved]
        return parents[child]

    def step(self, tokens):
        """Reads one more token of each row, (n,); returns the logits of the next, (n, V)."""
        padding = self.padding[:len(tokens)]                                    # (n, 1)
        rotary = [table[self.length - padding[:, 0]] for table in self.rotary]  # (n, 1, d)
        self.length += 1
        n, H, K, d = len(tokens), self.H, self.K, self.d
        bias = padding.new_zeros(n, 1, self.length, dtype=self.cache.dtype)
        bias.masked_fill_((self.places[:self.length] < padding)[:, None], float("-inf"))
        attention = plain_attention
        if self.cache.dtype != torch.float32:
            attention, bias = fused_attention, bias.expand(-1, K, -1).reshape(n * K, 1, 1, -1)
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
    """A query of each head, (n, H, d), to keys and values (n*K, S, d) -> (n, H*d)."""
    (n, H, d), (nK, S, _) = q.shape, keys.shape
    q = (q * d**-0.5).view(nK, n * H // nK, d)
    scores = torch.bmm(q, keys.transpose(1, 2))                                 # (n*K, H/K, S)
    scores.view(n, H, S).add_(bias)
    return torch.bmm(scores.softmax(-1), values).view(n, H * d)


def fused_attention(q, keys, values, bias):
    """The same in bfloat16: the scores stay float32, which a product would round to 8 bits."""
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
    """A linear layer as a function: packed for oneDNN on a CPU; cast once, where autocast would."""
    if hasattr(layer, "lora_A"):            # with adapters nothing is copied
        return layer
    weight, bias, device = layer.weight, layer.bias, layer.weight.device.type
    if torch.is_autocast_enabled(device):
        if isinstance(layer, Head):         # float32 either way
            return layer
        weight = weight.to(torch.get_autocast_dtype(device))
        return functools.partial(F.linear, weight=weight, bias=bias)
    # The packed product is private to PyTorch: where it is missing, weights stay as they are.
    packed = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if (weight.numel() < PACK_FROM or device != "cpu" or weight.dtype != torch.float32
            or packed is None):
        return layer
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: packed(x, weight, bias, "none", [], "")
