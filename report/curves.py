"""Draws the metrics.jsonl and eval.jsonl of a run as one picture that explains itself.

    python -m report.curves out/run_a -o picture.png              one run, in six panels
    python -m report.curves out/run_a out/run_b -o picture.png    several runs, a colour each
"""
import argparse
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from .command_line import UserError, user_errors
from .metrics import training_time
from .text import duration, is_finite, read_jsonl

# The palette of Okabe and Ito, whose colours colour-blind readers can tell apart. Its yellow is too
# pale for lines, so brown takes its place.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5C3E"]
BLUE, ORANGE, GREEN, PINK, SKY, _, BROWN = COLORS
INK, GREY = "#22272e", "#6b7280"
STYLE = {
    "text.parse_math": False, "font.size": 9, "text.color": INK,
    "axes.edgecolor": "#c4c9d0", "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e5e7eb", "grid.linewidth": 0.8,
    "axes.labelsize": 8, "axes.labelcolor": GREY, "axes.labelpad": 1,
    "xaxis.labellocation": "right",
    "xtick.color": GREY, "xtick.labelsize": 8, "xtick.major.size": 0,
    "ytick.color": GREY, "ytick.labelsize": 8, "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
}
MOST_STEPS = 500            # about as many as a panel has pixels


def draw_curves(run_dirs, path):
    """Write a PNG: everything that one run recorded, or the key numbers of several runs overlaid.

    Raises UserError if a folder holds no run. Runs are labelled with their folders' names.
    """
    runs = [Run(run_dir) for run_dir in run_dirs]
    with picture(path, 13, 8, dpi=130) as fig:
        if len(runs) > 1:
            draw_several(fig, runs)
        else:
            draw_one(fig, runs[0])


@contextmanager
def picture(path, width, height, dpi=150):
    """A figure in our style, of so many inches, which is written at the end."""
    # Matplotlib is slow to load, so load it only to draw. Figure rather than pyplot, because pyplot
    # would settle the backend for the whole process.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
        yield fig
        fig.savefig(path)


class Run:
    """What a run has recorded so far; UserError if it has not finished a step."""

    def __init__(self, run_dir):
        self.name = Path(run_dir).resolve().name
        self.steps = read_jsonl(Path(run_dir) / "metrics.jsonl", most=MOST_STEPS)
        self.evaluations = read_jsonl(Path(run_dir) / "eval.jsonl", most=MOST_STEPS)
        if not self.steps:
            raise UserError(f"{run_dir}: no step in metrics.jsonl yet; "
                            "give the folder of a run, such as out/run_a.")
        for row in self.steps:
            row["training_time"] = training_time(row)

    def keys(self, start):
        """The names of the metrics that begin with `start`, in the order they were written."""
        rows = self.steps + self.evaluations
        return list(dict.fromkeys(key for row in rows for key in row if key.startswith(start)))

    def series(self, key):
        """The steps and values of one metric, (2, steps); a value that was not finite is NaN."""
        rows = self.evaluations if key.startswith("eval/") else self.steps
        pairs = [(row["step"], row[key] if is_finite(row[key]) else np.nan)
                 for row in rows if key in row]
        return np.array(pairs, dtype=float).reshape(-1, 2).T

    def finite(self, key):
        """The finite values of one metric."""
        values = self.series(key)[1]
        return values[np.isfinite(values)]

    def headline(self):
        """What the run achieved: "held-out accuracy 25% → 71%, answers 30 → 52 tokens, in ..."."""
        parts = []
        for template, *keys in (
                ("held-out accuracy {:.1%} → {:.1%}", "eval/accuracy"),
                ("answers {:.0f} → {:.0f} tokens", "eval/mean_length", "completions/mean_length"),
                ("reward {:.2f} → {:.2f}", "reward")):
            known = [values for values in map(self.finite, keys) if len(values) > 1]
            parts += [template.format(values[0], values[-1]) for values in known[:1]]
        count = self.steps[-1]["step"] - self.steps[0]["step"] + 1
        seconds = self.finite("step_time").sum() * count / len(self.steps)
        # The reward only if one of the better two is missing.
        parts = [*parts[:2], f"in {count:,} step{'s' * (count != 1)}", duration(seconds)]
        return ", ".join(parts if seconds else parts[:-1])


