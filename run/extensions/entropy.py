"""--entropy_coef: a bonus for the mean entropy of a token's distribution, as in PPO."""
from errors import POSITIVE_OR_0

from . import no_defaults, nothing_to_refuse

NAME = "--entropy_coef"
EXCLUDES = ()
defaults = no_defaults
refuse = nothing_to_refuse


def add_flags(parser):
    parser.group("4. learn (the objective)").add_argument(
        NAME, type=POSITIVE_OR_0, default=0.0, help="weight of an entropy bonus")


def is_on(args):
    return args.entropy_coef > 0


def install(t):
    t.policy.entropy_learns = t.pulls_on_all = True     # in a completion of advantage 0, too
    t.wrap(NAME, compute_loss=minus_entropy)


def minus_entropy(inner, t, part, logps, entropy):
    loss, metrics = inner(t, part, logps, entropy)
    total = (entropy * part.loss_mask).sum()
    return loss - t.args.entropy_coef * total / max(1, part.num_tokens), metrics
