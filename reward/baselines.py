"""A std that leaves out missing rewards; other baselines and scales; what else makes advantages.

BASELINES and SCALES are choices of train_grpo.group_advantages. docs/losses.md is the map of the
family.
"""
import math

import torch

from report import UserError


def from_best(groups):
    """Rewards minus the best of their group: equal ones are then 0, whatever a mean rounds to."""
    return groups - groups.nan_to_num(-math.inf).amax(-1, keepdim=True)


def nanstd(x):
    """Sample std (n-1) over the last dim (kept), ignoring NaNs; 0 for a single value."""
    x = from_best(x)
    deviation = (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    count = (~x.isnan()).sum(-1, keepdim=True)
    return (deviation.pow(2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


def above_others(groups):
    """Rewards minus the mean of the others in their group: RLOO, arXiv 2402.14740."""
    groups = from_best(groups)
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    return groups - (groups.nansum(1, keepdim=True) - groups) / others.clamp(min=1)


def above_second_best(groups):
    """A baseline for pass@k, arXiv 2503.19595: a group counts as its best answer.

    That one is compared with the second best, what the group would have without it. The others,
    without which it would have the same, have advantage 0.
    """
    highest = groups.nan_to_num(-math.inf).topk(2, dim=1)
    is_best = torch.arange(groups.shape[1], device=groups.device) == highest.indices[:, :1]
    second = highest.values[:, 1:]              # -inf, if only one was judged
    return torch.where(is_best & second.isfinite(), groups - second, 0.0)


def group_mean(groups, batch_std, eps):
    """Scale of MaxRL, arXiv 2602.02710: A = (r - mean) / mean, and 0 in a group whose mean is 0.

    The gradient is that of log p, p the probability to be right, as far as G answers can tell: a
    prompt weighs (1 - (1-p)^(G-1)) / p, so 1 / p, but at most G - 1. UserError for a reward outside
    0 to 1.
    """
    wrong = groups[(groups < 0) | (groups > 1 + 1e-6)]
    if len(wrong):
        raise UserError(f"--scale_rewards mean is for rewards from 0 to 1, and one is "
                        f"{wrong[0]:g}; choose other --reward_funcs, accuracy alone, or "
                        "--reward_weights that add up to 1")
    mean = groups.nanmean(1, keepdim=True)
    return mean.where(mean > 0, torch.ones_like(mean))


# From the rewards of groups, (B, G) with NaNs, to the same minus a baseline.
BASELINES = {"rloo": above_others, "grpo_passk": above_second_best}
# From these, the std of all rewards, and eps, to the divisor: (B, 1), (1,) or a float.
SCALES = {
    "batch": lambda groups, std, eps: (nanstd(groups.flatten()) if std is None else std) + eps,
    "none":  lambda groups, std, eps: 1.0,      # Dr. GRPO: a small std blows up tiny differences
    "mean":  group_mean,
}


def minus_kl(rollout, kl_penalty, args):
    """The rewards less beta times the KL of the whole completion, (N,): --kl_in_reward.

    It takes k1, whose value is right and whose gradient does not count here.
    """
    kl = kl_penalty(rollout.policy_logps, rollout.ref_logps, kl_type="k1")              # (N, R)
    return rollout.rewards - args.beta * (kl * rollout.mask).sum(1).cpu()


def towards_teacher(rollout):
    """Advantages of on-policy distillation, (N, R): --teacher_path; arXiv 2306.13649.

        A_t = log pi_teacher(o_t | q, o_<t) - log pi(o_t | q, o_<t)

    Of what pi draws after o_<t, the mean of A_t grad log pi is minus the gradient of the KL there,
    KL(pi || pi_teacher): it lowers the KL of each token, with its prefix as given. But pi has drawn
    the prefix, too. For the KL of whole answers, the mean of minus the sum of A_t, a token answers
    for all that follows: in place of A_t it has the sum of A_u over u >= t, which is noisier.
    Neither takes a group, a std or a reward; both models are at --temperature. (The paper reads the
    teacher's whole distribution; the drawn token alone is verl's k1 with use_policy_gradient.)
    """
    return (rollout.teacher_logps - rollout.policy_logps) * rollout.mask


def normalize_then_sum(rollout, normalize, world, args):
    """Advantages of GDPO, arXiv 2601.05242, (N,): each reward function normalised on its own.

        S = sum over functions k of weight_k (r_k - mean_k(group)) / (std_k(group) + eps)
        A = (S - mean(S)) / (std(S) + eps)          over the completions of the step, of all ranks

    `normalize` is group_advantages. What a function has not judged adds nothing to S.
    """
    rewards = torch.stack([*rollout.rewards_per_func.values()])                 # (functions, N)
    each = normalize(rewards.flatten(), args.num_generations).view_as(rewards)
    total = torch.tensor(args.reward_weights, dtype=each.dtype) @ each          # (N,)
    total = total.where(~rollout.rewards.isnan(), math.nan)
    of_all = torch.tensor(world.gather([total.tolist()]), dtype=total.dtype)    # (ranks, N)
    advantages = normalize(of_all.flatten(), of_all.numel()).view_as(of_all)[world.rank]
    return advantages.to(rollout.mask.device)


def best_rows(rollout, args):
    """The rows to learn from: all; with --oversample, the groups with the largest std of rewards.

    One round of DAPO's dynamic sampling, by rank: DAPO drops only the groups without a spread.
    """
    if args.oversample == 1:
        return torch.arange(len(rollout.mask), device=rollout.mask.device)
    spread = nanstd(rollout.rewards.view(-1, args.num_generations))[:, 0]               # (B,)
    groups = spread.topk(math.ceil(len(spread) / args.oversample)).indices.sort().values
    rows = groups[:, None] * args.num_generations + torch.arange(args.num_generations)
    return rows.flatten().to(rollout.mask.device)


def rows_to_learn_from(rollout, args):
    """Which rows count, as indices; of all N, which are kept, and which have a gradient, as bools.

    Not kept are cut-off ones with --mask_truncated_completions. Kept ones of advantage 0 have no
    gradient, but from a KL or an entropy bonus. With --shard every row is read: a rank that makes
    fewer passes would leave the others waiting for its part of the weights.
    """
    kept = torch.ones_like(rollout.ended)                                               # (N,)
    if args.mask_truncated_completions:
        kept = rollout.ended
    has_gradient = kept
    if rollout.ref_logps is None and not args.entropy_coef:
        has_gradient = kept & rollout.advantages.view(len(kept), -1).any(1)
    if args.shard:
        has_gradient = torch.ones_like(kept)
    return best_rows(rollout, args), kept, has_gradient
