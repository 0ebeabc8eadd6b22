"""The .jsonl files of a run: one JSON object per line, NaN and infinity written as null."""
import json
import math
import re
from contextlib import suppress
from pathlib import Path

# What a terminal would obey instead of showing it: C1 controls, line separators, bidirectional
# marks; and halves of characters, which UTF-8 cannot write. JSON itself escapes the C0 controls.
HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def is_finite(value):
    """True for a finite number; False for NaN, infinity and None, which is how null reads."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def rounded(value):
    """A number to four digits, all that a picture of it can show."""
    return float(f"{value:.4g}") if isinstance(value, float) and is_finite(value) else value


def columns(rows):
    """Rows as {name: values}, to four digits; None where a row lacks the name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [rounded(row.get(name)) for row in rows] for name in names}


def to_json(value):
    """A copy of `value` in types that strict JSON knows.

    NaN and infinity become None, tensors numbers or lists, and what else JSON lacks its text.
    """
    text = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    return json.loads(text, parse_constant=lambda constant: None)


def to_line(row):
    """The row as a line of strict JSON that can be shown: other languages stay, controls don't."""
    line = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False)
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n"


def read_jsonl(path, *, most=None):
    """The lines of a file as a list of dicts; an empty list if there is no such file.

    most: read no more lines than that, evenly spaced, with the first and the last.
    Reading stops at the first line that is not JSON: a run that is still writing, or was killed,
    may leave half a line at the end.
    """
    if not Path(path).exists():
        return []
    rows, wanted = [], None
    with open(path, encoding="utf-8", errors="replace") as file, suppress(ValueError):
        if most:
            last = sum(line.endswith("\n") for line in file) - 1
            wanted = {round(i * last / (most - 1)) for i in range(most)}
            file.seek(0)
        for number, line in enumerate(file):
            if wanted is None or number in wanted:
                rows.append(json.loads(line))
    return rows


def drop_lines_after(step, path):
    """Cut off a file after the lines of `step`; with step 0, a new run, keep none.

    A run that crashed may have written lines for steps after its last checkpoint, and half a line.
    """
    if not path.exists():
        return
    with open(path, "r+b") as file:
        kept = 0
        with suppress(ValueError, LookupError, TypeError):
            for line in file if step else ():
                if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                    break
                kept += len(line)
        file.truncate(kept)
