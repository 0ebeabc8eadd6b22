"""Experiments: a run becomes a line, a line is run once, and its numbers are shown."""
import functools
import importlib
import itertools
import math
import re
import shlex
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from statistics import median, stdev

import numpy as np
import pytest

import train_grpo
from errors import UserError
from lab.experiments import __main__ as command
from lab.experiments import figures, pages, pass_at_k, tasks
from lab.experiments.__main__ import EXPERIMENTS, RESULTS
from pages import PAGES, tables
from support import ROOT, jsonl, write


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """An experiment of two arms, and its results; all goes to tmp_path."""
    experiment = {"arms": {"small, $": "--loss_type $"}, "each": ["grpo", "dapo"],
                  "seeds": [1], "panels": ["length", "gave_up"]}
    monkeypatch.setitem(EXPERIMENTS, "tiny", experiment)
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(command, "OUT", tmp_path / "the runs")
    (tmp_path / "results").mkdir()
    return experiment, tmp_path / "results/tiny.jsonl"


def result(arm, seed, *values, row=""):
    """What stays of a run that recorded lengths."""
    return {"row": row, "arm": arm, "seed": seed, "steps": list(range(len(values))),
            "series": {"length": list(values)}, "eval": {}}


SHARE = {"length": ("Length", "", "{:.0%}")}


# --- running --------------------------------------------------------------------------------------


LINE, WRONG = "all_logps = (logits.float() / temperature)", "all_logps = (0)"


@pytest.fixture
def started(tiny, tmp_path, monkeypatch):
    """The experiment's runs so far, (flags, script) each, and the files that its `first` wrote.

    The second of its two arms changes the script, and reads such a file. A run leaves what two
    steps would; their lengths are its seed.
    """
    experiment, _ = tiny
    page = tmp_path / "page.md"
    page.write_text(f"# T\n\n## Small (in `a`)\n\n```diff\n-{LINE}\n+{WRONG}\n```\n")
    experiment |= {"page": page, "seeds": [1, 2],
                   "first": ["-m model.train_sft --save {out}/a"],
                   "arms": {"right": "", "small, b": "--loss_type dapo --eval_data_path {out}/a"}}
    runs, first = [], []

    def python(arguments, log, folder=ROOT):
        if "train_sft" in arguments:
            first.append(shlex.split(arguments)[-1])
            return
        args = train_grpo.parse_args(shlex.split(arguments)[1:])
        runs.append((args, Path(folder, "train_grpo.py").read_text(encoding="utf-8")))
        run_dir = Path(args.out_dir) / args.run_name
        run_dir.mkdir(parents=True)
        reply = {"completion": "a", "length": args.seed, "reward": 1.0, "ended": True}
        write(run_dir / "metrics.jsonl", [{"step": step, "step_time": 3.0} for step in (1, 2)])
        write(run_dir / "completions.jsonl", [{"step": step} | reply for step in (1, 2)])

    monkeypatch.setattr(command, "python", python)
    return runs, first


def test_runs_have_their_flags_seed_and_change_and_leave_a_line_each(tiny, started):
    runs, first = started
    command.run_all("tiny", jobs=2)
    assert sorted((args.loss_type, args.seed) for args, _ in runs) == [
        ("dapo", 1), ("dapo", 2), ("grpo", 1), ("grpo", 2)]
    ours = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    assert ours.count(LINE) == 1 and first == [str(command.OUT / "tiny/a")]
    for args, script in runs:
        assert script == (ours if args.loss_type == "grpo" else ours.replace(LINE, WRONG))
    rows = jsonl(tiny[1])
    assert [row["series"]["length"] for row in rows] == [[row["seed"]] * 2 for row in rows]
    assert [row["seconds"] for row in rows] == [6] * 4


def test_runs_that_are_missing_are_run_once_and_one_arm_can_be_repeated(tiny, started):
    runs, first = started
    command.run_all("tiny", jobs=1)
    rows = jsonl(tiny[1])
    write(tiny[1], rows[1:])
    for _ in range(2):              # the second time nothing is missing
        command.run_all("tiny", jobs=1)
        assert jsonl(tiny[1]) == rows[1:] + rows[:1] and len(runs) == 5
    assert runs[4][0].seed == rows[0]["seed"]
    first.clear()
    command.repeat("tiny", "", "right", [3], jobs=1)
    assert len(runs) == 6 and not first                 # this arm reads nothing of `first`
    command.repeat("tiny", "", "small, b", [3], jobs=1)
    assert len(runs) == 7 and len(first) == 1


