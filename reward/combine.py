"""From names to reward functions, and from several rewards to one number per completion."""
import functools
import importlib
import threading
import traceback
import warnings

import torch

from .penalties import repetition_reward, soft_overlong_reward
from .reward_model import load_reward_model, reward_model_reward
from .rules import accuracy_reward, format_reward, tag_reward

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward,
         "repetition": repetition_reward}


def load_reward_funcs(names, *, reward_model_path=None, device="cpu", max_completion_length=None,
                      timeout=0, **reward_model_options):
    """The reward functions with these names, where `module:function` names one of your own.

    "overlong" penalises completions that come close to max_completion_length. A function that
    takes longer than `timeout` seconds counts as failed (0: no limit). The other options are those
    of reward_model_reward: reasoning, clip, scale, answer_share. ValueError for an unknown name.
    """
    funcs = []
    for name in names:
        if name == "rm":
            model = load_reward_model(reward_model_path, device=device)
            funcs.append(reward_model_reward(model, **reward_model_options))
        elif name == "overlong":
            funcs.append(soft_overlong_reward(max_completion_length))
        elif ":" in name:
            module, _, function = name.partition(":")
            try:
                funcs.append(getattr(importlib.import_module(module), function))
            except (ImportError, AttributeError) as error:
                raise ValueError(f"--reward_funcs {name}: {error}; write module:function, with a "
                                 "module that Python can import from this folder") from None
        elif name in RULES:
            funcs.append(RULES[name])
        else:
            raise ValueError(f"--reward_funcs {name}: no such reward; choose from "
                             f"{', '.join(RULES)}, rm, overlong, or give module:function")
    return [within(timeout, function) for function in funcs] if timeout else funcs


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


def combine_rewards(prompts, completions, reward_funcs, reward_weights, **columns):
    """The weighted sum of all rewards, (N,), and each function's values, {name: (N,)}, in float32.

    A None becomes NaN in the values and adds nothing to the sum. A completion that no function
    judged has a NaN reward. If a function raises, a warning says so, all its values are NaN, and
    the run goes on.
    """
    per_function = {}
    for function in reward_funcs:
        name = getattr(function, "__name__", type(function).__name__)
        if name in per_function:
            name = f"{name}_{len(per_function)}"
        try:
            values = function(prompts=prompts, completions=completions, **columns)
            values = [float("nan") if value is None else float(value) for value in values]
            values = torch.tensor(values)                                       # (N,)
            if len(values) != len(completions):
                raise ValueError(f"it returned {len(values)} rewards for {len(completions)} "
                                 "completions")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(f"reward function {name} failed and judged nothing in this step: "
                          f"{type(error).__name__}: {error} ({place.filename}, line "
                          f"{place.lineno})", stacklevel=2)
            values = torch.full((len(completions),), float("nan"))
        per_function[name] = values
    values = torch.stack(list(per_function.values()))                           # (functions, N)
    rewards = (values * torch.tensor(reward_weights)[:, None]).nansum(0)        # (N,)
    rewards[values.isnan().all(0)] = float("nan")
    return rewards, per_function
