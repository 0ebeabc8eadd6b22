"""Other baselines and scales than those of train_grpo.group_advantages (see docs/losses.md).

With its default arguments, `estimate` returns the same advantages as group_advantages.
"""
import math

import torch

from errors import UserError


def nanstd(x):
    """Returns the sample std over the last dimension (kept), ignoring NaNs. One value has std 0."""
    x = x.double()
    deviation = (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    count = (~x.isnan()).sum(-1, keepdim=True)
    return (deviation.pow(2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def above_others(groups):
    """RLOO (arXiv 2402.14740) subtracts from each reward the mean of the group's other rewards."""
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    mean = (groups.nansum(1, keepdim=True) - groups) / others.clamp(min=1)
    return torch.where(others > 0, groups - mean, 0.0)


def above_second_best(groups):
    """A baseline for pass@k (arXiv 2503.19595), where a group's score is its highest reward.

    The best completion's advantage is its reward minus the second highest reward of the group.
    The other completions have advantage 0, because the group's score doesn't depend on them.
    """
    highest = groups.nan_to_num(-math.inf).topk(2, dim=1)
    is_best = torch.arange(groups.shape[1], device=groups.device) == highest.indices[:, :1]
    second = highest.values[:, 1:]              # -inf if only one was scored
    return torch.where(is_best & second.isfinite(), groups - second, 0.0)


def group_mean(groups, batch_std, eps):
    """MaxRL (arXiv 2602.02710) divides by the group's mean reward: A = (r - mean) / mean.

    The gradient then approximates that of log p, where p is the probability of a right answer: the
    gradient of p is multiplied by (1 - (1-p)^(G-1)) / p, which is about 1 / p.
    Raises a UserError if a reward is not between 0 and 1.
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
    """Returns advantages (N,): (rewards - baseline) / scale, computed in float64.

    batch_std: the std of all rewards, for scale "batch". A reward of NaN gets advantage 0."""
    groups = rewards.double().view(-1, num_generations)                                 # (B, G)
    difference, divisor = groups - groups.nanmean(1, keepdim=True), nanstd(groups) + eps
    if baseline != "grpo":
        difference = BASELINES[baseline](groups)
    if scale != "group":
        divisor = SCALES[scale](groups, batch_std, eps)
    return (difference.nan_to_num(0.0) / divisor).view(-1).to(rewards.dtype)
