"""What the tests share: files, commands, runs, fixtures, and the hooks of pytest."""
import gc
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
from contextlib import chdir, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "model/weights/reason_128"
SMALL = "--batch_size 4 --num_generations 4 --eval_samples 16 --max_gen_len 64".split()
PLACE = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"      # a test that reaches for the network fails, everywhere
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:      # -n 2: they share the cores, and do not wait
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
import torch  # noqa: E402 - it reads that variable
from transformers import AutoTokenizer  # noqa: E402

import train_grpo  # noqa: E402
from model import MiniMindConfig, MiniMindForCausalLM, load_pretrained  # noqa: E402

# How to start processes that need not import torch once more: they fork from one that has.
START = "spawn" if os.name == "nt" else "forkserver"
multiprocessing.set_forkserver_preload(["pytest", "train_grpo", "torch._dynamo"])
# Under nohup, or in the background of a shell, these signals are ignored, and the runs that the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):           # Windows has none
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def write(path, rows):
    """A jsonl file; returns its path."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def jsonl(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def measured(folder):
    """A run's metrics, without those that a clock has measured."""
    clocks = ("timing_s", "perf", "step_time")
    return [{name: value for name, value in line.items() if not name.startswith(clocks)}
            for line in jsonl(folder / "metrics.jsonl")]


def assert_same_weights(first, second):
    ours, theirs = load_pretrained(first).state_dict(), load_pretrained(second).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def free_ports(count):
    """Free ports below those that the system hands out: nobody else gets one before its use."""
    def is_free(port):
        with socket.socket() as client:
            return client.connect_ex(("localhost", port)) != 0

    return list(filter(is_free, random.sample(range(10_000, 30_000), 2 * count)))[:count]


def turns(*contents):
    """A chat of these texts, by user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content}
            for i, content in enumerate(contents)]


def left_padded(lengths, vocab_size):
    """Random ids (N, T) of these lengths, padded on the left with id 0, and their mask (N, T)."""
    T, generator = max(lengths), torch.Generator().manual_seed(0)
    mask = torch.tensor([[0] * (T - length) + [1] * length for length in lengths])
    return torch.randint(1, vocab_size, (len(lengths), T), generator=generator) * mask, mask


def edit(path, remove=(), **changes):
    """Change or remove fields of a json file."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: content[key] for key in content if key not in remove}))


def files(folder):
    """{path: content} of the files in a folder; a lock is none."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def write_files(folder, contents):
    """contents: {path: bytes}"""
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def refusal(program, *flags):
    """The line on stderr in which a command ends, with exit code 2. It runs in this process."""
    errors = StringIO()
    with redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            if program == "train_grpo":
                train_grpo.main()
            patch.delitem(sys.modules, program, raising=False)      # else Python would warn
            runpy.run_module(program, run_name="__main__")
    line, = errors.getvalue().splitlines()
    assert end.value.code == 2, line
    return line


def assert_refused(command, words, folder):
    """A command in this folder ends in a sentence with these words, and changes no file there.

    An argument _ stands for one that is blank.
    """
    before = files(folder)
    with chdir(folder):
        line = refusal(*(" " if word == "_" else word for word in command.split()))
    for word in ("error: ", *words.split()):
        assert word in line
    assert files(folder) == before


def pytest_configure(config):
    # A GPU has other last digits: what is asked of one is a command of its own.
    if not any("test_cuda" in str(name) for name in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish():
    # What the imports made stays: the search for garbage need not look through it time and again.
    gc.freeze()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A folder with the first prompts of the included data."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 160), ("heldout", 100)):
        lines = (ROOT / f"dataset/{name}.jsonl").read_bytes().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_bytes(b"".join(lines[:count]))
    return folder


@pytest.fixture
def all_prompts():
    """Runs read all prompts of the included data."""


@pytest.fixture
def pictures():
    """Runs draw their curves."""


@pytest.fixture(autouse=True)
def small_runs(request, monkeypatch, small_data):
    """A run that a test starts in this process reads fewer prompts, and leaves an empty curves.png:
    both take longer than a few steps. Tests of either have the fixture of its name above."""
    if "all_prompts" not in request.fixturenames:
        monkeypatch.setattr("dataset.prompts.HERE", small_data)
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("run.report.picture.draw_curves", lambda run_dirs, path: path.touch())


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Writes a module of the user's, as `name`, to where Python finds it."""
    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return make


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def one_thread():
    """For small tensors: a second thread would only wait for the first, and slow a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_policy(tokenizer):
    """The tokenizer and a policy with random weights."""
    torch.manual_seed(0)
    config = MiniMindConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                            num_hidden_layers=2, head_dim=8)
    return tokenizer, MiniMindForCausalLM(config)


@pytest.fixture
def policy():
    return load_pretrained(POLICY, dtype=torch.float32)


@pytest.fixture
def six(policy):
    from steps import rollout_of_six

    return rollout_of_six(policy)
