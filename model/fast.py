"""Faster versions of `sample` and `token_logps`, with the same signatures, weights and results.

Each run compares both `token_logps` once (run/policy.py); --sampler plain uses the plain versions.
The table says how many times as long sampling or learning takes on a CPU without each trick (python
tests/bench.py --tricks). Differences below 0.1 may be noise; sampling has become up to 5% slower.

    without ...                                          default   trained   1.7M   26M
    sampling: completions share a row until they diverge   1.27      2.44    1.03   0.90
    sampling: weights are packed for oneDNN                0.93      1.02    1.13   1.96
    learning: each distinct prefix is read once            1.91      1.32    1.21   1.16
    learning: sequences of similar size attend together    1.27      1.02    1.05   0.99
    all tricks: sampling, learning                    1.8, 3.9  3.9, 7.3  2.4, 1.2  2.8, 1.2

A reward model with our own network also reads each distinct prefix once (reward/reward_model.py),
so the rewards of a default step take 0.056 s instead of 0.089 s.

These versions only work for our own network; other architectures (transformers_model.py) use the
plain ones. Nothing here was measured on a GPU; to sample fast there, use an inference engine.
"""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from . import sampler
from .lora import LoRALinear
from .model import (
    Head,
    KVCache,
    MixtureOfExperts,
    RMSNorm,
    rotary_frequencies,
    rotary_tables,
    rotate,
)

PACK_FROM = 95_000          # weights in the smallest matrix that is worth packing
CHUNK_TOKENS, CHUNK_LOGITS = 1024, 2**24    # a chunk in log_probs has at least this many


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, **options):
    """Samples as model/sampler.py does, but completions of a prompt share a row until they diverge.

    With the same seed, both return the same completions.
    """
    rows = len(prompt_ids) * num_generations
    with torch.inference_mode():
        decoding = Decoding(model, prompt_ids, prompt_mask, rows, max_new_tokens)
        found = sampler.sample(decoding, prompt_ids, prompt_mask, num_generations=num_generations,
                               max_new_tokens=max_new_tokens, **options)
    return tuple(x.clone() for x in found)      # autograd can't use tensors from inference mode


