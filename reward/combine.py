"""From names to functions, and from several rewards to one number per completion."""
import functools
import importlib
import threading
import traceback
import warnings

import torch

from .penalties import repetition_reward, soft_overlong_reward
from .reward_model import load_reward_model, reward_model_reward
from .rules import accuracy_reward, format_reward, tag_reward

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward, "repetition": repetition_reward}


def load_reward_funcs(names, *, reward_model_path=None, device="cpu", max_completion_length=None, timeout=0,
                      **reward_model_options):
    """The functions behind the names of rewards, or behind `module:function`; ValueError names one that is not there.

    max_completion_length is overlong's limit; with a `timeout`, in seconds, a function that takes longer has failed. The
    other options are those of reward_model_reward: reasoning, clip, scale, answer_share.
    """
    funcs = []
    for name in names:
        if name == "rm":
            funcs.append(reward_model_reward(load_reward_model(reward_model_path, device=device), **reward_model_options))
        elif name == "overlong":
            funcs.append(soft_overlong_reward(max_completion_length))
        elif ":" in name:
            module, _, function = name.partition(":")
            try:
                funcs.append(getattr(importlib.import_module(module), function))
            except (ImportError, AttributeError) as error:
                raise ValueError(f"--reward_funcs {name}: {error}; write module:function, for a module that Python finds "
                                 "from this folder") from None
        elif name in RULES:
            funcs.append(RULES[name])
        else:
            raise ValueError(f"--reward_funcs {name}: no such reward; choose from {', '.join(RULES)}, rm, overlong, "
                             "or give module:function")
    return [within(timeout, function) for function in funcs] if timeout else funcs


def within(seconds, function):
    """The function, except that it raises TimeoutError after so many seconds. What it was doing goes on, unheard."""
    @functools.wraps(function)
    def limited(**arguments):
        results, errors = [], []

        def call():
            try:
                results.append(function(**arguments))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call, daemon=True)         # daemon: one that hangs can't keep the run from ending
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError(f"it took more than {seconds:g} seconds (--reward_timeout)")
        if errors:
            raise errors[0]
        return results[0]

    return limited


def combine_rewards(prompts, completions, reward_funcs, reward_weights, **columns):
    """The weighted sum of all rewards, (N,), and each one's values by its name, {name: (N,)}, all float32.

    A None is NaN among the values and adds nothing to the sum; a completion that no function judged has reward NaN. A
    function that raises has judged nothing this time: a warning says so, and the run goes on.
    """
    per_function = {}
    for function in reward_funcs:
        name = getattr(function, "__name__", type(function).__name__)
        if name in per_function:
            name = f"{name}_{len(per_function)}"
        try:
            values = function(prompts=prompts, completions=completions, **columns)
            values = torch.tensor([float("nan") if value is None else float(value) for value in values])
            if len(values) != len(completions):
                raise ValueError(f"it returned {len(values)} rewards for {len(completions)} completions")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(f"reward function {name} failed and judged nothing in this step: {type(error).__name__}: {error} "
                          f"({place.filename}, line {place.lineno})", stacklevel=2)
            values = torch.full((len(completions),), float("nan"))
        per_function[name] = values
    values = torch.stack(list(per_function.values()))                                   # (functions, N)
    rewards = (values * torch.tensor(reward_weights)[:, None]).nansum(0)
    rewards[values.isnan().all(0)] = float("nan")
    return rewards, per_function
