"""Completions of a prompt, token by token, with the log-probability that each token was sampled with."""
import torch

from .model import KVCache


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0, eos_token_id,
           pad_token_id, generator=None, greedy=False):
    """Samples G = num_generations completions of each prompt from the model's own distribution: no top-k, no top-p.

    prompt_ids, prompt_mask (B, P), padded on the left; eos_token_id an int or a list of them.
    Returns completion_ids (N, R) and logps (N, R), N = B*G, the G completions of a prompt adjacent, R <= max_new_tokens.
    A completion ends with its EOS; behind it stand pad_token_id and a log-probability of 0. logps are float32, those of
    the distribution that was sampled, log softmax(logits / temperature); `greedy` takes its most likely token instead.
    """
    B, P = prompt_ids.shape
    N, device = B * num_generations, prompt_ids.device
    eos = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id, device=device)
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)

    cache = KVCache(P + max_new_tokens)
    logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=cache)[:, 0]        # (B, V): a prompt is read once
    prompt = torch.arange(B, device=device).repeat_interleave(num_generations)          # (N,): a a a b b b
    logits, prompt_mask = logits[prompt], prompt_mask[prompt]
    cache.select(prompt)
    mask = torch.cat((prompt_mask, prompt_mask.new_ones(N, max_new_tokens)), dim=1)     # (N, P + R)

    rows = torch.arange(N, device=device)       # which completion each row of the batch is: finished ones leave it
    alive = torch.ones(N, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        tokens, token_logps = next_token(logits, temperature, generator, greedy)
        completion_ids[rows[alive], t], logps[rows[alive], t] = tokens[alive], token_logps[alive]
        alive &= ~torch.isin(tokens, eos)
        num_alive = int(alive.sum())
        if num_alive == 0 or t + 1 == max_new_tokens:
            break
        if num_alive < 0.75 * len(rows):        # moving the cache costs about a step: not for a few rows
            keep = alive.nonzero()[:, 0]
            rows, tokens, mask, alive = rows[keep], tokens[keep], mask[keep], alive[keep]
            cache.select(keep)
        logits = model(tokens[:, None], mask[:, :P + t + 1], logits_to_keep=1, cache=cache)[:, 0]
    return completion_ids[:, :t + 1], logps[:, :t + 1]


def next_token(logits, temperature, generator, greedy):
    """One token per row and its log-probability, by inverting the cumulative distribution: one random number a row."""
    logps = (logits.float() / temperature).log_softmax(-1)                              # (n, V)
    if greedy:
        tokens = logps.argmax(-1)
    else:
        cumulative = logps.exp().cumsum(-1)
        u = torch.rand(len(logps), 1, device=logps.device, generator=generator) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, u, right=True)[:, 0].clamp(max=logps.shape[1] - 1)
    return tokens, logps.gather(-1, tokens[:, None])[:, 0]
