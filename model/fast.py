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
from torch.utils.checkpoint import checkpoint

from .decoding import Decoding
from .graph import GraphedStep
from .head import log_probs
from .model import rotary_frequencies, rotary_tables
from .sampler import next_token

# --- sampling -------------------------------------------------------------------------------------

# Tokens between looks at which completions have ended. Each look makes a GPU wait, so there they
# are rare, completions that agree do not share a row, and a step is one launch: see graph.py.
CHECK_EVERY = {"cpu": 1}    # elsewhere 16


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
           eos_token_id, pad_token_id, generator=None, greedy=False):
    """The `sample` of model/sampler.py; on a CPU the same seed gives the same completions."""
    N, device = len(prompt_ids) * num_generations, prompt_ids.device
    eos_ids = prompt_ids.new_tensor(eos_token_id)
    check_every = CHECK_EVERY.get(device.type, 16)
    # Created outside of inference mode, so that a loss can use them.
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)
    longest = torch.zeros((), dtype=torch.long, device=device)
    with torch.inference_mode():
        decoding = Decoding(model, prompt_ids, prompt_mask, N, max_new_tokens,
                            fixed_shapes=check_every > 1)
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
