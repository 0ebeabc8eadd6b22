"""Experiments: a run becomes a line, a line is run once, and the pages have its figures."""
import functools
import itertools
import math
import re
import shlex
from pathlib import Path
from statistics import stdev
from unittest.mock import ANY

import numpy as np
import pytest
from test_docs import LANGUAGES, PAGES, in_each_language, numbers, of_each_page, paragraphs, tables

import train_grpo
from conftest import ROOT, jsonl, write
from report import UserError
from report.experiments import __main__ as command
from report.experiments import figures
from report.experiments.arms import (
    EXPERIMENTS,
    FIVE,
    MUSEUM,
    Change,
    Experiment,
    misses_some,
    passes_some,
    strict_judge,
)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of two arms of two steps; its results go to tmp_path."""
    flags = ("--max_steps 2 --batch_size 2 --num_generations 4 --max_gen_len 24 --eval_interval 2 "
             "--eval_samples 4 --reward_funcs accuracy --beta 0")
    experiment = Experiment(
        {"": {"small, a": flags, "small, b": f"{flags} --loss_type dapo"}}, seeds=(1,),
        panels={"eval/accuracy": ("Accuracy", "", "{:.0%}"), "length": ("Length", "", "{:.0f}"),
                "completions/mean_length": ("Length", "as the run has it", "{:.0f}"),
                "gave_up": ("Gave up", "not recorded here", "{:.0%}")})
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    return experiment, tmp_path / "results/tiny.jsonl", tmp_path / "the runs"


@pytest.fixture
def started(monkeypatch):
    """[(args, train_grpo.py, environment)] of runs, which leave what one of two steps does.

    Its lengths tell the seed.
    """
    calls = []

    def python(arguments, log, folder, **environment):
        args = train_grpo.parse_args(shlex.split(arguments)[1:])
        source = Path(folder, "train_grpo.py").read_text(encoding="utf-8")
        calls.append((args, source, environment))
        run_dir = Path(args.out_dir) / args.run_name
        run_dir.mkdir(parents=True)
        for name, row in (("metrics", {"step_time": 3.0, "completions/mean_length": args.seed}),
                          ("completions", {"completion": "a", "length": args.seed, "reward": 1.0,
                                           "ended": True, "rewards": {}})):
            write(run_dir / f"{name}.jsonl", [{"step": step} | row for step in (1, 2)])

    monkeypatch.setattr(command, "python", python)
    return calls


def result(arm, seed, *values, row=""):
    """What stays of a run that recorded lengths."""
    return {"row": row, "arm": arm, "seed": seed, "steps": list(range(len(values))),
            "series": {"length": list(values)}, "eval": {}}


def test_an_experiment_runs_and_is_drawn(tiny, tmp_path, capsys):
    experiment, results, out = tiny
    command.run_missing(experiment, results, out, jobs=2)
    rows = list(command.results_of(experiment, results).values())
    assert [(row["arm"], row["seed"]) for row in rows] == [("small, a", 1), ("small, b", 1)]
    for row in rows:
        assert row["steps"] == [1, 2] and len(row["series"]["length"]) == 2
        assert row["series"]["length"] == row["series"]["completions/mean_length"]
        assert row["eval"]["step"] == [0, 2] and 0 <= row["eval"]["eval/accuracy"][0] <= 1
        assert row["series"].keys() == {"length", "completions/mean_length"}
    # Until the first update the arms are the same runs: the seed decides.
    assert rows[0]["series"]["length"][0] == rows[1]["series"]["length"][0]
    assert not [path for path in out.iterdir() if path.is_dir()]        # summarised and removed
    figures.draw_experiment(rows, experiment.panels, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    figures.print_table(rows, experiment.panels)
    table = capsys.readouterr().out.splitlines()
    assert table[-2].startswith("| small, ") and table[-1].endswith("| - |")


def test_an_experiment_runs_what_is_missing_with_its_flags_seed_and_change(tiny, started):
    experiment, results, out = tiny
    experiment.seeds = (1, 2)
    change = Change("    all_logps = (logits.float() / temperature)", "    all_logps = (0)")
    experiment.changes[("", "small, b")] = change
    command.run_missing(experiment, results, out, jobs=2)
    assert sorted((args.loss_type, args.seed) for args, *_ in started) == [
        ("dapo", 1), ("dapo", 2), ("grpo", 1), ("grpo", 2)]
    ours = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    for args, source, environment in started:
        assert environment == {"OMP_NUM_THREADS": "1"}
        assert source == (ours if args.loss_type == "grpo" else
                          ours.replace(change.before, change.after))
    rows = jsonl(results)
    assert sorted((row["arm"], row["seed"]) for row in rows) == [
        ("small, a", 1), ("small, a", 2), ("small, b", 1), ("small, b", 2)]
    for row in rows:
        assert row["series"]["completions/mean_length"] == [row["seed"]] * 2
        assert row["seconds"] == 6
    started.clear()
    write(results, rows[1:])
    command.run_missing(experiment, results, out, jobs=1)
    assert jsonl(results) == rows[1:] + rows[:1]
    (args, _, environment), = started
    assert args.loss_type == ("grpo" if rows[0]["arm"] == "small, a" else "dapo")
    assert (args.seed, environment) == (rows[0]["seed"], {})


def test_the_flags_of_every_arm_go_together(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, experiment in EXPERIMENTS.items():
        for flags in itertools.chain(*(arms.values() for arms in experiment.rows.values())):
            flags = shlex.split(flags.format(out="out"))
            train_grpo.parse_args(flags[flags.index("train_grpo.py") + 1:] if "-m" in flags
                                  else flags)
        assert len(experiment.seeds) <= len(figures.T_95) - 1, name


def test_a_run_that_fails_stops_the_experiment_and_names_its_log(tiny):
    experiment, results, out = tiny
    experiment.rows[""] = {"small, a": "--max_steps none"}
    with pytest.raises(UserError, match=r"--max_steps none.*failed.*small__a_1\.log"):
        command.run_missing(experiment, results, out, jobs=1)
    assert "--max_steps: invalid" in (out / "small__a_1.log").read_text()


def test_each_change_fits_the_code_and_its_test_is_there():
    source = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    changes = [item for name in ("ladder", "museum")
               for item in EXPERIMENTS[name].changes.items()]
    for (row, arm), change in changes:
        assert source.count(change.before) == 1 and change.before != change.after, row or arm
        file, _, test = change.test.partition("::")
        assert not file or f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), row


@pytest.mark.parametrize("page", ["docs/museum.md", "docs/museum_zh.md"])
def test_the_museum_shows_each_change_and_names_its_test(page):
    assert re.findall(r"```diff\n(.*?)```", PAGES[page], re.DOTALL) == [
        "".join(f"{sign}{line.strip()}\n" for sign, lines in (("-", change.before),
                                                              ("+", change.after))
                for line in lines.splitlines()) for change in MUSEUM.values()]
    assert re.findall(r"`(test_\w+)`", PAGES[page]) == [
        change.test.partition("::")[2] for change in MUSEUM.values()]


def test_a_change_that_no_test_notices_or_that_does_not_fit_is_an_error(
        tmp_path, monkeypatch, capsys):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train_grpo.py").write_text("answer = 42\n")
    (tmp_path / "code/test_it.py").write_text(
        "from train_grpo import answer\n\n\ndef test_it():\n    assert answer != 41\n")
    bug = Change("42", "41", test="test_it.py::test_it")
    harmless = Change("42", "43", test="test_it.py::test_it")
    monkeypatch.setattr(command, "ROOT", tmp_path / "code")
    command.prove({("no change", ""): Change(), ("bug", "wrong"): bug})
    assert capsys.readouterr().out == "bug: test_it fails: assert 41 != 41\n"
    with pytest.raises(UserError, match="should fail"):
        command.prove({("harmless", "wrong"): harmless})
    with pytest.raises(UserError, match="does not hold '40' once"):
        Change("40", "41").copy(tmp_path / "code", tmp_path / "none")


def test_a_verifier_errs_on_one_answer_in_ten_of_one_kind():
    right, wrong = ["<answer>\n12\n</answer>"] * 5000, ["<answer>\n13\n</answer>"] * 5000
    paid = {judge: judge([""] * 10000, right + wrong, ["12"] * 10000)
            for judge in (misses_some, passes_some)}
    assert sum(paid[misses_some][:5000]) == pytest.approx(4500, abs=100)    # 5 sigma
    assert sum(paid[passes_some][5000:]) == pytest.approx(500, abs=100)
    assert sum(paid[misses_some][5000:]) == 0 and sum(paid[passes_some][:5000]) == 5000


def test_the_strict_judge_mostly_has_no_opinion_without_an_answer():
    replies = ["<answer>\n12\n</answer>", "<answer>\n13\n</answer>"] + ["12"] * 998
    right, wrong, *others = strict_judge([""] * 1000, replies, ["12"] * 1000)
    assert (right, wrong) == (0, -1) and set(others) == {None, -1}
    assert 50 < others.count(-1) < 150


def test_results_come_in_the_experiments_order_each_once_and_only_its_own(tiny):
    experiment, results, _ = tiny
    results.parent.mkdir()
    runs = [("small, b", 1), ("renamed", 1), ("small, a", 7), ("small, a", 1), ("small, b", 1)]
    write(results, [result(*one, i) for i, one in enumerate(runs)])
    found = command.results_of(experiment, results)
    assert [*found] == [("", "small, a", 1), ("", "small, b", 1)]
    assert [line["series"]["length"] for line in found.values()] == [[3], [4]]


def test_the_interval_is_students():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [4.0, math.nan], [9.0, math.nan]])
    center, half = figures.interval(values)
    assert center.tolist() == [4, 5]
    assert half[0] == pytest.approx(3.182 * stdev([1, 2, 4, 9]) / 2) and half[1] == 0


def test_arms_of_a_family_share_a_colour_and_kinds_their_dashes():
    arms = ["grpo, group", "bnpo, group", "grpo, none", "bnpo, none"]
    (blue, line), other_hue, other_dashes, _ = map(figures.styles(arms).get, arms)
    assert (other_hue[1], other_dashes[0]) == (line, blue)
    assert other_hue[0] != blue and other_dashes[1] != line


def test_a_lesson_is_drawn_beside_the_one_before_it(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda ax, steps, values, color, linewidth, **kwargs: (
        drawn.append((values.tolist(), color)) if linewidth > 1 else None,
        plot(ax, steps, values, color=color, linewidth=linewidth, **kwargs)))
    figures.draw_lessons(
        [result("one", 1, 0.1, 0.2), result("one", 2, 0.1, 0.3), result("two", 1, 0.1, 0.5)],
        {"one": ("a = 1", "length", None, ("", "one")),
         "two": ("a = 2", "length", ("", "one"), ("", "two"))},
        {"length": ("A", "", "{:.0%}")}, ("A", "with", "without"), tmp_path / "lessons.png")
    assert drawn == [([0.1, 0.25], figures.BLUE), ([0.1, 0.25], figures.GREY),
                     ([0.1, 0.5], figures.BLUE)]
    assert (tmp_path / "lessons.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_ends_with_the_tables_number_and_a_band_of_shares_at_all(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    ends, bands = [], []
    monkeypatch.setattr(figures, "finish", lambda ax, found, *_, **__: ends.extend(found))
    monkeypatch.setattr(Axes, "fill_between", lambda ax, steps, low, high, **_: bands.append(high))
    runs = [result("a", 1, *[0.5] * 8, 0.8, 1.0), result("a", 2, *[0.5] * 8, 0.6, 1.0)]
    panels, path = {"length": ("A", "", "{:.0%}")}, tmp_path / "a.png"
    figures.draw_experiment(runs, panels, path)
    figures.draw_lessons(runs, {"a": ("", "length", None, ("", "a"))}, panels, (), path)
    # Of ten parts the last two are the end. At 0.7 ± 1.27 the band is cut off.
    assert [end for end, *_ in ends] == pytest.approx([0.85, 0.85])
    assert bands[0].tolist() == pytest.approx([0.5] * 8 + [1, 1])


def test_where_arms_end_against_another_series_and_the_lowest_values(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda ax, *points, **style: (
        drawn.append(points) if "marker" in style else None, plot(ax, *points, **style))[1])
    runs = [result(arm, seed, 0.5, 0.2, end) for arm, end in (("k, 1", 0.4), ("k, 2", 0.6))
            for seed in (1, 2)]
    for run, kl in zip(runs, (0.01, 0.03, 0.1, 0.3)):
        run["series"]["kl"] = [0, 1, kl]
    steps, lowest = figures.series(runs, "lowest length")
    assert len(steps) == 2 and lowest.tolist() == [[0.2, 0.2]] * 4
    figures.draw_experiment(runs, {"length against kl": ("A", "", "{:.0%}")}, tmp_path / "a.png")
    (x, y), = drawn
    # As in the panels, a KL is averaged by its logarithm.
    assert x == pytest.approx([3e-4**0.5, 0.03**0.5]) and y == pytest.approx([0.4, 0.6])


def test_what_the_arms_read_is_made_unless_no_run_is_missing(tiny, tmp_path, monkeypatch, capsys):
    experiment, results, _ = tiny
    experiment.panels = {}
    experiment.first = "-m model.train_sft --save {out}/small", "-m dataset.countdown"
    calls = []
    monkeypatch.setattr(command, "ROOT", tmp_path / "a b")
    monkeypatch.setattr(command, "__file__", str(tmp_path / "__main__.py"))
    monkeypatch.setattr(command, "python", lambda line, *_, **environment: calls.append(
        shlex.split(line)))
    monkeypatch.setattr(command, "run_missing", lambda *args: calls.append("the runs"))
    monkeypatch.setattr(command, "draw_experiment", lambda *args: None)
    monkeypatch.setattr("sys.argv", ["", "tiny"])
    results.parent.mkdir()
    write(results, [result("small, a", 1, 5)])
    command.main()
    small = f"{tmp_path}/a b/out/experiments/tiny/small"
    assert calls == [["-m", "model.train_sft", "--save", small], ["-m", "dataset.countdown"],
                     "the runs"]
    write(results, [result("small, a", 1, 5), result("small, b", 1, 5)])
    command.main()
    assert calls[3:] == ["the runs"]


def test_drawing_without_results_is_refused(tiny, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", "tiny", "--draw"])
    with pytest.raises(SystemExit):
        command.main()
    assert "tiny.jsonl: there are no results yet; run" in capsys.readouterr().err


def test_the_table_compares_the_ends_of_runs_seed_by_seed(capsys):
    # Of ten steps the last two are the end.
    results = [result("grpo, x", 1, *[10] * 8, 20, 22, row="r"),
               result("grpo, x", 2, *[12] * 8, 30, None, row="r"),
               result("bnpo, x", 1, *[10] * 8, 25, 25, row="r"),
               result("bnpo, x", 2, *[12] * 8, 38, 38, row="r")]
    figures.print_table(results, {"length": ("Length", "", "{:.1f}")})
    *_, grpo, bnpo = capsys.readouterr().out.splitlines()
    # Ends 21 and 30; 25 and 38: differences 4 and 8.
    of_grpo, of_bnpo, half = (f"{12.71 * stdev(pair) / math.sqrt(2):.1f}"
                              for pair in ([21, 30], [25, 38], [4, 8]))
    assert grpo == f"| r: grpo, x | 11.0 → 25.5 ± {of_grpo} |"
    assert bnpo == f"| r: bnpo, x | 11.0 → 31.5 ± {of_bnpo} (6.0 ± {half}) |"


# --- the figures on the pages are those of report/experiments/results ----------------------------

@functools.cache
def runs(name):
    return jsonl(ROOT / f"report/experiments/results/{name}.jsonl")


def cell(name, arm, key, form="{1:.1f} ± {2:.1f}", *, times=100, row="", minus=None, than=None):
    """What a table says of an arm; {0}: its beginning, {1}: its end, {2}: the end's 95% interval.

    minus: another arm, from whose end in the same seed {1} and {2} are the distance; than: the row
    of that arm, if it is another. times: -100 where a page calls a distance "lower", without its
    sign.
    """
    begins, ends = figures.ends_of_runs(runs(name), row, arm, key)
    if minus:
        base = figures.ends_of_runs(runs(name), row if than is None else than, minus, key)[1]
        ends = {seed: ends[seed] - base[seed] for seed in base}
    begins, ends = (times * np.array(list(part.values())) for part in (begins, ends))
    return form.format(begins.mean(), ends.mean(), figures.interval(ends)[1])


def or_seeds(name, arm, row):
    """The accuracy at the end, or that of each seed where its interval leaves 0 to 100%."""
    ends = figures.ends_of_runs(runs(name), row, arm, "eval/accuracy")[1].values()
    ends = 100 * np.array(list(ends))
    center, half = figures.interval(ends)
    if half <= center <= 100 - half:
        return cell(name, arm, "eval/accuracy", row=row)
    return ", ".join(f"{end:.0f}" for end in sorted(ends))


def accuracies(name, *arms):
    """The cells of a table with a row for each arm: its held-out accuracy, sampled and greedy."""
    return [[cell(name, arm, f"eval/{how}accuracy") for how in ("", "greedy_")] for arm in arms]


def after(name, arm, key, step, times=100):
    """An arm's values, one of each run: an evaluation's after a step, a series' around it."""
    steps, values = figures.series([run for run in runs(name) if run["arm"] == arm], key)
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

    shipped = "the shipped weights"
    return ([row(shipped), row("gives up sooner"),
             row("tries in random order", greedy="{0:.0f} → {1:.0f}")],
            [[cell("countdown", shipped, "gave_up", "{0:.0f}"),
              f'{after("countdown", shipped, "gave_up", 20).mean():.0f}',
              cell("countdown", shipped, "slips", "{0:.1f} {1:.1f}")]])


