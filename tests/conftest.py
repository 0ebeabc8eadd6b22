import argparse
import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"      # a test that reaches for the network fails, everywhere
# Under nohup, or in the background of a shell, these signals are ignored, and the runs that the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):           # Windows has none
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def report_args(**changed):
    """The flags that a Report reads."""
    return argparse.Namespace(**{"swanlab": "disabled", "wandb_project": "MiniGRPO",
                                 "log_interval": 1, "num_generations": 2,
                                 "completions_limit": 0} | changed)


def interrupt(number):
    """Send this process a signal; returns once the watch has seen it."""
    from model.watch import Watch

    os.kill(os.getpid(), number)
    until = time.monotonic() + 60
    while Watch.current.signal is None:
        assert time.monotonic() < until, "the watch has not seen the signal"
        time.sleep(0.001)


def pytest_collection_finish():
    # What the imports made stays: the search for garbage need not look through it time and again.
    gc.freeze()


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """A run that a test starts in this process leaves an empty curves.png: to draw it takes longer
    than a few steps. Tests of the picture itself have the fixture `pictures`.
    """
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("report.curves.draw_curves", lambda run_dirs, path: path.touch())


@pytest.fixture
def pictures():
    """Runs draw their curves."""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """A tokenizer trained on a few strings, as it comes back from disk."""
    from transformers import AutoTokenizer

    from model.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["user", "assistant", "What is 7 + 3*7?", "The answer is 28."]
    train_tokenizer(texts).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def one_thread():
    """For small tensors: a second thread would only wait for the first, and slow a busy machine."""
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
    config = MiniMindConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                            num_hidden_layers=2, head_dim=8)
    return tokenizer, MiniMindForCausalLM(config)
