import model  # noqa: F401 - first, because it sets how OpenMP threads wait before torch loads

from .functions import accuracy_reward
from .load import load_reward_funcs
from .process_rewards import process_advantages
from .reward_model import load_reward_model

__all__ = ["accuracy_reward", "load_reward_funcs", "load_reward_model",
           "process_advantages"]
