"""Plots the metrics of one or more runs, from their metrics.jsonl and eval.jsonl, in one picture.

    python -m run.report.picture out/run_a -o picture.png              one run, in six panels
    python -m run.report.picture out/run_a out/run_b -o picture.png    several runs, a color each
"""
import itertools
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dataset.jsonl import is_finite, read_jsonl
from errors import Parser, UserError, explained, user_errors

# The palette of Okabe and Ito, whose colors color-blind readers can tell apart. Its yellow is too
# pale for lines, so brown replaces it.
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5C3E"]
INK, GREY = "#22272e", "#6b7280"
STYLE = {
    "text.parse_math": False, "font.size": 9, "text.color": INK,
    "svg.fonttype": "none", "svg.hashsalt": "MiniGRPO",     # text stays text; the same file again
    "axes.edgecolor": "#c4c9d0", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e5e7eb",
    "axes.labelsize": 8, "axes.labelcolor": GREY, "axes.labelpad": 1,
    "xaxis.labellocation": "right",
    "xtick.color": GREY, "xtick.labelsize": 8, "xtick.major.size": 0,
    "ytick.color": GREY, "ytick.labelsize": 8, "ytick.major.size": 0,
    "lines.solid_capstyle": "round", "axes.xmargin": 0.02,
    "figure.subplot.hspace": 0.4,       # between the metrics of a panel
}
MOST_STEPS = 500            # about one per pixel of a panel's width
SETTINGS = "batch_size", "num_generations", "learning_rate", "beta", "seed"     # in the title


def draw_curves(run_dirs, path):
    """Plots all metrics of one run, or the most important metrics of several runs, as a PNG file.

    Runs are labeled with the names of their folders. Raises a UserError if a folder has no run.
    """
    runs = [Run(run_dir) for run_dir in run_dirs]
    with picture(path, 13, 8, dpi=130) as fig:
        if len(runs) > 1:
            draw_several(fig, runs)
        else:
            draw_one(fig, runs[0])


@contextmanager
def picture(path, width, height, dpi=150):
    """Yields a matplotlib figure of this size in inches, and then saves it to `path`."""
    # Matplotlib is slow to load, so it is loaded only here. pyplot would set the backend for the
    # whole process, so this uses Figure.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
        yield fig
        kind = Path(path).suffix[1:] or "png"
        with explained(path, "matplotlib cannot write it", "pass a name that ends in .png"):
            fig.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


class Run:
    """The metrics that a run has recorded so far. Raises a UserError if no step is finished."""

    def __init__(self, run_dir):
        self.name = Path(run_dir).resolve().name
        self.args = args_in(Path(run_dir) / "args.json")
        self.steps = numbers_in(Path(run_dir) / "metrics.jsonl")
        rows = numbers_in(Path(run_dir) / "eval.jsonl")
        self.measure = rows[-1].get("measure") if rows else None    # None: from an old version
        self.evaluations = [row for row in rows if row.get("measure") == self.measure]
        if not self.steps:
            raise UserError(f"{run_dir}: no step in metrics.jsonl yet; "
                            "pass the folder of a run, such as out/run_a")

    def keys(self, start, end=""):
        """Returns the metrics whose names start with `start` and end with `end`."""
        names = dict.fromkeys(key for row in self.steps + self.evaluations for key in row)
        return [name for name in names if name.startswith(start) and name.endswith(end)]

    def series(self, key):
        """Returns an array, (2, steps), of a metric's steps and values; missing values are NaN."""
        rows = self.evaluations if key.startswith("eval/") else self.steps
        pairs = [(row["step"], row[key]) for row in rows if key in row]
        return np.array(pairs, dtype=float).reshape(-1, 2).T

    def finite(self, key):
        """Returns a metric's finite values; an empty array for evaluations without `measure`."""
        if key.startswith("eval/") and self.measure is None:
            return np.array([])
        values = self.series(key)[1]
        return values[np.isfinite(values)]

    def settings(self):
        """Returns the main flags, such as "batch_size 16, num_generations 8, ...", or ""."""
        return ", ".join(f"{name} {self.args[name]:g}" for name in SETTINGS if name in self.args)

    def headline(self):
        """Returns a summary such as "held-out accuracy 25% → 71%, answers 30 → 52 tokens, ..."."""
        scored = self.finite("eval/judged").min(initial=1)
        parts = [f"only {scored:.1%} of the held-out problems scored"] if scored < 1 else []
        for form, key in (("held-out accuracy {:.1%} → {:.1%}", "eval/accuracy"),
                          ("answers {:.0f} → {:.0f} tokens", "eval/mean_length"),
                          ("reward {:.2f} → {:.2f}", "reward")):
            values = self.finite(key)
            if len(values) > 1 and len(parts) < 2:      # the reward only if another is missing
                parts.append(form.format(values[0], values[-1]))
        count = self.steps[-1]["step"] - self.steps[0]["step"] + 1
        seconds = self.finite("step_time").sum() * count / len(self.steps)
        steps = "1 step" if count == 1 else f"{count:,} steps"
        return ", ".join([*parts, steps, tqdm.format_interval(seconds)])


