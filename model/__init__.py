"""The policy. Three pages to read: model.py, the network; sampler.py; rollout.py. Beside them stand

    fast/         pair.py, the sampler and the log-probabilities again, in less time: a run uses
                  these; vllm_engine.py, an engine that samples in their place
    policy.py     a model and its pair of functions
    storage/      weights in and out: files.py opens what a stranger wrote, read.py and write.py
                  weights; any_model.py wraps a model of transformers that model.py does not build
    commands/     what runs by itself: chat with a policy, train one from chats (train_sft), train a
                  tokenizer, read a GGUF file
    lora.py       adapters; weights/: those that we ship

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
