"""A step of GRPO to look into: its state, a rollout of six, its gradient; the losses in a loop."""
import math
from dataclasses import dataclass
from unittest.mock import patch

import torch

import train_grpo
from model import fast
from run.extensions import class_of_run, teacher
from run.policy import Policy
from train_grpo import GRPO, Rollout, World, completion_mask


def arguments(*flags, **changes):
    """The flags that the functions of a step read: no KL, and a gradient that nothing clips."""
    args = train_grpo.parse_args(list(flags))
    vars(args).update({"beta": 0.0, "grad_clip": 1e9, "max_gen_len": 12} | changes)
    return args


def state_of(model, args, world=None, reader=fast.token_logps, **fields):
    """The GRPO of a model, with the options that its flags turn on, but without a reference.

    fields: of GRPO, or methods that its options find in the place of its own.
    """
    world, own = world or World("cpu"), {name: fields.pop(name) for name in [*fields]
                                         if name not in GRPO.__dataclass_fields__}

    class Base(GRPO):
        def __post_init__(self):
            super().__post_init__()
            vars(self).update({name: own[name] for name in own if not hasattr(GRPO, name)})

    for name in own:
        if hasattr(GRPO, name):
            setattr(Base, name, own[name])
    with patch.object(teacher, "load_teacher"):
        return class_of_run(Base, args, Base)(**{
            "args": args, "world": world, "policy": Policy(model, fast.sample, reader, world),
            "tokenizer": None, "eos_ids": [2], "reference": None, "optimizer": None,
            "reward_funcs": [], "eval_funcs": []} | fields)


@dataclass
class Known(Rollout):
    """A rollout whose old_logps are given, instead of those of the policy before an update."""
    old_logps: torch.Tensor = None

    def select(self, rows):
        part = Rollout.select(self, rows)
        if self.old_logps is not None:
            part.old_logps = self.old_logps[rows, :part.loss_mask.shape[1]]
        return part


def rollout_of_six(model, token_logps=fast.token_logps):
    """Six completions of different lengths for two prompts, the second padded. The old and the
    reference policy are near the model."""
    rng = torch.Generator().manual_seed(0)
    completion_ids = torch.randint(3, 280, (6, 12), generator=rng)
    for row, length in enumerate((3, 12, 5, 1, 7, 12)):
        if length < 12:
            completion_ids[row, length - 1:] = 2
    prompt_ids = torch.randint(3, 280, (2, 9), generator=rng).repeat_interleave(3, 0)
    prompt_mask = torch.ones_like(prompt_ids)
    prompt_mask[3:, :4] = 0
    mask = completion_mask(completion_ids, 2)
    rewards = torch.tensor([2.0, 0.5, math.nan, 0.0, 1.0, 1.5])
    rollout = Known(
        prompts=[*"aaabbb"], columns={"answer": [*"111222"], "number": [0, 1, 2, 3, 4, 5]},
        prefills=[""] * 3 + ["<think>\n"] * 3, completions=[*"uvwxyz"], prompt_ids=prompt_ids,
        prompt_mask=prompt_mask, completion_ids=completion_ids,
        completion_mask=mask, loss_mask=mask,
        ended=mask.sum(1) < 12, sampling_logps=torch.zeros(6, 12), rewards=rewards,
        rewards_per_func={"half": rewards / 2, "rest": rewards - rewards / 2},
        advantages=torch.tensor([1.0, -0.5, 0.3, -1.2, 0.0, 0.1]))
    state = state_of(model, arguments(), reader=token_logps)
    rollout.sampling_logps = logps = state.compute_logps(state.policy, rollout)
    rollout.old_logps, rollout.ref_logps, teacher_logps = (
        logps + 0.3 * torch.randn(6, 12, generator=rng) for _ in range(3))
    rollout.extra = {"teacher_logps": teacher_logps}
    return rollout