def args_in(path):
    """Returns the flags of a run as a dict, which is empty if there is no args.json."""
    with explained(path, "this is not what a run has written", "restore or delete the file"):
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def numbers_in(path):
    """Returns evenly spaced rows of a file as dicts; infinite and NaN values become None."""
    with explained(path, "no run has written it", "pass the folder of a run, such as out/run_a"):
        return [{name: value if is_finite(value) or name == "measure" else None
                 for name, value in row.items()} | {"step": int(float(row["step"]))}
                for row in read_jsonl(path, most=MOST_STEPS)]


# --- the panels -----------------------------------------------------------------------------------

# For each panel: its title, what to expect, and its metrics from top to bottom, each with the
# format of its values and an explanation.
PANELS = [
    ("Reward", "the total should climb; its parts tell what is being learned", {
        "reward": ("{:.2f}", "the total, weighted")}),
    ("Held-out accuracy", "problems never trained on; sampled should climb towards greedy", {
        "eval/accuracy": ("{:.0%}", "sampled")}),
    ("Completion length, tokens", "grows if longer reasoning is rewarded", {
        "completions/mean_length": ("{:.0f}", "in training"),
        "completions/clipped_ratio": ("{:.0%}", "cut off at the length limit: should be rare")}),
    ("Exploration and drift", "how confident the policy is, and how far it has moved", {
        "kl": ("{:.2g}", "KL to the reference: a spike is fine, a lasting climb is not"),
        "entropy": ("{:.2g}", "entropy, nats per token: falls as the policy gets more confident")}),
    ("Health of the updates", "early trouble shows here first", {
        "frac_reward_zero_std":
            ("{:.0%}", "zero-variance groups: bad early; late, the task is solved"),
        "clip_ratio/region_mean": ("{:.1%}", "tokens clipped: a few percent at most"),
        "grad_norm": ("{:.2g}", "gradient norm: spikes are clipped")}),
    ("Where the time goes", "how fast the run is, and which phase takes how long", {
        "perf/throughput": ("{:,.0f}", "sampled tokens per second")}),
]
METRICS = {key: shown for _, _, metrics in PANELS for key, shown in metrics.items()}


def panels(fig, name, sentence):
    """Creates two rows of three panels below a headline. Returns {metric: its axes}."""
    fig.text(0.027, 0.955, name, fontsize=17, fontweight="bold", va="center")
    fig.text(0.027, 0.913, sentence, fontsize=11.5, color=GREY, va="center")
    columns = [[[key] for key in metrics] for _, _, metrics in PANELS]
    axes = fig.subplot_mosaic([columns[:3], columns[3:]], gridspec_kw={
        "left": 0.05, "right": 0.9, "bottom": 0.06, "top": 0.81, "wspace": 0.68, "hspace": 0.5})
    for title, subtitle, metrics in PANELS:
        own = [axes[key] for key in metrics]
        above(own[0], title, -22, 32, fontsize=11.5, fontweight="bold")
        above(own[0], subtitle, -22, 19, fontsize=8.5, color=GREY)
        for ax in own[:-1]:
            ax.tick_params(labelbottom=False)
        own[-1].set_xlabel("step")
    return axes


def draw_one(fig, run):
    axes = panels(fig, run.settings() or run.name, f"{run.name}: {run.headline()}")
    draw_lines(axes.pop("reward"), "{:.2f}", [(run, "reward", "total")] + [
        (run, key, key.split("/")[1].removesuffix("_reward").replace("_", " "))
        for key in run.keys("rewards/", "/mean")])
    draw_lines(axes.pop("eval/accuracy"), "{:.0%}", [
        (run, "eval/accuracy", "sampled"), (run, "eval/greedy_accuracy", "greedy"),
        *((run, key, key.removeprefix("eval/")) for key in run.keys("eval/pass@"))])
    draw_lines(axes.pop("completions/mean_length"), "{:.0f}", [
        (run, "completions/mean_length", "training"), (run, "eval/mean_length", "held-out"),
        (run, "completions/min_length", "shortest"), (run, "completions/max_length", "longest")])
    draw_time(axes.pop("perf/throughput"), run)
    for key, ax in axes.items():
        draw_strip(ax, [run], key)


def draw_several(fig, runs):
    from matplotlib.lines import Line2D

    measures = {run.measure for run in runs if run.evaluations}
    alike = len(measures) < 2 and None not in measures
    note = "" if alike else "; not all say that they were evaluated alike"
    for key, ax in panels(fig, f"{len(runs)} runs{note}", "").items():
        draw_strip(ax, runs, key)
    swatches = [Line2D([], [], color=color, linewidth=3)
                for _, color in zip(runs, itertools.cycle(COLORS))]
    fig.legend(swatches, [run.name for run in runs], frameon=False, loc="center left",
               bbox_to_anchor=(0.02, 0.915), ncols=6, fontsize=10, handlelength=1.2)


