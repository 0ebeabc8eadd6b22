import gc
import os

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from .model import MiniMindConfig, MiniMindForCausalLM
from .processes.world import World
from .rollout import Rollout
from .sampler import sample
from .storage.config import eos_token_ids
from .storage.read import find_weights, load_checkpoint, load_pretrained, load_tokenizer
from .storage.saving import Saver
from .storage.write import save_checkpoint, save_pretrained

# Modules stay: the search for garbage need not look through their 200,000 objects time and again.
gc.freeze()

__all__ = [
    "MiniMindConfig", "MiniMindForCausalLM", "Rollout", "Saver", "World", "eos_token_ids",
    "find_weights", "load_checkpoint", "load_pretrained", "load_tokenizer", "sample",
    "save_checkpoint", "save_pretrained"]
