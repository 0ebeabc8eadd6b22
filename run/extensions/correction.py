"""--sampler_correction, --off_policy_mask_threshold: correct for a sampler unlike the policy."""
from dataclasses import replace
from typing import NamedTuple

from errors import POSITIVE_OR_0, UserError

from ..metrics import Mean
from .losses import ONE_RATIO

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class EffectiveShare(NamedTuple):
    """Kish's effective sample size divided by the sample size; it is 1 if all weights are equal."""
    sum: float
    squares: float
    count: float

    def value(self):
        return self.sum**2 / (max(self.count, 1) * self.squares or 1)


def add_flags(parser):
    flag = parser.group("4. update (the objective)").add_argument
    flag("--sampler_correction", choices=CORRECTIONS, default="none", help="correct for a sampler "
         "that differs from the policy: multiply advantages by pi_old / pi_sampler of the token or "
         "completion; outside of --sampler_ratio, by the bound (truncate) or 0 (mask)")
    flag("--sampler_ratio", type=POSITIVE_OR_0, nargs=2, default=[0.0, 3.0],
         metavar=("MIN", "MAX"), help="bounds of the weight in --sampler_correction")
    flag("--off_policy_mask_threshold", type=POSITIVE_OR_0, default=0.0, help="don't train on bad "
         "completions with a mean of log pi_sampler - log pi above this, e.g. 0.5; 0: use all")


def is_on(args):
    flags = []
    if args.sampler_correction != "none":
        flags.append("--sampler_correction")
    if args.off_policy_mask_threshold > 0:
        flags.append("--off_policy_mask_threshold")
    return flags


def check(args):
    low, high = args.sampler_ratio
    if not low <= 1 <= high:
        raise UserError(f"--sampler_ratio {low:g} {high:g} excludes the weight 1 of a sampler that "
                        "equals the policy; pass bounds around 1")
    if args.sampler_correction.startswith("token") and args.loss_type in ONE_RATIO:
        raise UserError(f"--sampler_correction {args.sampler_correction} has a weight per token, "
                        f"but --loss_type {args.loss_type} has one ratio per completion; pass "
                        "sequence_truncate or sequence_mask")


class SamplerCorrection:
    def compute_loss(self, part, logps, entropy):
        """Changes the advantages, and adds two metrics of the weights.

        rollout_is_mean: the mean weight over tokens. rollout_is_eff_sample_size: Kish's effective
        sample size, (sum w)² / sum w², divided by the number of tokens.
        """
        args = self.args
        if args.off_policy_mask_threshold:
            part = near_sampler(part, logps, args.off_policy_mask_threshold)
        if args.sampler_correction == "none":
            return super().compute_loss(part, logps, entropy)
        weights = sampler_weights(part, args.sampler_correction, *args.sampler_ratio)  # (n, 1 or R)
        advantages = weights * part.advantages.view(len(logps), -1)
        loss, metrics = super().compute_loss(replace(part, advantages=advantages), logps, entropy)
        total, squares = ((x * part.loss_mask).sum() for x in (weights, weights.square()))
        tokens = part.loss_mask.sum()
        return loss, metrics | {
            "rollout_is_mean": Mean(total, tokens),
            "rollout_is_eff_sample_size": EffectiveShare(total, squares, tokens)}


def near_sampler(part, logps, threshold):
    """Sets the advantage of bad completions to 0 that have become much less likely since sampled.

    These are those with a negative advantage and a mean of log pi_sampler - log pi over the
    completion above the threshold (DeepSeek-V3.2, arXiv 2512.02556, equation 9).
    """
    log_ratio = (part.sampling_logps - logps.detach()) * part.loss_mask                 # (n, R)
    lengths = part.loss_mask.sum(1, keepdim=True).clamp(min=1)
    left = log_ratio.sum(1, keepdim=True) / lengths                                     # (n, 1)
    advantages = part.advantages.view(len(logps), -1)
    return replace(part, advantages=advantages * ((advantages >= 0) | (left <= threshold)))


def sampler_weights(part, correction, low, high):
    """Returns importance weights w = pi_old / pi_sampler per token, (n, R), or completion, (n, 1).

        token_...       w of each token                 ..._truncate    clip(w, low, high)
        sequence_...    product over the completion     ..._mask        0 outside of [low, high]

    They correct for differences between the probabilities of the sampler and of the trainer, like
    TRL's vllm_importance_sampling_mode (Yao et al., 2025; token_mask: IcePop, arXiv 2510.18855).
    Only the sequence_... weights also correct for the tokens before a token, but their variance
    grows with the length. The KL and the entropy are not weighted, as in TRL.
    """
    log_ratio = (part.old_logps - part.sampling_logps) * part.loss_mask                 # (n, R)
    level, _, bound = correction.partition("_")
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)                                      # (n, 1)
    weights = log_ratio.exp()
    if bound == "truncate":
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)
