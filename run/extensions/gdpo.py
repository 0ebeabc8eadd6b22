"""--multi_objective_aggregation normalize_then_sum: GDPO, arXiv 2601.05242."""
import math

import torch

from reward.baselines import nanstd

from . import refuse_other_advantages

NAME = "--multi_objective_aggregation normalize_then_sum"
EXCLUDES = ("kl_in_reward",)


def add_flags(parser):
    parser.group("3. rewards").add_argument(
        "--multi_objective_aggregation", choices=("sum_then_normalize", "normalize_then_sum"),
        default="sum_then_normalize", help="normalize_then_sum: divide each reward function by "
        "its own std in the group, then the sum by that of the step (GDPO)")


def is_on(args):
    return args.multi_objective_aggregation == "normalize_then_sum"


def check(args):
    refuse_other_advantages(NAME, args)


def install(state):
    state.replace(NAME, compute_advantages=normalize_then_sum)


def normalize_then_sum(state, rollout):
    """GDPO's advantages, (N,): each reward function is normalised on its own.

        S = sum over functions k of weight_k (r_k - mean_k(group)) / (std_k(group) + eps)
        A = (S - mean(S)) / (std(S) + eps)          over the completions of the step, of all ranks

    What a function has not judged adds nothing to S.
    """
    rewards = torch.stack([*rollout.rewards_per_func.values()])                 # (functions, N)
    each = normalized(rewards.view(-1, state.args.num_generations)).view_as(rewards)
    total = torch.tensor(state.args.reward_weights, dtype=each.dtype) @ each               # (N,)
    total = total.where(~rollout.rewards.isnan(), math.nan)
    of_all = torch.tensor(state.world.gather([total.tolist()]), dtype=total.dtype)    # (ranks, N)
    advantages = normalized(of_all.flatten()).view_as(of_all)[state.world.rank]
    return advantages.to(rollout.loss_mask.device, rollout.rewards.dtype)


def normalized(x, eps=1e-4):
    """(x - mean) / (std + eps) over the last dim; 0 for NaN, which counts in neither."""
    x = x.double()
    return (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0) / (nanstd(x) + eps)
