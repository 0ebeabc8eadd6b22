"""Numbers, durations, paths and long texts, formatted for a terminal."""
import math
import textwrap
from pathlib import Path


def number(value, spec=".2f"):
    """The value in a format spec; "-" for None, NaN and infinity."""
    value = math.nan if value is None else float(value)
    return format(value, spec) if math.isfinite(value) else "-"


def duration(seconds):
    """Seconds in a readable unit: 8.2s, 2m 40s, 1h 03m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"


def short(path):
    """The path relative to the current folder, if it lies inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def printable(text):
    """The text with a dot for each character that a terminal would obey instead of showing it.

    Escape sequences recolour and overwrite what was printed before; bidirectional marks reorder it.
    Line breaks and tabs stay, and so do the Chinese space and the joiner inside some emoji.
    """
    return "".join(c if c.isprintable() or c in "\n\t\u3000\u200d" else "·" for c in text)


def fold(text, width, max_lines):
    """The text wrapped into at most `max_lines` lines, its line breaks shown as ⏎.

    A long text loses its middle rather than its end, where the answer is.
    """
    text = printable(text.strip().replace("\n", "⏎ ").replace("\t", "·"))
    room = (max_lines - 1) * width      # one line is spare, since wrapping at spaces wastes room
    if len(text) > room:
        half = room // 2 - 15
        text = f"{text[:half]} … [{len(text) - 2 * half:,} more characters] … {text[-half:]}"
    return textwrap.wrap(text, width) or ["(empty)"]
