"""Variants of GRPO's loss: --loss_type and the other flags of the objective.

`family_loss` computes all variants. By default it equals train_grpo.grpo_loss bit for bit. It
replaces grpo_loss if a flag selects another ratio (`importance_ratio`), another way to bound the
ratio (POLICY_LOSSES), another average over tokens (LOSS_AGGREGATIONS) or another estimator of the
KL (KL_TYPES). docs/losses.md describes all variants.

use_bias_correction_kl multiplies the KL term k by the ratio (DeepSeek-V3.2, arXiv 2512.02556; RPG,
2505.17508), so tokens count as if the current policy had sampled them. The gradient of ratio * k is
ratio * (k + dk / d log pi) * grad log pi. For k1 and k3, the mean of this gradient is the gradient
of the KL; for k2, k3+ and abs, it is not.
"""
import inspect
from functools import partial

import torch

from errors import POSITIVE, UserError
from reward.load import fault, import_function

ONE_RATIO = ("r1", "gmpo")      # losses with one ratio per completion
CORRECTED = ("k1", "k3")        # estimates that, times the ratio, have the KL's gradient


# --- the ratio ------------------------------------------------------------------------------------


def importance_ratio(logps, old_logps, mask, *, level="token"):
    """Returns the ratio pi / pi_old, with d = log pi - log pi_old of each token:

        token      exp(d)                                     (N, R)    PPO, GRPO
        sequence   exp(mean of d over the completion)         (N, 1)    GSPO, arXiv 2507.18071
    """
    log_ratio = (logps - old_logps).masked_fill(mask == 0, 0)                           # (N, R)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(max=80).exp()        # e^89 would be infinite


# --- bounds ---------------------------------------------------------------------------------------
# All are called like ppo_clip, some with additional numbers (--loss_options). Like ppo_clip, they
# return the loss, (N, 1 or R), and at which tokens the bound acts.