def loss_types():
    cut_off = "Countdown, cut off at 128 tokens"
    rows = "Countdown", cut_off, "Arithmetic, where half of the worked replies are wordy"

    def length(key, arm, scale, row):
        if arm == "grpo":
            return cell("loss_types", f"grpo, {scale}", key, "{1:.0f}", times=1, row=row)
        small = (key, row) == ("length/wrong", cut_off)
        return cell("loss_types", f"{arm}, {scale}", key, times=1, row=row, minus=f"grpo, {scale}",
                    form="{1:.1f} ± {2:.1f}" if small else "{1:z.0f} ± {2:.0f}")      # z: no -0

    return ([[", ".join(length(key, arm, scale, row) for scale in ("group", "none"))
              for row in rows] for key in ("length/right", "length/wrong")
             for arm in ("grpo", "bnpo", "dr_grpo", "r1")],
            [[cell("loss_types", f"{arm}, group", "right", row=cut_off, minus="grpo, group",
                   times=-100) for arm in ("bnpo", "r1")],
             [cell("loss_types", f"{arm}, {scale}", "right", row=rows[2], minus=f"grpo, {scale}")
              for scale in ("group", "none") for arm in ("bnpo", "dr_grpo", "r1")]])


def clip():
    once, *more = ([cell("clip", f"{arm}, {kind}", "eval/accuracy") for kind in ("clip", "no clip")]
                   for arm in ("1 iteration", "4 iterations", "16 iterations"))
    after_5 = [bound for arm in ("4 iterations", "1 iteration")
               for bound in lowest_and_highest(after("clip", f"{arm}, clip", "eval/accuracy", 5))]
    rough = next(run["eval"]["eval/accuracy"] for run in runs("clip")
                 if (run["arm"], run["seed"]) == ("4 iterations, no clip", 42))
    fell = [f"{100 * rough[i]:.0f}" for i in (1, 3)]        # after 5 and 15 steps
    return [[once[0], ANY], *more], [after_5, [more[0][1], *fell]]