class Decoding:
    """Stands in for the network and its cache when a sampler runs, without gradients.

    Completions of a prompt share a row until they diverge: see `branch`. The layers are those of
    model.py in half as many operations, since queries and keys are normalized and rotated together.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_rows, max_new_tokens):
        """Reads the prompts (B, P), one per row; `prompt_logits` (B, 1, V) predict what follows."""
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
        """Returns the logits after the prompts, (B, 1, V), or after one token per completion."""
        if mask.shape[1] == self.length:            # the prompts have already been read
            return self.prompt_logits
        tokens = tokens.squeeze(1)
        self.row = self.branch(self.row, tokens)
        of_rows = tokens.new_zeros(self.num_rows).index_copy_(0, self.row, tokens)
        return self.step(of_rows)[self.row, None]                               # (n, 1, V)

    def parts(self, layer):
        """Returns the parts of a layer that `step` needs, in the order of use."""
        attention, mlp, head_norm = layer.self_attn, layer.mlp, nn.Identity()
        if isinstance(attention.q_norm, RMSNorm):       # one norm for queries and keys together
            weights = [attention.q_norm.weight] * self.H + [attention.k_norm.weight] * self.K
            head_norm = RMSNorm(self.d, attention.q_norm.eps)
            head_norm.weight = nn.Parameter(torch.stack(weights))               # (H + K, d)
        qkv = [linear(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return (layer.input_layernorm, qkv, head_norm, linear(attention.o_proj),
                layer.post_attention_layernorm, feed_forward(mlp))

    def branch(self, row, tokens):
        """Splits each row whose completions diverge: one row for each distinct next token.

        row, tokens (n,): each completion's row and next token -> its new row, (n,). The first
        continuation of a row stays in place; the others move to rows that are no longer in use.
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
        """Reads one more token per row, (n,); returns the logits of the token after it, (n, V)."""
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
    """Attention of one query per head, (n, H, d), to keys and values (n*K, S, d) -> (n, H*d)."""
    (n, H, d), (nK, S, _) = q.shape, keys.shape
    q = (q * d**-0.5).view(nK, n * H // nK, d)
    scores = torch.bmm(q, keys.transpose(1, 2))                                 # (n*K, H/K, S)
    scores.view(n, H, S).add_(bias)
    return torch.bmm(scores.softmax(-1), values).view(n, H * d)


def fused_attention(q, keys, values, bias):
    """Does the same for bfloat16: scores stay float32, while bmm would round them to 8 bits."""
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
    """Returns a linear layer as a function whose weight is cast once and, on a CPU, packed.

    The dtype is the one that autocast would use; packing is for oneDNN. An adapter is merged into
    float32 weights, but computed separately for bfloat16 weights, which would round it away.
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
    """Returns the dtype of matrix products: autocast's, or the weights' own without autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return dtype


def can_pack(dtype, device):
    """Whether oneDNN can multiply this dtype here; not every build of PyTorch includes it."""
    if device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """Does what `token_logps` of train_grpo.py does, but reads each shared prefix only once.

    Padding must be at either end of a sequence, not inside it.
    """
    (N, R), device = (len(input_ids), num_completion_tokens), input_ids.device
    P = input_ids.shape[1] - R
    hidden, node, mask = read_tree(model.model, input_ids, attention_mask, P)           # (n, D)
    wanted = mask.flatten().nonzero().squeeze(1)                    # (p,) indices into N*R
    predicts, row = node.flatten()[wanted].unique(return_inverse=True)          # (m,), (p,)
    wanted, predicts, row = (x.to(device) for x in (wanted, predicts, row))
    sampled, entropy = log_probs(model.lm_head, hidden.index_select(0, predicts), row,
                                 input_ids[:, P:].flatten()[wanted], temperature=temperature,
                                 with_entropy=with_entropy)

    def spread(x):      # a new tensor, because FSDP warns about views
        return x.new_zeros(N, R).index_put((wanted // R, wanted % R), x)

    if not with_entropy:
        return spread(sampled)
    return spread(sampled), spread(entropy[row])


def read_tree(decoder, input_ids, attention_mask, P):
    """Reads each distinct prefix of sequences (N, T) once; returns their hidden states, (n, D).

    Also returns which state predicts each token from column P on, (N, R), and the mask of these
    columns. Both are on the CPU: shapes depend on them, and reading a shape would stall a GPU.
    """
    device, mask = input_ids.device, attention_mask.cpu()
    tokens, positions, node, groups = prefix_tree(input_ids.cpu(), mask, P)
    dtype = products_dtype(device, decoder.embed_tokens.weight.dtype)
    groups = [(C, real.to(device), nodes.to(device), causal_bias(start.to(device), C, nodes, dtype))
              for C, real, nodes, start in groups]
    rotary = rotary_tables(positions.to(device), rotary_frequencies(decoder.config, device))
    attend = functools.partial(attention, groups=groups)
    return decoder.read(tokens.to(device), rotary, attend=attend), node, mask[:, P:]


@torch.no_grad()
def prefix_tree(input_ids, attention_mask, P):
    """Turns the batch (N, T) into a tree of n nodes, in which sequences share their prefixes.

    A node stands for a prefix and holds its last token. Returns the nodes' tokens and positions,
    (n,) each; the node that predicts each completion token, (N, R); and the groups of sequences
    that attention computes together. A group of m sequences, with at most C new nodes and S nodes
    each, is (C, real, nodes, start): real holds the indices in the flattened (m, C) that are not
    padding; nodes (m, S), the node at each position; start (m,), how many nodes a sequence shares.
    """
    T = input_ids.shape[1]
    column, lengths = torch.arange(T), attention_mask.sum(1, keepdim=True)
    unpadded = (column + attention_mask.argmax(1, keepdim=True)).clamp(max=T - 1)
    rows = torch.where(column < lengths, input_ids.gather(1, unpadded), -1)
    # Rows are sorted, so each shares its longest known prefix with the row above it.
    rows, place = rows.unique(dim=0, return_inverse=True)                               # (U, T)
    is_input = column < (rows >= 0).sum(1, keepdim=True) - 1        # the last one predicts nothing
    shared = shared_with_the_row_above(rows) & is_input.roll(1, dims=0)
    new = is_input & ~shared                            # the nodes that a sequence adds
    count, start = new.sum(1), (shared & is_input).sum(1)                               # (U,)
    kind = size_class(count)
    order = kind.argsort(stable=True)                   # nodes are ordered by group, then by row
    node = torch.empty_like(rows)
    node[order] = (new[order].flatten().cumsum(0) - 1).view_as(rows)
    # A shared node belongs to the nearest row above that added it.
    owner = torch.where(new, torch.arange(len(rows))[:, None], 0).cummax(0).values
    node = node.gather(0, owner)                                                        # (U, T)
    groups = []
    for k in kind[kind >= 0].unique():
        members = order[kind[order] == k]
        C, S = int(count[members].max()), int((start + count)[members].max())
        real = (column[:C] < count[members, None]).flatten().nonzero().squeeze(1)
        groups.append((C, real, node[members, :S] * is_input[members, :S], start[members]))
    positions = new[order].nonzero()[:, 1]                                              # (n,)
    before = attention_mask[:, :P].sum(1, keepdim=True) - 1 + column[:T - P]            # (N, R)
    predicting = node[place].gather(1, before)
    return rows[order][new[order]], positions, predicting * attention_mask[:, P:], groups


def causal_bias(start, C, nodes, dtype):
    """Returns an attention bias (m, 1, C, S): 0, or -inf after a query's own position.

    It is made on the device and in the dtype of attention, so that no layer has to cast it.
    """
    m, S = nodes.shape
    positions = torch.arange(max(C, S), device=start.device)
    hidden = positions[:S] > start[:, None, None] + positions[:C, None]                 # (m, C, S)
    bias = torch.zeros(m, 1, C, S, dtype=dtype, device=start.device)
    return bias.masked_fill_(hidden[:, None], float("-inf"))


def shared_with_the_row_above(rows):
    """Marks the prefix that each row shares with the row above it, (U, T) bool."""
    same = (rows == rows.roll(1, dims=0)).int().cumprod(1).bool()
    same[0] = False
    return same


def size_class(count):
    """Returns the size class of sequences with 1, 2-3, 4-7, ... nodes; -1 without nodes."""
    return torch.where(count > 0, count.log2().floor(), -1.0)


def attention(q, k, v, *, groups):
    """Attention of each node to its prefix: q (n, H, d), k, v (n, K, d) -> (n, H*d)."""
    out = []
    own = q.split([len(real) for _, real, _, _ in groups])
    for (C, real, nodes, bias), queries in zip(groups, own):
        padded = q.new_zeros(len(nodes) * C, *q.shape[1:])
        padded = padded.index_copy(0, real, queries).unflatten(0, (-1, C))      # (m, C, H, d)
        # index_select, because its gradient is cheaper than that of indexing.
        keys, values = (x.index_select(0, nodes.flatten()).unflatten(0, nodes.shape)
                        .transpose(1, 2) for x in (k, v))                       # (m, K, S, d)
        if q.is_cuda:       # the fused kernels don't support a mask if heads share keys
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1)
                            for x in (keys, values))
        x = F.scaled_dot_product_attention(
            padded.transpose(1, 2), keys, values, attn_mask=bias,
            enable_gqa=keys.shape[1] != q.shape[1])                             # (m, H, C, d)
        out.append(x.transpose(1, 2).flatten(0, 1).index_select(0, real).flatten(1))
    return torch.cat(out)


def log_probs(head, hidden, row, tokens, *, temperature, with_entropy):
    """Returns log softmax(head(hidden) / temperature) at some tokens, and each row's entropy or 0.

    hidden (m, D); row, tokens (p,): which row predicts which token -> float32 (p,) and (m,).
    """
    size = max(CHUNK_TOKENS, CHUNK_LOGITS // head.out_features)
    if len(hidden) > size:
        row, order = row.sort()
        logps, entropy = InChunks.apply(hidden, head.weight, row, tokens[order], size, temperature,
                                        with_entropy)
        return logps[order.argsort()], entropy
    all_logps = (head(hidden).float() / temperature).log_softmax(-1)                    # (m, V)
    entropy = all_logps.new_zeros(len(hidden))                                          # (m,)
    if with_entropy:
        entropy = -(all_logps.exp() * all_logps).sum(-1)
    return all_logps.flatten().take(row * all_logps.shape[1] + tokens), entropy


class InChunks(torch.autograd.Function):
    """Computes `log_probs` of many tokens with the logits of only one chunk of rows in memory.

    If the vocabulary is large, logits are a micro-batch's largest tensor, so the backward pass
    recomputes them. With p the softmax, T the temperature and H the entropy, it needs

        d log p(token) / d logits = (one_hot(token) - p) / T
        d H            / d logits = -p (log p + H) / T

    Everything is float32 even under autocast, as in model.Head. torch.utils.checkpoint over the
    same chunks takes 1.5 times the processor time and 2.4 times the memory (a forward and a
    backward pass on one core, 2,048 tokens, V = 49,152, D = 576; three runs each).
    """

    @staticmethod
    def all_logps(hidden, weight, temperature):
        return F.linear(hidden.float(), weight.float()).div_(temperature).log_softmax(-1)

    @staticmethod
    def forward(ctx, hidden, weight, row, tokens, size, temperature, with_entropy):
        """Like log_probs; row must be sorted."""
        starts = torch.arange(0, len(hidden) + size, size, device=row.device)
        ends = torch.searchsorted(row, starts).tolist()
        ctx.temperature, ctx.chunks = temperature, []
        for i, pair in enumerate(zip(ends, ends[1:])):
            ctx.chunks.append((slice(i * size, (i + 1) * size), slice(*pair)))
        logps = torch.zeros(len(row), device=row.device)
        entropy = torch.zeros(len(hidden), device=row.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, those in ctx.chunks:
                all_logps = InChunks.all_logps(hidden[rows], weight, temperature)       # (c, V)
                logps[those] = all_logps[row[those] - rows.start, tokens[those]]
                if with_entropy:
                    entropy[rows] = -all_logps.exp().mul_(all_logps).sum(-1)
                del all_logps                           # before the next chunk is computed
        ctx.save_for_backward(hidden, weight, row, tokens, entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx, of_logps, of_entropy):
        hidden, weight, row, tokens, entropy = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
        has_entropy = bool(of_entropy.any())
        of_logps, of_entropy = of_logps / ctx.temperature, of_entropy / ctx.temperature
        of_row = torch.zeros_like(entropy).index_add_(0, row, of_logps)                 # (m,)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, those in ctx.chunks:
                all_logps = InChunks.all_logps(hidden[rows], weight, ctx.temperature)   # (c, V)
                times_p = of_row[rows, None]                                            # (c, 1)
                if has_entropy:
                    times_p = times_p + of_entropy[rows, None] * (all_logps + entropy[rows, None])
                of_logits = all_logps.exp_().mul_(-times_p)     # in place
                of_logits.index_put_((row[those] - rows.start, tokens[those]), of_logps[those],
                                     accumulate=True)
                of_hidden[rows] = (of_logits @ weight.float()).to(hidden.dtype)
                if of_weight is not None:
                    of_weight.addmm_(of_logits.T, hidden[rows].float())
                del all_logps, of_logits, times_p
        return of_hidden, of_weight, None, None, None, None, None
