"""--teacher_path: on-policy distillation, with a teacher's probabilities instead of rewards."""
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
        NAME, help="weights of a teacher with the policy's tokenizer: train on its log-probs of "
        "the sampled tokens instead of on rewards (on-policy distillation; the defaults of beta "
        "and loss_type are then 0 and bnpo)")


def defaults(args):
    return {"beta": 0.0, "loss_type": "bnpo"}


def check(args):
    check_token_advantages(NAME, args)
    if args.supervision == "process" or args.kl_in_reward or args.oversample > 1:
        raise UserError(f"{NAME} does not train on rewards; leave --supervision process, "
                        "--kl_in_reward and --oversample out")


class Distillation:
    def __post_init__(self):
        super().__post_init__()
        self.teacher = load_teacher(self)

    def compute_advantages(self, rollout):
        rollout.extra["teacher_logps"] = self.compute_logps(self.teacher, rollout)
        return towards_teacher(rollout, self.compute_logps(self.policy, rollout))

    def update_policy(self, rollout):
        """Updates the policy although no completion has a reward."""
        return super().update_policy(replace(rollout, rewards=torch.zeros_like(rollout.rewards)))

    def compute_loss(self, part, logps, entropy):
        """Adds the metric teacher_kl, the mean over tokens of log pi_old - log pi_teacher."""
        loss, metrics = super().compute_loss(part, logps, entropy)
        difference = (part.old_logps - part.extra["teacher_logps"]) * part.loss_mask
        return loss, metrics | {"teacher_kl": Mean(difference.sum(), part.loss_mask.sum())}


def load_teacher(grpo):
    """Loads the frozen teacher. Raises a UserError if its vocabulary differs from the policy's."""
    path = grpo.args.teacher_path
    teacher = load_frozen(path, grpo.world, grpo.args, grpo.token_logps)
    advice = "pass a --teacher_path with the policy's tokenizer"
    tokenizer = load_tokenizer(path, teacher.model.config.vocab_size, advice)
    if tokenizer.get_vocab() != grpo.tokenizer.get_vocab():
        raise UserError(f"{path}: its tokens are not the policy's; {advice}")
    return teacher


def towards_teacher(rollout, policy_logps):
    """Returns the advantages of on-policy distillation, (N, R); arXiv 2306.13649.

        A_t = log pi_teacher(o_t | q, o_<t) - log pi(o_t | q, o_<t)

    The mean of A_t grad log pi over all possible tokens o_t is minus the gradient of
    KL(pi || pi_teacher) at position t, so training lowers the KL at each position, given the tokens
    before it. To lower the KL of whole completions, the advantage would need to be the sum of A_u
    over u >= t, which has a higher variance. Groups and rewards are not needed. Both models use
    --temperature. The paper uses the teacher's probabilities of all tokens; this function uses only
    the sampled token, like verl's k1 with use_policy_gradient.
    """
    return (rollout.extra["teacher_logps"] - policy_logps) * rollout.loss_mask