def test_commit_of_a_result_says_if_it_is_not_the_code_that_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "ROOT", tmp_path)
    (tmp_path / "lab/experiments/results").mkdir(parents=True)
    write(tmp_path / "lab/experiments/results/a.jsonl", [{}])
    (tmp_path / "script.py").write_text("a = 1\n")
    command.git("init", "--quiet")
    command.git("add", ".")
    command.git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "a")
    clean = command.where_run("--beta 0")
    write(tmp_path / "lab/experiments/results/a.jsonl", [{}, {}])
    assert command.where_run("--beta  0") == clean and "-" not in clean["commit"]
    (tmp_path / "script.py").write_text("a = 2\n")
    changed = command.where_run("--beta 1")
    assert changed["commit"] == f"{clean['commit']}-dirty" and clean["commit"]
    assert changed["flags"] != clean["flags"]


def test_the_flags_of_every_arm_go_together(monkeypatch):
    monkeypatch.chdir(ROOT)
    for experiment in EXPERIMENTS.values():
        if "arms" not in experiment:
            continue
        for flags in command.commands_of(experiment).values():
            flags = shlex.split(flags.format(out="out"))
            if flags[:1] == ["-m"] and flags[1].startswith("lab.experiments."):
                module = importlib.import_module(flags[1])
                own, flags = module.parse_args(flags[2:])[:2]
                if str(own).startswith("recipe:"):      # it makes a module that flags may name
                    module.recipe(own.removeprefix("recipe:"))
            train_grpo.parse_args(flags[flags.index("train_grpo.py") + 1:] if "-m" in flags
                                  else flags)


def test_failing_run_stops_the_experiment_and_names_its_log(tmp_path):
    with pytest.raises(UserError, match=r"1/0.*failed.*small\.log"):
        command.python("-c 'print(1/0)'", tmp_path / "logs/small.log")
    assert "ZeroDivisionError" in (tmp_path / "logs/small.log").read_text()


def test_results_come_in_the_experiments_order_each_once_and_only_its_own(
        tiny, tmp_path, monkeypatch, capsys):
    _, results = tiny
    runs = [("small, dapo", 1), ("renamed", 1), ("small, grpo", 7), ("small, grpo", 1),
            ("small, dapo", 1)]
    write(results, [result(*one, i) for i, one in enumerate(runs)])
    assert [(line["arm"], line["series"]["length"]) for line in command.known("tiny")] == [
        ("small, grpo", [3]), ("small, dapo", [4])]
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["", "tiny", "--draw"])
    (tmp_path / "docs/images").mkdir(parents=True)
    command.main()
    assert (tmp_path / "docs/images/tiny.png").read_bytes().startswith(b"\x89PNG")
    results.unlink()
    with pytest.raises(SystemExit):
        command.main()
    assert "tiny: there are no results yet; run" in capsys.readouterr().err


def test_pictures_of_the_readmes_say_what_the_results_say(tmp_path, monkeypatch):
    def texts(folder, name):
        picture = (folder / "docs/images" / name).read_text(encoding="utf-8")
        return re.findall("<text.*?>(.*?)</text>", picture)

    (tmp_path / "docs/images").mkdir(parents=True)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["", "default", "--draw"])
    command.main()
    for name, ends in (("front.svg", "sampled 25% → 96.5%"), ("front_zh.svg", "采样 25% → 96.5%")):
        assert texts(tmp_path, name) == texts(ROOT, name) and ends in texts(ROOT, name)


@pytest.mark.parametrize("page", ["lab/results.md", "lab/zh/results.md"])
def test_row_of_all_default_runs_is_what_they_come_to(page):
    runs = command.known("default") + command.known("default", fresh=True)
    (row,) = [row for table in tables(PAGES[page]) for row in table if row[0].startswith("20 ")]
    for text, key in zip(row[1:4], ("eval/accuracy", "eval/greedy_accuracy", "eval/pass@2")):
        values = 100 * np.array([(run["eval"][key][0], run["eval"][key][-1]) for run in runs])
        (begin, end), (_, half) = figures.interval(values)
        assert len(runs) == 20 and text == f"{begin:.1f} → {end:.1f} ± {half:.1f}"


# --- the changes that the ladder and the museum show ----------------------------------------------

MUSEUM = pages.changes(ROOT / "docs/museum.md")
# These start whole runs; the experiment sees them fail.
SLOW = ("test_a_run_leaves_all_its_files",
        "test_ranks_micro_batches_and_the_pair_change_no_gradient")
QUICK = [heading for heading, (_, _, test) in MUSEUM.items() if not test.endswith(SLOW)]


