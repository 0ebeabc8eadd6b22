"""--ref_model_sync_steps: moves the reference towards the policy (TR-DPO, arXiv 2404.09656)."""
import torch

from errors import COUNT_OR_0, UserError, number

from ..policy import load_frozen

NAME = "--ref_model_sync_steps"


def add_flags(parser):
    flag = parser.group("2. reference").add_argument
    flag(NAME, type=COUNT_OR_0, default=0, help="for long runs: move the reference towards the "
         "policy every so many steps; 0: never")
    flag("--ref_model_mixup_alpha", type=number(float, 0, 1, above=True), default=0.6,
         help="size of the move: reference <- alpha policy + (1 - alpha) reference")


def check(args):
    if args.lora_rank or not args.beta:
        raise UserError(f"{NAME} moves the reference, but with --beta 0 there is none, and with "
                        "--lora_rank it is the frozen base; leave one of the two out")


class MovingReference:
    def __post_init__(self):
        super().__post_init__()
        if self.world.matrix_dtype != torch.float32:        # float32, so small moves aren't lost
            self.reference = load_frozen(
                self.args.model_path, self.world, self.args, self.token_logps, exact=True)
        self.saved["reference"] = self.reference.model

    def update_policy(self, rollout):
        """Moves the reference after the update."""
        metrics = super().update_policy(rollout)
        if self.current_step % self.args.ref_model_sync_steps == 0:
            weights = self.reference.model.parameters(), self.policy.model.parameters()
            with torch.no_grad():
                for theirs, ours in zip(*weights):
                    theirs.lerp_(ours, self.args.ref_model_mixup_alpha)
        return metrics