def ppo_clip(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, delta=None):
    """Returns PPO's loss, -min(ratio A, clip(ratio) A), and {name: mask of clipped tokens}.

    If `delta` is given, tokens with A < 0 and a ratio above delta have no gradient either
    (INTELLECT-2; dual clip, Ye et al. 2020).
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    where = {"low": (ratio < 1 - epsilon_low) & (advantages < 0),
             "high": (ratio > 1 + epsilon_high) & (advantages > 0)}
    if delta is not None:
        where["delta"] = (ratio > delta) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.min(loss, -delta * advantages), loss)
    return loss, where


def cispo_cap(ratio, advantages, logps, mask, *, epsilon_high, **unused):
    """CISPO's loss, -sg[min(ratio, epsilon_high)] A log pi, where sg is detach; arXiv 2506.13585.

    The ratio is only a weight, so no token ever loses its gradient. This weight is at
    most epsilon_high (not 1 + epsilon_high, as in PPO), and there is no lower bound.
    """
    weight = ratio.detach().clamp(max=epsilon_high)
    high = (ratio > epsilon_high) & (advantages > 0)        # counted as in TRL
    return -weight * advantages * logps, {"low": torch.zeros_like(high), "high": high}


def soft_gate(ratio, advantages, logps, mask, *, tau_good=1.0, tau_bad=1.05, **unused):
    """SAPO's loss, -(4 / tau) sigmoid(tau (ratio - 1)) A, which clips nothing; arXiv 2511.20347.

    At a ratio of 1, its gradient equals that of -ratio * A. The gradient shrinks as the ratio moves
    away from 1, and a bit faster for tokens with A < 0, which have a larger tau.
    """
    tau = torch.full_like(advantages, tau_bad).masked_fill(advantages > 0, tau_good)
    loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    nowhere = torch.zeros_like(loss, dtype=torch.bool)
    return loss, {"low": nowhere, "high": nowhere}


def geometric_mean(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, **unused):
    """GMPO's loss, -A exp(mean of d over tokens), (N, 1), where d = log ratio; arXiv 2507.20673.

    Before the mean is taken, each token's d is limited: it is at most epsilon_high if A > 0, and at
    least -epsilon_low if A < 0.
    """
    d = ratio.clamp(min=1e-30).log()                                                    # (N, R)
    bounded = torch.where(advantages > 0, d.clamp(max=epsilon_high), d.clamp(min=-epsilon_low))
    mean = (bounded * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -mean.exp() * advantages, {"low": (d < -epsilon_low) & (advantages < 0),
                                      "high": (d > epsilon_high) & (advantages > 0)}


def pi_region(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, largest_weight=20.0,
              **unused):
    """DPPO's loss, -sg[min(ratio, 20)] A log pi, (N, R), where sg is detach; arXiv 2602.04879.

    A token has no gradient if pi - pi_old > epsilon_high and A > 0, or if pi_old - pi > epsilon_low
    and A < 0. There is no limit on the ratio, so a rare token may become many times as likely.
    """
    ratio, pi = ratio.detach(), logps.detach().exp()
    gained = pi - pi / ratio                                              # pi - pi_old, (N, R)
    low = (gained < -epsilon_low) & (advantages < 0)
    high = (gained > epsilon_high) & (advantages > 0)
    weight = ratio.clamp(max=largest_weight).masked_fill(low | high, 0.0)
    return -weight * advantages * logps, {"low": low, "high": high}


POLICY_LOSSES = {"ppo": ppo_clip, "cispo": cispo_cap, "dppo": pi_region, "sapo": soft_gate,
                 "gmpo": geometric_mean}
# Each token's term is divided by one of these, then all are added up. `length` is that of the
# token's completion, L the maximum; completions and tokens are those of the whole optimizer step.
LOSS_AGGREGATIONS = {
    "completion": lambda length, completions, tokens, L: completions * length,
    "tokens":     lambda length, completions, tokens, L: tokens,
    "limit":      lambda length, completions, tokens, L: completions * L,
    "sum":        lambda length, completions, tokens, L: completions,
}
LOSS_TYPES = {      # docs/losses.md lists the flags of each
    # name      bound    average
    "grpo":    ("ppo",   "completion"),
    "bnpo":    ("ppo",   "tokens"),
    "dr_grpo": ("ppo",   "limit"),
    "dapo":    ("ppo",   "tokens"),
    "cispo":   ("cispo", "tokens"),
    "dppo":    ("dppo",  "tokens"),
    "sapo":    ("sapo",  "completion"),
    "gmpo":    ("gmpo",  "completion"),
    "luspo":   ("ppo",   "sum"),        # for GSPO's ratio, arXiv 2602.05261
}                   # and r1, a whole loss: one_action_loss


# KL(pi || pi_ref), estimated at a token that pi sampled, from x = log pi_ref - log pi. The mean of
# an unbiased estimate is the KL, but the mean of its gradient may not be the KL's gradient, because
# autograd ignores that another pi would sample other tokens. k3+ comes from verl.
def k2(x):
    return x.pow(2) / 2


KL_TYPES = {        # each is called with x and the script's k3
    # name                                                    value      mean gradient of
    "k1":  lambda x, k3: -x,                                # unbiased   0: no penalty on average
    "k2":  lambda x, k3: k2(x),                             # biased     KL(pi || pi_ref)
    "k3":  lambda x, k3: k3(x),                             # unbiased   KL(pi_ref || pi)
    "k3+": lambda x, k3: (k3(x) - k2(x)).detach() + k2(x),  # k3's       k2's
    "abs": lambda x, k3: x.abs(),                           # biased     the sum of |pi - pi_ref|
}


def kl_penalty(logps, ref_logps, *, k3, kl_type="k3"):
    """Returns an estimate of the KL to the reference at each token, (N, R)."""
    return KL_TYPES[kl_type](ref_logps - logps, k3)


# --- the loss -------------------------------------------------------------------------------------


def family_loss(logps, old_logps, advantages, mask, *, k3, ref_logps=None, beta=0.0,
                epsilon_low=0.2, epsilon_high=0.2, num_sequences=None, num_tokens=None,
                loss_type="grpo", kl_type="k3", delta=None, importance_sampling_level="token",
                max_completion_length=None, use_bias_correction_kl=False, loss_options=(),
                bounded=None):
    """Returns (loss, metrics) for GRPO or a variant of it, like grpo_loss in train_grpo.py.

    k3: the function k3 in train_grpo.py. If num_sequences and num_tokens are None, the batch is
    assumed to be the whole batch of the optimizer step. bounded: a tensor of zeros, (n, R), or None
    (default). It becomes 1 at tokens whose gradient the bound removes, apart from that of the KL.
    """
    options = dict(ref_logps=ref_logps, beta=beta, epsilon_low=epsilon_low,
                   epsilon_high=epsilon_high, num_sequences=num_sequences, num_tokens=num_tokens,
                   kl_type=kl_type, delta=delta, max_completion_length=max_completion_length,
                   importance_sampling_level=importance_sampling_level,
                   use_bias_correction_kl=use_bias_correction_kl)
    bound, average, numbers = row_of(loss_type, loss_options)
    if bound is one_action_loss:
        numbers = numbers | {"k3": k3}
    if average is None:                 # a whole loss: r1, or one of your own
        return bound(logps, old_logps, advantages, mask, **options | numbers)
    if beta and ref_logps is None:
        raise ValueError("beta weights the KL to the reference; pass ref_logps")
    advantages = advantages.view(len(mask), -1)                                       # (N, 1 or R)
    num_sequences, num_tokens = num_sequences or len(mask), num_tokens or mask.sum().clamp(min=1)
    ratio = importance_ratio(logps, old_logps, mask, level=importance_sampling_level)
    loss, where = bound(ratio, advantages, logps.masked_fill(mask == 0, 0), mask,     # (N, 1 or R)
                        epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta, **numbers)
    if bounded is not None and loss.requires_grad:
        gradient, = torch.autograd.grad(loss.sum(), logps, retain_graph=True)
        bounded.copy_((gradient == 0) & (advantages != 0) & (mask != 0))
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                    # (N, 1)
    metrics = clip_ratios(where, mask, num_sequences, num_tokens, level=importance_sampling_level)
    if ref_logps is not None:
        x = (ref_logps - logps).masked_fill(mask == 0, 0)                               # (N, R)
        kl = KL_TYPES[kl_type](x, k3)
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens     # for every loss, per token
        loss = loss + beta * (ratio * kl if use_bias_correction_kl else kl)
    divisor = LOSS_AGGREGATIONS[average](lengths, num_sequences, num_tokens, max_completion_length)
    return (loss * mask / divisor).sum(), metrics


def row_of(loss_type, options=()):
    """Returns (function, average, numbers) for a loss type.

    `average` is a key of LOSS_AGGREGATIONS, or None if `function` computes the whole loss. For a
    user's `module:function`, it is "completion" if the function's first parameter is named `ratio`,
    else None. `numbers` has the function's keyword arguments from options such as "width=0.2".
    """
    if loss_type == "r1":
        function, average = one_action_loss, None
    elif loss_type in LOSS_TYPES:
        bound, average = LOSS_TYPES[loss_type]
        function = POLICY_LOSSES[bound]
    else:
        known = ", ".join([*LOSS_TYPES, "r1", "for GSPO --importance_sampling_level sequence"])
        function = import_function("--loss_type", loss_type, known)
        if not callable(function):
            raise ValueError(f"--loss_type {loss_type}: {function!r:.99} is not a function")
        is_bound = next(iter(inspect.signature(function).parameters), None) == "ratio"
        average = "completion" if is_bound else None
    of_every_loss, numbers = inspect.signature(family_loss).parameters, {}
    own = [one.name for one in inspect.signature(function).parameters.values()
           if one.kind is one.KEYWORD_ONLY and one.name not in of_every_loss]
    for option in options:
        name, _, value = option.partition("=")
        if name not in own:
            raise ValueError(f"--loss_options {option}: --loss_type {loss_type} has no number "
                             f"{name}; it has {', '.join(own) or 'none'}")
        numbers[name] = float(value)
    if ":" in loss_type:
        function = partial(call_own, loss_type, function, average is not None)
    return function, average, numbers


def call_own(name, function, is_bound, /, *given, **options):
    """Calls a user's loss function. Raises a UserError if it fails or returns unusable values."""
    logps, advantages, mask = given[2 * is_bound], given[2 - is_bound], given[3]
    shapes = [(len(mask), 1), tuple(mask.shape)] if is_bound else [(), (1,)]
    try:
        loss, named = function(*given, **options)
        loss, *others = map(torch.as_tensor, (loss, *{**named}.values()))
        if is_bound:
            others.append(named["low"] | named["high"])
        elif {"step", "loss"} & {*named}:
            raise ValueError("step and loss are metrics of the run; rename the function's metrics")
        returned = [tuple(x.shape) for x in (loss, *others)]
        if not {*returned} <= {*shapes} or loss.dtype not in (logps.dtype, torch.float64):
            raise ValueError(f"a {'bound' if is_bound else 'whole loss'} returns the shapes "
                             f"{shapes} and {logps.dtype}, not {returned} and {loss.dtype}")
        # If an input is not finite, the weights are to blame, and the optimizer skips the step.
        if not loss.isfinite().all() and all(x.isfinite().all() for x in given):
            raise ValueError(f"its loss has a value of {loss[~loss.isfinite()][0].item()}")
        learns = logps.requires_grad and torch.is_grad_enabled()
        if learns and not loss.requires_grad and (advantages.any() or not is_bound):
            raise ValueError("its loss has no gradient")
    except (Exception, SystemExit) as error:
        raise fault(f"--loss_type {name} failed", error, "write it as docs/losses.md says"
                    ) from error
    return loss, named