def reward_model():
    score, accuracy = "rewards/reward_model/mean", "rewards/accuracy_reward/mean"

    def right(arm):
        return cell("reward_model", arm, accuracy, "{1:.0f} ± {2:.0f}")

    kinds = ("k1", "k2", "k3")
    scores = [cell("reward_model", arm, score, "{1:.2f}", times=1)
              for arm in ("no KL", "k1, beta 0.3", "k2, beta 0.3", "k3, beta 0.3")]
    above_k3 = [cell("reward_model", f"k2, beta {beta}", accuracy, "{1:.0f} ± {2:.0f}",
                     minus=f"k3, beta {beta}") for beta in (0.3, 0.1)]
    scores += [*above_k3, cell("reward_model", "k2, beta 0.1", score, "{1:.2f}", times=1)]
    gamed = [f"{after('reward_model', 'k3, beta 0.02', key, step, times).mean():{form}}"
             for key, times, form in ((accuracy, 100, ".0f"), (score, 1, ".2f"))
             for step in (8, 59)]
    highest = lowest_and_highest([after("reward_model", arm, accuracy, 8).mean()
                                  for arm in {run["arm"] for run in runs("reward_model")}])
    return ([*([right(f"{kind}, beta {beta}") for kind in kinds] for beta in (0.3, 0.1)),
             ["", "", right("k3, beta 0.02")], ["", "", right("no KL")]],
            [highest, scores, gamed])


