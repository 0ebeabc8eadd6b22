"""Log-probabilities from the language-model head, without logits of the whole batch.

Logits are a micro-batch's largest tensor where the vocabulary is large: with 152,000 entries those
of a token take 0.6 MB, and learning holds three such tensors. Here the logits of one chunk exist at
a time. The backward pass computes them again, which costs one more product with the head.
"""
import torch
from torch.utils.checkpoint import checkpoint

CHUNK, SMALL = 1024, 2**24          # tokens; logits (a small vocabulary makes longer chunks)


def log_probs(head, hidden, row, tokens, *, temperature, with_entropy):
    """log softmax(head(hidden) / temperature) at some tokens, and the entropy of each row, or 0.

    hidden (m, D); row, tokens (p,): which row predicts which token -> float32 (p,) and (m,).
    """
    size = max(CHUNK, SMALL // head.out_features)
    recompute = torch.is_grad_enabled() and len(hidden) > size

    def of_chunk(hidden, row, tokens):
        all_logps = (head(hidden).float() / temperature).log_softmax(-1)                # (c, V)
        entropy = all_logps.new_zeros(len(hidden))                                      # (c,)
        if with_entropy:
            entropy = -(all_logps.exp() * all_logps).sum(-1)
        return all_logps.flatten().take(row * all_logps.shape[1] + tokens), entropy

    if len(hidden) <= size:
        return of_chunk(hidden, row, tokens)
    row, order = row.sort()
    starts = torch.arange(0, len(hidden) + size, size, device=row.device)
    ends = torch.searchsorted(row, starts).tolist()
    parts = []
    for i, (start, end) in enumerate(zip(ends, ends[1:])):
        inputs = (hidden[i * size:(i + 1) * size], row[start:end] - i * size,
                  tokens[order[start:end]])
        parts.append(checkpoint(of_chunk, *inputs, use_reentrant=False) if recompute
                     else of_chunk(*inputs))
    logps, entropy = map(torch.cat, zip(*parts))
    return logps[order.argsort()], entropy
