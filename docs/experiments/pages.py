"""What the pages show: tables whose numbers come from results, and changes that experiments make.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. Its head and its names are
written by hand, in the language of the page. Its numbers are not: tables.toml says what they are.
A cell that does not begin with a number is text and stays, so a new table begins with zeros.
"""
import re

import numpy as np

from report import UserError

from .figures import ends_of, geometric_mean, interval, of_arm

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n\n)(.*?)(?=\n\n<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(\s*\**)-?\d.*?(\**\s*)")


def filled(text, tables, page):
    """A page with the numbers of its tables written anew; tables: {NAME: rows of texts}."""
    def write(block):
        start, name, table = block.groups()
        head, rule, *lines = table.splitlines()
        if len(lines) != len(tables.get(name, ())):
            raise UserError(f"{page}: the table {name} has {len(lines)} rows, other than what "
                            "docs/experiments/tables.toml says")
        return start + "\n".join([head, rule, *map(fill, lines, tables[name])])

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


def texts_of(table, results, panels):
    """What stands in the last cells of a table of tables.toml, row by row.

    panels: {series: (title, subtitle, format)}; a % in the format makes it percent here too.
    """
    rows = table.get("rows")
    if rows is None:
        arms = dict.fromkeys((run["row"], run["arm"]) for run in results)
        rows = [{"row": row, "arm": arm} for row, arm in arms]
    texts = []
    for row in rows:
        row = {"arm": row} if isinstance(row, str) else row
        texts.append([])
        for column in table["columns"]:
            column = {"key": column} if isinstance(column, str) else column
            spec = {"row": "", "key": "eval/accuracy"} | table | column | {"arm": "$"} | row
            arms = column.get("arm", "")
            arms = [arms] if isinstance(arms, str) else arms
            texts[-1].append(", ".join(text_of(spec, arm, results, panels) for arm in arms))
    return texts


def text_of(spec, arm, results, panels):
    """One cell, of an arm of the column; "" without results."""
    key = spec["key"]
    runs = [run for run in results if run["row"] == spec["row"]
            and run["seed"] == spec.get("seed", run["seed"])]
    begins, ends = ends_of(of_arm(runs, spec["arm"].replace("$", arm)), key, spec.get("at"))
    if "minus" in spec:
        base = ends_of(of_arm(runs, spec["minus"].replace("$", arm)), key, spec.get("at"))[1]
        ends = {seed: ends[seed] - base[seed] for seed in ends if seed in base}
    if not ends:
        return ""
    share = "%" in panels[key][2]
    scale, form = 1, "{end:.2f} ± {half:.2f}"
    if share:
        scale, form = 100, "{end:.1f} ± {half:.1f}"
    begin, ends = scale * np.mean(list(begins.values())), scale * np.array(list(ends.values()))
    end, half = interval(ends)
    if spec.get("seeds_beyond") and share and not half <= end <= 100 - half:
        return ", ".join(f"{value:.0f}" for value in sorted(ends))
    form = spec.get("form", form)
    geometric = geometric_mean(ends) if "{geometric" in form else None
    return form.format(begin=begin, end=end, half=half, geometric=geometric)


def changes(page):
    """{heading in small letters: (its diff, the test that it says catches it)} of a page."""
    found = {}
    for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0].partition(" (in ")[0]
        diff = re.search(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        test = re.search(r"\*\*Caught by\*\* `(\w+)`", section)
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
