import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"      # a test that would reach for the network fails at once, on every machine


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer trained on a few strings, as it comes back from disk."""
    from transformers import AutoTokenizer

    from model.tokenizer import train_tokenizer
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["user", "assistant", "What is 7 + 3*7?", "The answer is 28."]).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def one_thread():
    """For tensors so small that a second thread only waits for the first, seconds long on a busy machine."""
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_policy(tokenizer):
    """The tokenizer and a policy with random weights."""
    import torch

    from model import MiniMindConfig, MiniMindForCausalLM
    torch.manual_seed(0)
    config = MiniMindConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8)
    return tokenizer, MiniMindForCausalLM(config)
