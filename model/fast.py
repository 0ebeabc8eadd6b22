"""`sample` and `token_logps` again: same signatures, same weights, same numbers, in less time.

--fast 0 runs the plain pair instead. How many times as long the sampling or the learning pass takes
on a CPU without each trick (python tests/bench.py --tricks; differences below 0.1 may be noise):

    without ...                                          default   trained   1.7M   26M
    sampling: completions that agree so far are one row    1.27      2.44    1.03   0.90
    sampling: matrices with the same input are one         1.01      1.05    0.98   1.05
    sampling: weights packed for oneDNN                    0.93      1.02    1.13   1.96
    learning: each distinct prefix is read once            1.91      1.32    1.21   1.16
    learning: sequences of like size attend together       1.27      1.02    1.05   0.99
    all of it: sampling, learning                     1.8, 3.9  3.9, 7.3  2.4, 1.2  2.8, 1.2
"""
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .experts import all_experts
from .graph import GraphedStep
from .head import log_probs
from .model import KVCache, MixtureOfExperts, RMSNorm, rotary_frequencies, rotary_tables, rotate
from .sampler import next_token

# --- sampling -------------------------------------------------------------------------------------

PACK_FROM = 95_000          # weights of a matrix; packing a smaller one does not pay
# Tokens between looks at which completions have ended. Each look makes a GPU wait, so there they
# are rare, completions that agree do not share a row, and a step is one launch: see graph.py.
CHECK_EVERY = {"cpu": 1}    # elsewhere 16


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
           eos_token_id, pad_token_id, generator=None, greedy=False):
    """The `sample` of model/sampler.py; on a CPU the same seed gives the same completions."""
    N, device = len(prompt_ids) * num_generations, prompt_ids.device
    eos_ids = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    eos_ids = torch.tensor(eos_ids, device=device)
    check_every = CHECK_EVERY.get(device.type, 16)
    # Created outside of inference mode, so that a loss can use them.
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)
    longest = torch.zeros((), dtype=torch.long, device=device)
    with torch.inference_mode():
        decoding = Decoding(model, prompt_ids, prompt_mask, N, max_new_tokens)
        # Of each completion still in the batch: its number, its row, whether it has yet to end.
        number = torch.arange(N, device=device)                                         # (n,)
        row = number // num_generations
        logits = decoding.prompt_logits[row]                                            # (n, V)
        alive = torch.ones(N, dtype=torch.bool, device=device)
        step = decoding.step
        if check_every > 1:
            row = decoding.branch(row, number)
            if device.type != "mps":        # where nobody has tried it
                step = GraphedStep(decoding)
        for t in range(max_new_tokens):
            tokens, token_logps = next_token(logits, temperature, generator, greedy)
            completion_ids[number, t] = torch.where(alive, tokens, pad_token_id)
            logps[number, t] = torch.where(alive, token_logps, 0.0)
            longest += alive.any()
            alive &= ~torch.isin(tokens, eos_ids)
            if t + 1 == max_new_tokens:
                break
            if (t + 1) % check_every == 0:
                if not alive.any():
                    break
                number, row, tokens, alive = (x[alive] for x in (number, row, tokens, alive))
                row = decoding.branch(row, tokens)
            of_rows = tokens.new_zeros(decoding.num_rows).index_copy_(0, row, tokens)
            logits = step(of_rows)[row]
    return completion_ids[:, :longest], logps[:, :longest]