def lora():
    arms = ["all weights, 3e-4", *(f"rank {rank}, {rate}" for rank in (16, 4, 1)
                                   for rate in ("3e-3", "1e-3"))]
    return [[arm.partition(", ")[2], *row] for arm, row in zip(arms, accuracies("lora", *arms))], []


def trl():
    seconds = [bound for arm in ("TRL", "MiniGRPO") for bound in lowest_and_highest(
        [run["seconds"] for run in runs("trl") if run["arm"] == arm])]
    return None, [[*sum(accuracies("trl", "TRL", "MiniGRPO"), []), *seconds]]


def rewards():
    return None, [[cell("rewards", "all four", "eval/mean_length", "{0:.0f}", times=1),
                   cell("rewards", "accuracy alone", "eval/mean_length", "{1:.0f}", times=1),
                   *(cell("rewards", arm, "eval/accuracy")
                     for arm in ("accuracy alone", "all four"))]]


def process():
    return (accuracies("process", "outcome", "process"),
            [[cell("process", "process", key, minus="outcome", times=-100)
              for key in ("eval/accuracy", "eval/greedy_accuracy")]])


def oversample():
    default = "300 steps"
    equal_samples, equal_time = (f"{steps} steps with twice the prompts" for steps in (150, 188))
    return ([[ANY, *row] for row in accuracies("oversample", default, equal_samples, equal_time)],
            [[cell("oversample", arm, "eval/accuracy", minus=default, times=times)
              for arm, times in ((equal_time, 100), (equal_samples, -100))]])


