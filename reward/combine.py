"""From names to reward functions, and from several rewards to one number per completion."""
import importlib
import math
import os
import sys
import traceback

import torch

from report import UserError

from .countdown import countdown_reward
from .judge import Judge
from .penalties import repetition_reward, soft_overlong_reward
from .reward_model import load_reward_model, reward_model_reward
from .rules import accuracy_reward, format_reward, tag_reward

RULES = {"format": format_reward, "tag": tag_reward, "accuracy": accuracy_reward,
         "repetition": repetition_reward, "countdown": countdown_reward}


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
