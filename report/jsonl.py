"""The .jsonl files of a run: one JSON object per line, NaN and infinity written as null."""
import json
import math
import os
import re
from pathlib import Path

# What a terminal would obey instead of showing it: C1 controls, line separators, bidirectional
# marks; and halves of characters, which UTF-8 cannot write. JSON itself escapes the C0 controls.
HIDDEN = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def is_finite(value):
    """True for a finite number; False for NaN, infinity and None, which is how null reads."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def to_json(value):
    """A copy of `value` in types that strict JSON knows.

    NaN and infinity become None, tensors become numbers or lists, paths become strings.
    """
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_line(row):
    """The row as a line of strict JSON that can be shown: other languages stay, controls don't."""
    line = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False)
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n"


def read_jsonl(path):
    """The lines of a file as a list of dicts; an empty list if there is no such file.

    Reading stops at the first line that is not JSON: a run that is still writing, or was killed,
    may leave half a line at the end.
    """
    rows = []
    if Path(path).exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break
    return rows


def drop_lines_after(step, path):
    """Keep the lines of a file up to and including `step`; with step 0, a new run, keep none.

    A run that crashed may have written lines for steps after its last checkpoint.
    """
    kept = [row for row in read_jsonl(path) if row["step"] <= step] if step > 0 else []
    # Write a copy and rename it: a crash in between must not lose the lines to keep.
    partial = path.with_suffix(".partial")
    partial.write_text("".join(map(to_line, kept)), encoding="utf-8")
    os.replace(partial, path)
