"""The relatives of GRPO's objective, each by the few lines in which it differs from grpo_loss.

Other bounds of the ratio, rows of BOUNDS in train_grpo.py, and corrections for a sampler that is
not the policy. docs/losses.md is the map of the family; reward/baselines.py has those that differ
in the advantages.

use_bias_correction_kl of grpo_loss multiplies the KL's term by the ratio (DeepSeek-V3.2, arXiv
2512.02556): tokens count as if the policy of now had sampled them, and k3 gets the KL's gradient.
"""
import torch

from report import UserError


def choice(table, name, option):
    """The row of a table; ValueError, if it has none of this name."""
    if name not in table:
        raise ValueError(f"{option} is {name!r}; choose {', '.join(table)}")
    return table[name]


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


def clip_ratios(where, weight):
    """Metrics: the share of tokens at which a bound acts, on each side and on both ("region").

    where: {side: (N, 1 or R)}; weight (N, R): of each token, 1 in all. Tokens have the same, or,
    if a completion has one ratio, completions have.
    """
    where = where | {"region": where["low"] | where["high"]}
    return {f"clip_ratio/{name}_mean": (acts * weight).sum() for name, acts in where.items()}


# --- a sampler that is not the policy -------------------------------------------------------------


CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def corrected(advantages, part, logps, old_logps, args):
    """The advantages, (n, 1 or R), as two flags correct them; by default as they are."""
    if args.off_policy_mask_threshold:
        advantages = near_sampler(advantages, part, logps, args)
    if args.sampler_correction != "none":
        part.sampler_weights = sampler_weights(part, old_logps, args)
        advantages = part.sampler_weights * advantages
    return advantages


def sampler_weights(part, old_logps, args):
    """Importance weights w = pi_old / pi_sampler, (n, R), or (n, 1) by completion, within bounds.

        token_...       w of each token                 ..._truncate    clip(w, min, max)
        sequence_...    their product                   ..._mask        0 outside of [min, max]

    For a sampler that rounds differently than the trainer, or more coarsely: --sampler_correction,
    TRL's vllm_importance_sampling_mode; of Yao et al., 2025, and IcePop, arXiv 2510.18855
    (token_mask). Only the product weights a token's prefix too, at a variance that grows with the
    length. The weights scale the advantage, and with it all bounds; the KL and the entropy keep
    weight 1, as in TRL.
    """
    log_ratio = (old_logps - part.sampling_logps) * part.mask                           # (n, R)
    level, _, bound = args.sampler_correction.partition("_")
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)                                      # (n, 1)
    weights, low, high = log_ratio.exp(), args.sampler_ratio_min, args.sampler_ratio_max
    if bound == "truncate":
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def near_sampler(advantages, part, logps, args):
    """The advantages, (n, 1 or R), with 0 for bad completions that the policy has moved away from.

    The off-policy sequence mask, DeepSeek-V3.2, arXiv 2512.02556, equation 9: where A < 0, and the
    completion's mean of log pi_sampler - log pi is above --off_policy_mask_threshold.
    """
    log_ratio = (part.sampling_logps - logps.detach()) * part.mask                      # (n, R)
    left = log_ratio.sum(1, keepdim=True) / part.mask.sum(1, keepdim=True).clamp(min=1)  # (n, 1)
    return advantages * ((advantages >= 0) | (left <= args.off_policy_mask_threshold))


# --- flags ----------------------------------------------------------------------------------------


def refuse_contradictions(args):
    """UserError for flags of a run that would together learn something else, unnoticed."""
    loss_type, high, delta = args.loss_type, args.epsilon_high, args.delta
    one_ratio, by_steps = loss_type in ("r1", "gmpo"), args.supervision == "process"
    sequence = args.importance_sampling_level == "sequence"
    by_function = args.multi_objective_aggregation == "normalize_then_sum"
    per_token = "--teacher_path" if args.teacher_path else "--supervision process"
    other_advantages = (args.scale_rewards, args.advantage_estimator) != ("group", "grpo")
    for is_there, sentence in [
        (loss_type == "cispo" and high <= 1, f"--epsilon_high {high} is the cap itself with "
         "--loss_type cispo and would scale down every token; give one above 1, or none for 5"),
        (delta is not None and loss_type in ("cispo", "sapo", "gmpo", "dppo"), "--delta belongs to "
         f"PPO's clip, and --loss_type {loss_type} has none; leave it out"),
        (delta is not None and delta <= 1 + high,
         f"--delta {delta} undoes the clip at 1 + epsilon_high = {1 + high}; give a larger one"),
        (one_ratio and sequence, f"--loss_type {loss_type} makes one ratio of a completion's "
         "tokens itself; leave --importance_sampling_level out"),
        (loss_type == "dppo" and sequence, "--loss_type dppo bounds the probability of each token; "
         "leave --importance_sampling_level out"),
        (loss_type == "luspo" and not sequence, "--loss_type luspo is for one ratio per "
         "completion; add --importance_sampling_level sequence"),
        ((by_steps or args.teacher_path) and (one_ratio or sequence), f"{per_token} gives each "
         "token an advantage, and this loss has one ratio per completion; change one of the two"),
        (args.teacher_path and (by_steps or by_function or other_advantages or args.kl_in_reward
                                or args.oversample > 1), "--teacher_path takes advantages from the "
         "teacher instead of rewards; leave --supervision, --multi_objective_aggregation, "
         "--scale_rewards, --advantage_estimator, --kl_in_reward and --oversample out"),
        (by_steps and (other_advantages or by_function), "--supervision process normalises all "
         "steps of a group together; leave --scale_rewards, --advantage_estimator and "
         "--multi_objective_aggregation out"),
        (by_function and (other_advantages or args.kl_in_reward), "--multi_objective_aggregation "
         "normalize_then_sum has its own way to advantages; leave --scale_rewards, "
         "--advantage_estimator and --kl_in_reward out"),
        (by_steps and not any(args.reward_weights), "--supervision process divides the outcome by "
         "the sum of --reward_weights, which is 0; give one above 0"),
        (args.kl_in_reward and args.kl_type != "k1", f"--kl_type {args.kl_type} is for the KL in "
         "the loss, and --kl_in_reward takes k1; leave one of the two out"),
        (args.kl_in_reward and not args.beta,
         "--kl_in_reward subtracts beta * KL, and --beta is 0; give a --beta above 0"),
        (args.ref_model_sync_steps and (args.lora_rank or not args.beta),
         "--ref_model_sync_steps moves a reference, and with --beta 0 there is none, with "
         "--lora_rank it is the frozen base; leave one of the two out"),
        (args.tool and args.sampler == "vllm", "--tool answers between two tokens, and --sampler "
         "vllm writes a completion in one go; choose --sampler fast"),
        (args.tool and by_steps, "--supervision process looks for steps of arithmetic in a whole "
         "reply, a tool's words too; leave --supervision or --tool out"),
        (not args.sampler_ratio_min <= 1 <= args.sampler_ratio_max, f"--sampler_ratio_min "
         f"{args.sampler_ratio_min} and --sampler_ratio_max {args.sampler_ratio_max} leave out the "
         "weight 1 of a sampler that is the policy; give bounds around 1"),
        (args.sampler_correction.startswith("token") and one_ratio, "--sampler_correction "
         f"{args.sampler_correction} has a weight per token, and --loss_type {loss_type} one ratio "
         "per completion; choose one of sequence_..."),
    ]:
        if is_there:
            raise UserError(sentence)
