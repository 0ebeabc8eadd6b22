"""--oversample: sample in rounds, so that each group has a spread of rewards (DAPO)."""
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
        NAME, type=COUNT, default=1, help="rounds of sampling, at most: each after the first takes "
        "new prompts in place of groups whose summed rewards are all equal (DAPO); a step sets so "
        "many times the prompts aside, and what it does not need waits for another pass")


def is_on(args):
    return args.oversample > 1


def check(args):
    if not args.shuffle:
        raise UserError(f"{NAME} leaves prompts out in each pass, with --shuffle 0 always the same "
                        "ones; leave one of the two out")


def install(state):
    metrics = {}        # of the last rollout
    state.num_prompts *= state.args.oversample
    state.wrap(NAME, generate=partial(in_rounds, metrics), compute_rewards=only_once,
               update_policy=lambda inner, state, rollout: inner(rollout) | metrics)


def in_rounds(metrics, inner, state, batch, rng, num_generations=None, greedy=False):
    """DAPO's dynamic sampling, arXiv 2503.14476: a Rollout of B groups that has its rewards.

    A round takes as many prompts of the batch as the rank that misses most groups with a spread. A
    rank learns from its first B, and, if it has fewer, from its first ones without a spread. The
    rewards count before --kl_in_reward.
    """
    if num_generations or greedy:           # an evaluation
        return inner(batch, rng, num_generations, greedy)
    total, most = len(batch["prompts"]), state.args.oversample
    B = missing = math.ceil(total / most)
    if total < state.num_prompts:           # the last of the file
        warnings.warn(f"{NAME} {most}: this step has only {total} prompts, and learns from {B}; "
                      "lower --batch_size, or give more prompts", stacklevel=2)
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
        # The same on all ranks, which wait for each other in compute_rewards.
        flat = state.world.gather([is_flat.sum().item()])
        missing = min(total - done, max(flat) - done + B)
    metrics.update({"oversample/rounds": rounds,
                    "oversample/frac_zero_std": sum(flat) / done / state.world.size})
    best = is_flat.int().argsort(stable=True)[:B].sort().values
    return rollout.only(torch.arange(rewards.numel()).view_as(rewards)[best].flatten())


def only_once(inner, state, rollout, *how):
    """The rewards; of a rollout of in_rounds those that it has."""
    if rollout.rewards is None:
        return inner(rollout, *how)
    return rollout.rewards, rollout.rewards_per_func
