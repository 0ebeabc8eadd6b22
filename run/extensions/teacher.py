"""--teacher_path: on-policy distillation. A teacher's probabilities take the rewards' place."""
from dataclasses import replace

import torch

from errors import UserError
from model.load import load_tokenizer

from ..metrics import Mean
from ..policy import load_frozen
from .losses import check_token_advantages

NAME = "--teacher_path"


def add_flags(parser):
    parser.group("3. rewards").add_argument(
        NAME, help="weights with the policy's tokenizer: learn from how likely each sampled token "
        "is to them, instead of from rewards (on-policy distillation; beta is then 0 and "
        "loss_type bnpo, unless you give others)")


def defaults(args):
    return {"beta": 0.0, "loss_type": "bnpo"}


def check(args):
    check_token_advantages(NAME, args)
    if args.supervision == "process" or args.kl_in_reward or args.oversample > 1:
        raise UserError(f"{NAME} learns nothing from rewards; leave --supervision process, "
                        "--kl_in_reward and --oversample out")


def install(state):
    teacher = load_teacher(state)

    def compute_advantages(state, rollout):
        rollout.extra["teacher_logps"] = state.compute_logps(teacher, rollout)
        return towards_teacher(rollout, state.compute_logps(state.policy, rollout))

    state.replace(NAME, compute_advantages=compute_advantages)
    state.wrap(NAME, update_policy=as_if_judged, compute_loss=with_distance)


def load_teacher(state):
    """The frozen model; UserError if its tokens are not the policy's."""
    path = state.args.teacher_path
    teacher = load_frozen(path, state.world, state.args, state.token_logps)
    advice = "give a --teacher_path whose tokenizer is the policy's"
    tokenizer = load_tokenizer(path, teacher.model.config.vocab_size, advice)
    if tokenizer.get_vocab() != state.tokenizer.get_vocab():
        raise UserError(f"{path}: its tokens are not the policy's; {advice}")
    return teacher


def towards_teacher(rollout, policy_logps):
    """The advantages of on-policy distillation, (N, R); arXiv 2306.13649.

        A_t = log pi_teacher(o_t | q, o_<t) - log pi(o_t | q, o_<t)

    Of what pi draws after o_<t, the mean of A_t grad log pi is minus the gradient of the KL there,
    KL(pi || pi_teacher): it lowers the KL of each token, with its prefix as given. But pi has drawn
    the prefix, too. For the KL of whole answers, the mean of minus the sum of A_t, a token answers
    for all that follows: in place of A_t it has the sum of A_u over u >= t, which is noisier.
    Neither takes a group, a std or a reward; both models are at --temperature. (The paper reads the
    teacher's whole distribution; the drawn token alone is verl's k1 with use_policy_gradient.)
    """
    return (rollout.extra["teacher_logps"] - policy_logps) * rollout.loss_mask


def as_if_judged(inner, state, rollout):
    """Learns, whatever the rewards say."""
    return inner(replace(rollout, rewards=torch.zeros_like(rollout.rewards)))


def with_distance(inner, state, part, logps, entropy):
    """The metric teacher_kl: the mean over tokens of log pi_old - log pi_teacher."""
    loss, metrics = inner(part, logps, entropy)
    difference = (part.old_logps - part.extra["teacher_logps"]) * part.loss_mask
    return loss, metrics | {"teacher_kl": Mean(difference.sum(), part.loss_mask.sum())}
