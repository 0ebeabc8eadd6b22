from .combine import combine_rewards, load_reward_funcs
from .penalties import repetition_reward, soft_overlong_reward
from .process import judge_steps, process_advantages
from .reward_model import load_reward_model
from .rules import accuracy_reward, format_reward, tag_reward

__all__ = ["accuracy_reward", "combine_rewards", "format_reward", "judge_steps",
           "load_reward_funcs", "load_reward_model", "process_advantages", "repetition_reward",
           "soft_overlong_reward", "tag_reward"]
