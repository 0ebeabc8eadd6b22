"""Alternatives to the baseline and scale of train_grpo.group_advantages: docs/losses.md.

`estimate` chooses among them; with its defaults it equals group_advantages.
"""
import math

import torch

from errors import UserError


def nanstd(x):
    """Sample std (n-1) over the last dim (kept), in float64; ignores NaNs; 0 for a single value."""
    x = x.double()
    deviation = (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    count = (~x.isnan()).sum(-1, keepdim=True)
    return (deviation.pow(2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def above_others(groups):
    """RLOO (arXiv 2402.14740): rewards minus the mean of the others in the group; 0 if alone."""
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    mean = (groups.nansum(1, keepdim=True) - groups) / others.clamp(min=1)
    return torch.where(others > 0, groups - mean, 0.0)


def above_second_best(groups):
    """A baseline for pass@k (arXiv 2503.19595), which scores a group by its best completion.

    The best completion's advantage is its lead over the second best, the group's score without it.
    The group's score doesn't depend on the other completions, so their advantage is 0.
    """
    highest = groups.nan_to_num(-math.inf).topk(2, dim=1)
    is_best = torch.arange(groups.shape[1], device=groups.device) == highest.indices[:, :1]
    second = highest.values[:, 1:]              # -inf if only one was scored
    return torch.where(is_best & second.isfinite(), groups - second, 0.0)


def group_mean(groups, batch_std, eps):
    """Scale of MaxRL, arXiv 2602.02710: A = (r - mean) / mean, and 0 in a group whose mean is 0.

    Its gradient approximates that of log p, where p is the probability of a right answer: a prompt
    is weighted by (1 - (1-p)^(G-1)) / p, which is about 1 / p and at most G - 1. Raises a UserError
    for a reward outside 0 to 1.
    """
    wrong = groups[(groups < 0) | (groups > 1 + 1e-6)]
    if len(wrong):
        raise UserError(f"--scale_rewards mean needs rewards from 0 to 1, but one is "
                        f"{wrong[0]:g}; pass other --reward_funcs, e.g. only accuracy, or "
                        "--reward_weights that add up to 1")
    mean = groups.nanmean(1, keepdim=True)
    return mean.where(mean > 0, torch.ones_like(mean))


# From the rewards of groups, (B, G) with NaNs, to the same minus a baseline.
BASELINES = {"rloo": above_others, "grpo_passk": above_second_best}
# From these, the std of all rewards, and eps, to the divisor: (B, 1), (1,) or a float.
SCALES = {
    "batch": lambda groups, std, eps: (nanstd(groups.flatten()) if std is None else std) + eps,
    "none":  lambda groups, std, eps: 1.0,      # Dr. GRPO: a small std magnifies tiny differences
    "mean":  group_mean,
}


def estimate(rewards, num_generations, *, baseline="grpo", scale="group", batch_std=None, eps=1e-4):
    """Returns advantages, (N,), computed in float64: rewards minus the mean (or one of BASELINES),
    divided by the std (or one of SCALES). batch_std: the std of all rewards, for scale "batch". A
    reward of NaN has advantage 0."""
    groups = rewards.double().view(-1, num_generations)                                 # (B, G)
    difference, divisor = groups - groups.nanmean(1, keepdim=True), nanstd(groups) + eps
    if baseline != "grpo":
        difference = BASELINES[baseline](groups)
    if scale != "group":
        divisor = SCALES[scale](groups, batch_std, eps)
    return (difference.nan_to_num(0.0) / divisor).view(-1).to(rewards.dtype)
