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
    return args.supervision == "process"


def check(args):
    check_token_advantages(NAME, args)
    if not any(args.reward_weights):
        raise UserError(f"{NAME} divides the outcome by the sum of --reward_weights, which is 0; "
                        "pass one above 0")
    if args.tool:
        raise UserError(f"{NAME} looks for arithmetic in whole completions, including a tool's "
                        "words; leave --supervision or --tool out")


def install(state):
    state.replace(NAME, compute_advantages=of_steps)


def of_steps(state, rollout):
    """Returns advantages, (N, R), from the rewards of lines of arithmetic and of the outcome."""
    # A step's reward is 0 or 1. Dividing by the sum of the weights gives outcomes a similar scale.
    outcomes = (rollout.rewards / sum(map(abs, state.args.reward_weights))).tolist()
    steps = judge_steps(rollout.completions, rollout.token_ids(), state.tokenizer, state.eos_ids,
                        outcomes)
    return process_advantages(*steps, state.args.num_generations, rollout.loss_mask)
