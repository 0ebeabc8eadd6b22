"""From names to functions, and from several rewards to one number per completion."""
import importlib
import traceback
import warnings

import torch

from .reward_model import load_reward_model, reward_model_reward
from .rules import accuracy_reward, format_reward, tag_reward

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward}


def load_reward_funcs(names, *, reward_model_path=None, device="cpu", **reward_model_options):
    """The functions behind `format`, `tag`, `rm`, `accuracy`, `module:function`; ValueError names one that is not there.

    The options are those of reward_model_reward: reasoning, clip, scale, answer_share.
    """
    funcs = []
    for name in names:
        if name == "rm":
            funcs.append(reward_model_reward(load_reward_model(reward_model_path, device=device), **reward_model_options))
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
            raise ValueError(f"--reward_funcs {name}: no such reward; choose from {', '.join(RULES)}, rm, "
                             "or give module:function")
    return funcs


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
