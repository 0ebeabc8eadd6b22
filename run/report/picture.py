"""Draws the metrics.jsonl and eval.jsonl of a run as one picture that explains itself.

    python -m run.report.picture out/run_a -o picture.png              one run, in six panels
    python -m run.report.picture out/run_a out/run_b -o picture.png    several runs, a colour each
"""
import itertools
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dataset.jsonl import is_finite, read_jsonl
from errors import Parser, UserError, explained, user_errors

from ..metrics import duration, training_time

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
    "figure.subplot.hspace": 0.4,       # between the metrics of a panel
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
        with explained(path, "matplotlib can't write it", "give a name that ends in .png"):
            fig.savefig(path, format=Path(path).suffix[1:] or "png")


class Run:
    """What a run has recorded so far; UserError if it has not finished a step."""

    def __init__(self, run_dir):
        self.name = Path(run_dir).resolve().name
        self.steps = numbers_in(Path(run_dir) / "metrics.jsonl")
        self.evaluations = numbers_in(Path(run_dir) / "eval.jsonl")
        if not self.steps:
            raise UserError(f"{run_dir}: no step in metrics.jsonl yet; "
                            "give the folder of a run, such as out/run_a.")
        for row in self.steps:
            row["training_time"] = training_time(row)

    def keys(self, start, end=""):
        """The names of the metrics that begin and end so, in the order they were written."""
        names = dict.fromkeys(key for row in self.steps + self.evaluations for key in row)
        return [name for name in names if name.startswith(start) and name.endswith(end)]

    def series(self, key):
        """The steps and values of one metric, (2, steps); a value that was not finite is NaN."""
        rows = self.evaluations if key.startswith("eval/") else self.steps
        rows = [row for row in rows if key in row]
        values = [row[key] if is_finite(row[key]) else np.nan for row in rows]
        return np.array([[row["step"] for row in rows], values], dtype=float)

    def finite(self, key):
        """The finite values of one metric."""
        values = self.series(key)[1]
        return values[np.isfinite(values)]

    def headline(self):
        """What the run achieved: "held-out accuracy 25% → 71%, answers 30 → 52 tokens, ..."."""
        parts = []
        for form, key in (("held-out accuracy {:.1%} → {:.1%}", "eval/accuracy"),
                          ("answers {:.0f} → {:.0f} tokens", "eval/mean_length"),
                          ("reward {:.2f} → {:.2f}", "reward")):
            values = self.finite(key)
            if len(values) > 1 and len(parts) < 2:      # the reward only if one of them is missing
                parts.append(form.format(values[0], values[-1]))
        count = self.steps[-1]["step"] - self.steps[0]["step"] + 1
        seconds = self.finite("step_time").sum() * count / len(self.steps)
        steps = "1 step" if count == 1 else f"{count:,} steps"
        return ", ".join([*parts, steps, duration(seconds)])


def numbers_in(path):
    """The rows of a run's file, evenly spaced; what is no finite number is None, as null is."""
    with explained(path, "no run has written it", "give the folder of a run, such as out/run_a"):
        return [{name: value if is_finite(value) else None for name, value in row.items()}
                | {"step": int(float(row["step"]))} for row in read_jsonl(path, most=MOST_STEPS)]


# --- the panels -----------------------------------------------------------------------------------

# Of each panel: its title, what to expect of one run, and its metrics from top to bottom.
PANELS = [
    ("Reward", "the total should climb; its parts tell what is being learned", "reward"),
    ("Held-out accuracy", "problems never trained on; sampled should climb towards greedy",
     "eval/accuracy"),
    ("Completion length, tokens", "grows where thinking pays; band: shortest to longest",
     "completions/mean_length", "completions/clipped_ratio"),
    ("Exploration and drift", "how sure the policy is, and how far it has moved", "kl", "entropy"),
    ("Health of the updates", "early trouble shows here first", "frac_reward_zero_std",
     "clip_ratio/region_mean", "grad_norm"),
    ("Where the time goes", "seconds per step, and each phase's share of the whole run",
     "training_time"),
]
STRIPS = {      # metric: the format of its values, its colour if there is one run, what it is
    "kl": ("{:.2g}", PINK, "KL to the reference: a spike is fine, a lasting climb is not"),
    "entropy": ("{:.2g}", GREEN, "entropy, nats per token: falls as the policy gets sure"),
    "frac_reward_zero_std":
        ("{:.0%}", ORANGE, "groups of equal rewards: bad early; late, the task is solved"),
    "completions/clipped_ratio": ("{:.0%}", PINK, "cut off at the length limit: should be rare"),
    "clip_ratio/region_mean": ("{:.1%}", BLUE, "tokens clipped: a few percent at most"),
    "grad_norm": ("{:.2g}", BROWN, "gradient norm: spikes are clipped"),
    "reward": ("{:.2f}", INK, "the total, weighted"), "eval/accuracy": ("{:.0%}", BLUE, "sampled"),
    "completions/mean_length": ("{:.0f}", BLUE, "in training"),
    "training_time": ("{:.2f}", INK, "seconds per step, without evaluations and checkpoints"),
}