def one_action_loss(logps, old_logps, advantages, mask, *, ref_logps=None, num_sequences=None,
                    num_tokens=None, **options):
    """DeepSeek-R1's loss (r1): the ratio of a completion uses the sum of its tokens' log-probs."""
    if advantages.dim() == 2 and advantages.shape[1] > 1:
        raise ValueError("loss_type r1 has one ratio per completion; pass advantages (N,)")
    logps, old_logps, ref_logps = (
        None if x is None else x.masked_fill(mask == 0, 0).sum(1, keepdim=True)
        for x in (logps, old_logps, ref_logps))                                         # (N, 1)
    num_sequences = num_sequences or len(mask)
    return family_loss(
        logps, old_logps, advantages, mask.any(1, keepdim=True).int(), ref_logps=ref_logps,
        loss_type="luspo", num_sequences=num_sequences, num_tokens=num_sequences, **options)


def clip_ratios(where, mask, num_sequences, num_tokens, *, level):
    """Returns the share of tokens that are clipped on each side; "region" counts both sides.

    where: {side: mask of clipped tokens}. With level="sequence", all completions count equally.
    """
    weight = mask / num_tokens
    if level == "sequence":
        weight = mask / mask.sum(1, keepdim=True).clamp(min=1) / num_sequences
    where = where | {"region": where["low"] | where["high"]}
    return {f"clip_ratio/{name}_mean": (acts * weight).sum() for name, acts in where.items()}


