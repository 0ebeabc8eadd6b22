"""Draws the results of an experiment, and says what runs come to."""
import functools
import math
import warnings

import numpy as np

from run.report.picture import COLORS, GREY, above, finish, picture

BLUE, ORANGE, GREEN, PINK, _, _, BROWN = COLORS
ARM_COLORS = [BLUE, ORANGE, GREEN, PINK, BROWN]
LOGARITHMIC = ("kl", "grad_norm")       # one run's may be a hundred times another's
DASHES = ["-", (0, (3, 1.5)), ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (1, 3))]


def draw(results, experiment, panels, path):
    """Write a PNG: the cells of the experiment, or a panel for each series of each of its rows.

    panels: {series: (title, subtitle, format of the values)}. An arm named `grpo, none` has the
    colour of all arms that begin with `grpo`; what follows the comma picks the dashes. Arms of a
    cell have the colours of the legend, one after the other. The numbers beside a panel are the
    ends of its lines, as the tables have them.
    """
    arms = list(dict.fromkeys(run["arm"] for run in results))
    rows = list(dict.fromkeys(run["row"] for run in results))
    own = "cells" in experiment
    if own:     # arms beyond the legend are in tables only
        cells, arms = experiment["cells"], list(experiment["legend"])
        lines = {name: (color, "-") for name, color in experiment["legend"].items()}
    else:
        cells = [{"row": row, "key": key} for key in experiment["panels"] for row in rows]
        lines = styles(arms)
    columns = experiment.get("columns", 2)
    height = math.ceil(len(cells) / columns)                # in panels
    width, inches, gap = 10.4, 2.3 * height + 2, 0.85
    panel_width, deep = (width - 1.2 + gap) / columns - gap, math.ceil(len(lines) / 4)
    with picture(path, width, inches) as fig:
        grid = fig.add_gridspec(height, columns, left=0.6 / width, right=1 - 0.6 / width,
                                top=1 - (0.87 + 0.21 * deep) / inches, bottom=0.45 / inches,
                                hspace=0.55, wspace=gap / panel_width)
        draw_legend(fig, lines, 1 - 0.1 / inches)
        for i, cell in enumerate(cells):
            ax = fig.add_subplot(grid[i // columns, i % columns])
            row, key = cell.get("row", ""), cell.get("key", "eval/accuracy")
            title, subtitle, form = panels[key]
            if row:
                title, subtitle = row, title
            elif own:
                title, subtitle = cell["arms"][-1], cell["subtitle"]
            above(ax, title, -22, 18, fontsize=10, fontweight="bold")
            above(ax, subtitle, -22, 6, fontsize=8, color=GREY)
            runs = [run for run in results if run["row"] == row]
            here = dict(zip(cell.get("arms", arms), lines.values()))
            draw_panel(ax, runs, key, form, here, whole=own)


def draw_legend(fig, lines, top):
    from matplotlib.lines import Line2D

    # A legend is filled column by column, and read row by row.
    across = min(len(lines), 4)
    order = []
    for column in range(across):
        order += list(lines)[column::across]
    swatches = []
    for name in order:
        color, dashes = lines[name]
        swatches.append(Line2D([], [], color=color, linestyle=dashes, linewidth=2.4))
    fig.legend(swatches, order, frameon=False, loc="upper left", ncols=across, fontsize=10.5,
               bbox_to_anchor=(0.015, top), handlelength=2.2)


def styles(arms):
    """{arm: (colour, dashes)}, by what stands before and after the comma."""
    colors, dashes, found = {}, {}, {}
    for arm in arms:
        family, _, kind = arm.partition(", ")
        colors.setdefault(family, ARM_COLORS[len(colors) % len(ARM_COLORS)])
        dashes.setdefault(kind, DASHES[len(dashes) % len(DASHES)])
        found[arm] = colors[family], dashes[kind]
    return found


def draw_panel(ax, runs, key, form, lines, *, whole):
    """Draw a series of these runs: a line for each arm, the mean, and a band, its 95% interval.

    On a logarithmic axis it is the geometric mean, without a band. whole: shares from 0 to 100%.
    """
    most = 1 if "%" in form else np.inf     # the largest value there is
    for arm, (color, dashes) in lines.items():
        steps, values = series(runs, arm, key)
        if not len(steps):
            continue
        center, half = interval(values)
        if key in LOGARITHMIC:
            center = np.exp(np.nanmean(np.log(np.maximum(values, 1e-4)), 0))
        elif len(lines) <= 6:       # many bands would merge into a grey
            # Of a share or a length, nothing lies below 0, and of a share nothing above 1.
            low = np.maximum(center - half, min(0, np.nanmin(values)))
            high = np.minimum(center + half, most)
            ax.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
        label = None
        if len(lines) <= 4:     # more numbers would not fit beside the panel; the table has them
            ends = np.nanmean(at_end(key, values), 1)
            label = form.format((np.nanmedian if key in LOGARITHMIC else np.nanmean)(ends))
        ax.plot(steps, center, color=color, linestyle=dashes, linewidth=1.8, label=label)
    finish(ax, form)
    if most == 1 and (whole or ax.dataLim.y1 > 0.85):
        ax.set_ylim(0, 1.04)
    if key in LOGARITHMIC and ax.lines:
        values = np.concatenate([line.get_ydata() for line in ax.lines])
        ax.set_yscale("log")
        ax.set_ylim(np.nanmin(values) / 3, np.nanmax(values) * 3)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("")
    ax.set_xlabel("step")


def draw_bars(results, experiment, path):
    """Write a PNG: for the arm of the experiment's `bars`, the shares in its series `also`, which
    are equal parts from 0 to 1, before training (its first part) and after (its last fifth)."""
    arm, keys = experiment["bars"]["arm"], experiment["also"]
    found = [series(results, arm, key)[1] for key in keys]              # (runs, parts) each
    before = [values[:, 0].mean() for values in found]
    after = [at_end(key, values).mean() for key, values in zip(keys, found)]
    with picture(path, 10.4, 4.2) as fig:
        ax = fig.add_axes((0.08, 0.13, 0.85, 0.65))
        edges = np.linspace(0, 1, len(keys) + 1)
        ax.stairs(after, edges, fill=True, color=ORANGE, alpha=0.8, label="after")
        ax.stairs(before, edges, color=GREY, linewidth=2.4, label="before")
        ax.axvline(0.5, color=BLUE, linestyle="--", linewidth=1.4)
        above(ax, experiment["bars"]["title"], 0, 34, fontsize=12, fontweight="bold")
        above(ax, experiment["bars"]["subtitle"], 0, 18, fontsize=9, color=GREY)
        ax.set(xlim=(0, 1), xticks=(0, 0.5, 1), xticklabels=experiment["bars"]["ticks"])
        ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        ax.legend(frameon=False, loc="upper right")


def draw_front(results, experiment, folder):
    """Write the README's picture, an SVG for each language: of each series of the experiment's
    `front.lines` the mean over all runs, and a band from the lowest to the highest.

    Its texts stay texts, which a browser draws, so a picture in Chinese needs no Chinese font here.
    """
    front = experiment["front"]
    (arm,) = experiment["arms"]
    for i, name in enumerate(front["files"]):
        with warnings.catch_warnings(), picture(folder / name, 8, 3) as fig:
            warnings.filterwarnings("ignore", "Glyph")          # matplotlib's font lacks Chinese
            ax = fig.add_axes((0.06, 0.13, 0.7, 0.64))
            above(ax, front["title"][i], -22, 26, fontsize=12, fontweight="bold")
            above(ax, front["subtitle"][i].format(len(results)), -22, 10, fontsize=9, color=GREY)
            for (key, labels), color in zip(front["lines"].items(), COLORS):
                steps, values = series(results, arm, key)
                mean = values.mean(0)
                ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.2,
                                linewidth=0)
                ax.plot(steps, mean, "o-", color=color, linewidth=1.8, markersize=4)
                ends = f"{labels[i]} {mean[0]:.0%} → {mean[-1]:.1%}"
                ax.annotate(ends, (1.02, 0.6 + 0.1 * len(ax.texts)), xycoords="axes fraction",
                            color=color, fontsize=10)
            finish(ax, "{:.0%}")
            ax.set_ylim(0, 1.04)
            ax.set_xlabel(front["step"][i])


def draw_arrows(results, experiment, path):
    """Write a PNG: for each row of the experiment's `arrows` the truth, upward, and each arm's
    update: all of length 1, turned by its angle, to the right if it makes answers longer."""
    arrows = experiment["arrows"]
    with picture(path, 12, 3.6) as fig:
        for i, row in enumerate(arrows["rows"]):
            ax = fig.add_axes((0.01 + 0.5 * i, 0.02, 0.48, 0.8))
            above(ax, arrows["titles"][i], 8, 20, fontsize=11, fontweight="bold")
            above(ax, arrows["subtitles"][i], 8, 6, fontsize=9, color=GREY)
            ax.plot((0, 0), (0, 1.4), ":", color=GREY, linewidth=1)
            runs = [run for run in results if run["row"] == row]
            found = [(*update_of(runs, arm), name, color)
                     for (arm, name), color in zip(arrows["arms"].items(), COLORS)]
            for height, side in ((1.38, 1), (1.38, -1)):        # of labels, the first on each side
                for angle, spread, name, color in sorted(found, key=lambda arrow: abs(arrow[0])):
                    if (angle < 0) == (side < 0):
                        draw_arrow(ax, angle, spread, f"{name}, {abs(angle):.0f}°", color,
                                   (side * 0.9, height))
                        height -= 0.15
            ax.set(xlim=(-2.2, 2.2), ylim=(-0.05, 1.5), aspect="equal")
            ax.axis("off")


def update_of(runs, arm):
    """The angle of an arm, in degrees, below 0 if answers become shorter, and the covariance of a
    step (2, 2), across and along the truth; means over the runs, for groups of 8."""
    def mean(name):
        values = series(runs, arm, f"{name}/8")[1]
        return values.mean() if values.size else 0.0

    side, up = mean("side"), mean("up")
    both = mean("together") * side * up * (1 if mean("longer") >= 0 else -1)
    angle = mean("angle") * (1 if mean("longer") >= 0 else -1)
    return angle, np.array([[side ** 2, both], [both, up ** 2]])


def draw_arrow(ax, angle, spread, text, color, place):
    """An arrow with its label, and around its tip the standard deviation of a step of 2,048 answers
    (16 times as many as were simulated), an ellipse."""
    from matplotlib.patches import Ellipse

    tip = (np.sin(np.radians(angle)), np.cos(np.radians(angle)))
    variances, axes = np.linalg.eigh(spread / 16)
    ax.add_patch(Ellipse(tip, *(2 * np.sqrt(variances)), color=color, alpha=0.18, linewidth=0,
                         angle=np.degrees(np.arctan2(axes[1, 0], axes[0, 0]))))
    ax.annotate("", tip, (0, 0), arrowprops={
        "arrowstyle": "-|>", "color": color, "linewidth": 2, "mutation_scale": 13, "shrinkA": 0,
        "shrinkB": 0})
    ax.plot((tip[0], place[0]), (tip[1], place[1]), color=color, linewidth=0.6, alpha=0.6)
    ax.text(*place, f" {text} ", color=color, fontsize=9, va="center",
            ha="left" if place[0] > 0 else "right")


def draw_against_tokens(results, key, panels, path):
    """Write a PNG: a series whose steps are numbers of samples k, against k and k mean lengths."""
    title, subtitle, form = panels[key]
    lines = styles(list(dict.fromkeys(run["arm"] for run in results)))
    with picture(path, 10.4, 4.6) as fig:
        draw_legend(fig, lines, 0.98)
        left, right = fig.subplots(1, 2, gridspec_kw={
            "left": 0.06, "right": 0.95, "top": 0.74, "bottom": 0.1, "wspace": 0.25})
        for ax, counted, base in ((left, "k samples", 2), (right, "the tokens of k samples", 10)):
            above(ax, f"{title}, against {counted}", -22, 18, fontsize=10, fontweight="bold")
            above(ax, subtitle, -22, 6, fontsize=8, color=GREY)
            for arm, (color, dashes) in lines.items():
                steps, values = series(results, arm, key)
                if ax is right:
                    steps = steps * series(results, arm, "length")[1].mean()
                center, half = interval(values)
                low, high = np.clip((center - half, center + half), 0, 1)       # it is a share
                ax.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)
                ax.plot(steps, center, color=color, linestyle=dashes, linewidth=1.8)
            finish(ax, form)
            ax.set_ylim(0, 1.04)
            ax.set_xscale("log", base=base)
            ax.set_xlim(ax.dataLim.x0 / 1.2, ax.dataLim.x1 * 1.2)
            ax.xaxis.set_major_formatter("{x:,g}")
            ax.tick_params(which="minor", length=0)
            ax.set_xlabel(counted)