def panels(fig, runs):
    """Six panels, two rows of three; returns the axes of each metric.

    A panel leaves out metrics that are 0 throughout or were never recorded, but for its first.
    """
    shown = []
    for _, _, first, *others in PANELS:
        others = [key for key in others if any(run.finite(key).any() for run in runs)]
        shown.append([first, *others])
    cells = [[[key] for key in keys] for keys in shown]     # in each a mosaic of a single column
    axes = fig.subplot_mosaic([cells[:3], cells[3:]], gridspec_kw={
        "left": 0.05, "right": 0.9, "bottom": 0.06, "top": 0.81, "wspace": 0.68, "hspace": 0.5})
    for (title, subtitle, *_), keys in zip(PANELS, shown):
        above(axes[keys[0]], title, -22, 32, fontsize=11.5, fontweight="bold")
        if len(runs) == 1:
            above(axes[keys[0]], subtitle, -22, 19, fontsize=8.5, color=GREY)
        for key in keys[:-1]:
            axes[key].tick_params(labelbottom=False)
        axes[keys[-1]].set_xlabel("step")
    return axes


def draw_one(fig, run):
    head(fig, run.name, run.headline())
    axes = panels(fig, [run])
    lines = []
    for key, color in zip(run.keys("rewards/", "/mean"), itertools.cycle(COLORS)):
        name = key.removeprefix("rewards/").removesuffix("/mean").removesuffix("_reward")
        lines.append((run, key, color, name.replace("_", " "), 1.3))
    lines.append((run, "reward", INK, "total", 2.4))
    draw_lines(axes.pop("reward"), lines, "{:.2f}")
    any_of_k = [(run, key, GREEN, key.removeprefix("eval/"), 1.2)
                for key in run.keys("eval/pass@")]
    draw_lines(axes.pop("eval/accuracy"),
               [*any_of_k, (run, "eval/greedy_accuracy", ORANGE, "greedy", 1.6),
                (run, "eval/accuracy", BLUE, "sampled", 2.4)], "{:.0%}", top=1.04)
    ax = axes.pop("completions/mean_length")
    steps, low = run.series("completions/min_length")
    _, high = run.series("completions/max_length")
    if len(low) == len(high) > 0:
        ax.fill_between(steps, smooth(low), smooth(high), color=SKY, alpha=0.22, linewidth=0)
    draw_lines(ax, [(run, "completions/mean_length", BLUE, "training", 2.2),
                    (run, "eval/mean_length", ORANGE, "held-out", 1.2)], "{:.0f}")
    draw_time(axes.pop("training_time"), run)
    for key, ax in axes.items():
        draw_strip(ax, [run], key, [STRIPS[key][1]])


def draw_several(fig, runs):
    from matplotlib.lines import Line2D

    head(fig, f"{len(runs)} runs", "")
    colors = [COLORS[i % len(COLORS)] for i in range(len(runs))]
    swatches = [Line2D([], [], color=color, linewidth=3) for color in colors]
    fig.legend(swatches, [run.name for run in runs], frameon=False, loc="center left",
               bbox_to_anchor=(0.02, 0.915), ncols=min(len(runs), 6), fontsize=10,
               handlelength=1.2)
    for key, ax in panels(fig, runs).items():
        draw_strip(ax, runs, key, colors)


