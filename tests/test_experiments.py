"""Experiments: a run becomes a line, a line is run once, and its numbers are shown."""
import math
import shlex
import sys
from pathlib import Path
from statistics import stdev
from types import ModuleType

import numpy as np
import pytest

import train_grpo
from conftest import ROOT, jsonl, write
from docs.experiments import __main__ as command
from docs.experiments import figures, pages, tasks
from docs.experiments.__main__ import EXPERIMENTS
from report import UserError

FLAGS = ("--max_steps 2 --batch_size 2 --num_generations 4 --max_gen_len 24 --eval_interval 2 "
         "--eval_samples 4 --reward_funcs accuracy --beta 0")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of two arms of two steps; its results go to tmp_path."""
    experiment = {
        "arms": {"small, a": "", "small, b": "--loss_type dapo"}, "common": FLAGS, "seeds": [1],
        "panels": ["eval/accuracy", "length",
                   ["completions/mean_length", "Length", "as the run has it", "{:.0f}"],
                   ["gave_up", "Gave up", "not recorded here", "{:.0%}"]]}
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
        reply = {"completion": "a", "length": args.seed, "reward": 1.0, "ended": True}
        metrics = {"step_time": 3.0, "completions/mean_length": args.seed}
        write(run_dir / "metrics.jsonl", [{"step": step} | metrics for step in (1, 2)])
        write(run_dir / "completions.jsonl", [{"step": step} | reply for step in (1, 2)])

    monkeypatch.setattr(command, "python", python)
    return calls


def result(arm, seed, *values, row="", **series):
    """What stays of a run that recorded lengths."""
    return {"row": row, "arm": arm, "seed": seed, "steps": list(range(len(values))),
            "series": {"length": list(values)} | series, "eval": {}}


SHARE = {"length": ("Length", "", "{:.0%}")}


# --- running --------------------------------------------------------------------------------------

def test_an_experiment_runs_and_is_drawn(tiny, tmp_path, capsys):
    experiment, results, out = tiny
    experiment["arms"] = {"small": ""}
    command.run_missing(experiment, results, out, jobs=2)
    row, = command.results_of(experiment, results).values()
    assert (row["arm"], row["seed"], row["steps"]) == ("small", 1, [1, 2])
    assert row["series"].keys() == {"length", "completions/mean_length"}
    assert row["series"]["length"] == row["series"]["completions/mean_length"]
    assert row["eval"]["step"] == [0, 2] and 0 <= row["eval"]["eval/accuracy"][0] <= 1
    assert not [path for path in out.iterdir() if path.is_dir()]        # summarised and removed
    panels = command.panels_of(experiment)
    figures.draw([row], panels, tmp_path / "tiny.png")
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    command.print_table([row], panels)
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("| small | ") and line.endswith("|  |")      # nothing of the last


def test_an_experiment_runs_what_is_missing_with_its_flags_seed_and_change(
        tiny, started, tmp_path):
    experiment, results, out = tiny
    experiment["seeds"] = [1, 2]
    line, other = "all_logps = (logits.float() / temperature)", "all_logps = (0)"
    page = tmp_path / "page.md"
    page.write_text(f"# T\n\n## Small (in `a`)\n\n```diff\n-{line}\n+{other}\n```\n")
    experiment |= {"page": page, "arms": {"right": "", "small, b": "--loss_type dapo"}}
    command.run_missing(experiment, results, out, jobs=2)
    assert sorted((args.loss_type, args.seed) for args, *_ in started) == [
        ("dapo", 1), ("dapo", 2), ("grpo", 1), ("grpo", 2)]
    ours = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    assert ours.count(line) == 1
    for args, source, environment in started:
        assert environment == {"OMP_NUM_THREADS": "1"}
        assert source == (ours if args.loss_type == "grpo" else ours.replace(line, other))
    rows = jsonl(results)
    assert sorted((row["arm"], row["seed"]) for row in rows) == [
        ("right", 1), ("right", 2), ("small, b", 1), ("small, b", 2)]
    for row in rows:
        assert row["series"]["completions/mean_length"] == [row["seed"]] * 2
        assert row["seconds"] == 6
    started.clear()
    write(results, rows[1:])
    command.run_missing(experiment, results, out, jobs=1)
    assert jsonl(results) == rows[1:] + rows[:1]
    (args, _, environment), = started
    assert (args.seed, environment) == (rows[0]["seed"], {})


def test_the_flags_of_every_arm_go_together(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, experiment in EXPERIMENTS.items():
        for flags in command.commands_of(experiment).values():
            flags = shlex.split(flags.format(out="out"))
            train_grpo.parse_args(flags[flags.index("train_grpo.py") + 1:] if "-m" in flags
                                  else flags)
        assert len(experiment.get("seeds", ())) <= len(figures.T_95) - 1, name


def test_an_arm_has_the_flags_of_its_row_the_common_ones_and_its_own():
    experiment = {"rows": {"r": "--a", "s": "--b"}, "common": "--c",
                  "arms": {"x": "--x", "s": {"y": "--y"}}}
    commands = command.commands_of(experiment | {"arms": {"x": "--x", "y": ""}})
    assert {arm: flags.split() for arm, flags in commands.items()} == {
        ("r", "x"): ["--a", "--c", "--x"], ("r", "y"): ["--a", "--c"],
        ("s", "x"): ["--b", "--c", "--x"], ("s", "y"): ["--b", "--c"]}
    experiment["arms"] = {"r": {"x": "--x"}, "s": {"y": "--y"}}
    assert [*command.commands_of(experiment)] == [("r", "x"), ("s", "y")]


def test_a_run_that_fails_stops_the_experiment_and_names_its_log(tmp_path):
    with pytest.raises(UserError, match=r"1/0.*failed.*small\.log"):
        command.python("-c 'print(1/0)'", tmp_path / "logs/small.log")
    assert "ZeroDivisionError" in (tmp_path / "logs/small.log").read_text()


def test_what_the_arms_read_is_made_unless_no_run_is_missing(tiny, tmp_path, monkeypatch):
    experiment, results, out = tiny
    experiment["first"] = ["-m model.train_sft\n--save {out}/small", "-m dataset.countdown"]
    calls = []
    monkeypatch.setattr(command, "python", lambda line, *_, **environment: calls.append(
        shlex.split(line)))
    monkeypatch.setattr(command, "run_missing", lambda *args: calls.append("the runs"))
    results.parent.mkdir()
    write(results, [result("small, a", 1, 5)])
    command.run_all(experiment, results, out, 1)
    small = f"{tmp_path}/the runs/small"
    assert calls == [["-m", "model.train_sft", "--save", small], ["-m", "dataset.countdown"],
                     "the runs"]
    write(results, [result("small, a", 1, 5), result("small, b", 1, 5)])
    command.run_all(experiment, results, out, 1)
    assert calls[3:] == ["the runs"]


def test_results_come_in_the_experiments_order_each_once_and_only_its_own(tiny):
    experiment, results, _ = tiny
    results.parent.mkdir()
    runs = [("small, b", 1), ("renamed", 1), ("small, a", 7), ("small, a", 1), ("small, b", 1)]
    write(results, [result(*one, i) for i, one in enumerate(runs)])
    found = command.results_of(experiment, results)
    assert [*found] == [("", "small, a", 1), ("", "small, b", 1)]
    assert [line["series"]["length"] for line in found.values()] == [[3], [4]]


def test_drawing_without_results_is_refused(tiny, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["", "tiny", "--draw"])
    with pytest.raises(SystemExit):
        command.main()
    assert "tiny.jsonl: there are no results yet; run" in capsys.readouterr().err


# --- the changes that the ladder and the museum show ---------------------------------------------

MUSEUM = pages.changes(ROOT / "docs/museum.md")
# These start whole runs; the experiment sees them fail.
SLOW = ("test_a_run_leaves_all_its_files",
        "test_ranks_micro_batches_and_the_pair_change_no_gradient")
QUICK = [heading for heading, (_, test) in MUSEUM.items() if test not in SLOW]


def test_every_exhibit_has_a_diff_a_test_and_its_runs():
    assert {*MUSEUM} == {row.lower() for row in EXPERIMENTS["museum"]["rows"]}
    assert all(diff and command.node(test) for diff, test in MUSEUM.values())
    assert [*pages.changes(ROOT / "docs/ladder.md")] == ["1. reinforce"]
    assert {arm for arm in EXPERIMENTS["ladder"]["arms"]
            if command.diff_of(EXPERIMENTS["ladder"], "", arm)} == {
        arm for arm in EXPERIMENTS["ladder"]["arms"] if arm.startswith("1.")}


@pytest.mark.parametrize("heading", QUICK)
def test_the_test_of_an_exhibit_catches_its_error(heading, monkeypatch):
    diff, test = MUSEUM[heading]
    source = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    try:
        source = pages.changed(source, diff, "docs/museum.md")
    except UserError as error:
        pytest.skip(str(error))         # the experiment says so
    wrong = ModuleType("train_grpo")
    wrong.__file__ = train_grpo.__file__
    monkeypatch.setitem(sys.modules, "train_grpo", wrong)
    exec(compile(source, "train_grpo.py", "exec"), wrong.__dict__)
    node = command.node(test)
    monkeypatch.delitem(sys.modules, Path(node.partition("::")[0]).stem, raising=False)
    assert pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                        f"{ROOT}/{node}"]) == 1


def test_a_change_that_no_test_notices_or_that_does_not_fit_is_an_error(
        tmp_path, monkeypatch, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "train_grpo.py").write_text("answer = 42\n")
    (tmp_path / "tests/test_it.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nfrom train_grpo import answer\n\n\n"
        "def test_it():\n    assert answer != 41\n")
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "ROOT", tmp_path)
    text = "## Bug\n\n```diff\n-{}\n+{}\n```\n\n**Caught by** `test_it`.\n"
    page.write_text(text.format(42, 41))
    command.prove("page.md")
    assert capsys.readouterr().out == "bug: test_it fails: assert 41 != 41\n"
    page.write_text(text.format(42, 43))
    with pytest.raises(UserError, match="page.md: test_it should fail"):
        command.prove("page.md")
    page.write_text(text.format(40, 41))
    with pytest.raises(UserError, match="page.md: '40' does not stand in train_grpo.py once"):
        command.prove("page.md")


# --- own rewards and texts ------------------------------------------------------------------------

def test_a_verifier_errs_on_one_answer_in_ten_of_one_kind():
    right, wrong = ["<answer>\n12\n</answer>"] * 5000, ["<answer>\n13\n</answer>"] * 5000
    paid = {judge: judge([""] * 10000, right + wrong, ["12"] * 10000)
            for judge in (tasks.misses_some, tasks.passes_some)}
    assert sum(paid[tasks.misses_some][:5000]) == pytest.approx(4500, abs=100)      # 5 sigma
    assert sum(paid[tasks.passes_some][5000:]) == pytest.approx(500, abs=100)
    assert sum(paid[tasks.misses_some][5000:]) == 0
    assert sum(paid[tasks.passes_some][:5000]) == 5000


def test_the_strict_judge_mostly_has_no_opinion_without_an_answer():
    replies = ["<answer>\n12\n</answer>", "<answer>\n13\n</answer>"] + ["12"] * 998
    right, wrong, *others = tasks.strict_judge([""] * 1000, replies, ["12"] * 1000)
    assert (right, wrong) == (0, -1) and set(others) == {None, -1}
    assert 50 < others.count(-1) < 150


def test_half_of_the_sums_are_worked_link_by_link(tmp_path, monkeypatch):
    row = {"question": "22 - 78 + 0 + 9 =", "metadata": {"expression": "22 - 78 + 0 + 9"}}
    sums, chats = write(tmp_path / "sums.jsonl", [row] * 40), tmp_path / "chats.jsonl"
    monkeypatch.setattr("sys.argv", ["", str(sums), str(chats)])
    tasks.main()
    turns = [line["conversations"] for line in jsonl(chats)]
    assert {turn["content"] for turn, _ in turns} == {row["question"]}
    worked = [reply["content"] for _, reply in turns if "guess" not in reply["content"]]
    assert 10 < len(worked) < 30
    assert set(worked) == {"<think>\n22-78=-48-8=-56\n-56+0=-56\n-56+9=-47\n</think>\n"
                           "<answer>\n-47\n</answer>"}


# --- pictures -------------------------------------------------------------------------------------

@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: [(colour, x, y)] of lines, [(value, colour)] of their ends, bands' tops."""
    from matplotlib.axes import Axes

    lines, ends, bands, plot = [], [], [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, color, **style: (
        lines.append((color, [*x], [*y])), plot(ax, x, y, color=color, **style))[1])
    monkeypatch.setattr(Axes, "fill_between", lambda ax, steps, low, high, **_: bands.append(
        high.tolist()))
    monkeypatch.setattr(figures, "finish", lambda ax, found, *_, **__: ends.extend(
        (value, color) for value, _, color in found))
    return lines, ends, bands


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


