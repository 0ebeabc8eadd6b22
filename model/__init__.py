from .checkpoint import (discard_checkpoint, eos_token_ids, load_checkpoint, load_pretrained, load_tokenizer,
                         save_checkpoint, save_pretrained)
from .model import MiniMindConfig, MiniMindForCausalLM
from .sampler import sample

__all__ = ["MiniMindConfig", "MiniMindForCausalLM", "discard_checkpoint", "eos_token_ids", "load_checkpoint",
           "load_pretrained", "load_tokenizer", "sample", "save_checkpoint", "save_pretrained"]
