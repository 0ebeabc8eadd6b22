import os

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from .functions import accuracy_reward
from .load import load_reward_funcs
from .process_rewards import process_advantages
from .reward_model import load_reward_model

__all__ = ["accuracy_reward", "load_reward_funcs", "load_reward_model",
           "process_advantages"]
