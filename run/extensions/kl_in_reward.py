"""--kl_in_reward: subtracts beta * KL from the reward, as PPO does; the loss then has no KL."""
from dataclasses import replace

from errors import UserError

NAME = "--kl_in_reward"


def add_flags(parser):
    parser.group("3. rewards").add_argument(
        NAME, action="store_true", help="subtract beta * KL (k1) from rewards, as in PPO, instead "
        "of adding it to the loss")


def defaults(args):
    return {"kl_type": "k1"}


def check(args):
    if args.kl_type != "k1":
        raise UserError(f"--kl_type {args.kl_type} is for the KL in the loss, but {NAME} uses k1; "
                        "leave one of the two out")
    if not args.beta:
        raise UserError(f"{NAME} subtracts beta * KL, but --beta is 0; pass a --beta above 0")


class KLInReward:
    def compute_advantages(self, rollout):
        """Computes advantages, (N,), after subtracting beta * KL (k1) from each reward."""
        kl = self.compute_logps(self.policy, rollout) - rollout.ref_logps                # (N, R)
        rewards = rollout.rewards - self.args.beta * (kl * rollout.loss_mask).sum(1).cpu()
        return super().compute_advantages(replace(rollout, rewards=rewards))

    def grpo_loss(self, *tensors, **options):
        return super().grpo_loss(*tensors, **options | {"beta": 0.0})