def draw_marks(results, experiment, panels, path):
    """Write a PNG: a panel for each series of the experiment's `marks`, with a mark for each
    setting: its mean over all evaluations but the first, against how far a rollout's updates moved
    the policy. Both axes are logarithmic, the second in errors. The settings of
    `marks.ringed` have a ring, those of a single seed are pale.
    """
    legend, ringed = experiment["legend"], experiment["marks"]["ringed"]
    keys = experiment["marks"]["keys"]
    with picture(path, 10.4, 5.2) as fig:
        draw_legend(fig, {name: (color, "-") for name, color in legend.items()}, 0.99)
        axes = fig.subplots(1, len(keys), gridspec_kw={
            "left": 0.07, "right": 0.98, "top": 0.78, "bottom": 0.1, "wspace": 0.2})
        for ax, key in zip(axes, keys):
            above(ax, panels[key][0], -22, 18, fontsize=10, fontweight="bold")
            above(ax, "mean over a run's evaluations; the errors are on a logarithmic scale",
                  -22, 6, fontsize=8, color=GREY)
            for row, arm in dict.fromkeys((run["row"], run["arm"]) for run in results):
                runs = [run for run in results if (run["row"], run["arm"]) == (row, arm)]
                steps, moved = series(runs, arm, "moved/rms")
                color = next(legend[name] for name in legend if arm.startswith(name))
                has_ring = [row, arm] in ringed
                ax.plot(np.average(moved, 1, sizes(steps)).mean(),
                        1 - series(runs, arm, key)[1][:, 1:].mean(), "o", color=color,
                        alpha=0.45 if len(runs) == 1 else 1, markersize=7 if has_ring else 5,
                        markeredgewidth=1.2 if has_ring else 0, markeredgecolor="black",
                        zorder=3 if has_ring else 2)
            ax.set(xscale="log", yscale="log", ylim=(1.1, 0.009),
                   xlabel=": ".join(panels["moved/rms"][:2]))
            ax.xaxis.set_major_formatter("{x:g}")
            errors = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
            ax.set_yticks(errors, [f"{1 - error:.0%}" for error in errors])
            ax.yaxis.set_minor_formatter("")