# --- flags ----------------------------------------------------------------------------------------

# Flags that family_loss takes, with the values for which it equals the script's grpo_loss.
USUAL = {"loss_type": "grpo", "loss_options": [], "importance_sampling_level": "token",
         "delta": None, "kl_type": "k3", "use_bias_correction_kl": False}


def add_flags(parser):
    flag = parser.group("4. update (the objective)").add_argument
    flag("--loss_type", metavar="NAME", help="how the loss averages over tokens: first over each "
         "completion (grpo), over all tokens (bnpo, dapo), sum / max_gen_len (dr_grpo), or sum "
         "(luspo); cispo, dppo, sapo, gmpo and r1 also change the bound or the ratio; or your own "
         "bound or loss as module:function (docs/losses.md; default: grpo)")
    flag("--loss_options", nargs="+", default=[], metavar="NAME=NUMBER",
         help="numbers of the loss type, e.g. tau_bad=1.1 for sapo, or of your own function")
    flag("--importance_sampling_level", choices=("token", "sequence"), default="token", help="one "
         "ratio pi / pi_old per token, or per completion (GSPO, with epsilons of about 3e-4)")
    flag("--delta", type=POSITIVE, help="dual clip: upper bound of the ratio of tokens with a "
         "negative advantage (default: none)")
    flag("--kl_type", choices=tuple(KL_TYPES), help="estimator of the KL: k3 is GRPO's, k2 has the "
         "KL's gradient, k3+ has k3's value and k2's gradient (default: k3)")
    flag("--use_bias_correction_kl", action="store_true", help="multiply the KL (k1 or k3) by the "
         "ratio, so that it has the KL's gradient after any number of updates (with token ratios)")