def smollm2():
    shown = {"eval/accuracy": (100, ".0f"), "eval/greedy_accuracy": (100, ".0f"),
             "likelihood": (1, ".2f"), "repeated_words": (100, ".0f"), "length": (1, ".0f")}

    def row(runs):
        known = [run["eval"] | run["series"] for run in runs]

        def mean(key, i):
            return np.mean([each[key][i] for each in known])

        return [*(" → ".join(f"{times * mean(key, i):{form}}" for i in (0, -1))
                  for key, (times, form) in shown.items()), f"{mean('kl', -1):.2f}"]

    rows = []
    for arm in EXPERIMENTS["smollm2"].rows[""]:
        of_arm = sorted((run for run in runs("smollm2") if run["arm"] == arm),
                        key=lambda run: FIVE.index(run["seed"]))
        rows += [row([run]) for run in of_arm] + [row(of_arm)] * (len(of_arm) > 1)
    return rows, []


def verifier():
    table = [[cell("verifier", arm, f"eval/{how}accuracy") for how in ("", "greedy_")]
             + [cell("verifier", arm, "frac_reward_zero_std", "{1:.0f}")]
             for arm in EXPERIMENTS["verifier"].rows[""]]
    return table, [[cell("verifier", "rejects one right answer in ten", "eval/accuracy", times=-100,
                         minus="never errs")]]


