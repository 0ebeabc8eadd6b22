"""Reads and writes jsonl files, in which each line is strict JSON."""
import json
import re
from contextlib import suppress
from pathlib import Path

from errors import UserError, explained

DECODE = "python -c \"open('new.jsonl', 'wb').write(open(r'FILE', encoding='{}').read().encode())\""
OTHER_FILES = [     # first bytes, what such a file is, the command that converts it
    ((b"\xff\xfe", b"\xfe\xff"), "it is UTF-16, not UTF-8", DECODE.format("utf-16")),
    (b"{\0", "it is UTF-16, not UTF-8", DECODE.format("utf-16-le")),
    (b"\0{", "it is UTF-16, not UTF-8", DECODE.format("utf-16-be")),
    (b"\x1f\x8b", "it is compressed with gzip", "gunzip -k FILE"),
    (b"[", "it is one JSON array", "python -c \"import json; [print(json.dumps(row)) for row in "
     "json.load(open(r'FILE', encoding='utf-8-sig'))]\" > new.jsonl")]


def is_finite(value):
    """Returns True for a finite number, and False for NaN, infinity and values of other types."""
    return isinstance(value, (int, float)) and abs(value) < 1e308      # isfinite fails on huge ints


def rounded(value):
    """Rounds a float to four significant digits, which is enough for a plot."""
    return float(f"{value:.4g}") if isinstance(value, float) and is_finite(value) else value


def columns(rows):
    """Converts a list of dicts to a dict of lists. Floats are rounded. Missing keys become None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [rounded(row.get(name)) for row in rows] for name in names}


def to_json(value):
    """Returns a copy of `value` that contains only the types of strict JSON.

    NaN and infinity become None, tensors and arrays become numbers or lists, sets become sorted
    lists, and other types become strings: of an object that has no text of its own, its class.
    """
    text = json.dumps(with_text_keys(value), default=plain)
    return json.loads(text, parse_constant=lambda constant: None)


def plain(value):
    """Returns a value of any type as types of JSON. No address in memory becomes part of it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def with_text_keys(value):
    """Returns a copy in which the keys of all dicts are texts, as JSON needs them."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(plain(key)): with_text_keys(one)
                for key, one in value.items()}
    return [with_text_keys(one) for one in value] if isinstance(value, (list, tuple)) else value


def to_line(row):
    """Returns the row as a line of strict JSON. Non-ASCII characters are not escaped."""
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"


def read_jsonl(path, *, most=None):
    """Returns the lines of a jsonl file as a list of dicts, or [] if the file does not exist.

    most: the maximum number of lines to return, evenly spaced over the file. An incomplete last
    line is skipped, because a run may still be writing this line.
    """
    if not Path(path).exists():
        return []
    with open(path, "rb") as file:
        lines = [pair for pair in enumerate(file, start=1) if pair[1].endswith(b"\n")]
    if most and len(lines) > most:
        lines = [lines[i * (len(lines) - 1) // (most - 1)] for i in range(most)]
    return [parse(line, f"{path}, line {number}") for number, line in lines]


def read_lines(path):
    """Yields ("<path>, line <number>", parsed JSON) for each line that is not blank.

    If a line is not valid JSON, raises a UserError that names the file and the line.
    """
    if not Path(path).exists() or Path(path).is_dir():      # a pipe is fine
        raise UserError(f"{path}: no such file; pass a jsonl file")
    with open(path, "rb") as file:
        start = file.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        for first, what, line in OTHER_FILES:
            if start.startswith(first):
                raise UserError(f"{path}: {what}, but one JSON object per line is needed; "
                                f"this makes such a file: {line.replace('FILE', str(path))}")
        if start.startswith(b"PAR1"):
            with explained(path, "pyarrow cannot read this parquet file", "pip install pyarrow, "
                           "or download it again"):
                from pyarrow.parquet import ParquetFile
                rows = to_json(ParquetFile(file).read().to_pylist())        # dates become text
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, parse(line, where)


def parse(line, where):
    """Parses a line of UTF-8 bytes as strict JSON. Raises a UserError if the line is not valid."""
    with explained(where, "not UTF-8", "to convert GBK: iconv -f GB18030 -t UTF-8 "
                   f"{where.rpartition(', line')[0]} > new.jsonl"):
        text = line.decode("utf-8-sig")
    with explained(where, "not valid JSON", "write one object per line, in which a backslash is "
                   r"written as two: C:\\data for C:\data"):
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
        return row


def write_jsonl(path, rows):
    """Writes rows to a jsonl file, and creates its folder if needed. Returns the number of rows."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    lines = [to_line(row) for row in rows]
    Path(path).write_text("".join(lines), encoding="utf-8")
    return len(lines)


def write_new(path, rows, *, same_kind=False):
    """Like write_jsonl, but raises a UserError if the file exists with different content.

    same_kind: if True, an existing file is replaced if its first row has the same fields.
    """
    rows = [to_json(row) for row in rows]
    if Path(path).exists():
        there, fields = Path(path).read_bytes(), None
        with suppress(ValueError, AttributeError):      # not a JSON object
            fields = json.loads(there.partition(b"\n")[0]).keys()
        is_same = there == "".join(map(to_line, rows)).encode()
        if not is_same and not (same_kind and rows and fields == rows[0].keys()):
            raise UserError(f"{path} exists, and holds something else; move it away, or choose "
                            "another path")
    return write_jsonl(path, rows)