# --- one run --------------------------------------------------------------------------------------

def draw_one(fig, run):
    reward, accuracy, length, drift, health, seconds = title(fig, run.name, run.headline())
    draw_reward(reward, run)
    draw_accuracy(accuracy, run)
    draw_length(length, run)
    draw_strips(
        drift, [run], "Exploration and drift", "how sure the policy is, and how far it has moved",
        ("kl", "{:.2g}", "KL to the reference: a spike is fine, a lasting climb is not", [PINK]),
        ("entropy", "{:.2g}", "entropy, nats per token: falls as the policy gets sure", [GREEN]))
    draw_strips(
        health, [run], "Health of the updates", "early trouble shows here first",
        ("frac_reward_zero_std", "{:.0%}",
         "groups of equal rewards: bad early; late, the task is solved", [ORANGE]),
        ("clip_ratio/region_mean", "{:.1%}", "tokens clipped: a few percent at most", [BLUE]),
        ("grad_norm", "{:.2g}", "gradient norm: spikes are clipped", [BROWN]))
    draw_time(seconds, run)


def draw_reward(cell, run):
    ax, = panel(cell, "Reward", "the total should climb; its parts tell what is being learned")
    keys = [key for key in run.keys("rewards/") if key.endswith("/mean")]
    ends = []
    for key, color in zip(keys, COLORS * 9):
        name = key.removeprefix("rewards/").removesuffix("/mean").removesuffix("_reward")
        ends += line(ax, run, key, color, name.replace("_", " "), width=1.3)
    finish(ax, ends + line(ax, run, "reward", INK, "total", width=2.4), "{:.2f}")


def draw_accuracy(cell, run):
    ax, = panel(cell, "Held-out accuracy",
                "problems never trained on; sampled should climb towards greedy")
    rows = [(key, GREEN, key.removeprefix("eval/"), 1.2) for key in run.keys("eval/pass@")]
    ends = []
    for key, color, name, width in [*rows, ("eval/greedy_accuracy", ORANGE, "greedy", 1.6),
                                    ("eval/accuracy", BLUE, "sampled", 2.4)]:
        values = run.finite(key)
        label = f"{name} {100 * values[0]:.0f} →" if len(values) > 1 else name
        ends += line(ax, run, key, color, label, width)
    finish(ax, ends, "{:.0%}", top=1.04)


def draw_length(cell, run):
    clipped = run.finite("completions/clipped_ratio")
    ax, *below = panel(cell, "Completion length, tokens",
                       "grows where thinking pays; band: shortest to longest",
                       heights=[3, 1] if clipped.any() else [1])
    steps, low = run.series("completions/min_length")
    _, high = run.series("completions/max_length")
    if len(low) == len(high) > 0:
        ax.fill_between(steps, smooth(low), smooth(high), color=SKY, alpha=0.22, linewidth=0)
    ends = line(ax, run, "completions/mean_length", BLUE, "training", width=2.2)
    finish(ax, ends + line(ax, run, "eval/mean_length", ORANGE, "held-out", width=1.2), "{:.0f}")
    for ax in below:
        strip(ax, [run], "completions/clipped_ratio", "{:.0%}",
              "cut off at the length limit: should be rare", [PINK])