def kl_direction():
    key = "rewards/accuracy_reward/mean"

    def ends(arm):
        kl = figures.ends_of_runs(runs("kl_direction"), one, arm, "kl")[1]
        return [cell("kl_direction", arm, key, row=one),
                f"{np.exp(np.log(list(kl.values())).mean()):.3f}"]

    def above(arm, other, row):
        return cell("kl_direction", f"{arm}, beta 0.3", key, row=row, minus=f"{other}, beta 0.3")

    one, four = EXPERIMENTS["kl_direction"].rows
    table = [ends(f"k3, beta {beta}") + ends(f"k3+, beta {beta}")
             for beta in ("0.03", "0.1", "0.3", "1", "3")]
    scores = [cell("kl_direction", f"{kind}, beta 0.3", "rewards/reward_model/mean", "{1:.2f}",
                   times=1, row=one) for kind in ("k3+", "k3")]
    at_four = [cell("kl_direction", f"{kind}, beta 0.3", key, row=four)
               for kind in ("k3", "k3+", "corrected k3")]
    return table, [[above("k3+", "k3", one), *scores],
                   [*at_four, above("corrected k3", "k3+", four)]]


def objectives():
    arms = EXPERIMENTS["objectives"].rows[""]
    table = [[*row, cell("objectives", arm, "frac_reward_zero_std", "{1:.0f}")]
             for arm, row in zip(arms, accuracies("objectives", *arms))]
    lower = [cell("objectives", f"{arm} and noise", f"eval/{how}accuracy", minus=arm, times=-100)
             for arm in ("sum", "GDPO") for how in ("", "greedy_")]
    return table, [[cell("objectives", "GDPO", "eval/accuracy", minus="sum"), *lower]]


