"""Opens files that a stranger may have written: json, tensors, chat templates.

Such a file must never run code, fill the memory or end in a traceback. Whatever is wrong with it
becomes one UserError, a sentence: where, what is wrong, what to do.
"""
import json
import signal
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
from jinja2 import Environment
from safetensors.torch import load_file

from report import UserError, printable, reason

MAX_JSON = 64 * 2**20           # bytes; the largest index files have a few
MAX_SECONDS = 10                # for a template to write a chat of one word
MAX_CHARACTERS = 100_000        # in what it writes; some begin with pages of instructions
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@contextmanager
def explained(path, what, advice):
    """Turns any exception into that sentence: the path, what is wrong, the reason, the advice.

    A parser raises dozens of classes for a broken file, from KeyError to RecursionError, so it
    catches them all. A UserError that begins with the path is such a sentence already.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and str(error).startswith(str(path)):
            raise
        raise UserError(f"{path}: {what} ({reason(error)}); {advice}") from error


def read_json(path):
    """The object in a json file, as a dict."""
    path = Path(path)
    if not path.is_file():      # nor a pipe, which might never end
        raise UserError(f"{path}: no such file; copy it there")
    with explained(path, "not JSON", "download it again"):
        if path.stat().st_size > MAX_JSON:
            raise OverflowError(f"it has more than {MAX_JSON:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object, in braces; download it again")
    return content


def read_tensors(path):
    """The tensors of a safetensors file, or of one that torch.save wrote, by name.

    From a pickle torch builds tensors and plain containers, and refuses everything else. The
    tensors are the file itself, mapped, so that the ranks of a machine share one copy of it: copy
    those that you keep, since the disk can't drop the file before.
    """
    with explained(path, "truncated, a git-lfs pointer, or something other than tensors",
                   "download it again"):
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_stored(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError("it does not hold tensors by name")
        return state


def is_stored(path):
    """Whether a file has its tensors byte by byte: torch's zip, unless it was compressed later."""
    if not zipfile.is_zipfile(path):        # torch.save's older format
        return False
    with zipfile.ZipFile(path) as file:
        return all(part.compress_type == zipfile.ZIP_STORED for part in file.infolist())


def check_tensors(state, path):
    """Raise UserError, naming a tensor, for one that cannot be a weight."""
    for name, tensor in state.items():
        with explained(path, f"{printable(name)} is no weight", "download it again"):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS:
                kind = getattr(tensor, "dtype", type(tensor).__name__)
                raise TypeError(f"it is {kind}; weights are floating-point tensors")
            if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise TypeError("its shape is larger than its data")    # a few bytes, expanded
            # NaN and infinity both show in the extremes, which take a thirtieth of isfinite's time.
            if not all(extreme.isfinite() for extreme in tensor.aminmax()):
                raise ValueError("it has NaN or infinite values")


def check_template(tokenizer, path, advice):
    """Raise UserError unless the chat template writes a chat of one word as a short text.

    A template is a program. transformers runs it in Jinja's sandbox, from where it reaches neither
    files nor Python's insides, but it may still fail, loop or write gigabytes.
    """
    chat = [{"role": "user", "content": "a"}]
    with explained(path, "its chat template fails on a chat of one word", advice):
        tokens = Environment().lex(tokenizer.get_chat_template())
        if any((kind, text) == ("operator", "**") for _, kind, text in tokens):
            raise ValueError("it computes a power")     # 9**9**9**9, which no alarm interrupts
        with time_limit(MAX_SECONDS):
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        if len(text) > MAX_CHARACTERS or not text.strip():
            raise ValueError(f"it writes {len(text):,} characters")
        tokenizer(text, add_special_tokens=False)


@contextmanager
def time_limit(seconds):
    """TimeoutError after so many seconds. On Windows and in threads, where no alarm rings, none."""
    def stop(*_):
        raise TimeoutError(f"more than {seconds} seconds")

    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
