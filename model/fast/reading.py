"""Log-probabilities: `token_logps` without padding, from one of two readers.

    read_tree      reads each distinct prefix of the sequences once; for a CPU, and for float32
    read_packed    reads all tokens of all sequences as one row; for bfloat16 on a GPU

The tree computes less, but takes more and smaller kernels. On a GPU, starting those takes longer
than what they save, unless long prompts are shared (see `WORTH_A_TREE`).
"""
import functools

import torch
import torch.nn.functional as F

from ..model import rotary_frequencies, rotary_tables
from .shared_rows import products_dtype

CHUNK_TOKENS, CHUNK_LOGITS = 1024, 2**24    # a chunk in log_probs has at least this many
# On a GPU, read_tree pays off if (tokens that sharing prompts saves) * (weights of a layer) is
# larger. Derived from times on an H200 (docs/in_practice.md): per layer and pass, the tree takes
# about 3 ms longer, and 3 ms are 5e11 operations, 6 for each token and weight, at 170 TFLOP/s.
WORTH_A_TREE = 8e10


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """Like `token_logps` in train_grpo.py, but doesn't run the model on padding.

    Padding must be at the start or end of a sequence, not inside it.
    """
    (N, R), device = (len(input_ids), num_completion_tokens), input_ids.device
    P = input_ids.shape[1] - R
    read = reader_of(model.model, input_ids, attention_mask, P)
    hidden, node, mask = read(model.model, input_ids, attention_mask, P)                # (n, D)
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


def reader_of(decoder, input_ids, attention_mask, P):
    """Returns read_tree or read_packed, whichever is faster here."""
    device, d = input_ids.device, decoder.config.head_dim
    dtype = products_dtype(device, decoder.embed_tokens.weight.dtype)
    if (device.type != "cuda" or dtype != torch.bfloat16 or d % 8 or d > 256
            or torch.cuda.get_device_capability(device) < (8, 0)):
        return read_tree            # FlashAttention does not support these
    repeats = (input_ids[1:, :P] == input_ids[:-1, :P]).all(1)      # the prompt of the row above
    saved = (attention_mask[1:, :P].sum(1) * repeats).sum().item()
    weights = sum(weight.numel() for weight in decoder.layers[0].parameters())
    return read_tree if saved * weights > WORTH_A_TREE else read_packed


def read_packed(decoder, input_ids, attention_mask, P, attend=None):
    """Runs the decoder on the tokens of all sequences, packed. Returns the same as read_tree.

    attend: the attention, flash_attention by default; sdpa_attention also runs on a CPU.
    """
    device, mask = input_ids.device, attention_mask.cpu()
    lengths = mask.sum(1)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()             # of each sequence among all tokens
    real = mask.flatten().nonzero().squeeze(1).to(device)       # indices into N*T
    positions = (mask.cumsum(1) - 1).flatten().to(device)[real]
    rotary = rotary_tables(positions, rotary_frequencies(decoder.config, device))
    attend = functools.partial(attend or flash_attention, starts=(starts.to(device),) * 2,
                               longest=(int(lengths.max()),) * 2)
    hidden = decoder.read(input_ids.flatten()[real], rotary, attend=attend)             # (n, D)
    row = (mask.flatten().cumsum(0) - 1).view_as(mask)                                  # (N, T)
    return hidden, row[:, P - 1:-1] * mask[:, P:], mask[:, P:]


def flash_attention(q, k, v, *, starts, longest):
    """Attention of each sequence's queries to its own keys, by FlashAttention: bfloat16 on CUDA.

    q is (n, H, d), and k, v are (m, K, d). starts: for queries and for keys, where each sequence
    begins and the last one ends, int32. longest: the longest sequence of both. Returns (n, H*d). If
    a sequence has fewer queries than keys, the last query sees all of the keys.
    """
    from torch.nn.attention.varlen import varlen_attn
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    # Only keys to the left of each query: the window is aligned at the end of the keys.
    return varlen_attn(q, k, v, *starts, *longest, window_size=(-1, 0)).flatten(1)