def draw_strip(ax, runs, key):
    """Plots one metric of each run, with one color per run."""
    form, text = METRICS[key]
    above(ax, text, 0, 3, fontsize=8, color=GREY)
    draw_lines(ax, form, [(run, key, "") for run in runs])


def draw_lines(ax, form, lines):
    """Plots a line for each (run, metric, label), with the label and last value to its right.

    Lines are smoothed, and the original values are drawn in a pale color. Evaluations are not
    smoothed, and each has a marker. form: the format string of the values.
    """
    for (run, key, label), color in zip(lines, itertools.cycle(COLORS)):
        steps, values = run.series(key)
        seen = np.isfinite(values)
        if not seen.any():
            continue
        steps, values = steps[seen], values[seen]
        is_evaluation = key.startswith("eval/")
        means = values if is_evaluation else smooth(values)
        ax.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
        ax.plot(steps, means, "o-" if is_evaluation or len(means) < 20 else "-", color=color,
                linewidth=1.8, markersize=3.5,
                label=f"{label} {form.format(means[-1])}".strip())
    finish(ax, form)


def draw_time(ax, run):
    """Plots the seconds of each phase of a step as a stacked area chart.

    What only single steps have, such as an evaluation, is a bar on top of it, cut off at the top.
    """
    above(ax, "seconds per step (bars: single steps), and shares of the run", 0, 3, fontsize=8,
          color=GREY)
    phases = run.keys("timing_s/")
    table = np.array([[row.get(key, np.nan) for key in phases] for row in run.steps], dtype=float)
    in_each = np.isfinite(table).mean(axis=0) > 0.5
    table = np.nan_to_num(table)
    shares = table.sum(axis=0) / max(table.sum(), 1e-9)
    names = [f"{key.removeprefix('timing_s/').replace('_', ' ')} {share:.0%}"
             for key, share in zip(phases, shares)]
    steps = [row["step"] for row in run.steps]
    height = np.zeros(len(steps))
    for i in sorted(range(len(phases)), key=lambda i: not in_each[i]):
        color = COLORS[i % len(COLORS)]
        seconds = smooth(table[:, i]) if in_each[i] else table[:, i]
        has = seconds > 0
        if in_each[i]:
            ax.fill_between(steps, height, height + seconds, label=names[i], color=color,
                            alpha=0.85, linewidth=0)
            ax.set_ylim(top=1.3 * (height + seconds).max() or 1)
        elif has.any():
            bars = np.array([height, height + seconds, np.full(len(steps), np.nan)])
            ax.plot(np.repeat(steps, 3)[np.repeat(has, 3)], bars[:, has].T.ravel(),
                    label=names[i], color=color, linewidth=1.4, zorder=2 + shares[i])
        height = height + seconds
    finish(ax, reverse=True)


# --- the parts of a panel -------------------------------------------------------------------------

def above(ax, text, x, y, **style):
    """Writes a text above the axes, at (x, y) in points from the upper left corner of the axes."""
    ax.annotate(text, (0, 1), xytext=(x, y), xycoords="axes fraction", textcoords="offset points",
                **style)


def smooth(values):
    """Returns a moving average of the values, with a Hann window over a tenth of the series."""
    # A box window would spread a single spike into a plateau.
    means = np.empty(len(values))
    for i in range(len(values)):
        # Most is learned in the first steps, so the window starts with a single value and grows
        # while it stays centered; the curve then starts where the run started.
        reach = min(len(values) // 20, i)
        window = values[i - reach:i + reach + 1]
        weights = np.hanning(2 * reach + 3)[1:-1]
        means[i] = np.average(window, weights=weights[:len(window)])
    return means


def finish(ax, form="", reverse=False):
    """Sets the scales of the axes, and writes the labels of the lines to the right of the axes.

    form: the format string of the values. If it contains a %, the y axis is labeled in percent.
    """
    if not ax.has_data():
        ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", va="center",
                color=GREY)
        ax.set(xticks=[], yticks=[], xlabel="")
        return
    ax.set_xlim(left=-0.02 * ax.dataLim.x1)
    ax.locator_params(axis="x", integer=True, min_n_ticks=1, nbins=6)
    if ax.dataLim.y0 >= 0:
        ax.set_ylim(bottom=0)
    if "%" in form:
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8.5,
                  labelcolor="linecolor", handlelength=0, handletextpad=0, markerscale=0,
                  reverse=reverse)


@user_errors("run.report.picture")
def main(argv=None):
    parser = Parser(prog="python -m run.report.picture",
                    description="Draws the curves of one or more runs.")
    parser.add_argument("runs", nargs="+", help="folders of runs, such as out/run_a")
    parser.add_argument("-o", "--output", type=Path, default="curves.png", help="file to write")
    args = parser.parse_args(argv)
    kinds = b"\x89PNG", b"%PDF", b"<?xm"
    if args.output.is_file() and not args.output.read_bytes().startswith(kinds):
        parser.error(f"{args.output} exists, but is not a picture; pass another --output")
    draw_curves(args.runs, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
