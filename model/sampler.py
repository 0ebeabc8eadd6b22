"""Completions of a prompt, token by token, with the log-probability that each token was sampled with.

What makes it fast: a prompt is read once for all its completions; finished completions leave the batch; the keys and values
have their place in memory from the start; a step makes half of the operations that the model's forward would; drawing a
token takes one random number; a GPU is not asked after every token whether it is done.
"""
import functools

import torch
import torch.nn.functional as F
from torch import nn

from .model import MixtureOfExperts, SharedPrompts, rotary_frequencies, rotary_tables, rotate

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
    # Made outside of inference mode, because a loss must be able to use them.
    completion_ids = torch.full((N, max_new_tokens), pad_token_id, device=device)       # (N, R)
    logps = torch.zeros(N, max_new_tokens, device=device)                               # (N, R)
    width = torch.zeros((), dtype=torch.long, device=device)                            # of the longest completion

    with torch.inference_mode(), model.autocast():
        decoding = Decoding(model, prompt_ids, prompt_mask, max_new_tokens)
        prompt = torch.arange(len(prompt_ids), device=device).repeat_interleave(num_generations)    # (N,): a a a b b b
        decoding.select(prompt)
        logits = decoding.logits[prompt]                                                # (N, V)
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
                    decoding.select(keep)
            logits = decoding.step(tokens)
    return completion_ids[:, :width], logps[:, :width]


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


class Decoding:
    """The model's forward pass for the next token of each of n sequences, laid out for speed; no gradient goes through it.

    The same numbers, but for rounding, from half as many operations: matrices that multiply the same input are one matrix,
    queries and keys are normalised and turned as one tensor, and attention is two plain products, in which the heads that
    share their keys are rows of one matrix: for a single query that is faster than the fused kernel of a CPU.
    """

    def __init__(self, model, prompt_ids, prompt_mask, max_new_tokens):
        """Reads the prompts (n, P), padded on the left; `logits` (n, V) are those of their first new tokens.

        Under autocast weights are converted here, once: step has to run within the same autocast.
        """
        config, P, device = model.config, prompt_ids.shape[1], prompt_ids.device
        prompts, mask = SharedPrompts(), None if prompt_mask.all() else prompt_mask
        self.logits = model(prompt_ids, mask, logits_to_keep=1, cache=prompts)[:, 0]
        self.cache = [[F.pad(x.to(values.dtype), (0, 0, 0, max_new_tokens)) for x in (keys, values)]
                      for keys, values in prompts.layers.values()]      # two (n, K, P + max_new_tokens, d) for each layer
        self.length, self.positions = P, prompt_mask.sum(1)                             # padding takes no position
        self.rotary = rotary_tables(torch.arange(P + max_new_tokens, device=device), rotary_frequencies(config, device))
        self.padding_bias = None                                        # or (n, 1, P + max_new_tokens), -inf at padding
        if mask is not None:
            self.padding_bias = F.pad(torch.where(mask.bool(), 0.0, float("-inf")), (0, max_new_tokens))[:, None]
        self.H, self.K, self.d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.embedding, self.head = model.model.embed_tokens, linear(model.lm_head)
        self.norm = rms_norm(model.model.norm.weight, config.rms_norm_eps)
        self.layers = [self.functions(layer, config) for layer in model.model.layers]

    def functions(self, layer, config):
        """What `step` calls, in its order."""
        attention, head_norm = layer.self_attn, nn.Identity()
        if config.qk_norm:
            q_weight, k_weight = attention.q_norm.weight.expand(self.H, -1), attention.k_norm.weight.expand(self.K, -1)
            head_norm = rms_norm(torch.cat((q_weight, k_weight)), config.rms_norm_eps)
        return (rms_norm(layer.input_layernorm.weight, config.rms_norm_eps),
                linear(attention.q_proj, attention.k_proj, attention.v_proj), head_norm, linear(attention.o_proj),
                rms_norm(layer.post_attention_layernorm.weight, config.rms_norm_eps), feed_forward(layer.mlp))

    def select(self, rows):
        """Keeps these sequences, in this order; an index may occur more than once. Only what is filled is copied."""
        self.positions = self.positions[rows]
        self.padding_bias = None if self.padding_bias is None else self.padding_bias[rows]
        for layer, pair in enumerate(self.cache):
            self.cache[layer] = [old.new_empty(len(rows), *old.shape[1:]) for old in pair]
            for old, new in zip(pair, self.cache[layer]):
                new[:, :, :self.length] = old[rows, :, :self.length]

    def step(self, tokens):
        """Takes in one more token of each sequence, (n,), and returns the logits of the next, (n, V)."""
        n, H, K, d, S = len(tokens), self.H, self.K, self.d, self.length + 1
        rotary = [table[self.positions] for table in self.rotary]                       # (n, 1, d)
        x = self.embedding(tokens)                                                      # (n, D)
        for (attention_norm, qkv, head_norm, out, mlp_norm, mlp), (keys, values) in zip(self.layers, self.cache):
            heads = qkv(attention_norm(x)).view(n, H + 2 * K, d)
            qk = rotate(head_norm(heads[:, :H + K]), rotary)                            # (n, H + K, d)
            keys[:, :, S - 1], values[:, :, S - 1] = qk[:, H:], heads[:, H + K:]
            k, v = (side[:, :, :S].flatten(0, 1) for side in (keys, values))            # (n * K, S, d)
            q = (qk[:, :H] / d**0.5).view(n * K, H // K, d)
            scores = torch.bmm(q, k.transpose(1, 2))                                    # (n * K, H/K, S)
            if self.padding_bias is not None:
                scores.view(n, H, S).add_(self.padding_bias[:, :, :S])
            x = x + out(torch.bmm(scores.softmax(-1), v).view(n, H * d))
            x = x + mlp(mlp_norm(x))
        self.length, self.positions = S, self.positions + 1
        return self.head(self.norm(x))


def rms_norm(weight, eps):
    """w x / sqrt(mean(x^2) + eps) as sqrt(D) w x / hypot(|x|, sqrt(D eps)): four operations instead of six."""
    scale = weight.shape[-1] ** 0.5
    scaled_weight, floor = weight.float() * scale, torch.tensor(scale * eps**0.5, device=weight.device)

    def function(x):
        x = x.float()
        return (x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor) * scaled_weight).to(weight.dtype)
    return function


def feed_forward(mlp):
    if isinstance(mlp, MixtureOfExperts):
        return functools.partial(mlp.mix, linear(mlp.gate), [feed_forward(expert) for expert in mlp.experts])
    gate_up, down = linear(mlp.gate_proj, mlp.up_proj), linear(mlp.down_proj)

    def function(x):
        gate, up = gate_up(x).chunk(2, -1)
        return down(F.silu(gate) * up)
    return function


def linear(*layers):
    """Linear layers that read the same input as one function, their outputs side by side.

    Joined only where the weights have to be copied anyway, or are small: under autocast they are converted, once; on a CPU
    they are laid out for oneDNN, which costs more than it gains below about 100,000 weights.
    """
    device = layers[0].weight.device.type
    if device != "cpu" and not torch.is_autocast_enabled(device):
        return lambda x: torch.cat([layer(x) for layer in layers], -1)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layers[0].weight.dtype
    weight = torch.cat([layer.weight.to(dtype) for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.to(dtype) for layer in layers])
    if weight.numel() < 90_000 or not can_pack(weight):
        return functools.partial(F.linear, weight=weight, bias=bias)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def can_pack(weight):
    """Packing is private to PyTorch: where an operator is missing, on a GPU, in half precision, weights stay as they are."""
    return (weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
