"""--mask_truncated_completions: learn nothing from completions that were cut off (DAPO)."""
from dataclasses import replace

from . import no_defaults, nothing_to_refuse

NAME = "--mask_truncated_completions"
EXCLUDES = ()
defaults = no_defaults
refuse = nothing_to_refuse


def add_flags(parser):
    parser.group("4. learn (the objective)").add_argument(
        NAME, action="store_true", help="learn nothing from completions that were cut off")


def is_on(args):
    return args.mask_truncated_completions


def install(t):
    t.wrap(NAME, update_policy=from_whole_completions)


def from_whole_completions(inner, t, rollout):
    """No token of a completion that was cut off is learned, or counts in the mean over tokens.

    As a completion it still counts.
    """
    return inner(t, replace(rollout, loss_mask=rollout.loss_mask * rollout.ended[:, None]))
