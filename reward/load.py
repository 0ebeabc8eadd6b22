"""Loads reward functions by name, and calls them so that a failure doesn't end a long run."""
import asyncio
import inspect
import math
import os
import reprlib
import sys
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dataset.prompts import RESERVED, is_arithmetic
from errors import FINITE, GIVEN, POSITIVE_OR_0, UserError, number, printable, reason
from model.load import find_weights

from .child import CHILD, MOST_LATE, SECONDS
from .functions import RULES, soft_overlong_reward
from .reward_model import load_reward_model, reward_model_reward

LARGEST = 1e12      # absolute reward; squares of larger ones could overflow in float32


def add_flags(parser):
    flag = parser.group("3. rewards").add_argument
    flag("--reward_funcs", nargs="+", metavar="NAME", help="reward functions: format, tag, rm, "
         "accuracy, overlong, repetition, reasoning_gym, or your own as module:function (default: "
         "format tag rm accuracy; format and tag only with --reasoning 1, rm only with our data or "
         "a reward model of your own)")
    flag("--reward_weights", nargs="+", type=FINITE, metavar="W", help="one factor per reward "
         "function; with 0 its rewards are logged, but not trained on (default: 1 each)")
    flag("--reward_model_path", help="reward model behind rm, a folder or hub id: a ...ForSequence"
         "Classification with one label, an InternLM2 reward model, or one that "
         "reward.train_reward_model saved (default: reward_128, in out_dir or else in "
         "reward/weights)")
    flag("--reward_model_device", help="device of rm, e.g. cpu or cuda:1 (default: the policy's)")
    flag("--reward_model_clip", type=POSITIVE_OR_0, default=1.0, help="clip the scores of rm at "
         "plus and minus this value (accuracy gives 1 for a right answer); 0: no clip")
    flag("--reward_model_answer_share", type=number(float, 0, 1), default=0.6, help="with "
         "--reasoning 1, rm is share * score(answer alone) + (1 - share) * score(completion)")


def check(args, weights):
    """Checks the flags about rewards, and fills in defaults from `weights`, {name: weight}."""
    shipped = Path(__file__).resolve().parent / "weights"
    given = not args.resume and args.reward_model_path      # args.json also holds the default
    args.reward_model_path = args.reward_model_path or find_weights("reward", args, shipped)
    unfit = set() if args.reasoning else {"format", "tag"}
    # Our reward model was only trained on arithmetic.
    if not is_arithmetic(args.data_path) and Path(args.reward_model_path).parent == shipped:
        unfit.add("rm")
    args.reward_funcs = args.reward_funcs or [name for name in weights if name not in unfit]
    args.reward_weights = args.reward_weights or [
        weights.get(name, 1.0) for name in args.reward_funcs]
    if given and "rm" not in args.reward_funcs + args.eval_reward_funcs:
        raise UserError(f"--reward_model_path {given}: rm is not among the rewards, so the model "
                        "would not be used; add rm to --reward_funcs, or leave the path out")
    if len(args.reward_weights) != len(args.reward_funcs):
        raise UserError(f"--reward_weights has {len(args.reward_weights)} numbers for "
                        f"{' '.join(args.reward_funcs)}; pass one for each reward function")


def load_for_run(args, device, known):
    """Returns two lists of reward functions: one for training and one for evaluation."""
    funcs = load_reward_funcs(
        args.reward_funcs + args.eval_reward_funcs, known=known,
        reward_model_path=args.reward_model_path, device=args.reward_model_device or device,
        max_completion_length=args.max_gen_len, reasoning=args.reasoning,
        clip=args.reward_model_clip, answer_share=args.reward_model_answer_share)
    count = len(args.reward_funcs)
    return [apart(part, names) for part, names in (
        (funcs[:count], args.reward_funcs), (funcs[count:], args.eval_reward_funcs))]


def apart(funcs, typed):
    """Renames equal names to module:function. Raises a UserError if two names are still equal."""
    taken = Counter(func.__name__ for func in funcs)
    for func, name in zip(funcs, typed):
        if taken[func.__name__] > 1 and ":" in name:
            func.__name__ = name
    name, count = Counter(func.__name__ for func in funcs).most_common(1)[0]
    if count > 1:
        raise UserError(f"two of --reward_funcs are called {name}; rename one, or leave one out")
    return funcs


def load_reward_funcs(names, *, known=(), reward_model_path=None, device="cpu",
                      max_completion_length=None, **reward_model_options):
    """Returns a RewardFunction for each name. For your own function, the name is `module:function`.

    known: {name: function} for additional names, which are not in RULES.
    """
    functions = RULES | dict(known)
    if "rm" in names:
        model = load_reward_model(reward_model_path, device=device)
        functions["rm"] = reward_model_reward(model, **reward_model_options)
    if "overlong" in names:
        functions["overlong"] = soft_overlong_reward(max_completion_length)
    for name in names:
        if name not in functions:
            functions[name] = import_function(
                "--reward_funcs", name, ", ".join([*known, *RULES, "rm", "overlong"]))
    return [RewardFunction(functions[name], name) for name in names]    # each counts its failures


def import_function(flag, name, known=""):
    """Imports a function, given as `module:function`. The module may be in the current folder."""
    if name in GIVEN:
        return GIVEN[name]
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        __import__(module)      # importlib.import_module would add its frames to tracebacks
        return getattr(sys.modules[module], function)
    except (Exception, SystemExit) as error:
        show(error)
        others = f"choose from {known}, or " if known else ""
        raise UserError(f"{flag} {name}: {reason(error)}; {others}write module:function, with a "
                        "module that Python can import from this folder") from error


