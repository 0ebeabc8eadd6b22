"""From names to reward functions, and from several rewards to one number per completion.

A reward function is anybody's code: a Judge calls it so that it can't harm the run.
"""
import copy
import importlib
import inspect
import itertools
import math
import os
import pickle
import sys
import threading
import traceback
import warnings
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from report import UserError, printable

from .reward_model import load_reward_model, reward_model_reward
from .rules import (
    accuracy_reward,
    countdown_reward,
    format_reward,
    repetition_reward,
    soft_overlong_reward,
    tag_reward,
)

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward,
         "repetition": repetition_reward, "countdown": countdown_reward}
LARGEST = 1e12      # of a reward: the squares of larger ones soon overflow in float32
LIMIT = 4000        # characters that a call may print to stdout, and as many to stderr
late = set()        # threads of calls that ran out of time: what they go on to print is dropped


def load_reward_funcs(names, *, reward_model_path=None, device="cpu", max_completion_length=None,
                      timeout=0, **reward_model_options):
    """A Judge for each of these names, where `module:function` names a function of your own.

    "overlong" penalises completions that come close to max_completion_length. A function that
    takes longer than `timeout` seconds counts as failed (0: no limit). The other options are those
    of reward_model_reward: reasoning, clip, scale, answer_share. UserError for an unknown name.
    """
    def find(name):
        if name == "rm":
            model = load_reward_model(reward_model_path, device=device)
            return reward_model_reward(model, **reward_model_options)
        if name == "overlong":
            return soft_overlong_reward(max_completion_length)
        if ":" in name:
            return import_function(name)
        if name in RULES:
            return RULES[name]
        raise UserError(f"--reward_funcs {name}: no such reward; choose from "
                        f"{', '.join(RULES)}, rm, overlong, or give module:function")

    judges = {name: Judge(find(name), timeout=timeout, ours=":" not in name)
              for name in dict.fromkeys(names)}         # a reward model is loaded once
    return [judges[name] for name in names]


def import_function(name):
    """`module:function`, from the packages, the folder of the script or the current folder."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Where in the module; of a SyntaxError, the message says it.
        lines = [f" ({frame.filename}, line {frame.lineno})"
                 for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename not in (__file__, importlib.__file__)
                 and not frame.filename.startswith("<frozen")]
        reason = f"{type(error).__name__}: {error}{''.join(lines[:1])}"
    else:
        if callable(getattr(found, function, None)):
            return getattr(found, function)
        reason = f"{getattr(found, '__file__', module)} has no function {function}"
    raise UserError(f"--reward_funcs {name}: {reason}; write module:function, with a module that "
                    "Python can import from this folder")


def named(judges):
    """{name: Judge}; if a name is taken, a number is added to it."""
    found = {}
    for judge in judges:
        name = judge.__name__
        while name in found:
            name = f"{name}_{len(found)}"
        found[name] = judge
    return found


def failures(judges):
    """(name, failures so far, why it last failed) of each Judge that has failed.

    The reason is None if its last call was free of failures.
    """
    return [(name, judge.failed.total(), judge.reason)
            for name, judge in named(judges).items() if judge.failed]


def combine_rewards(prompts, completions, reward_funcs, reward_weights, **columns):
    """The weighted sum of all rewards, (N,), and each function's values, {name: (N,)}, in float32.

    The functions are Judges or any others, which then fail with a warning at most. A None, and
    whatever a Judge treats as one, becomes NaN in the values and adds nothing to the sum. A
    completion that no function judged has a NaN reward.
    """
    judges = named(function if isinstance(function, Judge) else Judge(function, proven=True)
                   for function in reward_funcs)
    per_function = {name: torch.tensor(judge(prompts=prompts, completions=completions, **columns),
                                       dtype=torch.float32) for name, judge in judges.items()}
    values = torch.stack(list(per_function.values()))                           # (functions, N)
    rewards = (values * torch.tensor(reward_weights)[:, None]).nansum(0)        # (N,)
    rewards[values.isnan().all(0) | ~rewards.isfinite()] = math.nan
    return rewards, per_function


class WrongRewards(ValueError):
    """What a function returned is not a list with a reward for each completion."""


class Judge:
    """Calls a reward function so that whatever it does, the run goes on.

    A call returns one float for each completion, NaN where the function judged nothing. Failures
    are counted by their kind in `failed`, and the first of each kind is a warning. A failure in the
    first call is a UserError instead, unless the function is `proven`, or only took too long: a
    service may be slow to start, or down for a while.
    """

    def __init__(self, function, *, timeout=0, ours=False, proven=False):
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.timeout, self.ours, self.proven = timeout, ours, proven
        self.failed = Counter()     # kind of failure -> how often, in the whole run
        self.reason = None          # what failed first in the last call
        self.thread = None          # of the last call, if there is a time limit

    def __call__(self, /, **arguments):
        count, self.reason = len(arguments["completions"]), None
        if self.thread and self.thread.is_alive():      # calls must not pile up
            self.fail("still running", "was not called and judged nothing in this step: its "
                      "earlier call still runs")
            return [math.nan] * count
        if not self.ours:       # it may change what it gets, which others read too
            arguments = copied(arguments)
        try:
            with limited_output() as gates:
                values = self.returned(arguments, count)
            self.proven = True
        except KeyboardInterrupt:
            raise
        except BaseException as error:      # SystemExit, too
            self.gave_up(error)
            values = [None] * count
        rewards = [self.reward(value) for value in values]
        if min(gate.left for gate in gates) < 0:
            self.fail("printed too much", f"printed more than {LIMIT:,} characters in one call; "
                      "the rest is not shown")
        return rewards

    def returned(self, arguments, count):
        """The list that the function returns. Raises what the function raises, or TimeoutError.

        A thread can't be killed, so a call that takes too long runs on; its result is ignored.
        """
        future, others = Future(), set(threading.enumerate())

        def call():
            try:
                future.set_result(as_list(self.__wrapped__(**arguments), count))
            except BaseException as error:
                future.set_exception(error)

        if self.timeout:
            self.thread = threading.Thread(target=call, daemon=True)    # must not block exit
            self.thread.start()
            self.thread.join(self.timeout)
        else:
            call()
        if not future.done():
            late.update(set(threading.enumerate()) - others)    # and the threads that it started
            raise TimeoutError(f"it took more than {self.timeout:g} seconds (--reward_timeout)")
        return future.result()

    def reward(self, value):
        """The value as a float, or NaN for None and for a value that is of no use."""
        try:
            number = math.nan if value is None else float(value)
            kind = ("not a number" if isinstance(value, (str, bytes)) else      # float() reads them
                    "infinite" if math.isinf(number) else
                    "too large" if abs(number) > LARGEST else
                    "NaN" if math.isnan(number) and value is not None else None)
        except OverflowError:                   # an int of hundreds of digits
            kind = "too large"
        except Exception:
            kind = "not a number"
        if kind:
            self.fail(kind, f"returned {brief(value)} ({kind}), treated as None")
        return math.nan if kind else number

    def gave_up(self, error):
        kind = "called exit" if isinstance(error, SystemExit) else type(error).__name__
        what = f"{kind}: {brief(error, str, 300)}"
        if "unexpected keyword argument" in what:
            what += "; end its arguments with **columns"
        if not self.proven and not isinstance(error, TimeoutError):
            raise UserError(f"reward function {self.__name__} failed in its first call: "
                            f"{what}{self.place(error)}") from error
        self.fail(kind, f"failed and judged nothing in this step: {what}", error)

    def fail(self, kind, what, error=None):
        """Count a failure; the first of its kind is a warning."""
        self.failed[kind] += 1
        what += self.place(error)
        self.reason = self.reason or what
        if self.failed[kind] == 1:
            # Not warn(), which would be silent in a second run of the same process.
            warnings.warn_explicit(f"reward function {self.__name__} {what}; from now on this is "
                                   "only counted", UserWarning, __file__, 0)

    def place(self, error):
        """" (file, line 3)" of the function, or of its last line on the way to the error."""
        code = getattr(inspect.unwrap(self), "__code__", None)
        if code is None:
            return ""
        lines = [frame.lineno for frame in traceback.extract_tb(error and error.__traceback__)
                 if frame.filename == code.co_filename]
        return f" ({code.co_filename}, line {[code.co_firstlineno, *lines][-1]})"


def copied(arguments):
    """A deep copy, in a quarter of deepcopy's time: 0.1 s for 1,024 completions of 2,000 tokens."""
    try:
        return pickle.loads(pickle.dumps(arguments))
    except Exception:
        return copy.deepcopy(arguments)


