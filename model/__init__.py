"""The policy. Two files to read: model.py, the network, and sampler.py. Beside them stand

    fast.py                   both again, and log-probabilities, in less time: a run uses these
    vllm.py                   an engine that samples in their place
    lora.py                   adapters
    load.py, save.py          weights and tokenizers, in and out
    transformers_model.py     any model of transformers that model.py does not build
    chat.py, train_sft.py     commands: chat with a policy, train one from chats
    weights/                  those that we ship

On disk, weights are what transformers writes: a folder with config.json, model.safetensors and the
tokenizer's files. Where a function takes a path to weights, a hub id like Qwen/Qwen3-0.6B will do
too, as will one of MiniMind's .pth files.
"""
import os

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from .load import eos_token_ids, find_weights, load_pretrained, load_tokenizer
from .model import MiniMindConfig, MiniMindForCausalLM
from .sampler import rng_of, sample
from .save import save_pretrained

__all__ = [
    "MiniMindConfig", "MiniMindForCausalLM", "eos_token_ids", "find_weights",
    "load_pretrained", "load_tokenizer", "rng_of", "sample", "save_pretrained"]