def test_exhibits_have_runs_and_a_change_that_does_not_fit_is_an_error():
    assert {*MUSEUM} == {row.lower() for row in EXPERIMENTS["museum"]["rows"]}
    ladder = EXPERIMENTS["ladder"]
    changed = {arm for arm in ladder["arms"] if command.change_of(ladder, "", arm)}
    assert changed == {arm for arm in ladder["arms"] if arm.startswith("1.")}
    with pytest.raises(UserError, match="page.md: '40' does not stand in the code once"):
        pages.changed("answer = 42\n", "-40\n+41\n", "page.md")


@pytest.mark.parametrize("heading", QUICK)
def test_exhibits_are_caught_by_their_tests(heading, monkeypatch):
    diff, file, test = MUSEUM[heading]
    wrong = pages.changed(command.source_of(file), diff, "docs/museum.md")
    code_of = SourceFileLoader.get_code
    monkeypatch.setattr(SourceFileLoader, "get_code", lambda loader, name: (
        compile(wrong, file, "exec") if loader.path == str(ROOT / file) else code_of(loader, name)))
    # These modules are imported anew, as the test's own process would do.
    of_test = re.compile(r"(model|run|train_grpo|steps|sampling|test_\w+)(\.|$)")
    for name in filter(of_test.match, [*sys.modules]):
        monkeypatch.delitem(sys.modules, name)
    assert pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                        f"{ROOT}/tests/{test}"]) == 1


# --- games and calls ------------------------------------------------------------------------------

def test_game_by_where_its_guesses_fall():
    halving = ["32 ", "high\n", "16 ", "low\n", "24 ", "low\n", "28 ", "high\n", "26 ", "yes\n", ""]
    assert command.places(halving) == {
        "guesses": 5, **{f"place/{i}": float(i == 7) for i in range(15)}}
    # 70 and 9 are not between the bounds; in the last third of 0 to 64, then of 0 to 63.
    assert {k: v for k, v in command.places(
        ["70 ", "high\n", "63 ", "high\n", "21 ", "low\n", "9 ", "low\n", "x"]).items() if v} == {
            "guesses": 4, "place/14": 0.5, "place/5": 0.5}
    row = {"completion": "", "reward": 1.0, "length": 9, "ended": True, "turns": halving,
           "columns": {"secret": 26, "level": 2}}
    assert [command.behaviour(row)[name] for name in ("guesses", "place/7", "calls/2")] == [5, 1, 5]


def test_answers_by_chance_know_a_hit_and_follow_from_the_seed():
    games, secret = [["5 "]] * 40, [5] * 4 + [9] * 36
    answers = tasks.any_answer(games, secret=secret, seeds=range(40))
    assert answers[:4] == ["yes\n"] * 4 and {*answers[4:]} == {"high\n", "low\n"}
    assert answers == tasks.any_answer(games, secret=secret, seeds=range(40))


# --- pass@k ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("c", range(6))
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(c):
    answers = [True] * c + [False] * (5 - c)
    for k in range(1, 6):
        chosen = [any(some) for some in itertools.combinations(answers, k)]
        assert pass_at_k.pass_at_k(5, c, k) == pytest.approx(sum(chosen) / len(chosen))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("never_give_up", [False, True])
def test_pass_at_k_counts_the_right_answers_of_each_problem(
        monkeypatch, own_module, never_give_up):
    own_module("adds", "def adds(prompts, completions, **columns):\n"
                       "    return [float('+' in text) for text in completions]")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pass_at_k, "AT_ONCE", 2)
    flags = ("@dataset/countdown.txt --eval_samples 3 --num_generations_eval 5 --max_gen_len 5 "
             "--eval_reward_funcs adds:adds --device cpu --seed 1")
    rows, counts = pass_at_k.answer_all(train_grpo.parse_args(flags.split()), never_give_up)
    problems = jsonl(ROOT / "dataset/countdown_heldout.jsonl")[:3]
    assert [row["columns"]["nums"] for row in rows] == [
        problem["nums"] for problem in problems for _ in range(5)]
    right = ["+" in row["completion"] for row in rows]
    assert counts == [sum(right[:5]), sum(right[5:10]), sum(right[10:])] and len({*counts}) > 1


# --- pictures and tables --------------------------------------------------------------------------

def test_the_interval_is_students():
    values = np.array([[1.0, 5.0], [2.0, 5.0], [4.0, math.nan], [9.0, math.nan]])
    center, half = figures.interval(values)
    assert center.tolist() == [4, 5]
    assert half[0] == pytest.approx(3.182 * stdev([1, 2, 4, 9]) / 2, rel=2e-4) and half[1] == 0


