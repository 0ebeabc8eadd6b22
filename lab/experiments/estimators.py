"""What each estimator of the family really estimates: its expected update, beside the truth.

    python -m lab.experiments estimators           what is missing, then the figure

On policy all ratios are 1, and an answer weighs by its prompt, reward and length alone:

    E[update] = mean over prompts of  sum over o of  pi(o) E[A | r(o)] / divisor(|o|) grad log pi(o)

The truth is the same with r(o) in place of E[A | r(o)] / divisor: grad E[r]. Two sets of answers
(answers.py): of a tiny policy all of them, so that both sums are exact; and 65,536 samples of the
default task. Where an update is known from samples, angles are taken between two independent lots,
so that noise does not pass for direction. Advantages are those of reward/baselines.py; divisors,
ratios, bounds and KL those of run/extensions/losses.py. Lines of results/NAME.jsonl, by
experiments.toml's name:

    estimators      on policy
    stale, stale_kl after the policy that sampled has moved, by so many updates; in rows named "by
                    itself" by 16 updates with each bound's own loss, at each of RATES
"""
import copy
import itertools
import math
from functools import cache

import torch
import torch.nn.functional as F

from dataset.jsonl import read_jsonl, rounded, to_line
from errors import user_errors
from reward.baselines import estimate
from run.extensions.losses import LOSS_AGGREGATIONS, LOSS_TYPES, POLICY_LOSSES, importance_ratio
from train_grpo import kl_penalty

from .__main__ import OUT, RESULTS, ROOT, python, quoted
from .answers import PROMPTS, Tiny, fewer_numbers, sampled

SIZES, STEP, SIMULATED = (2, 8, 32), 128, 512       # G; answers a step; steps, for its noise
SOLVED = {"start": 0.0, "half": 0.5, "late": 0.9}   # the tiny policy's checkpoints, by solve rate
AVERAGES = "grpo", "bnpo", "dr_grpo"
# Average, scale, baseline. rloo's update is G / (G - 1) times that with the group's mean.
ARMS = list(itertools.product(AVERAGES, ("none", "group", "mean"), ("grpo", "grpo_passk")))
ARMS += [(average, "none", "REINFORCE") for average in AVERAGES]


# --- on policy ------------------------------------------------------------------------------------

def advantages_of(rewards, G, scale, baseline):
    if baseline == "REINFORCE":
        return rewards
    return estimate(rewards, G, baseline=baseline, scale=scale)


@cache
def all_groups(values, G, scale, baseline):
    """For every way to fill the rest of a group: A of a first reward of each value (V, C), and how
    often each value is in the rest (C, V)."""
    values = torch.tensor(values, dtype=torch.float64)
    counts = torch.tensor([split for split in itertools.product(range(G), repeat=len(values))
                           if sum(split) == G - 1])
    rest = torch.stack([values.repeat_interleave(count) for count in counts])       # (C, G-1)
    first = values.repeat_interleave(len(rest))[:, None]
    groups = torch.cat((first, rest.repeat(len(values), 1)), 1)                     # (V*C, G)
    advantages = advantages_of(groups.flatten(), G, scale, baseline)
    return advantages.view(len(values), len(rest), G)[..., 0], counts.double()


def mean_advantages(values, shares, G, scale, baseline):
    """E[A | r] for each value of r, (V,), of which the rest of the group has these shares."""
    advantages, counts = all_groups(tuple(values.tolist()), G, scale, baseline)
    ways = math.lgamma(G) - torch.lgamma(counts + 1).sum(1)                         # (C,), log
    return advantages @ (ways + torch.special.xlogy(counts, shares).sum(1)).exp()


def aim_weights(values, shares, G, scale, baseline):
    """What an arm aims at itself, differentiated by the share of each value of r, (V,).

    E[r]; with the std E[r] / std of each prompt, std held fixed, which for two values has the
    gradient of 2 arcsin sqrt(p); with the mean log E[r]; with grpo_passk E[best of G].
    """
    shares = shares.clone().requires_grad_()
    mean = (shares * values).sum()
    std = (shares * (values - mean) ** 2).sum().sqrt().detach()
    below = shares.cumsum(0)
    best = (values * (below ** G - (below - shares).clamp(min=0) ** G)).sum()
    aim = {"none": mean, "group": mean / std, "mean": mean.log()}[scale]
    return torch.autograd.grad(best if baseline == "grpo_passk" else aim, shares)[0]