def defaults(args):
    return {"epsilon_high": 5.0} if args.loss_type == "cispo" else {}


def is_on(args):
    """Returns the flags that need family_loss instead of grpo_loss in train_grpo.py."""
    return [f"--{name} {own}" if ":" in str(own) else f"--{name}" for name, usual in USUAL.items()
            if (own := getattr(args, name)) not in (None, usual)]


class OtherLoss:
    def update_policy(self, rollout):
        """Also marks tokens for report.html, as rollout.extra["bounded"], (N, R).

        A mark means that the bound removed the token's gradient in the last update of its row.
        """
        self.marks = torch.zeros_like(rollout.loss_mask)
        metrics = super().update_policy(rollout)
        rollout.extra["bounded"] = self.marks
        return metrics

    def compute_loss(self, part, logps, entropy):
        self.bounded = torch.zeros_like(part.loss_mask)                                 # (n, R)
        loss_and_metrics = super().compute_loss(part, logps, entropy)
        self.marks[part.rows, :logps.shape[1]] = self.bounded
        return loss_and_metrics

    def grpo_loss(self, *tensors, **options):
        of_flags = {name: getattr(self.args, name) for name in USUAL}
        return family_loss(*tensors, k3=self.k3, max_completion_length=self.args.max_gen_len,
                           bounded=self.bounded, **of_flags, **options)


def check(args):
    """Raises a UserError if flags of the loss contradict each other."""
    try:
        bound, average, _ = row_of(args.loss_type, args.loss_options)
    except ValueError as error:
        raise UserError(str(error)) from error
    loss_type, high, delta = args.loss_type, args.epsilon_high, args.delta
    sequence = args.importance_sampling_level == "sequence"
    for is_there, sentence in [
        (loss_type == "cispo" and high <= 1, f"--epsilon_high {high} is the cap itself with --loss"
         "_type cispo, and would scale down every token; pass one above 1, or leave it out for 5"),
        (bound is soft_gate and (args.epsilon_low, high) != (0.2, 0.2) and not args.resume,
         "--loss_type sapo clips nothing; leave --epsilon_low and --epsilon_high out"),
        (bound is cispo_cap and args.epsilon_low != 0.2 and not args.resume,
         "--loss_type cispo has no lower bound; leave --epsilon_low out"),
        (delta is not None and bound is not ppo_clip and average is not None,
         f"--delta is for PPO's clip, which --loss_type {loss_type} does not use; leave it out"),
        (delta is not None and delta <= 1 + high,
         f"--delta {delta} undoes the clip at 1 + epsilon_high = {1 + high}; pass a larger value"),
        (args.use_bias_correction_kl and args.kl_type not in CORRECTED,
         f"--use_bias_correction_kl gives {args.kl_type} a gradient that is not the KL's; pass "
         f"--kl_type {' or '.join(CORRECTED)}, or leave it out"),
        (loss_type in (*ONE_RATIO, "dppo") and sequence, f"--loss_type {loss_type} has its own "
         "level; leave --importance_sampling_level out"),
        (loss_type == "luspo" and not sequence, "--loss_type luspo needs one ratio per "
         "completion; add --importance_sampling_level sequence"),
    ]:
        if is_there:
            raise UserError(sentence)


def check_token_advantages(name, args):
    """Raises a UserError for flags that don't work if each token has its own advantage."""
    if (args.scale_rewards, args.advantage_estimator) != ("group", "grpo"):
        raise UserError(f"{name} computes advantages in its own way; leave --scale_rewards and "
                        "--advantage_estimator out")
    if args.loss_type in ONE_RATIO or args.importance_sampling_level == "sequence":
        raise UserError(f"{name} gives each token an advantage, but this loss has one ratio per "
                        "completion; change one of the two")
