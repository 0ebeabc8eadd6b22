"""What commands share: one line instead of a traceback, numbers within bounds, readable help."""
import argparse
import functools
import math
import os
import shlex
import sys


def user_errors(program):
    """Decorate a main function: a ValueError or OSError prints one line and exits with code 2.

    program: the script's name, which starts that line. With the environment variable
    MINIGRPO_TRACEBACK set, the exception propagates, so that Python prints where it was raised.
    """
    def decorate(main):
        @functools.wraps(main)
        def wrapper(*args, **kwargs):
            try:
                return main(*args, **kwargs)
            except (ValueError, OSError) as error:
                if os.environ.get("MINIGRPO_TRACEBACK"):
                    raise
                notes = "".join(getattr(error, "__notes__", []))    # how to go on
                print(f"{program}: error: {error}{notes}", file=sys.stderr)
                sys.exit(2)
        return wrapper
    return decorate


def number(kind, low, high=math.inf, *, above=False):
    """An argparse type: a number of at least `low`, or above it, and at most `high`.

    kind: int or float, whose name argparse shows in its own messages.
    """
    def parse(text):
        value = kind(text)
        if not low <= value <= high or above and value == low:
            most = f" and at most {high}" if high < math.inf else ""
            bound = f"{'above' if above else 'at least'} {low}{most}"
            raise argparse.ArgumentTypeError(f"{text}; it must be {bound}")
        return value

    parse.__name__ = kind.__name__
    return parse


def steps_or_minutes(text):
    """An argparse type: "30", a number of steps, or "10m", minutes; it stays a text."""
    value = float(text[:-1]) if text.endswith("m") else int(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; it must be above 0")
    return text


class HelpFormatter(argparse.HelpFormatter):
    """Shows each default, and INT, FLOAT or TEXT for a value instead of the flag's name again."""

    def _get_default_metavar_for_optional(self, action):
        return getattr(action.type, "__name__", "text").upper()

    def _get_help_string(self, action):
        is_switch = isinstance(action.default, bool)
        if is_switch or action.default in (None, argparse.SUPPRESS):
            return action.help
        return f"{action.help} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser of flags, and of files of flags, named as @file.

    A wrong flag raises ValueError, so that all of a user's mistakes end in the same way.
    """

    def __init__(self, **options):
        super().__init__(usage="%(prog)s [flags] [@file of flags]", fromfile_prefix_chars="@",
                         formatter_class=HelpFormatter, **options)

    def convert_arg_line_to_args(self, line):
        """The flags in a line of a file of flags, as a shell reads them; # begins a comment."""
        try:
            return shlex.split(line.lstrip("\ufeff"), comments=True)
        except ValueError as error:
            raise ValueError(f"a file of flags has the line {line!r} ({error}); close its quotes"
                             ) from None

    def error(self, message):
        raise ValueError(message)
