from .checkpoint import (discard_checkpoint, eos_token_ids, find_weights, load_checkpoint, load_pretrained, load_tokenizer,
                         save_checkpoint, save_pretrained)
from .model import MiniMindConfig, MiniMindForCausalLM, SharedPrompts, in_precision
from .sampler import sample
from .world import World

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "SharedPrompts", "World", "discard_checkpoint", "eos_token_ids",
           "find_weights", "in_precision", "load_checkpoint", "load_pretrained", "load_tokenizer", "sample",
           "save_checkpoint", "save_pretrained"]
