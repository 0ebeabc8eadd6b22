"""Numbers, durations, paths and long texts, formatted for a terminal."""
import textwrap
from pathlib import Path

from .jsonl import is_finite


def number(value, spec=".2f"):
    """The value in a format spec; "-" for None, NaN and infinity."""
    return format(value, spec) if is_finite(value) else "-"


def duration(seconds):
    """Seconds in a readable unit: 8.2s, 2m 40s, 1h 03m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h {minutes % 60:02}m"
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


def cut(text, room):
    """The text, or its two ends if it has more than `room` characters: an answer is at the end."""
    half = max(room // 2 - 20, 1)       # the rest is for what stands between them
    if len(text) <= room:
        return text
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters left out] … {text[-half:]}"


def fold(text, width, max_lines):
    """The text cut and wrapped into at most `max_lines` lines, its line breaks shown as ⏎."""
    text = printable(text.strip().replace("\n", "⏎ ").replace("\t", "·"))
    # One line is spare, since wrapping at spaces wastes room.
    return textwrap.wrap(cut(text, (max_lines - 1) * width), width) or ["(empty)"]


def reason(error):
    """The class of an exception and the first sentence of its message, in one line.

    Further sentences are advice, and that of torch and transformers is to trust the file.
    """
    sentence = " ".join(printable(str(error)).split()).partition(". ")[0].rstrip(".")[:200]
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__
