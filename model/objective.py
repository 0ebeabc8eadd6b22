"""The relatives of GRPO's objective, each by the few lines in which it differs from grpo_loss.

Other bounds of the ratio, rows of BOUNDS in train_grpo.py, and flags of a loss that contradict each
other. docs/losses.md is the map of the family; reward/baselines.py has those that differ in the
advantages.

use_bias_correction_kl of grpo_loss multiplies the KL's term by the ratio (DeepSeek-V3.2, arXiv
2512.02556; RPG, 2505.17508): tokens count as if the policy of now had sampled them. The gradient of
ratio times k is ratio (k + dk / d log pi) grad log pi. That of k3 is -ratio x grad log pi, the
KL's; that of k1 has the same mean; those of k2, k3+ and abs do not.
"""
import inspect

import torch

from errors import UserError

ONE_RATIO = ("r1", "gmpo")      # losses whose ratio is one per completion
CORRECTED = ("k1", "k3")        # estimates which, times the ratio, have the gradient of the KL


def choice(table, name, option):
    """The row of a table; ValueError, if it has none of this name."""
    if name not in table:
        raise ValueError(f"{option} is {name!r}; choose {', '.join(table)}")
    return table[name]


def not_corrected(kl_type):
    return (f"use_bias_correction_kl gives {kl_type} a gradient that is no KL's; take kl_type "
            f"{' or '.join(CORRECTED)}, or leave it out")


def is_bound(function):
    """Whether a user's loss is a bound, by its first parameter, or else a whole loss."""
    return next(iter(inspect.signature(function).parameters), None) == "ratio"


# --- bounds ---------------------------------------------------------------------------------------
# All are called as ppo_clip is, with numbers of their own from LOSS_TYPES, and return the same: the
# loss, (N, 1 or R), and where they act.


def cispo_cap(ratio, advantages, logps, mask, *, epsilon_high, **unused):
    """CISPO's -sg[min(ratio, epsilon_high)] A log pi, arXiv 2506.13585.

    The ratio is a weight without gradient, sg, and epsilon_high the cap itself: no token ever loses
    its gradient. There is no lower bound.
    """
    weight = ratio.detach().clamp(max=epsilon_high)
    high = (ratio > epsilon_high) & (advantages > 0)        # as TRL counts
    return -weight * advantages * logps, {"low": torch.zeros_like(high), "high": high}


def soft_gate(ratio, advantages, logps, mask, *, tau_good, tau_bad, **unused):
    """SAPO's -(4 / tau) sigmoid(tau (ratio - 1)) A, arXiv 2511.20347: nothing is clipped.

    While the ratio is 1 the gradient is that of ratio A; the further it moves, either way, the more
    it fades. A bit sooner where A < 0: pushing a token down pushes up all others.
    """
    tau = torch.full_like(advantages, tau_bad).masked_fill(advantages > 0, tau_good)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, {"low": nowhere, "high": nowhere}


def geometric_mean(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, **unused):
    """GMPO's -A exp(mean over tokens of d, bounded), d = log ratio, arXiv 2507.20673; (N, 1).

    d is at most epsilon_high where A > 0, at least -epsilon_low where A < 0. Here ratio, bound and
    average are one: a completion's ratio is a mean over tokens, each of which was bounded before.
    """
    d = ratio.clamp(min=1e-30).log()                                                    # (N, R)
    bounded = torch.where(advantages > 0, d.clamp(max=epsilon_high), d.clamp(min=-epsilon_low))
    mean = (bounded * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -mean.exp() * advantages, {"low": (d < -epsilon_low) & (advantages < 0),
                                      "high": (d > epsilon_high) & (advantages > 0)}


def pi_region(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, largest_weight,
              **unused):
    """DPPO's -sg[min(ratio, 20)] A log pi in a region of probabilities, arXiv 2602.04879; (N, R).

    A token loses its gradient once pi - pi_old > epsilon_high where A > 0, or pi_old - pi >
    epsilon_low where A < 0: the paper's binary total variation. So a rare token may become many
    times as likely, and a frequent one, whose ratio hardly moves, soon stops.
    """
    ratio, pi = ratio.detach(), logps.detach().exp()
    gained = pi - pi / ratio                                              # pi - pi_old, (N, R)
    low = (gained < -epsilon_low) & (advantages < 0)
    high = (gained > epsilon_high) & (advantages > 0)
    weight = ratio.clamp(max=largest_weight).masked_fill(low | high, 0.0)
    return -weight * advantages * logps, {"low": low, "high": high}


BOUNDS = {"cispo": cispo_cap, "dppo": pi_region, "sapo": soft_gate, "gmpo": geometric_mean}


def clip_ratios(where, mask, num_sequences, num_tokens, *, level):
    """Metrics: the share of tokens at which a bound acts, by sides; "region": low or high.

    where: {side: (N, 1 or R)}. If a completion has one ratio, all completions count the same.
    """
    weight = mask / num_tokens
    if level == "sequence":
        weight = mask / mask.sum(1, keepdim=True).clamp(min=1) / num_sequences
    where = where | {"region": where["low"] | where["high"]}
    return {f"clip_ratio/{name}_mean": (acts * weight).sum() for name, acts in where.items()}


# --- flags ----------------------------------------------------------------------------------------


def refuse_contradictions(args, *, bound):
    """UserError for flags of the loss that would together learn something else, unnoticed.

    bound: a row of BOUNDS; None, if a whole loss of the user's may do as it likes.
    """
    loss_type, high, delta = args.loss_type, args.epsilon_high, args.delta
    sequence = args.importance_sampling_level == "sequence"
    for is_there, sentence in [
        (loss_type == "cispo" and high <= 1, f"--epsilon_high {high} is the cap itself with "
         "--loss_type cispo and would scale down every token; give one above 1, or none for 5"),
        (delta is not None and bound not in ("ppo", None), "--delta belongs to PPO's clip, and "
         f"--loss_type {loss_type} has none; leave it out"),
        (delta is not None and delta <= 1 + high,
         f"--delta {delta} undoes the clip at 1 + epsilon_high = {1 + high}; give a larger one"),
        (args.use_bias_correction_kl and args.kl_type not in CORRECTED,
         f"--{not_corrected(args.kl_type)}"),
        (loss_type in ONE_RATIO and sequence, f"--loss_type {loss_type} makes one ratio of a "
         "completion's tokens itself; leave --importance_sampling_level out"),
        (loss_type == "dppo" and sequence, "--loss_type dppo bounds the probability of each token; "
         "leave --importance_sampling_level out"),
        (loss_type == "luspo" and not sequence, "--loss_type luspo is for one ratio per "
         "completion; add --importance_sampling_level sequence"),
    ]:
        if is_there:
            raise UserError(sentence)


def refuse_one_ratio(name, args):
    """UserError if advantages of tokens, which `name` makes, would meet a ratio of completions."""
    if args.loss_type in ONE_RATIO or args.importance_sampling_level == "sequence":
        raise UserError(f"{name} gives each token an advantage, and this loss has one ratio per "
                        "completion; change one of the two")