def draw_time(ax, run):
    phases = run.keys("timing_s/")      # the columns of the table; its rows are the steps
    table = np.array([[row.get(key) or 0.0 for key in phases] for row in run.steps])
    shares = table.sum(axis=0) / max(table.sum(), 1e-9)
    # Means over at most 60 bins: a phase's area is still the time it took.
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
                  reverse=True, handlelength=0.8, handleheight=0.8, handletextpad=0.5)
    finish(ax, [])


def draw_strip(ax, runs, key, colors):
    """A metric of each run, in its colour."""
    form, _, text = STRIPS[key]
    draw_lines(ax, [(run, key, color, "", 1.8) for run, color in zip(runs, colors)], form,
               top=1.04 if key == "eval/accuracy" else None)
    if ax.lines:
        above(ax, text, 0, 3, fontsize=8, color=GREY)


def draw_lines(ax, lines, form, top=None):
    """Draw each of the lines, as line() takes them, and what finish() adds."""
    ends = []
    for arguments in lines:
        ends += line(ax, *arguments)
    finish(ax, ends, form, top)


# --- the parts of a panel -------------------------------------------------------------------------

def head(fig, name, sentence):
    fig.text(0.027, 0.955, name, fontsize=17, fontweight="bold", va="center")
    fig.text(0.027, 0.913, sentence, fontsize=11.5, color=GREY, va="center")


def above(ax, text, x, y, **style):
    """Write above the axes, (x, y) points from their upper left corner."""
    ax.annotate(text, (0, 1), xytext=(x, y), xycoords="axes fraction", textcoords="offset points",
                **style)


def line(ax, run, key, color, label, width):
    """Draw one series: an evaluation's by its points, another smoothed over a tint of its values.

    Returns the line's end, [(last value, label, color)], for finish(); [] without any finite value.
    """
    steps, values = run.series(key)
    seen = np.isfinite(values)
    if not seen.any():
        return []
    marker = ""
    if key.startswith("eval/"):
        marker, steps, values = "o", steps[seen], values[seen]
    else:
        ax.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
        values = smooth(values)
    if len(values) == 1:        # which makes no line
        marker = "o"
    ax.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=3.5)
    return [(values[np.isfinite(values)][-1], label, color)]


def smooth(values):
    """Centred moving average over a tenth of the series, with a Hann window, ignoring NaNs."""
    # A box window would spread a single spike into a plateau; this one keeps it a bump.
    means = np.full(len(values), np.nan)
    for i in range(len(values)):
        # Most is learned in the first steps: there the window grows from a single value, and stays
        # centred, so that the curve begins where the run began.
        reach = min(len(values) // 20, i)
        window = values[i - reach:i + reach + 1]
        weights = np.hanning(2 * reach + 3)[1:-1][:len(window)]
        seen = np.isfinite(window)
        if seen.any():
            means[i] = np.average(window[seen], weights=weights[seen])
    return means


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
    if not ends:
        return
    ends = sorted(ends)
    scale = ax.yaxis.get_transform().transform          # it may be logarithmic
    low, high = scale(ax.get_ylim())
    heights = (scale([value for value, _, _ in ends]) - low) / (high - low)
    # A line of text as a fraction of the height of the axes; there are 72 points to an inch.
    gap = 12 / (ax.get_position().height * ax.figure.get_figheight() * 72)
    for _ in range(100):    # labels that overlap push each other apart
        overlap = np.maximum(gap - np.diff(heights), 0) / 2
        heights[:-1] -= overlap
        heights[1:] += overlap
    heights -= max(heights[-1] - 1, 0)
    heights += max(-heights[0], 0)
    for height, (value, label, color) in zip(heights, ends):
        ax.text(1.02, height, f"{label} {form.format(value)}".strip(), transform=ax.transAxes,
                va="center", color=color, fontsize=8.5)


@user_errors("run.report.picture")
def main(argv=None):
    parser = Parser(prog="python -m run.report.picture",
                    description="Draw the curves of one or more runs.")
    parser.add_argument("runs", nargs="+", help="folders of runs, such as out/run_a")
    parser.add_argument("-o", "--output", type=Path, default="curves.png", help="to write")
    args = parser.parse_args(argv)
    draw_curves(args.runs, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
