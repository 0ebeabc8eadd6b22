"""The figures on the pages are those of report/experiments/results."""
import functools
import itertools
import re
from unittest.mock import ANY

import numpy as np
import pytest
from test_docs import LANGUAGES, PAGES, in_each_language, numbers, of_each_page, paragraphs, tables

from conftest import ROOT
from report.experiments.arms import BESIDE, LADDER, MUSEUM
from report.experiments.figures import ends_of_runs, interval, series
from report.text import read_jsonl


@functools.cache
def runs(name):
    return read_jsonl(ROOT / f"report/experiments/results/{name}.jsonl")


def cell(name, arm, key, form="{1:.1f} ± {2:.1f}", *, times=100, row="", minus=None):
    """What a table says of an arm; {0}: its beginning, {1}: its end, {2}: the end's 95% interval.

    minus: another arm, from whose end in the same seed {1} and {2} are the distance.
    """
    begins, ends = ends_of_runs(runs(name), row, arm, key)
    if minus:
        base = ends_of_runs(runs(name), row, minus, key)[1]
        ends = {seed: ends[seed] - base[seed] for seed in base}
    begins, ends = (times * np.array(list(part.values())) for part in (begins, ends))
    return form.format(begins.mean(), ends.mean(), interval(ends)[1])


def below(*args, **options):
    """A difference that a page calls lower, without its sign."""
    text = cell(*args, **options)
    assert text.startswith("-"), text
    return text[1:]


def after(name, arm, key, step, times=100):
    """An arm's values, one of each run: an evaluation's after a step, a series' around it."""
    steps, values = series([run for run in runs(name) if run["arm"] == arm], key)
    return times * values[:, steps.tolist().index(step)]


def lowest_and_highest(values):
    return f"{min(values):.0f}", f"{max(values):.0f}"


def countdown():
    def row(arm, greedy="{0:.0f} → {1:.1f}"):
        return [cell("countdown", arm, "eval/accuracy", "{0:.1f} → {1:.1f} ± {2:.1f}"),
                cell("countdown", arm, "eval/greedy_accuracy", greedy),
                cell("countdown", arm, "eval/mean_length", "{0:.0f} → {1:.0f}", times=1),
                cell("countdown", arm, "tries", "{0:.1f} → {1:.1f}", times=1),
                cell("countdown", arm, "repeats", "{0:.1f} → {1:.1f}")]

    gave_up = (cell("countdown", "the shipped weights", "gave_up", "{0:.0f}"),
               f'{after("countdown", "the shipped weights", "gave_up", 20).mean():.0f}')
    slips = cell("countdown", "the shipped weights", "slips", "{0:.1f} {1:.1f}")
    return ([row("the shipped weights"), row("gives up sooner"),
             row("tries in random order", greedy="{0:.0f} → {1:.0f}")],
            [[*gave_up, slips]])


def loss_types():
    cut_off = "Countdown, cut off at 128 tokens"
    rows = "Countdown", cut_off, "Arithmetic, where half of the worked replies are wordy"

    def length(key, arm, scale, row):
        if arm == "grpo":
            return cell("loss_types", f"grpo, {scale}", key, "{1:.0f}", times=1, row=row)
        small = (key, row) == ("length/wrong", cut_off)
        return cell("loss_types", f"{arm}, {scale}", key, times=1, row=row, minus=f"grpo, {scale}",
                    form="{1:.1f} ± {2:.1f}" if small else "{1:z.0f} ± {2:.0f}")      # z: no -0

    def less_often_right(arm):
        return below("loss_types", f"{arm}, group", "right", row=cut_off, minus="grpo, group")

    return ([[", ".join(length(key, arm, scale, row) for scale in ("group", "none"))
              for row in rows] for key in ("length/right", "length/wrong")
             for arm in ("grpo", "bnpo", "dr_grpo", "r1")],
            [[less_often_right("bnpo"), less_often_right("r1")]])


def clip():
    def row(arm):
        return [cell("clip", f"{arm}, {kind}", "eval/accuracy") for kind in ("clip", "no clip")]

    after_5 = [lowest_and_highest(after("clip", f"{arm}, clip", "eval/accuracy", 5))
               for arm in ("4 iterations", "1 iteration")]
    return ([[row("1 iteration")[0], ANY], row("4 iterations"), row("16 iterations")],
            [[*itertools.chain(*after_5)]])


def reward_model():
    def right(arm):
        return cell("reward_model", arm, "rewards/accuracy_reward/mean", "{1:.0f} ± {2:.0f}")

    kinds = ("k1", "k2", "k3")
    scores = [cell("reward_model", arm, "rewards/reward_model/mean", "{1:.2f}", times=1)
              for arm in ("no KL", "k1, beta 0.3", "k2, beta 0.3", "k3, beta 0.3")]
    gamed = [f"{after('reward_model', 'k3, beta 0.02', key, step, times).mean():{form}}"
             for key, times, form in (("rewards/accuracy_reward/mean", 100, ".0f"),
                                      ("rewards/reward_model/mean", 1, ".2f"))
             for step in (8, 59)]
    highest = lowest_and_highest([
        after("reward_model", arm, "rewards/accuracy_reward/mean", 8).mean()
        for arm in {run["arm"] for run in runs("reward_model")}])
    return ([*([right(f"{kind}, beta {beta}") for kind in kinds] for beta in (0.3, 0.1)),
             ["", "", right("k3, beta 0.02")], ["", "", right("no KL")]],
            [highest, scores, gamed])


