"""--entropy_coef: adds a bonus for the policy's mean entropy per token to the loss, as in PPO."""
from errors import POSITIVE_OR_0

NAME = "--entropy_coef"


def add_flags(parser):
    parser.group("4. update (the objective)").add_argument(
        NAME, type=POSITIVE_OR_0, default=0.0, help="weight of an entropy bonus in the loss")


class EntropyBonus:
    def __post_init__(self):
        super().__post_init__()
        self.policy.entropy_learns = True
        self.every_row_has_gradient = True      # rows with advantage 0 also get the bonus

    def compute_loss(self, part, logps, entropy):
        loss, metrics = super().compute_loss(part, logps, entropy)
        total = (entropy * part.loss_mask).sum()
        return loss - self.args.entropy_coef * total / max(1, part.num_tokens), metrics
