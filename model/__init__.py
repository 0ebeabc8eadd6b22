from .checkpoint import discard_checkpoint, load_checkpoint, load_pretrained, save_checkpoint, save_pretrained
from .model import MiniMindConfig, MiniMindForCausalLM
from .sampler import sample

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "discard_checkpoint", "load_checkpoint", "load_pretrained", "sample",
           "save_checkpoint", "save_pretrained"]
