"""A sampler with weights of its own is tested: does it take the policy's, all of them?

One that keeps old weights looks like a policy that learns slowly: at a low learning rate the
probabilities of sampler and trainer hardly differ for many steps.
"""
import re
from collections import defaultdict

import torch

from report import UserError

from .pair import token_logps

# How far rounding alone may move the log-probability of a token, on average.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@torch.no_grad()
def prove(sample, model, prompt_ids, dtype, temperature):
    """UserError unless the sampler follows the trainer wherever the weights go.

    sample: as in model/sampler.py; prompt_ids (1, P); dtype: of matrix products. Of one kind of
    tensor after the other, in all layers, one number in 32 is doubled. (All of them a norm would
    undo; and half of them would make a deep network enlarge every rounding, to a difference of 5
    with SmolLM2 in bfloat16.) The sampler's log-probabilities must then be nearer to the trainer's
    than to those of the old tensor, and differ by no more than ten times what they differ with the
    weights as they are. Halved again, a number is what it was, to the last bit.
    """
    def sampled():
        ids, logps = sample(
            model, prompt_ids, torch.ones_like(prompt_ids), num_generations=4, max_new_tokens=16,
            temperature=temperature, eos_token_id=[], pad_token_id=0,
            generator=torch.Generator(prompt_ids.device).manual_seed(0))
        return torch.cat((prompt_ids.expand(4, -1), ids), 1), logps

    def trained(sequences):
        return token_logps(model, sequences, torch.ones_like(sequences),
                           sequences.shape[1] - prompt_ids.shape[1], temperature=temperature)

    sequences, theirs = sampled()
    undisturbed = distance(trained(sequences), theirs)
    tolerance = max(undisturbed, ROUNDING[dtype])
    if not tolerance < 10 * ROUNDING[dtype]:
        raise UserError("--sampler: given all weights, its log-probabilities differ from the "
                        f"trainer's by {undisturbed:.1g} on average; choose another sampler")
    kinds = defaultdict(list)
    for name, weight in model.named_parameters():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(weight)
    for kind, weights in kinds.items():
        scale(weights, 2)
        sequences, theirs = sampled()
        ours = trained(sequences)
        scale(weights, 0.5)
        old, found = trained(sequences), distance(ours, theirs)
        shows = distance(ours, old) > 2 * tolerance     # not so an adapter that is still 0
        if not found < 10 * tolerance or shows and not found < distance(old, theirs):
            raise UserError(f"--sampler: given a new {kind}, its log-probabilities differ from "
                            f"the trainer's by {found:.1g} on average, and before by "
                            f"{undisturbed:.1g}: it samples with the old one; choose another "
                            "sampler")


def distance(logps, others):
    return (logps - others).abs().mean().item()


def scale(weights, factor):
    for weight in weights:      # .data: unnoticed by a tensor's version, as by AdamW's fused step
        weight.data[..., ::32] *= factor
