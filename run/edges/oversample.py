"""--oversample: sample more prompts, and learn from the groups with the largest spread."""
import math
from functools import partial

import torch

from errors import COUNT
from reward.baselines import nanstd

NAME = "--oversample"
DEFAULTS = {}
EXCLUDES = ()


def add_flags(parser):
    parser.group("1. ask").add_argument(
        NAME, type=COUNT, default=1, help="sample this many times the prompts, once, and learn "
        "from the groups whose summed rewards have the largest std")


def is_on(args):
    return args.oversample > 1


def refuse(args):
    pass


def install(t):
    t.num_prompts *= t.args.oversample
    t.after_advantages.append(partial(
        best_rows, times=t.args.oversample, num_generations=t.args.num_generations))


def best_rows(rollout, *, times, num_generations):
    """The rows to learn from become those of the groups with the largest std of rewards.

    One round of DAPO's dynamic sampling, by rank: DAPO drops only the groups without a spread. The
    rewards count before --kl_in_reward; the std of --scale_rewards batch is that of all groups,
    those that are dropped included.
    """
    spread = nanstd(rollout.rewards.view(-1, num_generations))[:, 0]                    # (B,)
    groups = spread.topk(math.ceil(len(spread) / times)).indices.sort().values
    rows = groups[:, None] * num_generations + torch.arange(num_generations)
    rollout.chosen = rows.flatten().to(rollout.mask.device)