def as_list(values, count):
    """What a function returned, as a list of `count` values; WrongRewards if it is not that."""
    if isinstance(values, (str, bytes, dict, set)) or not hasattr(values, "__iter__"):
        raise WrongRewards(f"it returned a {type(values).__name__}; return a list of {count} "
                           "numbers, one for each completion")
    values = list(itertools.islice(values, count + 1))      # a generator may be endless
    if len(values) != count:
        number = f"more than {count}" if len(values) > count else len(values)
        raise WrongRewards(f"it returned {number} rewards for {count} completions")
    return values


def brief(value, write=repr, length=80):
    """Any value in one short line that a terminal can show."""
    try:
        text = printable(" ".join(write(value).split()))
    except Exception:
        text = type(value).__name__
    return text if len(text) <= length else text[:length - 1] + "…"


class Gate:
    """Stands in for sys.stdout or sys.stderr during a call, and lets LIMIT characters through."""

    def __init__(self, stream):
        self._wrapped = stream      # tqdm's name for it, by which it knows the stream of its bar
        self.left, self.over = LIMIT, False

    def write(self, text):
        if threading.current_thread() not in late:
            # After the call, text is the run's own, or that of a logger made in the call.
            self._wrapped.write(text if self.over else printable(text[:max(0, self.left)]))
            self.left -= len(text)
        return len(text)

    def writelines(self, lines):
        self.write("".join(lines))

    def close(self):
        """Nothing: the stream is the run's."""

    def __getattr__(self, name):    # encoding, flush, isatty, ...
        return getattr(self._wrapped, name)


@contextmanager
def limited_output():
    """Limits what is printed inside; yields the gates of stdout and stderr.

    The gates go when the block ends, or stay while a late call still runs, to keep its text out.
    """
    streams = [stream._wrapped if isinstance(stream, Gate) else stream
               for stream in (sys.stdout, sys.stderr)]
    gates = sys.stdout, sys.stderr = [Gate(stream) for stream in streams]
    try:
        yield gates
    finally:
        late.intersection_update(threading.enumerate())     # forget those that have ended
        for gate in gates:
            gate.over = True
        sys.stdout, sys.stderr = gates if late else streams
