"""Completions of a prompt, token by token, with the log-probability that each token was sampled with.

What makes it fast: a prompt is read once for all its completions; finished completions leave the batch; the keys and values
have their place in memory from the start; drawing a token takes one random number; a CPU has the weights laid out for its
matrix products once, not at every token; a GPU is not asked after every token whether it is done.
"""
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from .model import KVCache

CHECK_EVERY = {"cpu": 1}        # steps after which finished rows are looked for; 16 elsewhere: a GPU has to stop and answer


def sample(model, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0, eos_token_id,
           pad_token_id, generator=None, greedy=False):
    """Samples G = num_generations completions of each prompt from the model's own distribution: no top-k, no top-p.

    prompt_ids, prompt_mask (B, P), padded on the left; eos_token_id an int or a list of them.
    Returns completion_ids (N, R) and logps (N, R), N = B*G, the G completions of a prompt adjacent, R <= max_new_tokens.
    A completion ends with its EOS; behind it stand pad_token_id and a log-probability of 0. logps are float32, those of
    the distribution that was sampled, log softmax(logits / temperature); `greedy` takes its most likely token instead.
    """
    N, device = len(prompt_ids) * num_generations, prompt_ids.device
    eos = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id, device=device)
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)
    width = torch.zeros((), dtype=torch.long, device=device)                            # of the longest completion

    # Inference mode is cheapest; but only outside of it does one autocast around all tokens convert the weights just once.
    # The results are made before, because a loss must be able to use them.
    without_gradients = torch.inference_mode if model.autocast is nullcontext else torch.no_grad
    with without_gradients(), model.autocast(), packed_weights(model):
        logits, mask, cache = read_prompts(model, prompt_ids, prompt_mask, num_generations, max_new_tokens)
        rows = torch.arange(N, device=device)       # which completion each row of the batch is: finished ones leave it
        alive = torch.ones(N, dtype=torch.bool, device=device)
        for t in range(max_new_tokens):
            tokens, token_logps = next_token(logits, temperature, generator, greedy)
            completion_ids[rows, t] = torch.where(alive, tokens, pad_token_id)
            logps[rows, t] = torch.where(alive, token_logps, 0.0)
            width += alive.any()
            alive &= ~torch.isin(tokens, eos)
            if t + 1 == max_new_tokens:
                break
            if (t + 1) % CHECK_EVERY.get(device.type, 16) == 0:
                num_alive = int(alive.sum())
                if num_alive == 0:
                    break
                if num_alive < 0.75 * len(rows):        # moving the cache costs about a step: not for a few rows
                    keep = alive.nonzero()[:, 0]
                    rows, tokens, alive = rows[keep], tokens[keep], alive[keep]
                    mask = None if mask is None else mask[keep]
                    cache.select(keep)
            so_far = None if mask is None else mask[:, :cache.length + 1]
            logits = model(tokens[:, None], so_far, logits_to_keep=1, cache=cache)[:, 0]
    return completion_ids[:, :width], logps[:, :width]


def read_prompts(model, prompt_ids, prompt_mask, num_generations, max_new_tokens):
    """Each prompt once; then its G completions get a copy of the logits (N, V), the mask (N, P + R) and the cache.

    The mask is None if no prompt is padded: then attention and positions are simpler.
    """
    B, P = prompt_ids.shape
    cache = KVCache(P + max_new_tokens)
    mask = None if prompt_mask.all() else prompt_mask
    logits = model(prompt_ids, mask, logits_to_keep=1, cache=cache)[:, 0]               # (B, V)
    prompt = torch.arange(B, device=prompt_ids.device).repeat_interleave(num_generations)      # (N,): a a a b b b
    cache.select(prompt)
    if mask is not None:
        mask = F.pad(mask[prompt], (0, max_new_tokens), value=1)
    return logits[prompt], mask, cache


def next_token(logits, temperature, generator, greedy):
    """One token per row and its log-probability, by inverting the cumulative distribution: one random number a row."""
    probs = (logits.float() / temperature).softmax(-1)                                  # (n, V)
    if greedy:
        tokens = logits.argmax(-1)
    else:
        cumulative = probs.cumsum(-1)
        u = torch.rand(len(probs), 1, device=probs.device, generator=generator) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, u, right=True)[:, 0].clamp(max=probs.shape[1] - 1)
    return tokens, probs.gather(-1, tokens[:, None])[:, 0].log()


@contextmanager
def packed_weights(model):
    """Lets the model's large linear layers multiply by copies of their weights that are laid out for oneDNN.

    Its layout costs more than it gains below about 100,000 weights. The operators are private to PyTorch: where they are
    missing, on a GPU, in half precision, the layers stay as they are.
    """
    packed = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.numel() >= 90_000 and can_pack(layer.weight):
            layer.forward = packed_linear(layer)
            packed.append(layer)
    try:
        yield packed
    finally:
        for layer in packed:
            del layer.forward           # uncovers the method of the class


def can_pack(weight):
    return (weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


def packed_linear(layer):
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight)

    def forward(x):
        if x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return nn.Linear.forward(layer, x)
        return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")
    return forward
