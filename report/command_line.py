"""What commands share: one line instead of a traceback, numbers within bounds, readable help."""
import argparse
import os
import shlex
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch

from .text import UserError, printable

NO_MEMORY = ("out of memory; train_grpo.py needs less with a lower --micro_batch_size or "
             "--rollout_batch_size, with --gradient_checkpointing, or with --lora_rank")


def sentence(error):
    """What the user reads of this error instead of a traceback; None if it needs its traceback.

    MINIGRPO_TRACEBACK=1 asks for every traceback.
    """
    if os.environ.get("MINIGRPO_TRACEBACK"):
        return None
    # Python, a GPU, and the CPU, which has no class of its own for it.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return NO_MEMORY
    if isinstance(error, (UserError, OSError)):
        return " ".join(printable(str(error)).splitlines())
    return None


@contextmanager
def user_errors(program):
    """Decorates a main function: an error that a sentence explains prints it and exits with code 2.

    program: the script's name, which starts that line. Warnings are one line too.
    """
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda text, *where: f"warning: {printable(str(text))}\n"
    try:
        yield
    except Exception as error:
        line = sentence(error)
        if line is None:
            raise
        notes = "".join(getattr(error, "__notes__", []))    # how to go on
        print(f"{program}: error: {line}{notes}", file=sys.stderr)
        sys.exit(2)
    finally:
        warnings.formatwarning = formatwarning


def number(kind, low, high=10**9, *, above=False):
    """An argparse type: a number of at least `low`, or above it, and at most `high`.

    kind: int or float, whose name argparse shows in its own messages.
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


def folder_name(text):
    """An argparse type: the name of a folder, which can't lead out of the folder it is made in."""
    if Path(text).name != text or text in ("", "..") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}; it must be the name of a folder, without /")
    return text


class HelpFormatter(argparse.HelpFormatter):
    """Shows each default, and INT, FLOAT or TEXT for a value instead of the flag's name again."""

    def _get_default_metavar_for_optional(self, action):
        return getattr(action.type, "__name__", "text").upper()

    def _get_help_string(self, action):
        default = action.default
        if isinstance(default, bool) or default in (None, argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser of flags, and of files of flags, named as @file, in which # begins a comment.

    A wrong flag raises UserError, so that all of a user's mistakes end in the same way.
    """

    def __init__(self, **options):
        super().__init__(usage="%(prog)s [flags] [@file of flags]", fromfile_prefix_chars="@",
                         formatter_class=HelpFormatter, **options)

    def convert_arg_line_to_args(self, arg_line):
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"{error} in {arg_line}")

    def error(self, message):
        raise UserError(message)
