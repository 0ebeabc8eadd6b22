"""A reward function is anybody's code: a Judge calls it so that it can't harm the run."""
import copy
import inspect
import itertools
import math
import pickle
import threading
import traceback
import warnings
from collections import Counter

from report import UserError, printable

from .output import LIMIT, late, limited_output

LARGEST = 1e12      # of a reward: the squares of larger ones soon overflow in float32


class Broken(UserError):
    """A reward function failed in its first call, so it will fail in the others too."""


class WrongRewards(ValueError):
    """What a function returned is not a list with a reward for each completion."""


class Judge:
    """Calls a reward function so that whatever it does, the run goes on.

    A call returns one float for each completion, NaN where the function judged nothing. Failures
    are counted by their kind in `failed`, and the first of each kind is a warning. A failure in the
    first call raises Broken instead, unless the function is `proven`, or only took too long: a
    service may be slow to start, or down for a while.
    """

    def __init__(self, function, *, timeout=0, ours=False, proven=False):
        self.__wrapped__, self.__name__ = function, name_of(function)
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
        if any(gate.dropped for gate in gates):
            self.fail("printed too much", f"printed more than {LIMIT:,} characters in one call; "
                      "the rest is not shown")
        return rewards

    def returned(self, arguments, count):
        """The list that the function returns. Raises what the function raises, or TimeoutError.

        A thread can't be killed, so a call that takes too long runs on; its result is ignored.
        """
        results, errors, others = [], [], set(threading.enumerate())

        def call():
            try:
                results.append(as_list(self.__wrapped__(**arguments), count))
            except BaseException as error:
                errors.append(error)

        if self.timeout:
            self.thread = threading.Thread(target=call, daemon=True)    # must not block exit
            self.thread.start()
            self.thread.join(self.timeout)
        else:
            call()
        if errors:
            raise errors[0]
        if not results:
            late.update(set(threading.enumerate()) - others)    # and the threads that it started
            raise TimeoutError(f"it took more than {self.timeout:g} seconds (--reward_timeout)")
        return results[0]

    def reward(self, value):
        """The value as a float, or NaN for None and for a value that is of no use."""
        number, kind = as_number(value)
        if kind:
            self.fail(kind, f"returned {brief(value)} ({kind}), treated as None")
        return number

    def gave_up(self, error):
        kind = "called exit" if isinstance(error, SystemExit) else type(error).__name__
        what = f"{kind}: {brief(error, str, 300)}"
        if "unexpected keyword argument" in what:
            what += "; end its arguments with **columns"
        if not self.proven and not isinstance(error, TimeoutError):
            raise Broken(f"reward function {self.__name__} failed in its first call: "
                         f"{what}{place(self.__wrapped__, error)}") from error
        self.fail(kind, f"failed and judged nothing in this step: {what}", error)

    def fail(self, kind, what, error=None):
        """Count a failure; the first of its kind is a warning."""
        self.failed[kind] += 1
        what += place(self.__wrapped__, error)
        self.reason = self.reason or what
        if self.failed[kind] == 1:
            # Not warn(), which would be silent in a second run of the same process.
            warnings.warn_explicit(f"reward function {self.__name__} {what}; from now on this is "
                                   "only counted", UserWarning, __file__, 0)


def copied(arguments):
    """A deep copy, in a third of deepcopy's time: 0.1 s for 1,024 completions of 2,000 tokens."""
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


def as_number(value):
    """A reward as a float, NaN if it is of no use, and why it is of none; None is fine."""
    if value is None:
        return math.nan, None
    if isinstance(value, (str, bytes)):     # float() would read it
        return math.nan, "not a number"
    try:
        number = float(value)
    except OverflowError:                   # an int of hundreds of digits
        return math.nan, "too large"
    except Exception:
        return math.nan, "not a number"
    if abs(number) <= LARGEST:
        return number, None
    kind = "NaN" if math.isnan(number) else "infinite" if math.isinf(number) else "too large"
    return math.nan, kind


def brief(value, write=repr, length=80):
    """Any value in one short line that a terminal can show."""
    try:
        text = printable(" ".join(write(value).split()))
    except Exception:
        text = type(value).__name__
    return text if len(text) <= length else text[:length - 1] + "…"


def place(function, error=None):
    """" (file, line 3)" of the function, or of its last line on the way to the error."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))
    lines = [code.co_firstlineno] + [
        frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f" ({code.co_filename}, line {lines[-1]})"


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)
