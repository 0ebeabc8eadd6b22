"""--oversample: samples more prompts until enough groups have rewards that differ (DAPO)."""
import math
import warnings

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
    return [NAME] if args.oversample > 1 else []


def check(args):
    if not args.shuffle:
        raise UserError(f"{NAME} leaves prompts out in each pass, and with --shuffle 0 always the "
                        "same ones; leave one of the two out")


class Oversample:
    def __post_init__(self):
        super().__post_init__()
        self.num_prompts *= self.args.oversample
        self.of_rounds = {}         # metrics of the last rollout

    def generate(self, batch, rng, num_generations=None, greedy=False):
        """DAPO's dynamic sampling, arXiv 2503.14476: returns a Rollout of B groups, with rewards.

        Further rounds of sampling replace groups whose rewards are all equal. If a rank has
        fewer than B groups with different rewards after the last round, it adds groups with equal
        rewards. In each round, all ranks sample the same number of groups.
        """
        if num_generations or greedy:           # for an evaluation
            return super().generate(batch, rng, num_generations, greedy)
        total, most = len(batch["prompts"]), self.args.oversample
        B = missing = math.ceil(total / most)
        if total < self.num_prompts:            # at the end of the file
            warnings.warn(f"{NAME} {most}: this step has only {total} prompts, so it trains on {B};"
                          " lower --batch_size, or add prompts", stacklevel=2)
        rollout, rounds, done = None, 0, 0
        while missing > 0 and rounds < most:
            self.phase("rollout")
            part = super().generate(rows_of(batch, torch.arange(done, done + missing)), rng)
            self.phase("reward")
            part.rewards, part.rewards_per_func = self.compute_rewards(
                part, self.reward_funcs, self.args.reward_weights)
            rollout = rollout.joined(part) if rollout else part
            rounds += 1
            rewards = rollout.rewards.view(-1, self.args.num_generations)
            done = len(rewards)
            is_flat = nanstd(rewards)[:, 0] <= 1e-6
            # `missing` must be the same on all ranks: they wait for each other in gather.
            flat = self.world.gather([is_flat.sum().item()])
            missing = min(total - done, max(flat) - done + B)
        self.of_rounds = {"oversample/rounds": rounds,
                          "oversample/frac_zero_std": sum(flat) / done / self.world.size}
        best = is_flat.int().argsort(stable=True)[:B].sort().values
        return rollout.only(torch.arange(rewards.numel()).view_as(rewards)[best].flatten())

    def compute_rewards(self, rollout, *how):
        """Computes the rewards, unless `generate` has already computed them."""
        if rollout.rewards is None:
            return super().compute_rewards(rollout, *how)
        return rollout.rewards, rollout.rewards_per_func

    def update_policy(self, rollout):
        return super().update_policy(rollout) | self.of_rounds