def test_own_cells_have_the_legends_colours(tmp_path, drawn):
    runs = [result("one", 1, 0.1, 0.2), result("one", 2, 0.1, 0.3), result("two", 1, 0.1, 0.5)]
    cells = [{"key": "length", "arms": ["", "one"]}, {"key": "length", "arms": ["one", "two"]}]
    figures.draw(runs, SHARE, tmp_path / "a.png", cells, {"without": "grey", "with": "blue"}, 2)
    assert drawn[0] == [(figures.BLUE, [0, 1], [0.1, 0.25]), (figures.GREY, [0, 1], [0.1, 0.25]),
                        (figures.BLUE, [0, 1], [0.1, 0.5])]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_ends_with_the_tables_number_and_a_band_of_shares_at_all(tmp_path, drawn):
    runs = [result("a", 1, *[0.5] * 8, 0.8, 1.0), result("a", 2, *[0.5] * 8, 0.6, 1.0)]
    figures.draw(runs, SHARE, tmp_path / "a.png")
    # Of ten parts the last two are the end. At 0.7 ± 1.27 the band is cut off.
    assert drawn[1] == [(pytest.approx(0.85), figures.BLUE)]
    assert drawn[2] == [pytest.approx([0.5] * 8 + [1, 1])]


def test_where_arms_end_against_another_series_and_the_lowest_values(tmp_path, drawn):
    runs = [result(arm, seed, 0.5, 0.2, end, kl=[0, 1, kl]) for arm, seed, end, kl in (
        ("k, 1", 1, 0.4, 0.01), ("k, 1", 2, 0.4, 0.03), ("k, 2", 1, 0.6, 0.1),
        ("k, 2", 2, 0.6, 0.3))]
    steps, lowest = figures.series(runs, "lowest length")
    assert len(steps) == 2 and lowest.tolist() == [[0.2, 0.2]] * 4
    figures.draw(runs, {"length against kl": ("A", "", "{:.0%}")}, tmp_path / "a.png")
    (_, x, y), = drawn[0]
    # As in the panels, a KL is averaged by its logarithm.
    assert x == pytest.approx([3e-4**0.5, 0.03**0.5]) and y == pytest.approx([0.4, 0.6])


