from .combine import combine_rewards, load_reward_funcs
from .reward_model import load_reward_model
from .rules import accuracy_reward, format_reward, tag_reward

__all__ = ["accuracy_reward", "combine_rewards", "format_reward", "load_reward_funcs", "load_reward_model", "tag_reward"]