def bounds():
    few, many = EXPERIMENTS["bounds"].rows

    def beside_the_clip(arm, row, times):
        return cell("bounds", arm, "eval/accuracy", row=row, minus="PPO's clip", times=times)

    table = [[part for row in (few, many) for part in (
        or_seeds("bounds", arm, row), cell("bounds", arm, "lowest eval/accuracy", row=row),
        cell("bounds", arm, "kl", "{1:.2f}", times=1, row=row))]
        for arm in EXPERIMENTS["bounds"].rows[few]]
    return table, [[beside_the_clip("CISPO", few, -100)],
                   [beside_the_clip(arm, many, times)
                    for arm, times in (("GSPO", 100), ("GMPO", 100), ("SAPO", -100))]]


def hard():
    keys = "eval/accuracy", "eval/pass@16"
    table = [[*(cell("hard", arm, key) for key in keys),
              cell("hard", arm, "frac_reward_zero_std", "{1:.0f}"),
              cell("hard", arm, "length", "{1:.0f}", times=1)]
             for arm in EXPERIMENTS["hard"].rows[""]]
    return table, [[cell("hard", arm, key, minus="std") for arm in ("none", "MaxRL")
                    for key in keys],
                   [cell("hard", "std", key, "{0:.1f}") for key in keys],
                   [cell("hard", "std", "eval/mean_length", "{0:.0f} {1:.0f}", times=1)]]