# --- the tables of the pages ----------------------------------------------------------------------

# Of ten steps the last two are the end: 0.21 and 0.30 of x, 0.25 and 0.38 of y.
RUNS = [result("x, 1", 1, *[0.10] * 8, 0.20, 0.22), result("x, 1", 2, *[0.12] * 8, 0.30, None),
        result("y, 1", 1, *[0.10] * 8, 0.25, 0.25), result("y, 1", 2, *[0.12] * 8, 0.38, 0.38)]


def half(*pair):
    return 12.71 * stdev(pair) / math.sqrt(2)


@pytest.mark.parametrize("table, texts", [
    ({"columns": ["length"]}, [[f"25.5 ± {half(21, 30):.1f}"], [f"31.5 ± {half(25, 38):.1f}"]]),
    ({"key": "length", "rows": ["y, $", "x, $"], "columns": [{"arm": "1"}, {"arm": "2"}],
      "form": "{begin:.0f} → {end:.1f}"}, [["11 → 31.5", ""], ["11 → 25.5", ""]]),
    ({"rows": [{"arm": "y, $", "minus": "x, $"}], "columns": [{"key": "length", "arm": "1"}]},
     [[f"6.0 ± {half(4, 8):.1f}"]]),
    ({"rows": [{"arm": "x, 1", "seed": 2}], "columns": [{"key": "length", "at": [7, 8],
      "form": "{end:.0f}"}]}, [["21"]]),
    ({"rows": ["x, $"], "columns": [{"key": "length", "arm": ["1", "1"], "form": "{end:.0f}"}]},
     [["26, 26"]]),
    ({"rows": ["x, 1"], "columns": ["length"], "seeds_beyond": True}, [["21, 30"]]),
    ({"rows": ["x, 1"], "columns": ["length"], "form": "{geometric:.2f}"},
     [[f"{math.sqrt(21 * 30):.2f}"]])])
