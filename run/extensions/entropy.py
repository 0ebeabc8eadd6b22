"""--entropy_coef: adds a bonus for the policy's mean entropy per token to the loss, as in PPO."""
from errors import POSITIVE_OR_0

NAME = "--entropy_coef"


def add_flags(parser):
    parser.group("4. update (the objective)").add_argument(
        NAME, type=POSITIVE_OR_0, default=0.0, help="weight of an entropy bonus in the loss")


def install(state):
    state.policy.entropy_learns = True
    state.every_row_has_gradient = True         # rows with advantage 0 also get the bonus
    state.wrap(NAME, compute_loss=minus_entropy)


def minus_entropy(inner, state, part, logps, entropy):
    loss, metrics = inner(part, logps, entropy)
    total = (entropy * part.loss_mask).sum()
    return loss - state.args.entropy_coef * total / max(1, part.num_tokens), metrics
