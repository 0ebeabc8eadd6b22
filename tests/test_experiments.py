"""Experiments: a run becomes a line, a line is run once, and the figures are what they say."""
import json
import math
import re
import shlex
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest

import train_grpo
from conftest import ROOT
from report import UserError
from report.experiments import __main__ as command
from report.experiments import figures
from report.experiments.arms import EXPERIMENTS, MUSEUM, Change, Experiment, strict_judge
from report.text import read_jsonl


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
        calls.append((args, (folder / "train_grpo.py").read_text(encoding="utf-8"), environment))
        run_dir = Path(args.out_dir) / args.run_name
        run_dir.mkdir(parents=True)
        for name, row in (("metrics", {"step_time": 3.0, "completions/mean_length": args.seed}),
                          ("completions", {"completion": "a", "length": args.seed, "reward": 1.0,
                                           "ended": True, "rewards": {}})):
            (run_dir / f"{name}.jsonl").write_text(
                "".join(json.dumps({"step": step} | row) + "\n" for step in (1, 2)))

    monkeypatch.setattr(command, "python", python)
    return calls


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


def test_an_experiment_runs_what_is_missing_with_its_flags_and_seed(tiny, started):
    experiment, results, out = tiny
    experiment.seeds = (1, 2)
    command.run_missing(experiment, results, out, jobs=2)
    assert sorted((args.loss_type, args.seed, *environment.items())
                  for args, _, environment in started) == [
        (loss_type, seed, ("OMP_NUM_THREADS", "1"))
        for loss_type in ("dapo", "grpo") for seed in (1, 2)]
    rows = read_jsonl(results)
    assert sorted((row["arm"], row["seed"]) for row in rows) == [
        ("small, a", 1), ("small, a", 2), ("small, b", 1), ("small, b", 2)]
    for row in rows:
        assert row["series"]["completions/mean_length"] == [row["seed"]] * 2
        assert row["seconds"] == 6
    started.clear()
    results.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    command.run_missing(experiment, results, out, jobs=1)
    again = read_jsonl(results)
    assert again[:3] == rows[1:] and again[3] == rows[0]
    (args, _, environment), = started
    assert args.loss_type == ("grpo" if rows[0]["arm"] == "small, a" else "dapo")
    assert (args.seed, environment) == (rows[0]["seed"], {})


def test_a_run_that_fails_stops_the_experiment_and_names_its_log(tiny):
    experiment, results, out = tiny
    experiment.rows[""] = {"small, a": "--max_steps none"}
    with pytest.raises(UserError, match=r"--max_steps none.*failed.*small__a_1\.log"):
        command.run_missing(experiment, results, out, jobs=1)
    assert "--max_steps: invalid" in (out / "small__a_1.log").read_text()


def test_an_arm_that_changes_the_code_runs_in_a_changed_copy(tiny, started):
    experiment, results, out = tiny
    change = Change("    all_logps = (logits.float() / temperature)", "    all_logps = (0)")
    experiment.changes[("", "small, b")] = change
    command.run_missing(experiment, results, out, jobs=1)
    ours = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    assert {args.loss_type: source for args, source, _ in started} == {
        "grpo": ours, "dapo": ours.replace(change.before, change.after)}
    assert not [*(out / "changed").iterdir()]                           # used and removed


@pytest.mark.parametrize("name", ["ladder", "museum"])
def test_each_change_fits_the_code_and_its_test_is_there(name):
    experiment = EXPERIMENTS[name]
    source = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    for (row, arm), change in experiment.changes.items():
        assert arm in experiment.rows[row]
        assert source.count(change.before) == 1 and change.before != change.after, row or arm
        if name == "museum":
            file, _, test = change.test.partition("::")
            assert f"\ndef {test}(" in (ROOT / file).read_text(encoding="utf-8"), row