class Decoding:
    """The network for one more token of each row, without gradients and in half the operations.

    Completions of a prompt share a row, and its computation, until they part: see `branch`.
    Matrices that read the same input are joined, and the attention of one query is two plain
    products, where query heads that share a key head are rows of one matrix; in bfloat16 one fused
    operation.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_rows, max_new_tokens):
        """Reads the prompts (B, P), a row each; `prompt_logits` (B, V) predict what follows."""
        config, (B, P), device = model.config, prompt_ids.shape, prompt_ids.device
        self.H, self.K = config.num_attention_heads, config.num_key_value_heads
        self.d = config.head_dim
        self.num_rows, self.length = B, P
        S = -(-(P + max_new_tokens) // 8) * 8       # CUDA's fused attention wants a bias in eights
        prompts = KVCache()
        logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=prompts)
        self.prompt_logits = logits[:, 0]
        torch.clear_autocast_cache()        # `linear` converts the weights anew, joined
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
        self.layers = [self.parts(layer) for layer in model.model.layers]
        autocast = torch.is_autocast_enabled(device.type)
        self.head = model.lm_head if autocast else linear(model.lm_head)    # float32 either way

    def parts(self, layer):
        """What `step` needs of a layer, in the order of use."""
        attention, head_norm = layer.self_attn, nn.Identity()
        if isinstance(attention.q_norm, RMSNorm):
            weights = [attention.q_norm.weight] * self.H + [attention.k_norm.weight] * self.K
            head_norm = RMSNorm(self.d, attention.q_norm.eps)
            head_norm.weight = nn.Parameter(torch.stack(weights), requires_grad=False)  # (H + K, d)
        return (layer.input_layernorm, linear(attention.q_proj, attention.k_proj, attention.v_proj),
                head_norm, linear(attention.o_proj), layer.post_attention_layernorm,
                feed_forward(layer.mlp))

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


def feed_forward(mlp):
    if isinstance(mlp, MixtureOfExperts):
        return mlp if mlp.gate.weight.device.type in CHECK_EVERY else all_experts(mlp)
    gate_up, down = linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj)

    def function(x):
        gate, up = gate_up(x).chunk(2, -1)
        return down(F.silu(gate) * up)
    return function


def linear(*layers):
    """Linear layers that read the same input as one function, their outputs side by side.

    Joined where weights are copied anyway: converted under autocast, packed for oneDNN on a CPU.
    """
    device = layers[0].weight.device.type
    autocast, adapted = torch.is_autocast_enabled(device), hasattr(layers[0], "lora_A")
    if device != "cpu" and not autocast or adapted:         # with adapters nothing is copied
        return lambda x: torch.cat([layer(x) for layer in layers], -1)
    dtype = torch.get_autocast_dtype(device) if autocast else layers[0].weight.dtype
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


# --- learning -------------------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """The `token_logps` of train_grpo.py, for sequences with padding at their ends only."""
    (N, R), device = (len(input_ids), num_completion_tokens), input_ids.device
    P = input_ids.shape[1] - R
    # On the CPU, because a GPU would have to stop for each number that a shape depends on.
    mask = attention_mask.cpu()
    *tree, node, groups = prefix_tree(input_ids.cpu(), mask, P)
    wanted = mask[:, P:].flatten().nonzero()[:, 0]                  # (p,) places of N*R
    predicts, row = node.flatten()[wanted].unique(return_inverse=True)          # (m,), (p,)
    tokens, positions, wanted, predicts, row = (
        x.to(device) for x in (*tree, wanted, predicts, row))
    groups = [(C, *(x.to(device) for x in tensors)) for C, *tensors in groups]
    hidden = hidden_states(model.model, tokens, positions, groups)                      # (n, D)
    sampled, entropy = log_probs(model.lm_head, hidden.index_select(0, predicts), row,
                                 input_ids[:, P:].flatten()[wanted], temperature=temperature,
                                 with_entropy=with_entropy)

    def spread(x):
        return x.new_zeros(N * R).index_copy(0, wanted, x).view(N, R)

    return (spread(sampled), spread(entropy[row])) if with_entropy else spread(sampled)


@torch.no_grad()
def prefix_tree(input_ids, attention_mask, P):
    """The batch (N, T) as a tree of n nodes: a prefix that sequences share is read once.

    A node stands for a prefix and holds its last token. Returns the nodes' tokens and positions,
    (n,) each; the node that predicts each completion token, (N, R); and the groups of sequences
    that attention takes together. A group of m sequences, with at most C new nodes and S nodes
    each, is (C, real, nodes, bias): real, which places of the flattened (m, C) are not padding;
    nodes (m, S), the node at each position; bias (m, 1, C, S), -inf after a query's own position.
    """
    T = input_ids.shape[1]
    column, lengths = torch.arange(T), attention_mask.sum(1, keepdim=True)
    unpadded = (column + attention_mask.argmax(1, keepdim=True)).clamp(max=T - 1)
    rows = torch.where(column < lengths, input_ids.gather(1, unpadded), -1)
    # Sorted, so that a row shares its longest known prefix with the row above it.
    rows, place = rows.unique(dim=0, return_inverse=True)                               # (U, T)
    is_input = column < (rows >= 0).sum(1, keepdim=True) - 1        # the last predicts nothing
    shared = shared_with_the_row_above(rows) & is_input.roll(1, dims=0)
    new = is_input & ~shared                            # a sequence's own nodes: the rest of it
    count, start = new.sum(1), (shared & is_input).sum(1)                               # (U,)
    kind = size_class(count)
    order = kind.argsort(stable=True)                   # nodes stand group by group, row by row
    node = torch.empty_like(rows)
    node[order] = (new[order].flatten().cumsum(0) - 1).view_as(rows)
    # A shared node belongs to the nearest row above that has it as its own.
    owner = torch.where(new, torch.arange(len(rows))[:, None], 0).cummax(0).values
    node = node.gather(0, owner)                                                        # (U, T)
    groups = []
    for members in (order[kind[order] == k] for k in kind.unique() if k >= 0):
        C, S = int(count[members].max()), int((start + count)[members].max())
        query = start[members, None] + column[:C]                                       # (m, C)
        real = (column[:C] < count[members, None]).flatten().nonzero()[:, 0]
        bias = torch.where(column[:S] <= query[:, :, None], 0.0, float("-inf"))[:, None]
        groups.append((C, real, node[members, :S] * is_input[members, :S], bias))
    positions = new[order].nonzero()[:, 1]                                              # (n,)
    before = attention_mask[:, :P].sum(1, keepdim=True) - 1 + column[:T - P]            # (N, R)
    predicting = node[place].gather(1, before.clamp(max=T - 1))
    return rows[order][new[order]], positions, predicting * attention_mask[:, P:], groups


def shared_with_the_row_above(rows):
    """(U, T) bool: the prefix of each row that the row before it begins with, too."""
    same = (rows == rows.roll(1, dims=0)).int().cumprod(1).bool()
    same[0] = False
    return same


def size_class(count):
    """Which sequences attention takes together: those of 1, 2-3, 4-7, ... nodes; -1 for none."""
    return torch.where(count > 0, count.log2().floor(), -1.0)


def hidden_states(decoder, tokens, positions, groups):
    """Final-norm hidden states of the nodes, (n, D)."""
    rotary = rotary_tables(positions, rotary_frequencies(decoder.config, tokens.device))
    attend = functools.partial(attention, groups=groups)
    x = decoder.embed_tokens(tokens)                                                    # (n, D)
    recompute = decoder.gradient_checkpointing and torch.is_grad_enabled()
    for layer in decoder.layers:
        run = functools.partial(checkpoint, layer, use_reentrant=False) if recompute else layer
        x = run(x, rotary, attend)
    return decoder.norm(x)


def attention(layer, q, k, v, *, groups):
    """Attention of each node to its prefix: q (n, H, d), k, v (n, K, d) -> (n, H*d)."""
    out = []
    own = q.split([len(real) for _, real, _, _ in groups])
    for (C, real, nodes, bias), queries in zip(groups, own):
        padded = q.new_zeros(len(nodes) * C, *q.shape[1:])
        padded = padded.index_copy(0, real, queries).unflatten(0, (-1, C))      # (m, C, H, d)
        # index_select, because its gradient is cheaper than that of indexing.
        keys, values = (x.index_select(0, nodes.flatten()).unflatten(0, nodes.shape)
                        .transpose(1, 2) for x in (k, v))                       # (m, K, S, d)
        if q.is_cuda:       # its fused kernels take no mask where heads share keys
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1)
                            for x in (keys, values))
        x = F.scaled_dot_product_attention(
            padded.transpose(1, 2), keys, values, attn_mask=bias.to(q.dtype),
            enable_gqa=keys.shape[1] != q.shape[1])                             # (m, H, C, d)
        out.append(x.transpose(1, 2).flatten(0, 1).index_select(0, real).flatten(1))
    return torch.cat(out)