def by_value(function, answers, kind, lot, *options):
    """function(values of r, their shares, *options) of each prompt, looked up for answers, (n,)."""
    values, which = answers.rewards[kind].unique(return_inverse=True)
    shares = torch.zeros(int(answers.prompt.max()) + 1, len(values), dtype=torch.float64)
    shares.index_put_((answers.prompt, which), answers.shares[lot], accumulate=True)
    of_prompts = torch.stack([function(values, row, *options) for row in shares])
    return of_prompts[answers.prompt, which]


def random_steps(answers, lot, G, count, rng):
    """Which answers `count` steps draw, (count, STEP): each prompt of a step has G, adjacent."""
    prompts = torch.randint(int(answers.prompt.max()) + 1, (count, STEP // G), generator=rng)
    places = prompts.repeat_interleave(G, 1) + torch.rand(count, STEP, generator=rng).double()
    return torch.searchsorted(answers.shares[lot].cumsum(0), places).clamp(
        max=len(answers.prompt) - 1)


def weights_in(answers, steps, kind, G, average, scale, baseline):
    """A / divisor of each answer of these steps, (count, STEP)."""
    advantages = advantages_of(answers.rewards[kind][steps].flatten(), G, scale, baseline)
    lengths = answers.length[steps]
    tokens = lengths.sum(1, keepdim=True)
    return advantages.view(steps.shape) / LOSS_AGGREGATIONS[LOSS_TYPES[average][1]](
        lengths, STEP, tokens, answers.limit)


def expected_weights(answers, kind, G, arm, lot, steps):
    """E[A / divisor] of each answer, (n,): exact, but where bnpo's divisor couples the answers of a
    step, or rewards have too many values to count all groups: there the mean in these random steps.
    """
    average, *rest = arm
    if average != "bnpo" and len(answers.rewards[kind].unique()) <= 4:
        advantages = by_value(mean_advantages, answers, kind, lot, G, *rest)
        divisor = LOSS_AGGREGATIONS[LOSS_TYPES[average][1]](answers.length, 1, None, answers.limit)
        return advantages / divisor
    alike = torch.stack((answers.prompt, answers.rewards[kind], answers.length))
    bins = alike.unique(dim=1, return_inverse=True)[1]                                  # (n,)
    weights = weights_in(answers, steps, kind, G, *arm).double() / len(steps)
    total, share = torch.zeros(2, int(bins.max()) + 1, dtype=torch.float64)
    total.index_add_(0, bins[steps].flatten(), weights.flatten())
    share.index_add_(0, bins, answers.shares[lot] / (answers.prompt.max() + 1))
    return (total / share.clamp(min=1e-300))[bins]


def expected_update(answers, kind, G, arm, lot, steps):
    """E[update], (D,)."""
    return answers.mean_gradient(expected_weights(answers, kind, G, arm, lot, steps), lot)


def inner(a, b):
    """The inner product of two vectors, each known from every lot."""
    if len(a) == 1:
        return (a[0] @ b[0]).item()
    return (a[0] @ b[1] + a[1] @ b[0]).item() / 2


def cosine(a, b):
    return inner(a, b) / math.sqrt(max(inner(a, a) * inner(b, b), 1e-300))


def degrees(a, b):
    return math.degrees(math.acos(min(1, max(-1, cosine(a, b)))))


def resampled(vectors, others, draws=400):
    """The 2.5th and the 97.5th percentile of their angle, if other prompts had been drawn.

    vectors, others: of every lot, a part for each prompt, (prompts, D).
    """
    rng, angles, prompts = torch.Generator().manual_seed(0), [], len(vectors[0])
    for _ in range(draws):
        drawn = torch.randint(prompts, (prompts,), generator=rng)
        counts = torch.bincount(drawn, minlength=prompts).to(vectors[0])
        angles.append(degrees([counts @ x for x in vectors], [counts @ x for x in others]))
    return torch.tensor(angles).quantile(torch.tensor([0.025, 0.975])).tolist()


def without(vectors, others):
    """The part of a vector that is orthogonal to another one, in every lot."""
    factor = inner(vectors, others) / inner(others, others)
    return [vector - factor * other for vector, other in zip(vectors, others)]


def on_policy(answers, seed):
    """Yields (kind of reward, arm, {series/G: number}):

    angle, aim  between the update and the truth, and what the arm aims at itself, in degrees
    from, to    of samples, a 95% interval of the angle: a bootstrap over prompts
    right       the same with the truth of rewards of two values, 1 for right answers
    length      in units of the truth / L, which is dr_grpo's with rloo
    longer      cosine of what is not the truth with what makes answers longer
    noise       standard deviation of the update of one step, in units of its length; up and side,
                that along the truth and across, in the plane of both; together: their correlation
    """
    rng, lots = torch.Generator().manual_seed(seed), range(len(answers.shares))
    lengthens = [answers.mean_gradient(answers.length, lot) for lot in lots]
    for kind, rewards in answers.rewards.items():
        truth, right = ([answers.mean_gradient(x, lot) for lot in lots]
                        for x in (rewards, answers.rewards["two values"]))
        parts = [answers.by_prompt(rewards, lot) for lot in lots]
        across, few = without(lengthens, truth), len(rewards.unique()) <= 4
        found = {arm: {} for arm in ARMS if few or "mean" not in arm}   # MaxRL wants 0 to 1
        drawn = {G: [random_steps(answers, lot, G, 16 * SIMULATED, rng) for lot in lots]
                 for G in SIZES}
        for (G, steps), (arm, numbers) in itertools.product(drawn.items(), found.items()):
            weights = [expected_weights(answers, kind, G, arm, lot, steps[lot]) for lot in lots]
            update = [answers.mean_gradient(weights[lot], lot) for lot in lots]
            size, off = math.sqrt(inner(update, update)), without(update, truth)
            is_true = inner(off, off) < 1e-6 * size ** 2
            plane = torch.stack([F.normalize(vector[0], dim=0)
                                 for vector in (truth, across if is_true else off)])
            updates = F.embedding_bag(
                steps[0][:SIMULATED], answers.gradients, mode="sum", per_sample_weights=weights_in(
                    answers, steps[0][:SIMULATED], kind, G, *arm).to(answers.gradients)) / size
            spread = (updates @ plane.T).T.cov()                                        # (2, 2)
            up, side = spread.diagonal().sqrt().tolist()
            numbers |= {
                f"angle/{G}": degrees(update, truth), f"right/{G}": degrees(update, right),
                f"length/{G}": size * answers.limit / math.sqrt(inner(truth, truth)),
                f"noise/{G}": updates.var(0).sum().sqrt().item(), f"up/{G}": up, f"side/{G}": side,
                f"together/{G}": spread[0, 1].item() / max(up * side, 1e-300)}
            if len(lots) > 1:
                numbers[f"from/{G}"], numbers[f"to/{G}"] = resampled(
                    [answers.by_prompt(weights[lot], lot) for lot in lots], parts)
            if not is_true:
                numbers[f"longer/{G}"] = cosine(off, across)
            if few and not (arm[1] != "none" and arm[2] == "grpo_passk"):   # that aims at nothing
                aim = [answers.mean_gradient(by_value(
                    aim_weights, answers, kind, lot, G, *arm[1:]), lot) for lot in lots]
                numbers[f"aim/{G}"] = degrees(update, aim)
        for arm, numbers in found.items():
            yield kind, arm, numbers


# --- after the policy has moved -------------------------------------------------------------------
# All add up tokens, with A = r - E[r] under pi_old: so only the ratio and its bound differ.

FREE = {"epsilon_low": 1e9, "epsilon_high": 1e9}
RATIOS = {      # name: loss_type, level of the ratio, epsilons
    "ratio per token": ("grpo", "token", FREE),
    "PPO's clip": ("grpo", "token", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    "GSPO, no clip": ("grpo", "sequence", FREE),
    "GSPO": ("grpo", "sequence", {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "CISPO": ("cispo", "token", {"epsilon_low": 0.2, "epsilon_high": 5.0}),
    "SAPO": ("sapo", "token", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    "GMPO": ("gmpo", "token", {"epsilon_low": 0.4, "epsilon_high": 0.4}),
    "product of ratios": ("luspo", "sequence", FREE)}
KLS = {"k1": ("k1", False), "k2": ("k2", False), "k3": ("k3", False), "corrected k3": ("k3", True)}
UPDATES = 0, 1, 4, 16, 64
# The bounds as they are tuned in lab/bounds.md, and rates for their own 16 updates.
TUNED = {
    "token, no bound": RATIOS["ratio per token"],
    "token clip": ("grpo", "token", {"epsilon_low": 0.03, "epsilon_high": 0.03}),
    "sequence, no bound": RATIOS["GSPO, no clip"],
    "sequence clip": ("grpo", "sequence", {"epsilon_low": 4e-4, "epsilon_high": 4e-4}),
    "DPPO": ("dppo", "token", {"epsilon_low": 0.05, "epsilon_high": 0.05}),
    "GMPO": ("gmpo", "token", {"epsilon_low": 0.1, "epsilon_high": 0.1})}
RATES = 1e-5, 3e-5, 1e-4, 3e-4


def policy_loss(logps, old_logps, advantages, mask, loss_type, level, epsilons):
    """The loss of each answer, (n,), a sum over its tokens."""
    if loss_type == "luspo":            # the product of ratios is r1's: an answer is one action
        logps, old_logps = ((x * mask).sum(1, keepdim=True) for x in (logps, old_logps))
        mask = mask.any(1, keepdim=True).int()
    ratio = importance_ratio(logps, old_logps, mask, level=level)
    bound, _ = LOSS_TYPES[loss_type]
    loss, _ = POLICY_LOSSES[bound](ratio, advantages, logps, mask, **epsilons)
    return (loss * mask).sum(1)


def kl_loss(logps, old_logps, ref_logps, mask, name):
    kl_type, corrected = KLS[name]
    kl = kl_penalty(logps, ref_logps, kl_type=kl_type)
    return ((kl * (logps - old_logps).exp() if corrected else kl) * mask).sum(1)


def stale(tiny, ref_logps):
    """Yields (name of the file, arm, {series: its values after UPDATES}), from where tiny stands.

    angle, length and bias compare with the truth for the policy as it is now: the gradient of E[r];
    of the KL at each prefix, and by `whole`, an angle, of the KL of whole answers. noise is the
    standard deviation of one answer; all but angles in units of the truth. moved is the root mean
    square of log pi - log pi_old of a token.
    """
    old_logps, advantages = sampled_by(tiny)
    optimizer, found = adam(tiny, 1e-4), {}
    for step in range(UPDATES[-1] + 1):
        if step in UPDATES:
            for key, numbers in compared(tiny, old_logps, ref_logps, advantages).items():
                for name, number in numbers.items():
                    found.setdefault(key, {}).setdefault(name, []).append(number)
        climb(tiny, optimizer, old_logps, advantages, RATIOS["ratio per token"])
    for (file, arm), series in found.items():
        yield file, arm, series


def by_itself(tiny, ref_logps):
    """Yields (arm, {series: its values after 16 updates at each of RATES}), from where tiny stands.

    The series are those of stale(); but each bound of TUNED moves the policy itself.
    """
    old_logps, advantages = sampled_by(tiny)
    for name, ratio in TUNED.items():
        found = {}
        for rate in RATES:
            there = copy.deepcopy(tiny)
            optimizer = adam(there, rate)
            for _ in range(16):
                climb(there, optimizer, old_logps, advantages, ratio)
            numbers = compared(there, old_logps, ref_logps, advantages, {name: ratio})
            for key, number in numbers["stale", name].items():
                found.setdefault(key, []).append(number)
        yield name, found


def sampled_by(tiny):
    """log pi_old of all answers' tokens (n, R), and A = r - E[r], (n, 1)."""
    old_logps, rewards = tiny.logps().detach(), tiny.rewards["two values"]
    old = old_logps.sum(1).exp() / len(PROMPTS)                                         # (n,)
    solved = torch.zeros(len(PROMPTS)).double().index_add(0, tiny.prompt, old * rewards)
    return old_logps, (rewards - len(PROMPTS) * solved[tiny.prompt])[:, None]


def adam(tiny, rate):
    return torch.optim.AdamW(tiny.policy.parameters(), rate, betas=(0.9, 0.99), weight_decay=0)


def climb(tiny, optimizer, old_logps, advantages, ratio):
    """One update with the expected loss."""
    optimizer.zero_grad()
    loss = policy_loss(tiny.logps(), old_logps, advantages, tiny.mask, *ratio)
    (old_logps.sum(1).exp() / len(PROMPTS) * loss).sum().backward()
    optimizer.step()


def compared(tiny, old_logps, ref_logps, advantages, ratios=RATIOS):
    """{(name of the file, arm): {series: number}} for the policy as it is now."""
    logps, mask = tiny.logps().detach().requires_grad_(), tiny.mask
    gradients, index = tiny.token_gradients()
    gradients = fewer_numbers(gradients)[index]                                     # (n, R, D)
    old, now = (x.detach().sum(1).exp() / len(PROMPTS) for x in (old_logps, logps))     # (n,)
    x = (logps - ref_logps).detach()                                                # (n, R)
    of_reward = (now * tiny.rewards["two values"]) @ gradients.sum(1)
    of_whole_kl = (now * x.sum(1)) @ gradients.sum(1)
    of_kl = torch.einsum("n,nr,nrd->d", now, x, gradients)
    moved = ((old @ (logps - old_logps).detach().pow(2)).sum() / (old @ mask.double()).sum()).sqrt()
    losses = {("stale", name): -policy_loss(logps, old_logps, advantages, mask, *ratio)
              for name, ratio in ratios.items()}
    losses |= {("stale_kl", name): kl_loss(logps, old_logps, ref_logps, mask, name) for name in KLS}
    found = {}
    for key, loss in losses.items():
        weights = torch.autograd.grad(loss.sum(), logps)[0]                         # (n, R)
        parts = torch.einsum("nr,nrd->nd", weights, gradients)
        update, truth = old @ parts, of_reward if key[0] == "stale" else of_kl
        variance = old @ parts.pow(2).sum(1) - update @ update
        found[key] = {
            "angle": degrees([update], [truth]), "whole": degrees([update], [of_whole_kl]),
            "length": (update.norm() / truth.norm()).item(),
            "bias": ((update - truth).norm() / truth.norm()).item(),
            "noise": (variance.clamp(min=0).sqrt() / truth.norm()).item(), "moved": moved.item()}
    return found


# --- the lines of results -------------------------------------------------------------------------

SEEDS, DEFAULT_SEED = (1, 2, 3, 4, 5), 42
TRAINED = {"start": 0, "5 steps": 5, "100 steps": 100}      # the default task's checkpoints


def add(file, row, arm, seed, steps, series):
    """Append a line, in the form of the other experiments' (lab/experiments/__main__.py)."""
    line = {"row": row, "arm": arm, "seed": seed, "steps": steps, "series": series, "eval": {}}
    with open(RESULTS / f"{file}.jsonl", "a", encoding="utf-8") as results:
        results.write(to_line(line))


def add_on_policy(task, answers, seed):
    for kind, arm, numbers in list(on_policy(answers, seed)):
        series = {name: [rounded(number)] for name, number in numbers.items()}
        add("estimators", f"{task}, {kind}", ", ".join(arm), seed, [0], series)
    print(f"{task}, seed {seed}: done", flush=True)


def run_tiny(seed, done):
    tiny = Tiny(seed)
    ref_logps = tiny.logps().detach()
    for name, rate in SOLVED.items():
        tiny.train(rate)
        if (f"tiny, {name}, four values", seed) not in done:
            answers = tiny.answers()
            answers.gradients = fewer_numbers(answers.gradients)
            add_on_policy(f"tiny, {name}", answers, seed)
        if (name, seed) not in done:
            there = copy.deepcopy(tiny)
            for file, arm, series in list(stale(there, ref_logps)):
                add(file, name, arm, seed, UPDATES, series)
        if (f"{name}, by itself", seed) not in done:
            for arm, series in list(by_itself(tiny, ref_logps)):
                add("stale", f"{name}, by itself", arm, seed, RATES, series)


def run_default(done):
    for name, steps in TRAINED.items():
        if (f"default, {name}, the default rewards", DEFAULT_SEED) in done:
            continue
        weights = ROOT / "model/weights/reason_128"
        if steps:
            run = f"--max_steps {steps} --eval_interval 0 --run_name {steps} --out_dir"
            python(f"train_grpo.py {run} {quoted(OUT / 'estimators')}", OUT / "estimators/log")
            weights = OUT / f"estimators/{steps}/final"
        add_on_policy(f"default, {name}", sampled(weights, 64, 1024, DEFAULT_SEED), DEFAULT_SEED)


@user_errors("lab.experiments.estimators")
def main():
    torch.set_num_threads(1)
    done = {(line["row"], line["seed"]) for file in ("estimators", "stale")
            for line in read_jsonl(RESULTS / f"{file}.jsonl")}
    for seed in SEEDS:
        run_tiny(seed, done)
    run_default(done)


if __name__ == "__main__":
    main()