def test_the_numbers_of_a_table(table, texts):
    assert pages.texts_of(table, RUNS, SHARE) == texts


def test_what_is_no_share_is_shown_as_it_is():
    first, _ = pages.texts_of({"columns": ["length"]}, RUNS, {"length": ("", "", "{:.1f}")})
    assert first == [f"0.26 ± {half(0.21, 0.30):.2f}"]


def test_only_the_numbers_of_marked_tables_are_written():
    text = ("| a | b |\n|---|---|\n| 1 | 2 |\n\n<!-- results: it -->\n\n| n | a | b | c |\n"
            "|---|---|---|---|\n| 1 | **2 → 3** | 1 is text? | -4 ± 5 |\n| 2 | | the same | 0 |\n\n"
            "<!-- end -->\n\n| 1 | 2 |\n")
    tables = {"it": [["5", "6", "7"], ["8", "9", "10"]]}
    wanted = text.replace("2 → 3", "5").replace("1 is text?", "6").replace("-4 ± 5", "7").replace(
        "| 0 |", "| 10 |")
    assert pages.filled(text, tables, "a.md") == wanted
    with pytest.raises(UserError, match=r"a\.md: the table it has 2 rows"):
        pages.filled(text, {"it": tables["it"][:1]}, "a.md")
    with pytest.raises(UserError, match="no results for this yet"):
        pages.filled(text, {"it": [["5", "6", "7"], ["8", "9", ""]]}, "a.md")


def test_the_pages_show_the_results():
    tables = command.tables()
    shown = set()
    for page in ROOT.glob("docs/*.md"):
        text = page.read_text(encoding="utf-8")
        assert pages.filled(text, tables, page.name) == text, "run python -m docs.experiments pages"
        shown |= {(name, page.stem.endswith("_zh")) for _, name, _ in pages.BLOCK.findall(text)}
    assert shown == {(name, chinese) for name in tables for chinese in (False, True)}
