"""The policy. Three pages to read: model.py, the network; sampler.py; rollout.py. Beside them stand

    fast/         the sampler and the log-probabilities again, in less time
    storage/      weights, tokenizers and checkpoints, in and out
    processes/    several processes that train one model, and the machine they run on
    lora.py       adapters; chat.py: talk to a policy; train_sft.py: fine-tune one; weights/: ours
"""
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
