"""--oversample: samples more prompts until enough groups have rewards that differ (DAPO)."""
import math
import warnings
from functools import partial

import torch

from errors import COUNT, UserError
from reward.baselines import nanstd

from ..rollout import rows_of

NAME = "--oversample"


def add_flags(parser):
    parser.group("1. generate").add_argument(
        NAME, type=COUNT, default=1, help="maximum rounds of sampling: each round after the first "
        "replaces groups whose rewards are all equal by groups of new prompts (DAPO); a step "
        "reserves this many times batch_size prompts, and unused ones wait for the next pass")


def is_on(args):
    return args.oversample > 1


def check(args):
    if not args.shuffle:
        raise UserError(f"{NAME} leaves prompts out in each pass, and with --shuffle 0 always the "
                        "same ones; leave one of the two out")


def install(state):
    metrics = {}        # those of the last rollout
    state.num_prompts *= state.args.oversample
    state.wrap(NAME, generate=partial(in_rounds, metrics), compute_rewards=only_once,
               update_policy=lambda inner, state, rollout: inner(rollout) | metrics)


def in_rounds(metrics, inner, state, batch, rng, num_generations=None, greedy=False):
    """DAPO's dynamic sampling, arXiv 2503.14476: returns a Rollout of B groups, with rewards.

    Further rounds of sampling replace groups whose rewards are all equal. If a rank has
    fewer than B groups with different rewards after the last round, it adds groups with equal
    rewards. In each round, all ranks sample the same number of groups.
    """
    if num_generations or greedy:           # for an evaluation
        return inner(batch, rng, num_generations, greedy)
    total, most = len(batch["prompts"]), state.args.oversample
    B = missing = math.ceil(total / most)
    if total < state.num_prompts:           # at the end of the file
        warnings.warn(f"{NAME} {most}: this step has only {total} prompts, so it trains on {B}; "
                      "lower --batch_size, or add prompts", stacklevel=2)
    rollout, rounds, done = None, 0, 0
    while missing > 0 and rounds < most:
        state.phase("rollout")
        part = inner(rows_of(batch, torch.arange(done, done + missing)), rng)
        state.phase("reward")
        part.rewards, part.rewards_per_func = state.compute_rewards(
            part, state.reward_funcs, state.args.reward_weights)
        rollout, rounds = rollout.joined(part) if rollout else part, rounds + 1
        rewards = rollout.rewards.view(-1, state.args.num_generations)
        is_flat, done = nanstd(rewards)[:, 0] <= 1e-6, len(rewards)
        # `missing` must be the same on all ranks: they wait for each other in compute_rewards.
        flat = state.world.gather([is_flat.sum().item()])
        missing = min(total - done, max(flat) - done + B)
    metrics.update({"oversample/rounds": rounds,
                    "oversample/frac_zero_std": sum(flat) / done / state.world.size})
    best = is_flat.int().argsort(stable=True)[:B].sort().values
    return rollout.only(torch.arange(rewards.numel()).view_as(rewards)[best].flatten())


def only_once(inner, state, rollout, *how):
    """Computes the rewards, unless in_rounds has already computed them."""
    if rollout.rewards is None:
        return inner(rollout, *how)
    return rollout.rewards, rollout.rewards_per_func
