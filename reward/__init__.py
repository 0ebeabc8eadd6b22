import os

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from .combine import combine_rewards, failures, load_reward_funcs
from .reward_model import load_reward_model
from .rules import accuracy_reward, countdown_reward, format_reward, tag_reward

__all__ = ["accuracy_reward", "combine_rewards", "countdown_reward", "failures", "format_reward",
           "load_reward_funcs", "load_reward_model", "tag_reward"]