# --- what runs come to ----------------------------------------------------------------------------

def series(runs, arm, key):
    """(steps, values (runs, steps)) of a series of an arm; both empty if it was not recorded.

    `lowest a` is the lowest a from the second value on.
    """
    if key.startswith("lowest "):
        steps, values = series(runs, arm, key.removeprefix("lowest "))
        return steps[1:], np.minimum.accumulate(values[:, 1:], 1)
    steps, found = [], []
    for run in runs:
        if key.startswith("eval/"):
            own_steps, values = run["eval"].get("step"), run["eval"].get(key)
        else:
            own_steps, values = run["steps"], run["series"].get(key)
        if run["arm"] == arm and values:
            steps = own_steps
            found.append(values)
    return np.array(steps), np.array(found, dtype=float, ndmin=2)       # None is NaN


def sizes(steps):
    """Of how many steps each part of a series is the mean, given their mean step."""
    found = []
    for step in steps:
        found.append(2 * (step - sum(found)) - 1)
    return found


def at_end(key, values):
    """Of the values (..., parts) of a series those of its end: the last fifth, or the last one."""
    last = 1 if "eval/" in key else max(1, values.shape[-1] // 5)
    return values[..., -last:]


def interval(values, outside=0.05):
    """The mean over the runs and half its confidence interval, 95% by default; values (runs, ...).

    outside: how often the true mean lies outside of it.
    """
    values = np.ma.masked_invalid(values)
    count = values.count(0)
    half = np.vectorize(t_of)(count, outside) * np.ma.filled(values.std(0, ddof=1), 0)
    return np.ma.filled(values.mean(0), math.nan), half / np.sqrt(np.maximum(count, 1))


def p_value(t, freedom):
    """How often Student's t is further from 0 than this: Abramowitz and Stegun, 26.7.3 and 4."""
    angle, odd = math.atan2(abs(t), math.sqrt(freedom)), freedom % 2
    inside, term = 0, math.cos(angle) if odd else 1
    for i in range(2 + odd, freedom + 1, 2):
        inside += term
        term *= math.cos(angle) ** 2 * (i - 1) / i
    inside *= math.sin(angle)
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


@functools.cache
def t_of(count, outside=0.05):
    """What Student's t of so many values exceeds in this share of cases; 0 for one value."""
    low, high = 0.0, 13.0
    while count > 1 and high - low > 1e-9:      # p falls as t grows, and passes it between these
        middle = (low + high) / 2
        if p_value(middle, count - 1) > outside:
            low = middle
        else:
            high = middle
    return low


def holm(p_values):
    """p values, each corrected for all: of n the smallest times n, the next times n - 1, and so on;
    none ends below a smaller one, or above 1."""
    corrected, least = {}, 0
    for i, p in enumerate(sorted(p_values)):
        least = max(least, min(1, (len(p_values) - i) * p))
        corrected[p] = least
    return [corrected[p] for p in p_values]
