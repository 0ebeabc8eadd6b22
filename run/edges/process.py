"""--supervision process: each line of arithmetic is rewarded too (DeepSeekMath, section 4.1.3)."""
from functools import partial

from errors import UserError
from model.objective import refuse_one_ratio
from reward.steps import judge_steps, process_advantages

from . import refuse_other_advantages

NAME = "--supervision process"
DEFAULTS = {}
EXCLUDES = ("gdpo",)


def add_flags(parser):
    parser.group("3. judge").add_argument(
        "--supervision", choices=("outcome", "process"), default="outcome",
        help="process: also reward each right line of arithmetic with 1")


def is_on(args):
    return args.supervision == "process"


def refuse(args):
    refuse_one_ratio(NAME, args)
    refuse_other_advantages(NAME, args)
    if not any(args.reward_weights):
        raise UserError(f"{NAME} divides the outcome by the sum of --reward_weights, which is 0; "
                        "give one above 0")
    if args.tool:
        raise UserError(f"{NAME} looks for steps of arithmetic in a whole reply, a tool's words "
                        "too; leave --supervision or --tool out")


def install(t):
    t.after_advantages.append(partial(
        of_steps, tokenizer=t.tokenizer, num_generations=t.args.num_generations,
        reward_weights=t.args.reward_weights))


def of_steps(rollout, *, tokenizer, num_generations, reward_weights):
    """The advantages become those of steps, (N, R); the last step of each is its outcome."""
    # A step earns 0 or 1. Divided by the sum of the weights, so does the outcome, about.
    outcomes = (rollout.returns / sum(map(abs, reward_weights))).tolist()
    steps = judge_steps(rollout.completions, rollout.token_ids(), tokenizer, outcomes)
    rollout.advantages = process_advantages(*steps, num_generations, rollout.mask)
