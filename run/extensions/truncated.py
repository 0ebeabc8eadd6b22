"""--mask_truncated_completions: doesn't train on truncated completions (DAPO)."""
from dataclasses import replace

NAME = "--mask_truncated_completions"


def add_flags(parser):
    parser.group("4. update (the objective)").add_argument(
        NAME, action="store_true", help="don't train on truncated completions")


def install(state):
    state.wrap(NAME, update_policy=from_whole_completions)


def from_whole_completions(inner, state, rollout):
    """Masks all tokens of truncated completions, so the loss doesn't train on them.

    If the loss is a mean over completions, truncated completions still count in its denominator.
    """
    return inner(replace(rollout, loss_mask=rollout.loss_mask * rollout.ended[:, None]))