def sdpa_attention(q, k, v, *, starts, longest):
    """Like flash_attention, one sequence after the other, on any device and in any dtype."""
    parts = [x.split(begins.diff().tolist())
             for x, begins in zip((q, k, v), (starts[0], starts[1], starts[1]))]
    out = []
    for own in zip(*parts):
        queries, keys, values = (x.transpose(0, 1)[None] for x in own)          # (1, H or K, ., d)
        L, S = queries.shape[2], keys.shape[2]
        mask = torch.ones(L, S, dtype=torch.bool, device=q.device).tril(S - L)
        x = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask,
                                           enable_gqa=queries.shape[1] != keys.shape[1])
        out.append(x[0].transpose(0, 1).flatten(1))
    return torch.cat(out)


def read_tree(decoder, input_ids, attention_mask, P):
    """Runs the decoder on each distinct prefix of the sequences once. Returns (hidden, node, mask).

    hidden (n, D): the hidden states. node (N, R): the row of `hidden` that predicts each completion
    token. mask (N, R): the completions' attention mask. node and mask are on the CPU.
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
    """Merges equal prefixes of the sequences (N, T). Returns (tokens, positions, node, groups).

    Each of n nodes stands for a distinct prefix. tokens, positions (n,): the prefix's last token,
    and its position. node (N, R): the node that predicts each completion token. groups: a tuple (C,
    real, nodes, start) per group of m sequences, each of which adds at most C nodes. real: indices
    into the flattened (m, C), without padding. nodes (m, S): each sequence's nodes. start (m,): how
    many of these nodes were added by earlier sequences.
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
    """Returns an attention bias, (m, 1, C, S): -inf for keys after a query's position, else 0.

    It already has the device and dtype of attention, so that no layer has to convert it.
    """
    m, S = nodes.shape
    positions = torch.arange(max(C, S), device=start.device)
    hidden = positions[:S] > start[:, None, None] + positions[:C, None]                 # (m, C, S)
    bias = torch.zeros(m, 1, C, S, dtype=dtype, device=start.device)
    return bias.masked_fill_(hidden[:, None], float("-inf"))


def shared_with_the_row_above(rows):
    """Returns a mask, (U, T): True for the prefix that a row has in common with the row above."""
    same = (rows == rows.roll(1, dims=0)).int().cumprod(1).bool()
    same[0] = False
    return same


def size_class(count):
    """Returns floor(log2(count)) for each sequence, or -1 if the count is 0."""
    return torch.where(count > 0, count.log2().floor(), -1.0)


def attention(q, k, v, *, groups):
    """Returns the attention output, (n, H*d). q is (n, H, d), and k, v are (n, K, d)."""
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
    """Returns (logps, entropy): the log-probability of each token, and the entropy of each row.

    hidden is (m, D). row (p,) says which row of hidden predicts each of the p tokens.
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
    """Computes `log_probs` in chunks, so that the logits of only one chunk are in memory.

    If the vocabulary is large, the logits are the largest tensor of a micro-batch. So they are not
    stored, and the backward pass recomputes them. Let p be the softmax probabilities, T the
    temperature and H the entropy. The gradients are

        d log p(token) / d logits = (one_hot(token) - p) / T
        d H            / d logits = -p (log p + H) / T

    Everything is float32, even under autocast. torch.utils.checkpoint would take 1.5 times the CPU
    time and 2.4 times the memory (measured on one core, 2,048 tokens, V = 49,152, D = 576).
    """

    @staticmethod
    def all_logps(hidden, weight, temperature):
        return F.linear(hidden.float(), weight.float()).div_(temperature).log_softmax(-1)

    @staticmethod
    def forward(ctx, hidden, weight, row, tokens, size, temperature, with_entropy):
        """Returns (logps, entropy), like log_probs. `row` must be sorted."""
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