def gradient(model, rollout, token_logps, world=None, **changes):
    """The gradient of the last update of a step, as one vector, None if that took no step; and the
    metrics of the step."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step = lambda: found.append(torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters()]))
    state = state_of(model, arguments(**changes), world, token_logps, optimizer=optimizer,
                     every_row_has_gradient=rollout.ref_logps is not None)
    metrics = state.update_policy(rollout)
    assert all(parameter.grad is None for parameter in model.parameters())
    return found[-1] if found else None, metrics


def random_case(seed, N=8, R=9):
    """logps, old_logps, advantages, mask, ref_logps: an EOS at once, full rows, one that is masked,
    ratios from 1/50 to 50, both signs of A."""
    rng = torch.Generator().manual_seed(seed)
    random = {"generator": rng, "dtype": torch.float64}
    logps, old_logps, ref_logps = (-2 + torch.randn(N, R, **random) for _ in range(3))
    mask = (torch.arange(R) < torch.tensor([1, R, 4, 2, R, 6, 3, 0])[:, None]).int()
    return logps, old_logps, torch.randn(N, **random), mask, ref_logps


def loop_loss(logps, old_logps, advantages, mask, ref_logps, *, beta=0.0, kl_type="k3",
              epsilon_low=0.2, epsilon_high=0.2, delta=math.inf, loss_type="grpo", level="token",
              L=None, corrected=False, largest_weight=20, tau_good=1.0, tau_bad=1.05):
    """The same formulas, a token at a time, with Python's min and max; autograd sees scalars.

    The loss, and the KL of a token, or of a completion that is one action, in the mean.
    """
    rows = [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]
    N, num_tokens, total, kls = len(rows), sum(map(len, rows)), 0.0, []
    for i, tokens in enumerate(rows):
        if not tokens:                      # a row that is masked counts in N and in nothing else
            continue
        A = [advantages[i, t] if advantages.dim() == 2 else advantages[i] for t in tokens]
        d = [logps[i, t] - old_logps[i, t] for t in tokens]
        x = [ref_logps[i, t] - logps[i, t] for t in tokens]
        logp, weight = [logps[i, t] for t in tokens], 1 / num_tokens
        if loss_type == "r1":               # one action: exp and clip of sums over the tokens
            A, d, x = A[:1], [sum(d)], [sum(x)]
        if level == "sequence":
            d = [sum(d) / len(d)] * len(d)
        if loss_type in ("grpo", "sapo", "gmpo"):
            weight = 1 / len(tokens) / N
        elif loss_type in ("dr_grpo", "luspo", "r1"):
            weight = 1 / N / (L or 1)
        bounded = [min(a.sign() * e, a.sign() * max(min(e, epsilon_high), -epsilon_low)) * a.sign()
                   for a, e in zip(A, d)]
        for k in range(len(d)):
            ratio = torch.exp(d[k])
            clipped = max(min(ratio, 1 + epsilon_high), 1 - epsilon_low)
            policy = -min(min(ratio, delta) * A[k], clipped * A[k])
            if loss_type == "cispo":
                policy = -min(ratio.detach(), epsilon_high) * A[k] * logp[k]
            elif loss_type == "dppo":
                gained = (torch.exp(logp[k]) - torch.exp(logp[k] - d[k])) * A[k].sign()
                inside = gained <= (epsilon_high if A[k] > 0 else epsilon_low)
                policy = -min(ratio.detach(), largest_weight) * A[k] * logp[k] * inside
            elif loss_type == "sapo":
                tau = tau_good if A[k] > 0 else tau_bad
                policy = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * A[k]
            elif loss_type == "gmpo":
                policy = -A[k] * torch.exp(sum(bounded) / len(d))
            k2, k3 = x[k] * x[k] / 2, torch.exp(min(x[k], 20)) - min(x[k], 20) - 1
            kl = {"k1": -x[k], "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach(),
                  "abs": abs(x[k])}[kl_type]
            total = total + weight * (policy + beta * (ratio * kl if corrected else kl))
            kls.append(kl.detach())
    return total, sum(kls) / (N if loss_type == "r1" else len(kls))
