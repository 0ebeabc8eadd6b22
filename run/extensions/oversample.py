"""--oversample: sample more prompts, and learn from the groups with the largest spread."""
import math

import torch

from errors import COUNT
from reward.baselines import nanstd

from . import no_defaults, nothing_to_refuse

NAME = "--oversample"
EXCLUDES = ()
defaults = no_defaults
refuse = nothing_to_refuse


def add_flags(parser):
    parser.group("1. ask").add_argument(
        NAME, type=COUNT, default=1, help="sample this many times the prompts, once, and learn "
        "from the groups whose summed rewards have the largest std")


def is_on(args):
    return args.oversample > 1


def install(t):
    t.num_prompts *= t.args.oversample
    t.wrap(NAME, update_policy=from_best_groups)


def from_best_groups(inner, t, rollout):
    """Learns from the rows of the groups with the largest std of rewards alone.

    One round of DAPO's dynamic sampling, by rank: DAPO drops only the groups without a spread. The
    rewards count before --kl_in_reward; the std of --scale_rewards batch is that of all groups,
    those that are dropped included.
    """
    G = t.args.num_generations
    spread = nanstd(rollout.rewards.view(-1, G))[:, 0]                                  # (B,)
    groups = spread.topk(math.ceil(len(spread) / t.args.oversample)).indices.sort().values
    rows = groups[:, None] * G + torch.arange(G)
    return inner(t, rollout.only(rows.flatten()))
