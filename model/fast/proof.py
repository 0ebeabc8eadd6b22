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
    tensor after the other, in all layers, every second number is doubled. (If all of them were, a
    norm would undo it.) The sampler's log-probabilities must then differ from the trainer's by no
    more than ten times what they differ with the weights as they are. Halved again, a number is
    what it was, to the last bit.
    """
    def difference():
        ids, logps = sample(
            model, prompt_ids, torch.ones_like(prompt_ids), num_generations=4, max_new_tokens=16,
            temperature=temperature, eos_token_id=[], pad_token_id=0,
            generator=torch.Generator(prompt_ids.device).manual_seed(0))
        sequences = torch.cat((prompt_ids.expand(4, -1), ids), 1)
        ours = token_logps(model, sequences, torch.ones_like(sequences), ids.shape[1],
                           temperature=temperature)
        return (ours - logps).abs().mean().item()

    undisturbed, rounding = difference(), ROUNDING[dtype]
    if not undisturbed < 10 * rounding:
        raise UserError("--sampler: given all weights, its log-probabilities differ from the "
                        f"trainer's by {undisturbed:.1g} on average; choose another sampler")
    kinds = defaultdict(list)
    for name, weight in model.named_parameters():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(weight)
    for kind, weights in kinds.items():
        scale(weights, 2)
        found = difference()
        scale(weights, 0.5)
        if not found < 10 * max(undisturbed, rounding):
            raise UserError(f"--sampler: given a new {kind}, its log-probabilities differ from "
                            f"the trainer's by {found:.1g} on average, and before by "
                            f"{undisturbed:.1g}: it samples with the old one; choose another "
                            "sampler")


def scale(weights, factor):
    for weight in weights:      # .data: unnoticed by a tensor's version, as by AdamW's fused step
        weight.data[..., ::2] *= factor
