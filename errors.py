"""The base module, which all other modules may import: errors for users, and a flag parser.

If the user makes a mistake, a run ends with a one-line message instead of a traceback.
"""
import argparse
import json
import os
import re
import shlex
import sys
import warnings
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

for room in "dataset", "model", "reward", "run":
    found = find_spec(room)
    where = found and (found.origin or [*found.submodule_search_locations][0])
    if where and not Path(where).resolve().is_relative_to(Path(__file__).resolve().parent):
        raise ImportError(f"{where} hides the folder {room} of MiniGRPO; rename it, or put the "
                          "folder of train_grpo.py before it in sys.path")

GIVEN = {}      # name -> object or function, during a call from Python (model/in_memory.py)
NO_MEMORY = ("out of memory; train_grpo.py needs less with a lower --micro_batch_size or "
             "--rollout_batch_size, with --gradient_checkpointing, or with --lora_rank")


class UserError(ValueError):
    """Raised for a user's mistake. The message says what is wrong, where, and how to fix it.

    Any other exception is a bug in this project, and is shown with its traceback.
    """


def printable(text):
    """Returns the text with a dot in place of each character that could change the terminal.

    For example, escape sequences could overwrite earlier output, and bidirectional marks could
    reorder the text. Line breaks, tabs and characters that occur in ordinary text are kept.
    """
    return "".join(c if c.isprintable() or c in "\n\t\u3000\u200d" else "·" for c in text)


def cut(text, room):
    """Returns the text; if it is longer than `room` characters, leaves out the middle part."""
    half = max(room // 2 - 20, 1)       # the other 40 characters are for the note
    if len(text) <= room:
        return text
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters left out] … {text[-half:]}"


def reason(error):
    """Returns the class name of an exception and the first sentence of its message, as one line.

    Later sentences are left out, since they often advise the user to load an unsafe file anyway.
    """
    text = re.sub(r"^\[enforce fail at \S+\] \. ", "", printable(str(error)))     # from torch
    sentence = " ".join(text.split()).partition(". ")[0].rstrip(".")[:200]
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


@contextmanager
def explained(path, what, advice):
    """Context manager that turns any exception into a UserError, which names the path.

    Parsers raise many different exception classes for broken files. A UserError that already starts
    with the path is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) and str(error).startswith(str(path)):
            raise
        raise UserError(f"{path}: {what} ({reason(error)}); {advice}") from error


def sentence(error):
    """Returns the message to print for an error, or None if its traceback should be shown instead.

    If the environment variable MINIGRPO_TRACEBACK is set, the traceback is always shown.
    """
    if os.environ.get("MINIGRPO_TRACEBACK"):
        return None
    text = str(error)
    kind = type(error).__name__         # by name, without importing torch or safetensors
    # Out of memory in Python, on a GPU, and on a CPU, for which torch has no exception class.
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or (
            isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return NO_MEMORY
    # tokenizers has no exception class for a full disk: "No space left on device (os error 28)".
    if (isinstance(error, (UserError, OSError)) or kind == "SafetensorError"
            or "(os error " in text):
        return " ".join(printable(text).splitlines()) or type(error).__name__
    return None


@contextmanager
def user_errors(program):
    """Decorator for a main function: prints a user's mistake as one line, and exits with code 2.

    program: the script's name, printed before the message. Warnings are printed as one line, too.
    """
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda text, *where: f"warning: {printable(str(text))}\n"
    with suppress(AttributeError):      # a notebook's stdout lacks this method; stdout may be None
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        print(end="", flush=True)   # if the disk is full, raises here, not when Python exits
    except KeyboardInterrupt:
        print(f"\n{program}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)           # the exit code that shells use for Ctrl-C
    except Exception as error:
        line = sentence(error)
        if line is None:
            raise
        print(f"{program}: error: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        warnings.formatwarning = formatwarning


def number(kind, low, high=10**9, *, above=False):
    """Returns an argparse type for numbers from `low` to `high`; `above` excludes `low` itself.

    kind: int or float. argparse shows this name in error messages.
    """
    def parse(text):
        value = kind(text)
        if not low <= value <= high or (above and value == low):
            least = "above" if above else "at least"
            raise argparse.ArgumentTypeError(
                f"{text.strip()}; it must be {least} {low:,} and at most {high:,}")
        return value

    parse.__name__ = kind.__name__
    return parse


COUNT, COUNT_OR_0 = number(int, 1), number(int, 0)
POSITIVE, POSITIVE_OR_0 = number(float, 0, above=True), number(float, 0)
FINITE = number(float, -10**6, 10**6)


class HelpFormatter(argparse.HelpFormatter):
    """Formats --help with default values and types (INT, FLOAT, TEXT), and keeps line breaks."""

    def _fill_text(self, text, width, indent):
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _get_default_metavar_for_optional(self, action):
        return getattr(action.type, "__name__", "text").upper()

    def _get_help_string(self, action):
        default = action.default
        if isinstance(default, bool) or default in (None, [], argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Parses command-line flags. "@file" reads flags from a file, in which # starts a comment.

    An invalid flag raises a UserError, like any other user mistake. An empty value is an error,
    too, because shells pass an empty value if a variable is not set.
    """

    def __init__(self, **options):
        super().__init__(fromfile_prefix_chars="@", formatter_class=HelpFormatter, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")       # argparse's own misses -1e-3

    def words(self, given):
        """Returns the words of a command line. given: {flag: value}, a list, or None (sys.argv)."""
        if given is None:       # a notebook's command line is that of its kernel
            return [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:]
        if not isinstance(given, dict):
            return given
        words = []
        for name, value in given.items():
            flag = self._option_string_actions.get(f"--{name}")
            if flag is None or name == "help":
                raise UserError(f"{name} is not a flag; `python train_grpo.py --help` lists them")
            if isinstance(value, dict) and flag.nargs:      # --loss_options
                value = [f"{key}={one}" for key, one in value.items()]
            elif isinstance(value, dict):
                value = json.dumps(value)
            if isinstance(value, (list, tuple)):
                words += [f"--{name}", *map(str, value)]
            elif flag.nargs == 0:           # a switch
                if value:
                    words.append(f"--{name}")
            elif value is not None:
                words.append(f"--{name}={int(value) if isinstance(value, bool) else value}")
        return words

    def group(self, title):
        """Returns the argument group whose title starts with `title`."""
        return next(one for one in self._action_groups if one.title.startswith(title))

    def convert_arg_line_to_args(self, line):
        return shlex.split(line, comments=True)

    def _read_args_from_files(self, words):
        named = " ".join(word for word in words if word.startswith("@"))
        with explained(named, "not a file of flags", "write them as on a command line"):
            return super()._read_args_from_files(words)

    def _get_value(self, action, text):
        if not text.strip():
            raise argparse.ArgumentError(action, "its value is empty; leave it out, or add a value")
        # Shells don't expand the ~ in --out_dir=~/runs or in a file of flags.
        return super()._get_value(action, os.path.expanduser(text))

    def error(self, message):
        raise UserError(message)
