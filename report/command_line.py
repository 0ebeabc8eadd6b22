"""What commands share: one line instead of a traceback, numbers within bounds, readable help."""
import argparse
import os
import shlex
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

from .text import UserError, printable


def needs_no_traceback(error):
    """Whether the error's message says it all. MINIGRPO_TRACEBACK=1 asks for every traceback."""
    return isinstance(error, (UserError, OSError)) and not os.environ.get("MINIGRPO_TRACEBACK")


@contextmanager
def user_errors(program):
    """Decorates a main function: a UserError or OSError prints one line and exits with code 2.

    program: the script's name, which starts that line. Warnings are one line too.
    """
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda text, *where: f"warning: {printable(str(text))}\n"
    try:
        yield
    except Exception as error:
        if not needs_no_traceback(error):
            raise
        notes = "".join(getattr(error, "__notes__", []))    # how to go on
        line = " ".join(printable(str(error)).splitlines())
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
        if not low <= value <= high or above and value == low:
            bound = f"{'above' if above else 'at least'} {low:,} and at most {high:,}"
            raise argparse.ArgumentTypeError(f"{text.strip()}; it must be {bound}")
        return value

    parse.__name__ = kind.__name__
    return parse


def steps_or_minutes(text):
    """An argparse type: "30", a number of steps, or "10m", minutes; it stays a text."""
    value = float(text[:-1]) if text.endswith("m") else int(text)
    if not 0 < value <= 10**9:
        raise argparse.ArgumentTypeError(f"{text}; it must be above 0 and at most {10**9}")
    return text


def folder_name(text):
    """An argparse type: the name of a folder, which can't lead out of the folder it is made in."""
    if Path(text).name != text or text in ("", "..") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}; it must be the name of a folder, without /")
    return text


def flags_of_file(path):
    """The flags in a file, each line as a shell reads it; # begins a comment.

    The file can't name another such file.
    """
    path, flags = Path(path), []
    if not path.is_file() or path.stat().st_size > 10**6:
        raise UserError(f"@{path}: no such file, or too large to be one of flags; check its name")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"@{path}: not UTF-8; save the file of flags as UTF-8") from None
    for number, line in enumerate(map(str.rstrip, text.split("\n")), start=1):
        where = f"@{path}, line {number}"
        if printable(line) != line:
            raise UserError(f"{where}: it has a character that can't be printed; write plain text")
        try:
            flags += shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{where}: {error}; close the quotes of that line") from None
    return flags


class HelpFormatter(argparse.HelpFormatter):
    """Shows each default, and INT, FLOAT or TEXT for a value instead of the flag's name again."""

    def _get_default_metavar_for_optional(self, action):
        return getattr(action.type, "__name__", "text").upper()

    def _get_help_string(self, action):
        default = action.default
        if isinstance(default, bool) or default in (None, argparse.SUPPRESS):
            return action.help
        if isinstance(default, tuple):      # as one would type it
            return f"{action.help} (default: {' '.join(default)})"
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser of flags, and of files of flags, named as @file.

    A wrong flag raises UserError, so that all of a user's mistakes end in the same way.
    """

    def __init__(self, **options):
        super().__init__(usage="%(prog)s [flags] [@file of flags]",
                         formatter_class=HelpFormatter, **options)

    def parse_args(self, arguments=None):
        """arguments: None for those of the command line."""
        flags = []
        for argument in sys.argv[1:] if arguments is None else arguments:
            flags += flags_of_file(argument[1:]) if argument.startswith("@") else [argument]
        return super().parse_args(flags)

    def error(self, message):
        raise UserError(message)