@pytest.mark.parametrize("freedom, t, p", [     # of printed tables
    (1, 63.66, 0.01), (2, 4.303, 0.05), (3, 5.841, 0.01), (4, 2.776, 0.05), (4, 4.604, 0.01),
    (9, 1.833, 0.10), (9, 4.781, 0.001), (10, 3.169, 0.01), (30, 2.042, 0.05), (5, 0, 1)])
def test_students_t(freedom, t, p):
    assert figures.p_value(t, freedom) == figures.p_value(-t, freedom) == pytest.approx(p, rel=2e-3)
    if p == 0.05:
        assert figures.t_of(freedom + 1) == pytest.approx(t, abs=5e-4)


def test_holms_correction_by_hand():
    # 4 x 0.01 and 3 x 0.015, but never below the one before; 2 x 0.4, then 1 x 0.7, lifted to 0.8.
    assert figures.holm([0.7, 0.015, 0.01, 0.4]) == pytest.approx([0.8, 0.045, 0.04, 0.8])
    assert figures.holm([0.02, 0.01, 0.012]) == pytest.approx([0.03, 0.03, 0.03])
    assert figures.holm([0.6, 0.6]) == [1, 1]


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
      "form": "{end:.0f}, {median:.1f}"}]}, [["21, 21.0"]]),
    ({"rows": ["y, 1"], "columns": [{"key": "length", "form": "{low:.1f} to {high:.1f}"}]},
     [[f"{31.5 - 6.314 * 6.5:.1f} to {31.5 + 6.314 * 6.5:.1f}"]])])
def test_the_numbers_of_a_table(table, texts):
    assert pages.texts_of({"table": table}, RUNS, SHARE) == texts


def test_a_mean_over_all_of_a_run_weighs_its_parts_by_their_steps():
    # Of 30 steps ten parts have two each and ten one: steps 1 and 2, ..., 21, 22, ...
    steps = [np.mean(part) for part in np.array_split(range(1, 31), 20)]
    assert figures.sizes(steps) == [2] * 10 + [1] * 10
    run = result("a", 1, *[0.1] * 10, *[0.4] * 10) | {"steps": steps}
    table = {"columns": [{"key": "length", "at": "all", "form": "{end:.0f}"}]}
    assert pages.texts_of({"table": table}, [run], SHARE) == [["20"]]


def test_claim_is_a_paired_difference_with_its_p():
    runs = [*RUNS, result("z", 1, 0.31, row="r"), result("z", 2, 0.41, row="r"),
            result("z", 3, 0.1, row="r"), result("z", 1, 0.21, row="s"),
            result("z", 2, 0.3, row="s")]
    claim = {"experiment": "e", "row": "", "key": "length"}
    claims = [claim | {"arm": "y, 1", "minus": "x, 1"},                             # 4, 8 points
              claim | {"row": "r", "arm": "z", "minus_row": "s", "minus": "z"},     # 10, 11
              claim | {"arm": "y, 1", "minus": "begin"},                            # 15, 26
              claim | {"arm": "y, 1", "minus": "z"}]        # z has other rows: nothing is known
    # Of two values t is their mean / (half of their difference), and p = 1 - 2/pi arctan t.
    p = [1 - 2 / math.pi * math.atan(t) for t in (6 / 2, 10.5 / 0.5, 20.5 / 5.5)]
    assert pages.claim_texts(claims, {"e": runs}, SHARE) == [
        ["2", f"6.0 ± {half(4, 8):.1f}", f"{p[0]:.3f}", f"{3 * p[2]:.3f}"],
        ["2", f"10.5 ± {half(10, 11):.1f}", f"{p[1]:.3f}", f"{4 * p[1]:.3f}"],
        ["2", f"20.5 ± {half(15, 26):.1f}", f"{p[2]:.3f}", f"{3 * p[2]:.3f}"],
        [""] * 4]


@pytest.fixture(scope="module")
def claims():
    """[(claim, its numbers as texts)]"""
    return [*command.claims_and_texts()]


def test_claims_have_results_and_headlines_have_ten_seeds(claims):
    for claim, texts in claims:
        assert all(texts), claim["says"]
        assert texts[0] == "10" or "headline" not in claim, claim["says"]


