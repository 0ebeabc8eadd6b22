"""The relatives of GRPO, each by the few lines in which it differs. docs/losses.md is their map.

Most are rows for the tables of train_grpo.py, which adds them to its own: what a reward is compared
with (BASELINES), what the difference is divided by (SCALES), how the ratio is bounded and tokens
are averaged (loss_types), what estimates the KL (kl_types). The others change advantages on their
way into the loss.
"""
import math

import torch

from report import UserError

TAU_GOOD, TAU_BAD = 1.0, 1.05       # SAPO's temperatures, by the sign of the advantage

# --- advantages -----------------------------------------------------------------------------------


def second_best(groups):
    """Baseline of pass@k training, arXiv 2503.19595, (B, G): a group counts as its best answer.

    That one is compared with the second best, what the group would have without it. The others,
    without which it would have the same, are compared with themselves: advantage 0.
    """
    highest = groups.nan_to_num(-math.inf).topk(2, dim=1)
    is_best = torch.arange(groups.shape[1], device=groups.device) == highest.indices[:, :1]
    second = highest.values[:, 1:]              # -inf, if only one was judged
    return torch.where(is_best & second.isfinite(), second, groups)


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


BASELINES = {"grpo_passk": second_best}
SCALES = {"mean": group_mean}


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


def best_rows(rollout, nanstd, args):
    """The rows to learn from: all; with --oversample, the groups with the largest std of rewards.

    One round of DAPO's dynamic sampling, by rank: DAPO drops only the groups without a spread.
    """
    if args.oversample == 1:
        return torch.arange(len(rollout.mask), device=rollout.mask.device)
    spread = nanstd(rollout.rewards.view(-1, args.num_generations))[:, 0]               # (B,)
    groups = spread.topk(math.ceil(len(spread) / args.oversample)).indices.sort().values
    rows = groups[:, None] * args.num_generations + torch.arange(args.num_generations)
    return rows.flatten().to(rollout.mask.device)


# --- advantages on their way into the loss --------------------------------------------------------


def sampler_weights(part, old_logps, args):
    """Truncated importance weights min(pi_old / pi_sampler, C), (n, R), or (n, 1) by completion.

    For a sampler that rounds differently than the trainer, or more coarsely: --rollout_is_threshold
    C, verl's rollout_is, TRL's vllm_importance_sampling_correction. Their level is that of the
    loss's ratio: the product of the two is pi / pi_sampler. They weight the advantage, with which
    all bounds scale; the KL and the entropy keep weight 1, as in TRL. Without a threshold: ones.
    """
    if not args.rollout_is_threshold:
        return torch.ones_like(old_logps[:, :1])
    log_ratio = (old_logps - part.sampling_logps) * part.mask                           # (n, R)
    if args.loss_type == "r1":
        log_ratio = log_ratio.sum(1, keepdim=True)
    elif args.importance_sampling_level == "sequence" or args.loss_type == "gmpo":
        log_ratio = log_ratio.sum(1, keepdim=True) / part.mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp().clamp(max=args.rollout_is_threshold)


def near_sampler(part, logps, args):
    """The advantages, (n, 1 or R), with 0 for bad completions that the policy has moved away from.

    The off-policy sequence mask, DeepSeek-V3.2, arXiv 2512.02556, equation 9: where A < 0, and the
    completion's mean of log pi_sampler - log pi is above --off_policy_mask_threshold.
    """
    advantages, mask = part.advantages.view(len(logps), -1), part.mask
    if not args.off_policy_mask_threshold:
        return advantages
    log_ratio = (part.sampling_logps - logps.detach()) * mask                           # (n, R)
    left = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)      # (n, 1)
    return advantages * ((advantages >= 0) | (left <= args.off_policy_mask_threshold))


# --- bounds ---------------------------------------------------------------------------------------
# Called as ppo_clip is, hence their arguments.


def cispo_cap(ratio, advantages, logps, mask, *, epsilon_high, **unused):
    """CISPO's -sg[min(ratio, epsilon_high)] A log pi, arXiv 2506.13585.

    The ratio is a weight without gradient, sg, and epsilon_high the cap itself: no token ever loses
    its gradient. There is no lower bound.
    """
    weight = ratio.detach().clamp(max=epsilon_high)
    high = (ratio > epsilon_high) & (advantages > 0)        # as TRL counts
    return -weight * advantages * logps, torch.zeros_like(high), high


def soft_gate(ratio, advantages, logps, mask, **unused):
    """SAPO's -(4 / tau) sigmoid(tau (ratio - 1)) A, arXiv 2511.20347: nothing is clipped.

    While the ratio is 1 the gradient is that of ratio A; the further it moves, either way, the more
    it fades. A bit sooner where A < 0: pushing a token down pushes up all others.
    """
    tau = torch.full_like(advantages, TAU_BAD).masked_fill(advantages > 0, TAU_GOOD)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, nowhere, nowhere


def geometric_mean(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, **unused):
    """GMPO's -A exp(mean over tokens of d, bounded), d = log ratio, arXiv 2507.20673; (N, 1).

    d is at most epsilon_high where A > 0, at least -epsilon_low where A < 0. Here ratio, bound and
    average are one: a completion's ratio is a mean over tokens, each of which was bounded before.
    """
    d = ratio.clamp(min=1e-30).log()                                                    # (N, R)
    bounded = torch.where(advantages > 0, d.clamp(max=epsilon_high), d.clamp(min=-epsilon_low))
    mean = (bounded * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    low, high = (d < -epsilon_low) & (advantages < 0), (d > epsilon_high) & (advantages > 0)
    return -mean.exp() * advantages, low, high


# --- rows that are made of the script's own -------------------------------------------------------


def loss_types(ppo_clip):
    """Rows of LOSS_TYPES.

    luspo, arXiv 2602.05261, is for GSPO's ratio: a completion counts once for each of its tokens.
    """
    return {
        "cispo": (cispo_cap,      lambda o, completions, tokens, L: tokens),
        "sapo":  (soft_gate,      lambda o, completions, tokens, L: completions * o),
        "gmpo":  (geometric_mean, lambda o, completions, tokens, L: completions * o),
        "luspo": (ppo_clip,       lambda o, completions, tokens, L: completions),
    }


def kl_types(k3):
    """Rows of KL_TYPES. k3+ has the value of k3 and the gradient of k2 (as in verl)."""
    return {"k3+": lambda x: (k3(x) - x.pow(2) / 2).detach() + x.pow(2) / 2}
