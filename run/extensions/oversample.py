"""--oversample: sample more prompts, and learn from the groups with the largest spread."""
import math
import warnings

import torch

from errors import COUNT
from reward.baselines import nanstd

NAME = "--oversample"


def add_flags(parser):
    parser.group("1. generate").add_argument(
        NAME, type=COUNT, default=1, help="sample this many times the prompts, once, and learn "
        "from the groups whose summed rewards have the largest std")


def is_on(args):
    return args.oversample > 1


def install(state):
    state.num_prompts *= state.args.oversample
    state.wrap(NAME, update_policy=from_best_groups)


def from_best_groups(inner, state, rollout):
    """Learns from the rows of the groups with the largest std of rewards alone.

    One round of DAPO's dynamic sampling, by rank: DAPO drops only the groups without a spread. The
    rewards count before --kl_in_reward; the std of --scale_rewards batch is that of all groups,
    those that are dropped included.
    """
    G = state.args.num_generations
    spread = nanstd(rollout.rewards.view(-1, G))[:, 0]                                  # (B,)
    B, times = len(spread), state.args.oversample
    best = math.ceil(B / times)
    if B < times * state.args.batch_size * state.args.accumulation_steps:   # the last of the file
        warnings.warn(f"{NAME} {times}: this step has only {B} prompts, and learns from {best}; "
                      "lower --batch_size, or give more prompts", stacklevel=2)
    groups = spread.topk(best).indices.sort().values
    rows = groups[:, None] * G + torch.arange(G)
    return inner(rollout.only(rows.flatten()))
