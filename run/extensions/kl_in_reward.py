"""--kl_in_reward: beta times the KL comes off the reward, as in PPO, and is not in the loss."""
from dataclasses import replace

from errors import UserError

NAME = "--kl_in_reward"


def add_flags(parser):
    parser.group("3. rewards").add_argument(
        NAME, action="store_true", help="take beta * KL (k1) off the reward instead")


def defaults(args):
    return {"kl_type": "k1"}


def check(args):
    if args.kl_type != "k1":
        raise UserError(f"--kl_type {args.kl_type} is for the KL in the loss, and {NAME} takes k1; "
                        "leave one of the two out")
    if not args.beta:
        raise UserError(f"{NAME} subtracts beta * KL, and --beta is 0; give a --beta above 0")


def install(state):
    state.wrap(NAME, compute_advantages=of_rewards_minus_kl, grpo_loss=without_kl)


def of_rewards_minus_kl(inner, state, rollout):
    """The advantages of the rewards less beta times the KL of the whole completion, (N,).

    k1 = log pi - log pi_ref: its value is right, and its gradient does not count here.
    """
    kl = state.compute_logps(state.policy, rollout) - rollout.ref_logps                  # (N, R)
    rewards = rollout.rewards - state.args.beta * (kl * rollout.loss_mask).sum(1).cpu()
    return inner(replace(rollout, rewards=rewards))


def without_kl(inner, *tensors, **options):
    return inner(*tensors, **options | {"beta": 0.0})
