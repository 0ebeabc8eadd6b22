"""--ref_model_sync_steps: the reference follows the policy (TR-DPO, arXiv 2404.09656)."""
from functools import partial

import torch

from errors import COUNT_OR_0, UserError, number

from ..backends import load_frozen

NAME = "--ref_model_sync_steps"
DEFAULTS = {}
EXCLUDES = ()


def add_flags(parser):
    flag = parser.group("2. remember").add_argument
    flag(NAME, type=COUNT_OR_0, default=0, help="steps between moves of the reference towards the "
         "policy, in long runs; 0: it stays")
    flag("--ref_model_mixup_alpha", type=number(float, 0, 1, above=True), default=0.6,
         help="such a move is reference <- alpha policy + (1 - alpha) reference")


def is_on(args):
    return args.ref_model_sync_steps > 0


def refuse(args):
    if args.lora_rank or not args.beta:
        raise UserError(f"{NAME} moves a reference, and with --beta 0 there is none, with "
                        "--lora_rank it is the frozen base; leave one of the two out")


def install(t):
    if t.world.matrix_dtype != torch.float32:       # else small moves would be rounded away
        t.reference = load_frozen(t.args.model_path, t.world, t.args, matrix_dtype=None)
        t.remembered["ref_logps"] = t.reference
    t.saved["reference"] = t.reference
    t.after_step.append(partial(
        sync_reference, reference=t.reference, policy=t.policy,
        every=t.args.ref_model_sync_steps, alpha=t.args.ref_model_mixup_alpha))


@torch.no_grad()
def sync_reference(step, *, reference, policy, every, alpha):
    """Now and then reference <- alpha policy + (1 - alpha) reference."""
    if step % every == 0:
        for theirs, ours in zip(reference.parameters(), policy.parameters()):
            theirs.lerp_(ours, alpha)