def draw_time(cell, run):
    ax, = panel(cell, "Where the time goes",
                "seconds per step, and each phase's share of the whole run")
    phases = run.keys("timing_s/")      # the columns of the table; its rows are the steps
    table = np.array([[row.get(key) or 0.0 for key in phases] for row in run.steps])
    shares = table.sum(axis=0) / max(table.sum(), 1e-9)
    # Average over at most 60 bins: a long run stays readable, and since these are means, each
    # phase's area is still the time it took.
    bins = np.array_split(np.arange(len(table)), min(len(table), 60))
    steps = [row["step"] for row in run.steps]
    edges = [steps[part[0]] - 0.5 for part in bins] + [steps[-1] + 0.5]
    base = np.zeros(len(bins))
    for i in np.flatnonzero(shares > 0.004):
        below, base = base, base + [table[part, i].mean() for part in bins]
        name = phases[i].removeprefix("timing_s/").replace("_", " ")
        ax.stairs(base, edges, baseline=below, fill=True, color=COLORS[i % len(COLORS)],
                  alpha=0.85, label=f"{name} {shares[i]:.0%}")
    if base.any():
        ax.legend(loc="center left", bbox_to_anchor=(0.99, 0.5), frameon=False, fontsize=8.5,
                  reverse=True, handlelength=0.8, handleheight=0.8, handletextpad=0.5,
                  labelspacing=0.7)
    finish(ax, [])


# --- several runs ---------------------------------------------------------------------------------

def draw_several(fig, runs):
    from matplotlib.lines import Line2D

    colors = (COLORS * len(runs))[:len(runs)]
    swatches = [Line2D([], [], color=color, linewidth=3) for color in colors]
    fig.legend(swatches, [run.name for run in runs], frameon=False, loc="center left",
               bbox_to_anchor=(0.02, 0.915), ncols=min(len(runs), 6), fontsize=10,
               handlelength=1.2)
    panels = [
        ("Reward", "the total; comparable where the reward weights are the same",
         ("reward", "{:.2f}", "")),
        ("Held-out accuracy, sampled", "problems never trained on: the number to compare",
         ("eval/accuracy", "{:.0%}", "")),
        ("Completion length, tokens", "grows where thinking pays",
         ("completions/mean_length", "{:.0f}", "")),
        ("Exploration and drift", "how sure the policies are, and how far they have moved",
         ("kl", "{:.2g}", "KL to the reference"), ("entropy", "{:.2g}", "entropy, nats per token")),
        ("Gradient norm", "should stay low and calm", ("grad_norm", "{:.2g}", "")),
        ("Seconds per step", "without evaluations and checkpoints; lower is faster",
         ("training_time", "{:.2f}", "")),
    ]
    for cell, (name, subtitle, *rows) in zip(title(fig, f"{len(runs)} runs", ""), panels):
        draw_strips(cell, runs, name, subtitle, *((*row, colors) for row in rows))


# --- the parts of a panel -------------------------------------------------------------------------

def title(fig, name, sentence):
    """Write the head of the picture; returns the six cells below it, row by row."""
    fig.text(0.027, 0.955, name, fontsize=17, fontweight="bold", va="center")
    fig.text(0.027, 0.913, sentence, fontsize=11.5, color=GREY, va="center")
    grid = fig.add_gridspec(2, 3, left=0.05, right=0.9, bottom=0.06, top=0.81,
                            wspace=0.68, hspace=0.5)
    return [grid[i] for i in range(6)]


def panel(cell, name, subtitle, heights=(1,)):
    """Put axes into one cell, top to bottom, with relative `heights`, under a common title."""
    rows = cell.subgridspec(len(heights), 1, height_ratios=heights,
                            hspace=0.25 * (len(heights) - 1))
    axes = rows.subplots(squeeze=False)[:, 0]
    above(axes[0], name, -22, 32, fontsize=11.5, fontweight="bold")
    above(axes[0], subtitle, -22, 19, fontsize=8.5, color=GREY)
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel("step")
    return axes


def above(ax, text, x, y, **style):
    """Write above the axes, (x, y) points from their upper left corner."""
    ax.annotate(text, (0, 1), xytext=(x, y), xycoords="axes fraction", textcoords="offset points",
                **style)


def draw_strips(cell, runs, name, subtitle, *rows):
    """Draw a panel of strips, as strip() takes them, but not those that were never recorded."""
    rows = [row for row in rows if any(len(run.finite(row[0])) for run in runs)] or rows[:1]
    for ax, row in zip(panel(cell, name, subtitle, heights=[1] * len(rows)), rows):
        strip(ax, runs, *row)


