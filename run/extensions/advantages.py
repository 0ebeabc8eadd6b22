"""--scale_rewards, --advantage_estimator: other baselines and scales, of reward/baselines.py."""
import torch

from reward.baselines import BASELINES, SCALES, estimate, nanstd

NAME = "--scale_rewards, --advantage_estimator"


def add_flags(parser):
    flag = parser.group("3. rewards").add_argument
    flag("--scale_rewards", choices=("group", *SCALES), help="divide advantages by the std of the "
         "group, of the step, by nothing, by the group's mean (default: group; none with another "
         "--advantage_estimator)")
    flag("--advantage_estimator", choices=("grpo", *BASELINES), default="grpo",
         help="compare a reward with its group's mean, or with the mean of the others (rloo); "
         "grpo_passk: only the best of a group, with the second best")


def defaults(args):
    return {"scale_rewards": "none"} if args.advantage_estimator != "grpo" else {}


def is_on(args):
    return args.advantage_estimator != "grpo" or args.scale_rewards not in (None, "group")


def install(state):
    state.replace(NAME, compute_advantages=compute_advantages)


def compute_advantages(state, rollout):
    args, batch_std = state.args, None
    if args.scale_rewards == "batch":
        batch_std = nanstd(torch.tensor(state.world.gather(rollout.rewards.tolist())))
    return estimate(rollout.rewards, args.num_generations, baseline=args.advantage_estimator,
                    scale=args.scale_rewards, batch_std=batch_std).to(rollout.loss_mask.device)