def lora():
    arms = ["all weights, 3e-4", *(f"rank {rank}, {rate}" for rank in (16, 4, 1)
                                   for rate in ("3e-3", "1e-3"))]
    return [[arm.partition(", ")[2], cell("lora", arm, "eval/accuracy"),
             cell("lora", arm, "eval/greedy_accuracy")] for arm in arms], []


def trl():
    accuracies = [cell("trl", arm, key) for arm in ("TRL", "MiniGRPO")
                  for key in ("eval/accuracy", "eval/greedy_accuracy")]
    seconds = [lowest_and_highest([run["seconds"] for run in runs("trl") if run["arm"] == arm])
               for arm in ("TRL", "MiniGRPO")]
    return None, [[*accuracies, *itertools.chain(*seconds)]]


def rewards():
    return None, [[cell("rewards", "all four", "eval/mean_length", "{0:.0f}", times=1),
                   cell("rewards", "accuracy alone", "eval/mean_length", "{1:.0f}", times=1),
                   *(cell("rewards", arm, "eval/accuracy")
                     for arm in ("accuracy alone", "all four"))]]


def process():
    keys = "eval/accuracy", "eval/greedy_accuracy"
    return ([[cell("process", arm, key) for key in keys] for arm in ("outcome", "process")],
            [[below("process", "process", key, minus="outcome") for key in keys]])


def oversample():
    default = "300 steps"
    equal_samples, equal_time = (f"{steps} steps with twice the prompts" for steps in (150, 188))
    differences = [function("oversample", arm, "eval/accuracy", minus=default)
                   for function, arm in ((cell, equal_time), (below, equal_samples))]
    return ([[ANY, *(cell("oversample", arm, f"eval/{key}") for key in
                     ("accuracy", "greedy_accuracy"))]
             for arm in (default, equal_samples, equal_time)], [differences])


def ladder():
    return [["{:.1f} ± {:.1f}".format(*interval(after("ladder", rung, "eval/accuracy", step)))
             for step in (20, 100)] for rung in LADDER | BESIDE], []


def museum():
    def end(error, arm):
        key = MUSEUM[error].watch
        return cell("museum", arm, key, row=error) if key.startswith("eval/") else cell(
            "museum", arm, key, "{1:.2f} ± {2:.2f}", times=1, row=error)

    return [[ANY, end(error, "right"), end(error, "wrong")] for error in MUSEUM], []


def groups():
    def dead(arm, steps):
        values = [run["series"]["frac_reward_zero_std"][i] for run in runs("groups")
                  if run["arm"] == arm for i, step in enumerate(run["steps"]) if step in steps]
        return f"{np.mean(values):.1%}"

    arms = [f"groups of {size}" for size in (2, 4, 8, 16, 32)]
    without_kl = cell("groups", "groups of 8, beta 0", "eval/accuracy")
    return ([[cell("groups", arm, "eval/accuracy"), dead(arm, (1.5, 3.5)), dead(arm, range(26, 31))]
             for arm in arms],
            [[without_kl, cell("groups", arms[2], "eval/accuracy")]])


INTERVAL = r"(-?\d+(?:\.\d+)?)%? ± (\d+(?:\.\d+)?)"
# A file of results -> the cells of its table (right of the first column), and figures that stand in
# this order in a paragraph.
FIGURES = {figures.__name__: figures for figures in (
    countdown, loss_types, clip, reward_model, lora, trl, groups, rewards, process, oversample,
    ladder, museum)}


def test_all_results_are_checked():
    assert FIGURES.keys() == {path.stem for path in ROOT.glob("report/experiments/results/*.jsonl")}


@in_each_language
@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_an_experiment_are_those_of_its_results(name, language):
    expected, in_sentences = FIGURES[name]()
    texts = LANGUAGES[language].values()
    held = [[row[1:] for row in table] for text in texts for table in tables(text)]
    assert expected is None or expected in held, "no such table:\n" + "\n".join(
        " | ".join(map(str, row)) for row in expected)
    for parts in in_sentences:
        figures = [number for part in parts for number in numbers(part)]
        assert any(all(figure in rest for figure in figures) for text in texts
                   for part in paragraphs(text) for rest in [iter(numbers(part))]), figures


@functools.cache
def known_intervals():
    """All `mean ± interval` of the results, as pairs."""
    of_all = [figures() for figures in FIGURES.values()]
    cells = [cell for table, in_sentences in of_all for row in [*(table or ()), *in_sentences]
             for cell in row]
    return {pair for cell in cells for pair in re.findall(INTERVAL, str(cell))}


@of_each_page
def test_every_interval_is_one_of_the_results(page):
    assert set(re.findall(INTERVAL, PAGES[page])) - known_intervals() == set()
