"""--supervision process: also rewards each line of arithmetic (DeepSeekMath, section 4.1.3)."""
from errors import UserError
from reward.process_rewards import judge_steps, process_advantages

from .losses import check_token_advantages

NAME = "--supervision process"


def add_flags(parser):
    parser.group("3. rewards").add_argument(
        "--supervision", choices=("outcome", "process"), default="outcome",
        help="process: also reward each correct line of arithmetic with 1")


def is_on(args):
    return [NAME] if args.supervision == "process" else []


def check(args):
    check_token_advantages(NAME, args)
    if not any(args.reward_weights):
        raise UserError(f"{NAME} divides the outcome by the sum of --reward_weights, which is 0; "
                        "pass one above 0")
    if args.tool:
        raise UserError(f"{NAME} looks for arithmetic in whole completions, including a tool's "
                        "words; leave --supervision or --tool out")


class ProcessRewards:
    def compute_advantages(self, rollout):
        """Returns advantages, (N, R), from the rewards of lines of arithmetic and of outcomes."""
        # A step's reward is 0 or 1. Dividing by the sum of the weights scales outcomes alike.
        outcomes = (rollout.rewards / sum(map(abs, self.args.reward_weights))).tolist()
        steps = judge_steps(rollout.completions, rollout.token_ids(), self.tokenizer,
                            self.eos_ids, outcomes)
        return process_advantages(*steps, self.args.num_generations, rollout.loss_mask)
