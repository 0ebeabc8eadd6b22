"""--mask_truncated_completions: doesn't train on truncated completions (DAPO)."""
from dataclasses import replace

NAME = "--mask_truncated_completions"


def add_flags(parser):
    parser.group("4. update (the objective)").add_argument(
        NAME, action="store_true", help="don't train on truncated completions")


class MaskTruncated:
    def update_policy(self, rollout):
        """Masks all tokens of truncated completions, so the loss doesn't train on them.

        If the loss is a mean over completions, truncated ones still count in its denominator.
        """
        mask = rollout.loss_mask * rollout.ended[:, None]
        return super().update_policy(replace(rollout, loss_mask=mask))