@pytest.mark.parametrize("page", ["lab/results.md", "lab/zh/results.md"])
def test_every_difference_in_the_sentences_is_a_claims(page, claims):
    text = re.sub(r"^\|.*$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    written = {number.lstrip("-") for number in re.findall(r"-?[\d.]+\s±\s[\d.]*\d", text)}
    assert len(written) > 8
    assert {" ".join(number.split()) for number in written} <= {
        texts[1].lstrip("-") for _, texts in claims}


def test_only_the_numbers_of_marked_tables_are_written():
    text = ("| a | b |\n|---|---|\n| 1 | 2 |\n\n<!-- results: it -->\n\n| n | a | b | c |\n"
            "|---|---|---|---|\n| 1 | **2 → 3** | 1 is text? | -4 ± 5 |\n| 2 | | the same | 0 |\n\n"
            "<!-- end -->\n\n| 1 | 2 |\n")
    rows = [["5", "6", "7"], ["8", "9", "10"]]
    wanted = text.replace("2 → 3", "5").replace("1 is text?", "6").replace("-4 ± 5", "7").replace(
        "| 0 |", "| 10 |")
    assert pages.filled(text, {"it": rows}.get, "a.md") == wanted
    with pytest.raises(UserError, match=r"a\.md: the table it should have 1 rows"):
        pages.filled(text, {"it": rows[:1]}.get, "a.md")
    with pytest.raises(UserError, match="no results for this yet"):
        pages.filled(text, {"it": [["5", "6", "7"], ["8", "9", ""]]}.get, "a.md")


def test_the_pages_show_the_results():
    table_of = functools.cache(command.table_of)        # in both languages the same
    for page in command.page_files():
        text = page.read_text(encoding="utf-8")
        new = pages.filled(text, table_of, page.name)
        assert new == text, "run python -m lab.experiments pages"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_ran_is_on_a_page_or_named_with_its_reason(language, claims):
    shown = set()
    for page in command.page_files():
        if ("zh" in page.parts) == (language == "zh"):
            shown |= shown_on(page.read_text(encoding="utf-8"), claims)
    for name, experiment in EXPERIMENTS.items():
        if "results" in experiment:
            continue
        ran = ({*command.commands_of(experiment)} if "arms" in experiment else
               {(line["row"], line["arm"]) for line in command.known(name)})
        missing = {run for run in ran if (name, *run) not in shown}
        for row_or_arm in itertools.chain(*experiment.get("untabled", {}).values()):
            named = {run for run in ran if row_or_arm in run}
            assert named & missing, f"{name}, {row_or_arm!r} is on a page, or never ran"
            missing -= named
        assert not missing, f"{name}: on no page, and not named as `untabled`"


def shown_on(text, claims):
    """{(experiment, row, arm)} of the tables and pictures of a page."""
    shown = set()
    for _, name, _ in pages.BLOCK.findall(text):
        if name == "claims":
            cells = [claim for claim, _ in claims if "headline" in claim]
        else:
            experiment = EXPERIMENTS[name]
            name = experiment.get("results", name)
            rows = pages.cells_of(experiment, command.known(name))
            cells = [{"experiment": name} | cell for cell in itertools.chain(*rows)]
        for cell in cells:
            shown.add((cell["experiment"], cell["row"], cell["arm"]))
            if "minus" in cell:
                shown.add((cell["experiment"], cell.get("minus_row", cell["row"]), cell["minus"]))
    for name in re.findall(r"images/(\w+)\.png", text):
        experiment = EXPERIMENTS.get(name, {})
        if "arms" in experiment and not {"cells", "bars"} & {*experiment}:      # it draws all arms
            shown |= {(name, *run) for run in command.commands_of(experiment)}
    return shown


@pytest.mark.parametrize("page", ["lab/results.md", "lab/zh/results.md"])
def test_the_number_of_claims_is_that_of_the_page(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    written = re.findall(r"\d+(?= claims with| here\)| 条结论)", text)
    assert written == [str(len(command.claims_of("results")))] * 2


def test_the_minutes_of_the_planning_table_are_the_medians_of_the_results():
    plan = {row[0]: float(row[-1]) for table in tables(PAGES["docs/own_task.md"]) for row in table
            if len(row) == 7}
    for task, name, row, arm in (
            ("arithmetic, the default", "default", "", "the default run"),
            ("`@dataset/countdown.txt`", "countdown", "", "the included weights"),
            ("`@dataset/guess.txt`", "guess", "", "nobody halves"),
            ("`@dataset/sentences.txt`, SmolLM2-135M", "smollm2", "", "the rule alone"),
            ("sums of reasoning-gym, SmolLM2-135M", "reasoning_gym", "SmolLM2, up to 3 numbers",
             "paid for the right number")):
        took = [line["seconds"] for line in jsonl(RESULTS / f"{name}.jsonl")
                if (line["row"], line["arm"]) == (row, arm)]
        assert len(took) >= 3 and round(median(took) / 60) == plan[task], task
