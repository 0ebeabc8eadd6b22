"""From names to reward functions, and from several rewards to one number per completion."""
import copy
import importlib
import inspect
import itertools
import math
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections import Counter
from concurrent.futures import Future

import torch

from report import UserError, printable

from . import rules
from .reward_model import load_reward_model, reward_model_reward

RULES = {"format": rules.format_reward, "tag": rules.tag_reward, "accuracy": rules.accuracy_reward,
         "repetition": rules.repetition_reward, "countdown": rules.countdown_reward,
         "sentence": rules.sentence_reward, "reasoning_gym": rules.reasoning_gym_reward}
LARGEST = 1e12      # of a reward: the squares of larger ones soon overflow in float32
LIMIT = 4000        # characters that a call may print to stdout, and as many to stderr
late = weakref.WeakSet()    # threads of calls that ran out of time: what they print is dropped


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
            return rules.soft_overlong_reward(max_completion_length)
        if ":" in name:
            return import_function(name)
        if name in RULES:
            return RULES[name]
        raise UserError(f"--reward_funcs {name}: no such reward; choose from "
                        f"{', '.join(RULES)}, rm, overlong, or give module:function")

    # A reward model is loaded once.
    judges = {name: Judge(find(name), timeout=timeout) for name in dict.fromkeys(names)}
    return [judges[name] for name in names]


def import_function(name):
    """`module:function`, from the packages, the folder of the script or the current folder."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        if callable(getattr(found, function, None)):
            return getattr(found, function)
        reason = f"{getattr(found, '__file__', module)} has no function {function}"
    except (Exception, SystemExit) as error:
        # Where in the module; of a SyntaxError, the message says it.
        lines = [f" ({frame.filename}, line {frame.lineno})"
                 for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename not in (__file__, importlib.__file__)
                 and not frame.filename.startswith("<frozen")]
        reason = f"{type(error).__name__}: {error}{''.join(lines[:1])}"
    raise UserError(f"--reward_funcs {name}: {reason}; write module:function, with a module that "
                    "Python can import from this folder")


def combine_rewards(prompts, completions, reward_funcs, reward_weights, **columns):
    """The weighted sum of all rewards, (N,), and each function's values, {name: (N,)}, in float32.

    The functions are Judges or any others, which then fail with a warning at most. What they have
    not judged is NaN in the values and adds nothing to the sum. A completion that no function
    judged has a NaN reward.
    """
    judges = [f if isinstance(f, Judge) else Judge(f, proven=True) for f in reward_funcs]
    per_function = {name: torch.tensor(judge(prompts=prompts, completions=completions, **columns),
                                       dtype=torch.float32) for name, judge in named(judges)}
    values = torch.stack(list(per_function.values()))                           # (functions, N)
    rewards = (values * torch.tensor(reward_weights)[:, None]).nansum(0)        # (N,)
    rewards[values.isnan().all(0) | ~rewards.isfinite()] = math.nan
    return rewards, per_function


def failures(judges):
    """(name, failures so far, why its last call failed or None) of each Judge that has failed."""
    return [(name, judge.failed.total(), judge.reason) for name, judge in named(judges)
            if judge.failed]


def named(judges):
    """(name, Judge) of each; if a name is taken, a number is added to it."""
    found = {}
    for judge in judges:
        name = judge.__name__
        while name in found:
            name = f"{name}_{len(found)}"
        found[name] = judge
    return found.items()


class Judge:
    """Calls a reward function, anybody's code, so that whatever it does, the run goes on.

    A call returns one float for each completion, NaN where the function judged nothing. Failures
    are counted by their kind in `failed`, and the first of each kind is a warning. A failure in the
    first call is a UserError instead, unless it only took too long: a service may be slow to start,
    or down for a while.
    """

    def __init__(self, function, *, timeout=0, proven=False):
        self.function, self.timeout = function, timeout
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.proven = proven        # whether a call went well
        self.failed = Counter()     # kind of failure -> how often, in the whole run
        self.reason = None          # what failed first in the last call
        self.thread = None          # of the last call, if there is a time limit

    def __call__(self, /, **arguments):
        count, self.reason = len(arguments["completions"]), None
        if self.thread and self.thread.is_alive():      # calls must not pile up
            self.fail("still running", "was not called and judged nothing in this step: its "
                      "earlier call still runs")
            return [math.nan] * count
        result, gates = self.run(arguments, count)
        error = result.exception() if result.done() else TimeoutError(
            f"it took more than {self.timeout:g} seconds (--reward_timeout)")
        if isinstance(error, KeyboardInterrupt):
            raise error
        if error is None:
            self.proven, values = True, result.result()
        else:
            self.gave_up(error)
            values = [None] * count
        rewards = [self.reward(value) for value in values]
        if min(gate.left for gate in gates) < 0:
            self.fail("printed too much", f"printed more than {LIMIT:,} characters in one call; "
                      "the rest is not shown")
        return rewards

    def run(self, arguments, count):
        """What the function returns or raises, as a Future, and the Gates of stdout and stderr.

        A thread can't be killed, so a call that takes too long runs on, while the Future is not
        done. Then the Gates stay, to keep out what it prints.
        """
        copies, result = copied(arguments), Future()            # others read the same lists

        def call():
            try:
                result.set_result(as_list(self.function(**copies), count))
            except BaseException as error:      # SystemExit, too
                result.set_exception(error)

        streams, others = (sys.stdout, sys.stderr), set(threading.enumerate())
        if not any(thread.is_alive() for thread in late):       # Gates that kept them out may go
            streams = [stream._wrapped if isinstance(stream, Gate) else stream
                       for stream in streams]
        gates = sys.stdout, sys.stderr = [Gate(stream) for stream in streams]
        try:
            if self.timeout:
                self.thread = threading.Thread(target=call, daemon=True)    # must not block exit
                self.thread.start()
                self.thread.join(self.timeout)
            else:
                call()
            if not result.done():
                late.update(set(threading.enumerate()) - others)    # and threads that it started
                streams = gates
        finally:
            for gate in gates:
                gate.over = True
            sys.stdout, sys.stderr = streams
        return result, gates

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
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        if code is None:
            return ""
        lines = [frame.lineno for frame in traceback.extract_tb(error and error.__traceback__)
                 if frame.filename == code.co_filename]
        return f" ({code.co_filename}, line {[code.co_firstlineno, *lines][-1]})"


class WrongRewards(ValueError):
    """What a function returned is not a list with a reward for each completion."""


def copied(arguments):
    """A copy of each value: rows of one prompt share theirs, and so do all functions."""
    copies = {}
    for name, values in arguments.items():
        # deepcopy looks at each of a million ids
        copy_of = list if name == "completion_ids" else copy.deepcopy
        copies[name] = [copy_of(value) for value in values]
    return copies


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
        # tqdm's name for it, by which it knows the stream of its bar
        self._wrapped = stream._wrapped if isinstance(stream, Gate) else stream
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