class RewardFunction:
    """Wraps a reward function. A call returns a float for each completion, or NaN without a score.

    Until a call has succeeded, any exception except a TimeoutError ends the run with a UserError,
    because the function is probably wrong. Later failures don't end the run: `failed` counts each
    kind of failure, and the first failure of each kind prints a warning.
    """

    def __init__(self, function, name=""):
        """name: the name to use if the function has no __name__, such as a functools.partial."""
        self.function = function
        self.__name__ = getattr(function, "__name__", "")
        if not self.__name__.isidentifier():
            self.__name__ = name.rpartition(":")[2] or type(function).__name__
        self.has_succeeded = False         # whether any call has succeeded
        self.failed = Counter()     # kind of failure -> how often, in the whole run
        self.reason = None          # the first failure in the last call

    def __call__(self, /, **arguments):
        count, self.reason = len(arguments["completions"]), None
        who = f"reward function {self.__name__}"
        if not self.has_succeeded:
            check_columns(who, self.function, arguments)
        unanswered = CHILD.unanswered
        try:
            values = COROUTINES.result(self.function(**copied(arguments)))
            values = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(values, (list, tuple)) or len(values) != count:
                raise TypeError(f"it returned {reprlib.repr(values)} instead of a list of {count} "
                                "rewards, one for each completion")
        except (Exception, SystemExit) as error:
            if not self.has_succeeded and isinstance(error, UserError):
                raise UserError(f"{who}: {error}") from error
            if not self.has_succeeded and not isinstance(error, TimeoutError):
                raise fault(f"{who} failed in its first call", error, "correct the function"
                            ) from error
            self.fail(type(error).__name__, f"scored nothing in this step: {reason(error)}")
            return [math.nan] * count
        self.has_succeeded = True
        if CHILD.unanswered > unanswered and not CHILD.given_up:
            self.fail("late", f"skipped {CHILD.unanswered - unanswered} checks in a step, because "
                      f"{MOST_LATE} others took longer than {SECONDS} s")
        return [self.reward(value) for value in values]

    def reward(self, value):
        """Converts a reward to a float. None and values that are not numbers become NaN."""
        if value is None:
            return math.nan
        with suppress(Exception):
            if not isinstance(value, str) and abs(float(value)) <= LARGEST:     # "1" would pass
                return float(value)
        self.fail("no number", f"returned {reprlib.repr(value)}, which is not a number up to "
                               f"{LARGEST:g}, so it counts as None")
        return math.nan

    def fail(self, kind, what):
        """Counts a failure, and prints a warning if it is the first failure of its kind."""
        self.failed[kind] += 1
        self.reason = self.reason or what
        if self.failed[kind] == 1:
            warn_first(f"reward function {self.__name__} {what}")


class Coroutines:
    """Runs the coroutines of rewards and tools, all in one event loop, until `end` is called.

    A semaphore or an HTTP client only works in the loop that first used it. The loop runs in a
    thread, because a notebook already runs one in the main thread.
    """

    def __init__(self):
        self.thread = self.runner = None

    def result(self, value):
        """Returns the result of a coroutine; any other value is returned as it is."""
        if not inspect.iscoroutine(value):
            return value
        if self.thread is None:
            self.thread, self.runner = ThreadPoolExecutor(1), asyncio.Runner()
        return self.thread.submit(self.runner.run, value).result()

    def end(self):
        if self.thread is not None:
            loop = self.runner.get_loop()
            for task in asyncio.all_tasks(loop):        # after Ctrl-C, one may still run
                loop.call_soon_threadsafe(task.cancel)
            self.thread.submit(self.runner.close).result()
            self.thread.shutdown()
            self.thread = None


COROUTINES = Coroutines()


def copied(value):
    """Returns a copy of nested lists and dicts, so that the function that gets it may change it."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    is_nested = any(isinstance(one, (list, dict)) for one in value)
    return [copied(one) for one in value] if is_nested else value.copy()


def fault(what, error, advice):
    """Returns the UserError that says what a user's function did, after printing its traceback.

    advice: what to do if there is no traceback, because what the function returned is unusable.
    """
    where = "its traceback is above" if show(error) else advice
    return UserError(f"{what}: {reason(error)}; {where}")


def warn_first(text):
    """Warns of the first case of a kind. warn() would be silent in a second run of a process."""
    warnings.warn_explicit(f"{text}; further cases are only counted", UserWarning, __file__, 0)


def show(error):
    """Prints an error's traceback without the caller's frame. Returns False if no frame is left.

    Control characters are replaced, because the error message may contain a completion.
    """
    frame = error.__traceback__.tb_next         # the first frame is the caller's
    if frame is not None:       # None: the call did not start, or its value was unusable
        lines = traceback.format_exception(type(error), error, frame)
        print(printable("".join(lines)), end="", file=sys.stderr)
    return frame is not None


def check_columns(who, function, columns, *before):
    """Raises a UserError if the function can't be called with these columns as keywords."""
    try:        # follow_wrapped=False, because a decorator may supply its function's arguments
        inspect.signature(function, follow_wrapped=False).bind(*before, **columns)
    except ValueError:      # some functions written in C have no signature
        return
    except TypeError as error:
        raise UserError(f"{who}: {error}; the data has the columns "
                        f"{', '.join(sorted(columns.keys() - RESERVED)) or 'none'}") from None
