"""--scale_rewards, --advantage_estimator: other ways to compute advantages from rewards."""
import math

import torch

from errors import UserError
from reward.baselines import BASELINES, SCALES, estimate, nanstd
from reward.load import fault, import_function

ESTIMATORS = ("grpo", *BASELINES, "gdpo")


def add_flags(parser):
    flag = parser.group("3. rewards").add_argument
    flag("--scale_rewards", choices=("group", *SCALES), help="what advantages are divided by: the "
         "group's std (group), the step's std (batch), nothing (none), or the group's mean (mean) "
         "(default: group; none with another --advantage_estimator)")
    flag("--advantage_estimator", metavar="NAME", default="grpo", help="what a reward is compared "
         "with: the group's mean (grpo); the mean of the others (rloo); the second best, for the "
         "best one only (grpo_passk); gdpo: as grpo, but for each reward function separately, with "
         "the sum divided by the step's std; or your own module:function (docs/losses.md)")


def defaults(args):
    return {"scale_rewards": "none"} if args.advantage_estimator != "grpo" else {}


def is_on(args):
    usual = {"advantage_estimator": "grpo", "scale_rewards": "group"}
    return [f"--{name} {getattr(args, name)}" for name, value in usual.items()
            if getattr(args, name) not in (None, value)]


def check(args):
    name = args.advantage_estimator
    if name == "gdpo" and (args.scale_rewards != "none" or args.kl_in_reward):
        raise UserError("--advantage_estimator gdpo scales each reward function separately; leave "
                        "--scale_rewards and --kl_in_reward out")
    if name not in ESTIMATORS:
        import_function("--advantage_estimator", name, ", ".join(ESTIMATORS))
        if args.scale_rewards != "none":
            raise UserError(f"--advantage_estimator {name} is a function, which does the scaling "
                            "itself; leave --scale_rewards out")


class OtherAdvantages:
    def compute_advantages(self, rollout):
        args, batch_std = self.args, None
        if args.advantage_estimator == "gdpo":
            return gdpo(rollout, args, self.world)
        if args.advantage_estimator not in ESTIMATORS:
            return call_own(rollout, args)
        if args.scale_rewards == "batch":
            batch_std = nanstd(torch.tensor(self.world.gather(rollout.rewards.tolist())))
        return estimate(rollout.rewards, args.num_generations, baseline=args.advantage_estimator,
                        scale=args.scale_rewards, batch_std=batch_std).to(rollout.loss_mask.device)


def gdpo(rollout, args, world):
    """GDPO's advantages, (N,), arXiv 2601.05242: each reward function is normalized separately.

        S = sum over functions k of weight_k (r_k - mean_k(group)) / (std_k(group) + eps)
        A = (S - mean(S)) / (std(S) + eps)          over the step's completions on all ranks

    If function k has not scored a completion, its term in S is 0.
    """
    rewards = torch.stack([*rollout.rewards_per_func.values()])                 # (functions, N)
    each = estimate(rewards.double().flatten(), args.num_generations).view_as(rewards)
    total = torch.tensor(args.reward_weights, dtype=each.dtype) @ each                    # (N,)
    total = total.where(~rollout.rewards.isnan(), math.nan)
    of_all = torch.tensor(world.gather([total.tolist()]), dtype=total.dtype)     # (ranks, N)
    advantages = estimate(of_all.flatten(), of_all.numel()).view_as(of_all)[world.rank]
    return advantages.to(rollout.loss_mask.device, rollout.rewards.dtype)


def call_own(rollout, args):
    """Calls a user's function for advantages, (N,). Raises a UserError unless all are finite."""
    name, rewards = args.advantage_estimator, rollout.rewards
    function = import_function("--advantage_estimator", name)
    try:
        found = function(rewards.clone(), args.num_generations)
        fits = found.shape == rewards.shape and found.is_floating_point()
        advantages = found.detach().to(rollout.loss_mask.device, rewards.dtype)
        if not fits or not advantages.isfinite().all():
            raise ValueError(f"it returned {found!r:.99}, not {len(rewards)} finite floats, (N,)")
    except (Exception, SystemExit) as error:
        raise fault(f"--advantage_estimator {name} failed", error, "write it as docs/losses.md says"
                    ) from error
    return advantages