def strip(ax, runs, key, form, text, colors):
    """Draw a metric of each run, in its color; `text` says what it is and what to expect of it."""
    ends = [end for run, color in zip(runs, colors)
            for end in line(ax, run, key, color, "", width=1.8)]
    finish(ax, ends, form, top=1.04 if key == "eval/accuracy" else None)
    above(ax, text if ends else "", 0, 3, fontsize=8, color=GREY)


def line(ax, run, key, color, label, width):
    """Draw one series: an evaluation's by its points, another smoothed over a tint of its values.

    Returns the line's end, [(last value, label, color)], for finish(); [] without any finite value.
    """
    steps, values = run.series(key)
    seen = np.isfinite(values)
    if not seen.any():
        return []
    if key.startswith("eval/"):
        marker = {"marker": "o", "markersize": 3.5} if len(values) < 40 else {}
        steps, values = steps[seen], values[seen]
    else:
        marker = {"marker": "o", "markersize": 4} if len(values) <= 3 else {}
        if len(values) > 10:
            ax.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
        values = smooth(values)
    ax.plot(steps, values, color=color, linewidth=width, **marker)
    return [(values[np.isfinite(values)][-1], label, color)]


def smooth(values):
    """Centred moving average over a tenth of the series, with a Hann window, ignoring NaNs."""
    # A box window would spread a single spike into a plateau; this one keeps it a bump.
    kernel = np.hanning((len(values) // 10 | 1) + 2)[1:-1]     # of an odd length: it has a centre
    seen = np.isfinite(values)
    known = np.array([seen, np.where(seen, values, 0.0)])
    sums = np.array([np.convolve(row, kernel, mode="same") for row in known])
    # Most is learned in the first steps, and a window cut in half there would hide where the run
    # began: so it grows from a single value, and stays centred.
    for i in range(len(kernel) // 2):
        sums[:, i] = known[:, :2 * i + 1] @ np.hanning(2 * i + 3)[1:-1]
    weight, total = sums
    return np.where(weight > 0, total / np.maximum(weight, 1e-9), np.nan)


def finish(ax, ends, form="", top=None):
    """Set the scales, and write each line's name and last value at its right end.

    ends: what line() returned. form: the format of the values; with a % in it, the
    y axis is in percent too. top: the upper limit of the y axis (default: from the data).
    """
    if not ax.has_data():
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center",
                color=GREY)
        ax.set(xticks=[], yticks=[], xlabel="")
        return
    last = max(1, ax.dataLim.x1)
    ax.set_xlim(-0.02 * last, 1.02 * last)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1, nbins=6)
    if ax.get_yscale() == "linear" and ax.dataLim.y0 >= 0:
        ax.set_ylim(0, top or 1.1 * ax.dataLim.y1 or 1)
    if "%" in form:
        ax.yaxis.set_major_formatter(
            lambda value, _: f"{value:.3%}".rstrip("0%").rstrip(".") + "%")
    ends, scale = sorted(ends), ax.yaxis.get_transform().transform
    (low, high), values = scale(ax.get_ylim()), scale([value for value, _, _ in ends])
    heights = (values - low) / (high - low)
    # A line of text as a fraction of the height of the axes; there are 72 points to an inch.
    gap = 12 / (ax.get_position().height * ax.figure.get_figheight() * 72)
    for _ in range(100):    # labels that overlap push each other apart
        overlap = np.maximum(gap - np.diff(heights), 0) / 2
        heights[:-1] -= overlap
        heights[1:] += overlap
    if ends:
        heights -= max(heights[-1] - 1, 0)
        heights += max(-heights[0], 0)
    for height, (value, label, color) in zip(heights, ends):
        ax.text(1.02, height, f"{label} {form.format(value)}".strip(), transform=ax.transAxes,
                va="center", color=color, fontsize=8.5)


@user_errors("report.curves")
def main():
    parser = argparse.ArgumentParser(prog="python -m report.curves",
                                     description="Draw the curves of one or more runs.")
    parser.add_argument("runs", nargs="+", help="folders of runs, such as out/run_a")
    parser.add_argument("-o", "--output", default="curves.png",
                        help="the picture to write (default: %(default)s)")
    args = parser.parse_args()
    draw_curves(args.runs, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
