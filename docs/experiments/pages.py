"""What the pages show: tables whose numbers come from results, and changes that experiments make.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. Its head and its names are
written by hand, in the language of the page; experiments.toml says what its numbers are. A cell
that does not begin with a number is text and stays, so a new table begins with zeros.
"""
import itertools
import re

import numpy as np

from report import UserError

from .figures import ends_of, interval

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n\n)(.*?)(?=\n\n<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(\s*\**)-?\d.*?(\**\s*)")


def filled(text, rows_of, page):
    """A page with the numbers of its tables written anew; rows_of(NAME): the rows of texts."""
    def write(block):
        start, name, table = block.groups()
        head, rule, *lines = table.splitlines()
        rows = rows_of(name)
        if len(lines) != len(rows):
            raise UserError(f"{page}: the table {name} should have {len(rows)} rows, as "
                            "docs/experiments/experiments.toml says")
        return start + "\n".join([head, rule, *map(fill, lines, rows)])

    return BLOCK.sub(write, text)


def fill(line, texts):
    """A row of a table with these texts in place of the numbers in its last cells."""
    cells = re.split(r"(?<!\\)\|", line)
    for i, text in enumerate(texts, start=len(cells) - 1 - len(texts)):
        number = NUMBER.fullmatch(cells[i])
        if number and not text:
            raise UserError(f"{line}: there are no results for this yet; run the experiment first")
        if number:
            cells[i] = number[1] + text + number[2]
    return "|".join(cells)


def texts_of(experiment, results, panels):
    """What stands in the last cells of an experiment's table, row by row."""
    table = experiment.get("table", {})
    rows = table.get("rows", [{"row": row, "arm": arm} for row, arm in dict.fromkeys(
        (run["row"], run["arm"]) for run in results)])
    if rows == "cells":
        rows = experiment["cells"]
    columns = table.get("columns", ["eval/accuracy", "eval/greedy_accuracy"])
    return [[text_of(table, row, column, results, panels) for column in expanded(columns, "key")]
            for row in expanded(rows, "arm")]


def expanded(parts, name):
    """Each row or column as a table: a text is one's `name`, a list stands for each in it."""
    for part in parts:
        part = {name: part} if isinstance(part, str) else part
        lists = {key: value for key, value in part.items()
                 if isinstance(value, list) and key != "at"}
        for values in itertools.product(*lists.values()):
            yield part | dict(zip(lists, values))


def text_of(table, row, column, results, panels):
    """One cell; "" without results."""
    spec = {"row": "", "key": "eval/accuracy"} | table | column | row
    arm, minus = (text.replace("$", column.get("arm", ""))
                  for text in (row.get("arm", "$"), table.get("minus", "")))
    runs = [run for run in results if run["row"] == spec["row"]
            and run["seed"] == spec.get("seed", run["seed"])]
    begins, ends = ends_of(runs, arm, spec["key"], spec.get("at"))
    _, _, picture, *form = panels[spec["key"]]
    share = "%" in picture
    forms = [column.get("form"), *form, table.get("form"),
             "{end:.1f} ± {half:.1f}" if share else "{end:.2f} ± {half:.2f}"]
    if arm == minus:
        forms = ["{end:.0f}"]
    elif minus:
        _, base = ends_of(runs, minus, spec["key"], spec.get("at"))
        ends = {seed: ends[seed] - base[seed] for seed in ends if seed in base}
    if not ends:
        return ""
    scale = 100 if share else 1
    begin, ends = scale * np.mean([*begins.values()]), scale * np.array([*ends.values()])
    end, half = interval(ends)
    if spec.get("seeds_beyond") and share and not half <= end <= 100 - half:
        return ", ".join(f"{value:.0f}" for value in sorted(ends))
    form = next(filter(None, forms))
    geometric = np.exp(np.log(ends).mean()) if "{geometric" in form else None
    return form.format(begin=begin, end=end, half=half, geometric=geometric)


def changes(page):
    """{heading in small letters: (its diff, the test that it says catches it)} of a page."""
    found = {}
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading = re.match(r"(.*?)( \(in|$)", section, re.MULTILINE)[1]
        diff = re.search(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        test = re.search(r"\*\*Caught by\*\* `(.+?)`", section)
        if diff:
            found[heading.lower()] = diff[1], test and test[1]
    return found


def changed(source, diff, page):
    """The source with the lines of a diff replaced; UserError if they do not stand there once."""
    before, after = ("\n".join(line[1:] for line in diff.splitlines() if line[0] == sign)
                     for sign in "-+")
    if source.count(before) != 1:
        raise UserError(f"{page}: {before.strip()!r} does not stand in train_grpo.py once; "
                        "adapt the diff to the code")
    return source.replace(before, after)
