"""Draws the results of an experiment, and says what runs come to."""
import itertools
import math
import textwrap

import numpy as np

from report.curves import BLUE, BROWN, GREEN, GREY, ORANGE, PINK, above, finish, picture

# Student's t for a 95% interval, by the number of values; a single value has no interval.
T_95 = np.array([0.0, 0.0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306])
LOGARITHMIC = ("kl", "grad_norm")       # one run's may be a hundred times another's
TOTALS = ("minutes",)                   # add up over a run
ARM_COLORS = [BLUE, ORANGE, GREEN, PINK, BROWN]
DASHES = ["-", (0, (3, 1.5)), ":", "-.", (0, (5, 1, 1, 1, 1, 1))]
NAMED = {"blue": BLUE, "orange": ORANGE, "grey": GREY}


def draw(results, panels, path, cells=(), legend=None, columns=None):
    """Write a PNG: a panel for each series of each row of the experiment, a line for each arm.

    panels: {series: (title, subtitle, format of the values)}. An arm named `grpo, none` has the
    colour of all arms that begin with `grpo`; what follows the comma picks the dashes. The number
    at a line is that of its end.

    cells, with as many columns: what stands in each panel in place of that, {row, key, arms,
    subtitle}: arms are drawn in the colours of the legend, {name: colour}, one after the other, and
    the panel has the name of the row or of the last arm.
    """
    rows, arms = (list(dict.fromkeys(run[name] for run in results)) for name in ("row", "arm"))
    own, lines = bool(cells), styles(arms)
    if own:
        lines = {name: (NAMED[color], "-") for name, color in legend.items()}
    else:
        columns = len(rows) if len(rows) > 1 else math.ceil(len(panels) / 2)
        cells = [{"row": row, "key": key} for key in panels for row in rows]
    headed = len(rows) > 1 and not own
    height = math.ceil(len(cells) / columns)                # in panels
    width, inches, gap = 10.4, 2.3 * height + 2, 0.85
    panel_width, deep = (width - 1.2 + gap) / columns - gap, math.ceil(len(lines) / 4)
    with picture(path, width, inches) as fig:
        grid = fig.add_gridspec(height, columns, left=0.6 / width, right=1 - 0.6 / width,
                                top=1 - (0.87 + 0.4 * headed + 0.21 * deep) / inches,
                                bottom=0.45 / inches, hspace=0.55, wspace=gap / panel_width)
        draw_legend(fig, lines, 1 - 0.1 / inches)
        for i, cell in enumerate(cells):
            ax = fig.add_subplot(grid[i // columns, i % columns])
            row, key = cell.get("row", ""), cell.get("key", "eval/accuracy")
            name, subtitle, form = panels[key]
            here = dict(zip(cell.get("arms", arms), lines.values()))
            if own:
                name, subtitle = row or cell["arms"][-1], cell.get("subtitle", name)
            elif i < columns:
                above(ax, textwrap.fill(row, 34), -22, 36, fontsize=11.5, fontweight="bold",
                      color=GREY)
            above(ax, name, -22, 18, fontsize=10, fontweight="bold")
            above(ax, subtitle, -22, 6, fontsize=8, color=GREY)
            runs = [run for run in results if run["row"] == row]
            draw_panel(ax, runs, key, form, here, whole=own)


def draw_legend(fig, lines, top):
    from matplotlib.lines import Line2D

    # A legend is filled column by column, and read row by row.
    across = min(len(lines), 4)
    order = [name for column in range(across) for name in [*lines][column::across]]
    swatches = [Line2D([], [], color=color, linestyle=dashes, linewidth=2.4)
                for color, dashes in map(lines.get, order)]
    fig.legend(swatches, order, frameon=False, loc="upper left", ncols=across, fontsize=10.5,
               bbox_to_anchor=(0.015, top), handlelength=2.2)


def styles(arms):
    """{arm: (colour, dashes)}, by what stands before and after the comma."""
    families, kinds = (dict.fromkeys(arm.partition(", ")[i] for arm in arms) for i in (0, 2))
    color = dict(zip(families, itertools.cycle(ARM_COLORS)))
    dashes = dict(zip(kinds, itertools.cycle(DASHES)))
    return {arm: (color[arm.partition(", ")[0]], dashes[arm.partition(", ")[2]]) for arm in arms}


def draw_panel(ax, runs, key, form, lines, *, whole):
    """Draw a series of these runs, a line for each arm; whole: shares from 0 to 100%."""
    most = 1 if "%" in form else None       # the largest value there is
    _, _, against = key.partition(" against ")
    ends = []
    for arm, style in lines.items():
        if not against:
            ends += draw_arm(ax, of_arm(runs, arm), key, *style, most, band=len(lines) <= 6)
    if against:
        draw_ends(ax, runs, lines, key)
    if key in LOGARITHMIC and ax.lines:
        ax.set_yscale("log")
        # What fits the lines: the intervals of so few seeds may be a hundred times as wide.
        values = np.concatenate([line.get_ydata() for line in ax.lines])
        ax.set_ylim(np.nanmin(values) / 3, np.nanmax(values) * 3)
    if len(lines) > 4:      # the numbers at their ends would not fit; the table has them
        ends = []
    finish(ax, ends, form, top=1.04 if most and (whole or ax.dataLim.y1 > 0.85) else None)
    if key in LOGARITHMIC:
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    ax.set_xlabel(against or "step")
    if against in LOGARITHMIC:
        ax.set_xscale("log")
        ax.autoscale(axis="x")
        ax.xaxis.get_major_locator().set_params(subs=(1, 2, 4, 6))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")


def draw_arm(ax, runs, key, color, dashes, most, *, band):
    """Draw the mean over the runs and the band of its 95% interval; its end, for finish().

    most: the largest value there is, or None.
    """
    steps, values = series(runs, key)
    if not len(steps):
        return []
    if key in LOGARITHMIC:
        center, half = interval(np.log(np.maximum(values, 1e-4)))
        low, center, high = np.exp([center - half, center, center + half])
    else:
        center, half = interval(values)
        # Of a share or a length, nothing lies below 0, and of a share nothing above 1.
        low = np.maximum(center - half, min(0, np.nanmin(values)))
        high = np.minimum(center + half, most or np.inf)
    if band:                # many would merge into a grey
        ax.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
    ax.plot(steps, center, color=color, linestyle=dashes, linewidth=1.8)
    return [(np.nanmean(at_end(key, center)), "", color)]


def draw_ends(ax, runs, lines, key):
    """Draw `a against b`: a line for each family of arms, through where its arms end."""
    what, _, against = key.partition(" against ")
    points = {}         # {colour, one for each family: [(b, a)]}
    for arm, (color, _) in lines.items():
        if of_arm(runs, arm):
            x, y = (np.array([*ends_of(of_arm(runs, arm), name)[1].values()])
                    for name in (against, what))
            x = geometric_mean(x) if against in LOGARITHMIC else x.mean()
            points.setdefault(color, []).append((x, y.mean()))
    for color, through in points.items():
        ax.plot(*zip(*through), color=color, marker="o", markersize=4, linewidth=1.8)


# --- what runs come to ----------------------------------------------------------------------------

def of_arm(runs, arm):
    return [run for run in runs if run["arm"] == arm]


def series(runs, key):
    """(steps, values (runs, steps)) of one series; both empty if it was not recorded.

    `lowest a` is the lowest a from the second value on.
    """
    if key.startswith("lowest "):
        steps, values = series(runs, key.removeprefix("lowest "))
        return steps[1:], np.minimum.accumulate(values[:, 1:], 1)
    pairs = [(run["eval"]["step"], run["eval"].get(key)) if key.startswith("eval/")
             else (run["steps"], run["series"].get(key)) for run in runs]
    pairs = [(steps, values) for steps, values in pairs if values]
    return (np.array(pairs[0][0] if pairs else []),
            np.array([values for _, values in pairs], dtype=float, ndmin=2))     # None is NaN


def at_end(key, values):
    """Of the values (..., parts) of a series those of its end: the last fifth, or the last one."""
    last = 1 if "eval/" in key or key in TOTALS else max(1, values.shape[-1] // 5)
    return values[..., -last:]


def ends_of(runs, key, at=None):
    """({seed: first value}, {seed: mean of the end, or at these steps}), if there are any."""
    begins, ends = {}, {}
    for run in runs:
        steps, values = series([run], key)
        end = at_end(key, values) if at is None else values[:, np.isin(steps, at)]
        for found, part in ((begins, values[:, :1]), (ends, end)):
            if np.isfinite(part).any():
                found[run["seed"]] = np.nanmean(part)
    return begins, ends


def interval(values):
    """The mean over the runs and half its 95% confidence interval; values (runs, ...)."""
    values = np.ma.masked_invalid(values)
    count = values.count(0)
    half = T_95[np.minimum(count, 9)] * np.ma.filled(values.std(0, ddof=1), 0)
    return np.ma.filled(values.mean(0), math.nan), half / np.sqrt(np.maximum(count, 1))


def geometric_mean(values):
    return np.exp(np.log(values).mean())
