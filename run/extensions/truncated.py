"""--mask_truncated_completions: learn nothing from completions that were cut off (DAPO)."""
from dataclasses import replace

NAME = "--mask_truncated_completions"


def add_flags(parser):
    parser.group("4. update (the objective)").add_argument(
        NAME, action="store_true", help="learn nothing from completions that were cut off")


def install(state):
    state.wrap(NAME, update_policy=from_whole_completions)


def from_whole_completions(inner, state, rollout):
    """No token of a completion that was cut off is learned, or counts in the mean over tokens.

    As a completion it still counts.
    """
    return inner(replace(rollout, loss_mask=rollout.loss_mask * rollout.ended[:, None]))
