"""--kl_in_reward: beta times the KL comes off the reward, as in PPO, and is not in the loss."""
from functools import partial

from errors import UserError

NAME = "--kl_in_reward"
DEFAULTS = {"kl_type": "k1"}
EXCLUDES = ()


def add_flags(parser):
    parser.group("3. judge").add_argument(
        NAME, action="store_true", help="take beta * KL (k1) off the reward instead")


def is_on(args):
    return args.kl_in_reward


def refuse(args):
    if args.kl_type != "k1":
        raise UserError(f"--kl_type {args.kl_type} is for the KL in the loss, and {NAME} takes k1; "
                        "leave one of the two out")
    if not args.beta:
        raise UserError(f"{NAME} subtracts beta * KL, and --beta is 0; give a --beta above 0")


def install(t):
    t.remembered["policy_logps"] = t.policy
    t.loss_options["beta"] = 0.0
    t.before_advantages.append(partial(minus_kl, beta=t.args.beta))


def minus_kl(rollout, *, beta):
    """The returns become the rewards less beta times the KL of the whole completion, (N,).

    k1 = log pi - log pi_ref: its value is right, and its gradient does not count here.
    """
    kl = rollout.per_token["policy_logps"] - rollout.per_token["ref_logps"]             # (N, R)
    rollout.returns = rollout.rewards - beta * (kl * rollout.mask).sum(1).cpu()
