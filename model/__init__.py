from .checkpoint import load_pretrained, save_pretrained
from .model import MiniMindConfig, MiniMindForCausalLM
from .sampler import sample

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "load_pretrained", "sample", "save_pretrained"]
