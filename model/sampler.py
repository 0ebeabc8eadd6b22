"""Samples completions token by token, and computes the log-probability of each sampled token."""
import torch
from torch.nn.utils.rnn import pad_sequence


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
           eos_token_id, pad_token_id, generator=None, greedy=False, tool=None):
    """Samples G = num_generations completions of each prompt, without top-k or top-p.

    prompt_ids and prompt_mask are (B, P), padded on the left. eos_token_id is an int or a list.
    With `greedy`, the most likely token is chosen instead of a random one.

    Returns (completion_ids, logps), each (N, R), with N = B*G and R <= max_new_tokens. The G
    completions of a prompt are adjacent. After a completion's EOS, completion_ids is pad_token_id
    and logps is 0. logps are float32 log-probabilities under softmax(logits / temperature). With a
    tool (reward/turns.py), returns a third tensor, (N, R): 1 for sampled tokens, and 0 for tokens
    that the tool has written, whose logps are 0.
    """
    N, device = len(prompt_ids) * num_generations, prompt_ids.device
    eos_ids = prompt_ids.new_tensor(eos_token_id)
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)
    logps = torch.zeros(N, max_new_tokens, device=device)
    drawn = torch.ones_like(completion_ids)                     # all three are cut to (N, R)

    if tool is not None:
        tool.begin(N)
    cache = model.new_cache()
    logits = model(prompt_ids, prompt_mask, logits_to_keep=1, cache=cache).squeeze(1)   # (B, V)
    # Each prompt was read once. From here on, each of its completions has a row: a a b b.
    prompt_of = torch.arange(len(prompt_ids), device=device).repeat_interleave(num_generations)
    cache.select(prompt_of)
    logits, mask = logits[prompt_of], prompt_mask[prompt_of]                    # (N, V), (N, P)
    completion_of = torch.arange(N, device=device)         # the completion that each row writes
    for t in range(max_new_tokens):
        tokens, token_logps = next_token(logits, temperature, generator, greedy)        # (n,)
        alive = ~torch.isin(tokens, eos_ids)
        if tool is not None:
            tokens, is_drawn, alive = tool.take(completion_of, tokens, alive)           # (n,)
            drawn[completion_of, t], token_logps = is_drawn, token_logps * is_drawn
        completion_ids[completion_of, t], logps[completion_of, t] = tokens, token_logps
        if t + 1 == max_new_tokens or not alive.any():
            break
        if not alive.all():                             # finished rows leave the batch
            completion_of, tokens, mask = completion_of[alive], tokens[alive], mask[alive]
            cache.select(alive)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        logits = model(tokens[:, None], mask, logits_to_keep=1, cache=cache).squeeze(1)  # (n, V)
    if tool is None:
        return completion_ids[:, :t + 1], logps[:, :t + 1]
    return completion_ids[:, :t + 1], logps[:, :t + 1], drawn[:, :t + 1]


def next_token(logits, temperature, generator, greedy):
    """Returns (tokens, logps), each (n,): the next token of each row, sampled from logits (n, V).

    For each row, it draws one uniform number, and looks it up in the cumulative distribution.
    torch.multinomial would draw V random numbers per row.
    """
    logps = (logits.float() / temperature).log_softmax(-1)                              # (n, V)
    if greedy:
        tokens = logps.argmax(-1)
    else:
        cumulative = logps.exp().cumsum(-1)
        u = torch.rand(len(logps), 1, device=logps.device, generator=generator)
        tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1)
        # With NaN logits the result is V, which is not a token. The trainer skips such a step.
        tokens = tokens.clamp(max=logps.shape[1] - 1)
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(1)


def in_slices(sampler, most):
    """Returns a sampler that processes at most `most` completions, or one group, at a time.

    This limits the size of the KV cache. sampler: the function called for each part of the batch.
    """
    def joined(of_slices, padding):         # slices differ in length
        return pad_sequence([row for rows in of_slices for row in rows], True, padding)

    def sliced(model, prompt_ids, prompt_mask, *, num_generations, **options):
        parts, prompts = [], max(1, most // num_generations)
        for one in zip(prompt_ids.split(prompts), prompt_mask.split(prompts)):
            parts.append(sampler(model, *one, num_generations=num_generations, **options))
        ids, *others = zip(*parts)      # others: log-probs and, with a tool, a mask of drawn tokens
        return joined(ids, options["pad_token_id"]), *(joined(other, 0) for other in others)

    return sliced


def rng_of(seed, *numbers, device="cpu"):
    """Returns a random generator seeded with these numbers. Its state needs no checkpoint."""
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**62
    return torch.Generator(device).manual_seed(seed)