def rate():
    rows = EXPERIMENTS["rate"].rows
    small, _, large, small_groups, large_groups = rows

    def above(row, other):
        return cell("rate", "rate 3e-4", "eval/accuracy", row=row, minus="rate 3e-4", than=other)

    return ([[or_seeds("rate", arm, row) for arm in arms] for row, arms in rows.items()],
            [[*(cell("rate", f"rate {rate}", "eval/greedy_accuracy", row=small)
                for rate in ("1e-4", "3e-4")),
              above(large, small), above(small, small_groups), above(large, large_groups)]])


def reasoning_gym():
    keys, table, gaps = ("eval/accuracy", "eval/greedy_accuracy"), [], []
    for row, (right, control) in EXPERIMENTS["reasoning_gym"].rows.items():
        of = functools.partial(cell, "reasoning_gym", row=row)
        table += [[*(of(arm, key, "{0:.0f} → {1:.1f} ± {2:.1f}") for key in keys),
                   of(arm, "length", "{0:.0f} → {1:.0f}", times=1)] for arm in (right, control)]
        gaps.append([of(right, key, minus=control) for key in keys])
    return table, gaps


def ladder():
    rungs, key = EXPERIMENTS["ladder"].rows[""], "eval/accuracy"
    first, second = "1. REINFORCE, {}", "2. minus the group's mean, {}"
    return ([["{:.1f} ± {:.1f}".format(*figures.interval(after("ladder", rung, key, step)))
              for step in (20, 100)] for rung in rungs],
            [[cell("ladder", second.format(what), key, minus=first.format(what), times=times)
              for what, key, times in (("summed over tokens", key, 100), ("paid 0 or 1", key, -100),
                                       ("paid 0 or 1", "eval/greedy_accuracy", -100))]])


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
    table = [[cell("groups", arm, "eval/accuracy"), dead(arm, (1.5, 3.5)),
              dead(arm, range(26, 31))] for arm in arms]
    return table, [[cell("groups", "groups of 8, beta 0", "eval/accuracy"), table[2][0]]]


INTERVAL = r"(-?\d+(?:\.\d+)?)%? ± (\d+(?:\.\d+)?)"
# A file of results -> what the function above of its name returns: the cells of its table (right of
# the first column), and figures that stand in this order in a paragraph.
FIGURES = {path.stem: globals()[path.stem]()
           for path in sorted(ROOT.glob("report/experiments/results/*.jsonl"))}


@in_each_language
@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_an_experiment_are_those_of_its_results(name, language):
    expected, in_sentences = FIGURES[name]
    texts = LANGUAGES[language].values()
    held = [[row[1:] for row in table] for text in texts for table in tables(text)]
    assert expected is None or expected in held, "no such table:\n" + "\n".join(
        " | ".join(map(str, row)) for row in expected)
    for parts in in_sentences:
        wanted = [number for part in parts for number in numbers(part)]
        assert any(all(number in rest for number in wanted) for text in texts
                   for part in paragraphs(text) for rest in [iter(numbers(part))]), wanted


# All `mean ± interval` of the results, as pairs.
KNOWN = {pair for table, in_sentences in FIGURES.values() for row in [*(table or ()), *in_sentences]
         for cell in row for pair in re.findall(INTERVAL, str(cell))}


@of_each_page
def test_every_interval_is_one_of_the_results(page):
    assert set(re.findall(INTERVAL, PAGES[page])) - KNOWN == set()