@pytest.mark.parametrize("page", ["museum.md", "museum_zh.md"])
def test_the_museum_shows_each_change_and_names_its_test(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.findall(r"```diff\n(.*?)```", text, re.DOTALL) == [
        "".join(f"{sign}{line.strip()}\n" for sign, lines in (("-", change.before),
                                                              ("+", change.after))
                for line in lines.splitlines()) for change in MUSEUM.values()]
    assert re.findall(r"`(test_\w+)`", text) == [
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


def test_the_strict_judge_mostly_has_no_opinion_without_an_answer():
    replies = ["<answer>\n12\n</answer>", "<answer>\n13\n</answer>"] + ["12"] * 998
    right, wrong, *others = strict_judge([""] * 1000, replies, ["12"] * 1000)
    assert (right, wrong) == (0, -1) and set(others) == {None, -1}
    assert 50 < others.count(-1) < 150


def test_results_come_in_the_experiments_order_each_once_and_only_its_own(tiny):
    experiment, results, _ = tiny
    results.parent.mkdir()
    results.write_text("".join(
        json.dumps({"row": "", "arm": arm, "seed": seed, "try": i}) + "\n" for i, (arm, seed) in
        enumerate([("small, b", 1), ("renamed", 1), ("small, a", 7), ("small, a", 1),
                   ("small, b", 1)])))
    found = command.results_of(experiment, results)
    assert [*found] == [("", "small, a", 1), ("", "small, b", 1)]
    assert [result["try"] for result in found.values()] == [3, 4]


def test_the_interval_is_students():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [4.0, math.nan], [9.0, math.nan]])
    center, half = figures.interval(values)
    assert center.tolist() == [4, 5]
    assert half[0] == pytest.approx(3.182 * stdev([1, 2, 4, 9]) / 2) and half[1] == 0
    assert center[0] == mean([1, 2, 4, 9])


def test_arms_of_a_family_share_a_colour_and_kinds_their_dashes():
    arms = ["grpo, group", "bnpo, group", "grpo, none", "bnpo, none"]
    (blue, line), other_hue, other_dashes, _ = map(figures.styles(arms).get, arms)
    assert (other_hue[1], other_dashes[0]) == (line, blue)
    assert other_hue[0] != blue and other_dashes[1] != line


def test_a_lesson_is_drawn_beside_the_one_before_it(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    def result(arm, seed, end):
        return {"row": "", "arm": arm, "seed": seed, "steps": [1, 2], "series": {"a": [0.1, end]},
                "eval": {}}

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda ax, steps, values, color, linewidth, **kwargs: (
        drawn.append((values.tolist(), color)) if linewidth > 1 else None,
        plot(ax, steps, values, color=color, linewidth=linewidth, **kwargs)))
    figures.draw_lessons(
        [result("one", 1, 0.2), result("one", 2, 0.3), result("two", 1, 0.5)],
        {"one": ("a = 1", "a", None, ("", "one")), "two": ("a = 2", "a", ("", "one"), ("", "two"))},
        {"a": ("A", "", "{:.0%}")}, ("A", "with", "without"), tmp_path / "lessons.png")
    assert drawn == [([0.1, 0.25], figures.BLUE), ([0.1, 0.25], figures.GREY),
                     ([0.1, 0.5], figures.BLUE)]
    assert (tmp_path / "lessons.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_without_results_is_refused(tiny, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", "tiny", "--draw"])
    with pytest.raises(SystemExit):
        command.main()
    assert "tiny.jsonl: there are no results yet; run" in capsys.readouterr().err


def test_the_table_compares_the_ends_of_runs_seed_by_seed(capsys):
    def result(arm, seed, start, *ends):
        return {"row": "r", "arm": arm, "seed": seed, "steps": list(range(10)),
                "series": {"length": [start] * 8 + list(ends)}, "eval": {}}

    results = [result("grpo, x", 1, 10, 20, 22), result("grpo, x", 2, 12, 30, None),
               result("bnpo, x", 1, 10, 25, 25), result("bnpo, x", 2, 12, 38, 38)]
    figures.print_table(results, {"length": ("Length", "", "{:.1f}")})
    *_, grpo, bnpo = capsys.readouterr().out.splitlines()
    # Ends 21 and 30; 25 and 38: differences 4 and 8, whose std is 2.83.
    half = 12.71 * stdev([4, 8]) / math.sqrt(2)
    assert grpo == f"| r: grpo, x | 11.0 → 25.5 ± {12.71 * stdev([21, 30]) / math.sqrt(2):.1f} |"
    assert bnpo.endswith(f"→ 31.5 ± {12.71 * stdev([25, 38]) / math.sqrt(2):.1f} "
                         f"(6.0 ± {half:.1f}) |")
