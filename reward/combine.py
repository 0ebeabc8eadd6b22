"""From names to reward functions, and from several rewards to one number per completion."""
import functools
import importlib
import inspect
import os
import sys
import threading
import traceback
import warnings

import torch

from .countdown import countdown_reward
from .penalties import repetition_reward, soft_overlong_reward
from .reward_model import load_reward_model, reward_model_reward
from .rules import accuracy_reward, format_reward, tag_reward

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward,
         "repetition": repetition_reward, "countdown": countdown_reward}


def load_reward_funcs(names, *, reward_model_path=None, device="cpu", max_completion_length=None,
                      timeout=0, **reward_model_options):
    """The reward functions with these names, where `module:function` names one of your own.

    "overlong" penalises completions that come close to max_completion_length. A function that
    takes longer than `timeout` seconds counts as failed (0: no limit). The other options are those
    of reward_model_reward: reasoning, clip, scale, answer_share. ValueError for an unknown name. A
    function that fails in its first call raises Broken, a ValueError, from there.
    """
    funcs = {}
    for name in dict.fromkeys(names):       # a reward model is loaded once
        if name == "rm":
            model = load_reward_model(reward_model_path, device=device)
            funcs[name] = reward_model_reward(model, **reward_model_options)
        elif name == "overlong":
            funcs[name] = soft_overlong_reward(max_completion_length)
        elif ":" in name:
            funcs[name] = import_function(name)
        elif name in RULES:
            funcs[name] = RULES[name]
        else:
            raise ValueError(f"--reward_funcs {name}: no such reward; choose from "
                             f"{', '.join(RULES)}, rm, overlong, or give module:function")
    if timeout:
        funcs = {name: within(timeout, function) for name, function in funcs.items()}
    return [proven(funcs[name]) for name in names]


def import_function(name):
    """`module:function`, from the packages, the folder of the script or the current folder."""
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except SyntaxError as error:
        reason = f"{error.msg} ({error.filename}, line {error.lineno})"
    except Exception as error:
        lines = [f" ({frame.filename}, line {frame.lineno})"
                 for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename not in (__file__, importlib.__file__)
                 and not frame.filename.startswith("<frozen")]
        reason = f"{type(error).__name__}: {error}{''.join(lines[:1])}"
    else:
        if callable(getattr(found, function, None)):
            return getattr(found, function)
        reason = f"{getattr(found, '__file__', module)} has no function {function}"
    raise ValueError(f"--reward_funcs {name}: {reason}; write module:function, with a module that "
                     "Python can import from this folder")


def within(seconds, function):
    """The function with a time limit: TimeoutError after so many seconds.

    A thread can't be killed, so the call itself runs on; its result is ignored.
    """
    @functools.wraps(function)
    def limited(**arguments):
        results, errors = [], []

        def call():
            try:
                results.append(function(**arguments))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)     # a hung call must not block exit
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError(f"it took more than {seconds:g} seconds (--reward_timeout)")
        if errors:
            raise errors[0]
        return results[0]

    return limited


class Broken(ValueError):
    """A reward function failed in its first call, so it will fail in the others too."""


def proven(function):
    """The function; if its first call fails, it raises Broken, which combine_rewards lets through.

    Later failures are warnings, and so is a first call that takes too long: a service may be slow
    to start, or down for a while.
    """
    worked = False

    @functools.wraps(function)
    def wrapper(completions, **arguments):
        nonlocal worked
        try:
            values = as_floats(function(completions=completions, **arguments), len(completions))
        except Exception as error:
            if worked or isinstance(error, TimeoutError):
                raise
            raise Broken(f"reward function {name_of(function)} failed in its first call: "
                         f"{failure(error, function)}") from error
        worked = True
        return values

    return wrapper


def as_floats(values, count):
    """A function's rewards as a list of floats, NaN for None. ValueError if it is not `count`."""
    if isinstance(values, (str, dict)) or not hasattr(values, "__iter__"):
        raise ValueError(f"it returned a {type(values).__name__}; return a list of {count} "
                         "numbers, one for each completion")
    values = [float("nan") if value is None else float(value) for value in values]
    if len(values) != count:
        raise ValueError(f"it returned {len(values)} rewards for {count} completions")
    return values


def failure(error, function):
    """What went wrong, and the last line in the function's own file on the way there."""
    code, place, hint = getattr(inspect.unwrap(function), "__code__", None), "", ""
    if code:
        lines = [code.co_firstlineno] + [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == code.co_filename]
        place = f" ({code.co_filename}, line {lines[-1]})"
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        hint = "; end its arguments with **columns"
    return f"{type(error).__name__}: {error}{hint}{place}"


def name_of(function):
    return getattr(function, "__name__", type(function).__name__)


def combine_rewards(prompts, completions, reward_funcs, reward_weights, **columns):
    """The weighted sum of all rewards, (N,), and each function's values, {name: (N,)}, in float32.

    A None becomes NaN in the values and adds nothing to the sum. A completion that no function
    judged has a NaN reward. If a function raises, a warning says so, all its values are NaN, and
    the run goes on.
    """
    per_function = {}
    for function in reward_funcs:
        name = name_of(function)
        if name in per_function:
            name = f"{name}_{len(per_function)}"
        try:
            values = as_floats(function(prompts=prompts, completions=completions, **columns),
                               len(completions))
        except Broken:
            raise
        except Exception as error:
            warnings.warn(f"reward function {name} failed and judged nothing in this step: "
                          f"{failure(error, function)}", stacklevel=2)
            values = [float("nan")] * len(completions)
        per_function[name] = torch.tensor(values)                               # (N,)
    values = torch.stack(list(per_function.values()))                           # (functions, N)
    rewards = (values * torch.tensor(reward_weights)[:, None]).nansum(0)        # (N,)
    rewards[values.isnan().all(0)] = float("nan")
    return rewards, per_function
