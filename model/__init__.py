"""The policy: network, sampler and weights. Start with model.py and sampler.py. Other files are

    fast/                     faster versions of both files and of token_logps, used by default
    vllm.py                   an inference engine that can replace the sampler
    lora.py                   adapters
    load.py, save.py          loading and saving of weights and tokenizers
    transformers_model.py     runs models of transformers that model.py does not support
    chat.py, train_sft.py     commands: chat with a policy, train a policy on chats
    weights/                  the included weights

Weights are saved in the format of transformers: a folder with config.json, model.safetensors and
the tokenizer's files. Functions that take the path of such a folder also accept a hub id, like
Qwen/Qwen3-0.6B, or one of MiniMind's .pth files.
"""
import os

# Set before torch is imported: idle OpenMP threads then soon sleep, and leave their cores free.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from .load import eos_token_ids, find_weights, load_pretrained, load_tokenizer
from .model import MiniMindConfig, MiniMindForCausalLM
from .sampler import rng_of, sample
from .save import save_pretrained

__all__ = [
    "MiniMindConfig", "MiniMindForCausalLM", "eos_token_ids", "find_weights",
    "load_pretrained", "load_tokenizer", "rng_of", "sample", "save_pretrained"]
