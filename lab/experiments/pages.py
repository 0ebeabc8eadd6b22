"""What the pages show: tables whose numbers come from results, and changes that experiments make.

A table stands between `<!-- results: NAME -->` and `<!-- end -->`. Its head and its names are
written by hand, in the language of the page; experiments.toml and claims.toml say what its numbers
are. A cell that does not begin with a number is text and stays, so a new table begins with zeros.
"""
import re

import numpy as np

from errors import UserError

from .figures import at_end, holm, interval, p_value, series, sizes

BLOCK = re.compile(r"(<!-- results: (\w+) -->\n\n)(.*?)(?=\n\n<!-- end -->)", re.DOTALL)
# A variable: functions, methods and fields keep their names.
NAME = re.compile(r"(?<![\w.])[^\W\d]\w*\b(?!\()")
# Those that `git apply` reads have a head, and stay as they are.
DIFF = re.compile(r"(^```diff\n)(?!---)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"(?m)^(?=## )")
# A row whose last cells are lines of code, and the function of the script that has them.
CODE = re.compile(r"(`[^|]*`)( \| \[`(\w+)`\]\((?:\.\./)+train_grpo\.py\) \|)$", re.MULTILINE)
# 5.0 ± 2.0, perhaps in bold; <0.001
NUMBER = re.compile(r"( *\**)[-<]?\d.*?(\** *)")


def filled(text, rows_of, page):
    """A page with the numbers of its tables written anew; rows_of(NAME): the rows of texts."""
    def write(block):
        start, name, table = block.groups()
        lines, rows = table.splitlines(), rows_of(name)
        if len(lines) != 2 + len(rows):
            raise UserError(f"{page}: the table {name} should have {len(rows)} rows, as "
                            "lab/experiments/*.toml say")
        for i, texts in enumerate(rows, start=2):       # after the head and the rule below it
            lines[i] = fill(lines[i], texts)
        return start + "\n".join(lines)

    return BLOCK.sub(write, text)


def fill(line, texts):
    """A row of a table with these texts in place of the numbers in its last cells."""
    cells = line.split("|")
    for i, text in enumerate(texts, start=len(cells) - 1 - len(texts)):
        number = NUMBER.fullmatch(cells[i])
        if number and not text:
            raise UserError(f"{line}: there are no results for this yet; run the experiment first")
        if number:
            before, after = number.groups()
            cells[i] = before + text + after
    return "|".join(cells)


def texts_of(experiment, results, panels):
    """What stands in the last cells of an experiment's table, row by row."""
    return [[text_of(cell, results, panels) for cell in row]
            for row in cells_of(experiment, results)]


def cells_of(experiment, results):
    """The last cells of an experiment's table, row by row."""
    table = experiment.get("table", {})
    columns = table.get("columns", ["eval/accuracy", "eval/greedy_accuracy"])
    rows = table.get("rows", arms_of(results))
    if rows == "cells":
        rows = experiment["cells"]
    return [[cell_of(table, column, row) for column in columns] for row in rows]


def arms_of(results):
    """Each arm once, with its row."""
    arms = dict.fromkeys((run["row"], run["arm"]) for run in results)
    return [{"row": row, "arm": arm} for row, arm in arms]


def cell_of(table, column, row):
    """What stands where these meet; the row has the last word, and its $ is the column's arm."""
    if isinstance(column, str):
        column = {"key": column}
    if isinstance(row, str):
        row = {"arm": row}
    cell = {"row": "", "key": "eval/accuracy"} | table | column | row
    for name in ("arm", "minus"):
        if name in cell:
            cell[name] = cell[name].replace("$", column.get("arm", ""))
    return cell


def text_of(cell, results, panels):
    """One cell; "" without results."""
    begins, ends = ends_of(cell, cell["arm"], results)
    if "minus" in cell:
        ends = differences(cell, results)
    if not ends:
        return ""
    _, _, number = panels.get(cell["key"], ("", "", ""))
    form, scale = "{end:.2f} ± {half:.2f}", 1
    if "%" in number:
        form, scale = "{end:.1f} ± {half:.1f}", 100
    begin, _ = interval(scale * np.array([*begins.values()]))
    values = scale * np.array([*ends.values()])
    (end, half), (_, narrow) = interval(values), interval(values, 0.1)
    return (cell.get("form") or form).format(
        begin=begin, end=end, half=half, low=end - narrow, high=end + narrow,
        median=np.median(values), least=values.min(), most=values.max())


def ends_of(cell, arm, results):
    """({seed: first value}, {seed: mean of the end, or at the steps of the cell}) of an arm."""
    begins, ends = {}, {}
    for run in results:
        seed = run["seed"]
        if (run["row"], run["arm"]) != (cell["row"], arm) or seed != cell.get("seed", seed):
            continue
        steps, values = series([run], arm, cell["key"])
        end = at_end(cell["key"], values)
        if cell.get("at") == "all" and len(steps):
            end = np.average(values, 1, sizes(steps))
        elif "at" in cell:
            end = values[:, np.isin(steps, cell["at"])]
        if np.isfinite(end).any():
            begins[seed] = values[0, 0]
            ends[seed] = np.nanmean(end)
    return begins, ends


def differences(cell, results):
    """{seed: the end of the arm minus that of another, or minus its own "begin"}."""
    begins, ends = ends_of(cell, cell["arm"], results)
    _, others = ends_of(cell | {"row": cell.get("minus_row", cell["row"])}, cell["minus"], results)
    if cell["minus"] == "begin":
        others = begins
    return {seed: ends[seed] - others[seed] for seed in ends if seed in others}


def claim_texts(claims, results, panels):
    """For each claim of a family [seeds, difference, p, p corrected for all of them].

    results: {experiment: its runs}. A claim without two seeds of both arms has no numbers yet.
    """
    found = [differences(claim, results[claim["experiment"]]) for claim in claims]
    p_values = [paired_p([*values.values()]) for values in found]
    texts = []
    for claim, values, *both in zip(claims, found, p_values, holm(p_values)):
        numbers = [""] * 4
        if len(values) > 1:
            numbers = [str(len(values)), text_of(claim, results[claim["experiment"]], panels)]
            numbers += ["<0.001" if p < 0.0005 else f"{p:.3f}" for p in both]
        texts.append(numbers)
    return texts


def paired_p(values):
    """p of the paired t test: were both arms alike, how often would they differ by as much?"""
    if len(values) < 2:
        return 1
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return p_value(np.mean(values) / error, len(values) - 1)


def changes(page):
    """Returns {heading in small letters: (diff, file that it changes, test that catches it)}."""
    found = {}
    for section in SECTION.split(page.read_text(encoding="utf-8"))[1:]:
        heading = re.match(r"## (.*?)( \(in|$)", section, re.MULTILINE)[1]
        diff = DIFF.search(section)
        test = re.search(r"\*\*Caught by\*\* `(.+?)`", section)
        if diff:
            found[heading.lower()] = diff[2], file_of(section), test and test[1]
    return found


def file_of(section):
    """The file that the diff of a section changes: the one in its heading, or the script."""
    named = re.match(r"## .*`([\w/]+\.py)`", section)
    return named[1] if named else "train_grpo.py"


def changed(source, diff, page):
    """The source with the lines of a diff replaced; UserError if they do not stand there once.

    A line ` ...` stands between two places that change.
    """
    for part in as_now(diff, source, page).split(" ...\n"):
        lines = part.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        source = source.replace(before, after)
    return source


def as_now(diff, source, page):
    """A diff with the names that its lines have in the source now."""
    parts = []
    for part in diff.split(" ...\n"):
        before = "\n".join(line[1:] for line in part.splitlines() if line[0] == "-")
        if source.count(before) != 1:
            names = renamed(before, source)
            if names is None:
                raise UserError(f"{page}: {before.strip()!r} does not stand in the code once; "
                                "adapt the diff to it")
            part = with_names(part, names)
        parts.append(part)
    return " ...\n".join(parts)


def renamed(text, source):
    """{name: its name in the source} of a text that stands there but for its names; else None."""
    first, *others = NAME.split(text)
    pattern = re.escape(first) + "".join(r"(\w+)" + re.escape(other) for other in others)
    names, best = NAME.findall(text), []
    for place in re.finditer(rf"(?=(?<!\w){pattern})", source):
        found = dict(zip(names, place.groups()))
        # Each of them is the same everywhere, and no two are one.
        if with_names(text, found) in source and len({*found.values()}) == len(found):
            best.append((sum(old == new for old, new in found.items()), found))
    best.sort(key=lambda one: one[0], reverse=True)
    if not best or len(best) > 1 and best[0][0] == best[1][0]:
        return None
    return best[0][1]


def with_names(text, names):
    return NAME.sub(lambda name: names.get(name[0], name[0]), text)


def code_as_now(text, source_of, page):
    """A page with its diffs and the lines of its table of code as the code has them now.

    source_of(name): the source of a function of the script, or of a file.
    """
    def section(old):
        def diff(block):
            return block[1] + as_now(block[2], source_of(file_of(old)), page)

        return DIFF.sub(diff, old)

    def cell(block):
        source = " ".join(source_of(block[3]).split())

        def line(quoted):
            names = {} if quoted[1] in source else renamed(quoted[1], source)
            if names is None:
                raise UserError(f"{page}: {quoted[1]!r} does not stand in {block[3]}; adapt it")
            return f"`{with_names(quoted[1], names)}`"

        return re.sub(r"`([^`]+)`", line, block[1]) + block[2]

    return CODE.sub(cell, "".join(section(part) for part in SECTION.split(text)))
