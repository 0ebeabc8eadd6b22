"""`token_logps` again, where each prefix that sequences share is read once."""
import functools

import torch
import torch.nn.functional as F

from ..model import rotary_frequencies, rotary_tables
from .head import log_probs


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
    rotary = rotary_tables(positions, rotary_frequencies(model.config, device))
    attend = functools.partial(attention, groups=groups)
    hidden = model.model.read(tokens, rotary, attend)                                   # (n, D)
    sampled, entropy = log_probs(model.lm_head, hidden.index_select(0, predicts), row,
                                 input_ids[:, P:].flatten()[wanted], temperature=temperature,
                                 with_entropy=with_entropy)

    def spread(x):      # no view of another tensor: FSDP warns of those
        return x.new_zeros(N, R).index_put((wanted // R, wanted % R), x)

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
