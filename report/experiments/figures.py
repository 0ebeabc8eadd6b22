"""Draws the results of an experiment, and prints their table."""
import itertools
import math
import textwrap

import numpy as np

from ..curves import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PINK, above, finish, picture

# Student's t for a 95% interval, by the number of values; a single value has no interval.
T_95 = np.array([0.0, 0.0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306])
LOGARITHMIC = ("kl", "grad_norm")       # one run's may be a hundred times another's
TOTALS = ("minutes",)                   # add up over a run
ARM_COLORS = [BLUE, ORANGE, GREEN, PINK, BROWN]


def draw_experiment(results, panels, path):
    """Write a PNG: a column of panels for each row of the experiment, a line for each arm.

    panels: {series: (title, subtitle, format of the values)}. An arm named `grpo, none` has the
    colour of all arms that begin with `grpo`; what follows the comma picks the dashes. The number
    at a line is the mean of its end, as in print_table().
    """
    rows, arms = (list(dict.fromkeys(run[name] for run in results)) for name in ("row", "arm"))
    columns = len(rows) if len(rows) > 1 else math.ceil(len(panels) / 2)
    lines = math.ceil(len(rows) * len(panels) / columns)
    width, height, gap = 10.4, 2.3 * lines + 2, 0.85        # inches
    inch, panel_width = 1 / height, (width - 1.2 + gap) / columns - gap
    deep = math.ceil(len(arms) / 4)     # lines of the legend
    with picture(path, width, height) as fig:
        grid = fig.add_gridspec(lines, columns, left=0.6 / width, right=1 - 0.6 / width,
                                top=1 - (0.87 + 0.4 * (len(rows) > 1) + 0.21 * deep) * inch,
                                bottom=0.45 * inch, hspace=0.55, wspace=gap / panel_width)
        draw_legend(fig, styles(arms), 1 - 0.1 * inch)
        cells = ((row, panel) for panel in panels.items() for row in rows)
        for i, (row, (key, (name, subtitle, form))) in enumerate(cells):
            ax, most = fig.add_subplot(grid[i // columns, i % columns]), 1 if "%" in form else None
            if against := key.partition(" against ")[2]:
                draw_ends(ax, results, row, arms, key)
                ends = []
            else:
                ends = [end for arm, style in styles(arms).items() for end in draw_arm(
                    ax, runs_of(results, (row, arm)), key, *style, most, band=len(arms) <= 6)]
            if i < columns:
                above(ax, textwrap.fill(row, 34), -22, 36, fontsize=11.5, fontweight="bold",
                      color=GREY)
            above(ax, name, -22, 18, fontsize=10, fontweight="bold")
            above(ax, subtitle, -22, 6, fontsize=8, color=GREY)
            # With many arms the numbers at the ends of the lines would not fit; the table has them.
            ends = ends if len(arms) <= 4 else []
            if key in LOGARITHMIC and ax.lines:
                ax.set_yscale("log")
                # What fits the lines: the intervals of so few seeds may be a hundred times as wide.
                values = np.concatenate([line.get_ydata() for line in ax.lines])
                ax.set_ylim(np.nanmin(values) / 3, np.nanmax(values) * 3)
            finish(ax, ends, form, top=1.04 if most and ax.dataLim.y1 > 0.85 else None)
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


def draw_legend(fig, styles, top):
    from matplotlib.lines import Line2D

    # A legend is filled column by column, and read row by row.
    across = min(len(styles), 4)
    order = [arm for column in range(across) for arm in [*styles][column::across]]
    swatches = [Line2D([], [], color=color, linestyle=dashes, linewidth=2.4)
                for color, dashes in map(styles.get, order)]
    fig.legend(swatches, order, frameon=False, loc="upper left", ncols=across, fontsize=10.5,
               bbox_to_anchor=(0.015, top), handlelength=2.2)


def draw_lessons(results, lessons, panels, legend, path):
    """Write a PNG: a panel for each lesson, its runs in colour and others beside them in grey.

    Thin lines are runs, thick ones their means.

    lessons: {title: (line of code or "", series, (row, arm) in grey or None, (row, arm))};
    panels: {series: (title, subtitle, format of the values)}; legend: what all panels show, and
    what their lines in colour and in grey are.
    """
    columns = 3 if len(lessons) % 4 else 4
    lines = math.ceil(len(lessons) / columns)
    inch = 1 / (2.6 * lines + 0.5)
    with picture(path, 10.4, 1 / inch) as fig:
        grid = fig.add_gridspec(lines, columns, left=0.05, right=0.94, bottom=0.4 * inch,
                                top=1 - 0.95 * inch, wspace=0.42, hspace=0.62)
        hue, at = (BLUE if any(code for code, *_ in lessons.values()) else ORANGE), 0.015
        for text, color in zip((*legend, "thin: single seeds"), (INK, hue, GREY, GREY)):
            written = fig.text(at, 1 - 0.22 * inch, text, color=color, fontsize=11, va="center")
            at += (written.get_window_extent().width / fig.dpi + 0.25) / fig.get_figwidth()
        for i, (title, (code, key, *pair)) in enumerate(lessons.items()):
            ax = fig.add_subplot(grid[i // columns, i % columns])
            name, _, form = panels[key]
            ends = []
            for arm, color in zip(pair, (GREY, hue)):
                steps, values = series(runs_of(results, arm), key)
                if len(steps):
                    ax.plot(steps, values.T, color=color, linewidth=0.8, alpha=0.45)
                    ax.plot(steps, mean := np.nanmean(values, 0), color=color, linewidth=2.2)
                    ends.append((np.nanmean(at_end(key, mean)), "", color))
            above(ax, title, -24, 22, fontsize=10, fontweight="bold")
            above(ax, code or name, -24, 8, fontsize=7.8, color=hue if code else GREY,
                  family="monospace" if code else None)
            finish(ax, ends, form, top=1.04 if "%" in form else None)
            ax.set_xlabel("step")


def styles(arms):
    """{arm: (colour, dashes)}, by what stands before and after the comma."""
    families, kinds = (dict.fromkeys(arm.partition(", ")[i] for arm in arms) for i in (0, 2))
    color = dict(zip(families, itertools.cycle(ARM_COLORS)))
    dashes = dict(zip(kinds, itertools.cycle(
        ["-", (0, (3, 1.5)), ":", "-.", (0, (5, 1, 1, 1, 1, 1))])))
    return {arm: (color[arm.partition(", ")[0]], dashes[arm.partition(", ")[2]]) for arm in arms}


def runs_of(results, arm):
    return [run for run in results if (run["row"], run["arm"]) == arm]


def draw_arm(ax, runs, key, color, dash, most, *, band):
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
        low, high = np.maximum(center - half, min(0, np.nanmin(values))), np.minimum(
            center + half, most or np.inf)
    if band:                # many would merge into a grey
        ax.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
    ax.plot(steps, center, color=color, linestyle=dash, linewidth=1.8)
    return [(np.nanmean(at_end(key, center)), "", color)]


def draw_ends(ax, results, row, arms, key):
    """Draw `a against b`: a line for each family of arms, through where its arms end."""
    what, _, against = key.partition(" against ")
    lines = {}          # {colour, one for each family: [(b, a)]}
    for arm, (color, _) in styles(arms).items():
        if runs_of(results, (row, arm)):
            ends = (np.array([*ends_of_runs(results, row, arm, name)[1].values()])
                    for name in (against, what))
            lines.setdefault(color, []).append([
                np.exp(np.log(end).mean()) if name in LOGARITHMIC else end.mean()
                for name, end in zip((against, what), ends)])
    for color, points in lines.items():
        ax.plot(*zip(*points), color=color, marker="o", markersize=4, linewidth=1.8)


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


def interval(values):
    """The mean over the runs and half its 95% confidence interval; values (runs, ...)."""
    values = np.ma.masked_invalid(values)
    count = values.count(0)
    half = T_95[np.minimum(count, 9)] * np.ma.filled(values.std(0, ddof=1), 0)
    return np.ma.filled(values.mean(0), math.nan), half / np.sqrt(np.maximum(count, 1))


def print_table(results, panels):
    """Print where each arm begins and ends in each panel, and the 95% interval of the end.

    The end is the mean of the last fifth of a run, or its last evaluation. After `grpo, none` the
    arm `bnpo, none` also gets its difference to it, seed by seed, with the interval of that.
    """
    panels = {key: panel for key, panel in panels.items() if " against " not in key}
    print("| |" + "".join(f" {title} |" for title, _, _ in panels.values()))
    print("|---|" + "---|" * len(panels))
    arms = list(dict.fromkeys((row["row"], row["arm"]) for row in results))
    for row, arm in arms:
        first = next(other for where, other in arms
                     if where == row and other.partition(", ")[2] == arm.partition(", ")[2])
        cells = []
        for key, (_, _, form) in panels.items():
            form = form.replace(":.0%", ":.1%").format
            begins, ends = ends_of_runs(results, row, arm, key)
            cell = " → ".join(form(np.mean(list(part.values())))
                              for part in (begins, ends) if part) or "-"
            if len(ends) > 1:
                cell += f" ± {form(interval(np.array(list(ends.values())))[1])}"
            base = ends_of_runs(results, row, first, key)[1]
            pairs = [ends[seed] - base[seed] for seed in ends if seed in base]
            if first != arm and len(pairs) > 1:
                center, half = interval(np.array(pairs))
                cell += f" ({form(center)} ± {form(half)})"
            cells.append(cell)
        print(f"| {f'{row}: {arm}' if row else arm} | {' | '.join(cells)} |")


def ends_of_runs(results, row, arm, key):
    """({seed: first value}, {seed: mean of the last fifth}) of an arm, as far as there are any."""
    begins, ends = {}, {}
    for run in runs_of(results, (row, arm)):
        _, values = series([run], key)
        for found, part in ((begins, values[:, :1]), (ends, at_end(key, values))):
            if np.isfinite(part).any():
                found[run["seed"]] = np.nanmean(part)
    return begins, ends
