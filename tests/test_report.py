import argparse
import io
import json
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from matplotlib.image import imread

import train_grpo
from errors import GIVEN, UserError, user_errors
from run.metrics import (
    Clock,
    Mean,
    Metrics,
    describe,
    rollout_metrics,
    token_texts,
)
from run.report.model_card import write_card
from run.report.picture import Run, draw_curves, draw_time, smooth
from run.report.terminal import Report, one_group, start_swanlab
from support import ROOT, turns, write


def report_args(**changed):
    """The flags that a Report reads."""
    return argparse.Namespace(**{
        "swanlab": "disabled", "wandb_project": "MiniGRPO", "num_generations": 2, "resume": False,
        "eval_only": False, "reward_funcs": [], "eval_reward_funcs": ["accuracy"]} | changed)


def metrics(step, **changed):
    return {"reward": 0.1 * step, "completions/mean_length": 20.0,
            "completions/clipped_ratio": 0.0, "frac_reward_zero_std": 0.2, "grad_norm": 1.0,
            "tokens": 100} | changed


@contextmanager
def reported(folder, args, *, total_steps, start_step=0, active=True):
    """A Report that writes into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args.json").write_text(json.dumps(vars(args)))
    report, error = Report(args, 0 if active else 1, folder), None
    report.open(total_steps, start_step)
    try:
        yield report
    except BaseException as raised:
        error = raised
        raise
    finally:
        report.close(error)


def run(folder, steps, start_step=0, **changed):
    with reported(folder, report_args(), total_steps=steps[-1], start_step=start_step) as report:
        for step in steps:
            report.step(step, metrics(step, **changed), ROWS)


ROWS = [
    {"prompt": "What is 1+1?", "columns": {}, "completion": "two", "reward": 1.5,
     "rewards": {"tag_reward": 1.0, "accuracy_reward": 0.5}, "advantage": 0.71},
    {"prompt": "What is 1+1?", "columns": {}, "completion": "three", "reward": 0.25,
     "rewards": {"tag_reward": 0.25, "accuracy_reward": None}, "advantage": -0.71},
]


def lines(path):
    """The rows of a file of whole lines of strict JSON, in which NaN is null."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n") and "NaN" not in text and "Infinity" not in text
    return [json.loads(line) for line in text.splitlines()]


def test_metrics_are_one_line_of_strict_json_per_step(tmp_path):
    nan, inf = float("nan"), float("inf")
    text, clock = "苹果\n\"quoted\"", Clock(torch.device("cpu"))
    with reported(tmp_path / "run", report_args(), total_steps=3) as report:
        evaluated = {"measure": "accuracy", "eval/accuracy": nan, "eval/greedy_accuracy": 0.5}
        assert report.evaluation(0, evaluated) is evaluated
        for step in (1, 2, 3):
            for phase in ("rollout", "eval", None):
                clock(phase)
                time.sleep(0.01)
            completions = [ROWS[0] | {"completion": text, "reward": nan}] if step == 3 else []
            report.step(step, metrics(step, kl=nan, grad_norm=-inf) | clock.taken(100),
                        completions)
            # A line is in the file as soon as its step is done, not only when the run ends.
            assert len(lines(tmp_path / "run/metrics.jsonl")) == step
    rows = lines(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    times = {name: rows[1][f"timing_s/{name}"] for name in ("rollout", "eval")}
    assert min(times.values()) >= 0.01 and rows[1]["step_time"] == sum(times.values())
    assert rows[1]["perf/throughput"] == pytest.approx(100 / times["rollout"])
    assert rows[1]["reward"] == 0.2 and rows[1]["kl"] is None and rows[1]["grad_norm"] is None
    assert lines(tmp_path / "run/eval.jsonl") == [
        {"step": 0, "measure": "accuracy", "eval/accuracy": None, "eval/greedy_accuracy": 0.5}]
    assert "measure" not in evaluated
    assert lines(tmp_path / "run/completions.jsonl") == [
        ROWS[0] | {"step": 3, "completion": text, "reward": None}]


@pytest.fixture
def swanlab(monkeypatch):
    """In the place of the package: `began` has the options of each start, `log` and `finish` fail
    once `error` is set."""
    def log(values=None, step=None):
        stand_in.calls.append(step)
        if stand_in.error:
            raise stand_in.error

    stand_in = SimpleNamespace(
        began=[], calls=[], error=None, Settings=lambda **options: None, log=log, finish=log,
        init=lambda **options: stand_in.began.append(options), has_run=lambda: True)
    monkeypatch.setitem(sys.modules, "swanlab", stand_in)
    return stand_in


def test_tracker_gets_the_flags_that_have_a_value(tmp_path, swanlab):
    args = report_args(swanlab="offline", delta=None, beta=0.0)
    start_swanlab(tmp_path, args)
    config = swanlab.began[0]["config"]
    assert config["beta"] == 0.0 and "delta" not in config
    for flags in (["--swanlab", "offline", "--use_wandb"], ["--use_wandb", "--swanlab", "offline"]):
        start_swanlab(tmp_path, train_grpo.parse_args(flags))
        assert swanlab.began[-1]["mode"] == "offline"


def test_tracker_that_fails_is_a_warning_once(tmp_path, swanlab, capsys):
    swanlab.error = ConnectionError("it is down")
    args = report_args(swanlab=None, use_wandb=True)        # online, unless --swanlab is given, too
    with reported(tmp_path / "run", args, total_steps=3) as report:
        for step in (1, 2, 3):
            report.step(step, metrics(step), ROWS)
        swanlab.error = SystemExit(1)       # at the end
    assert swanlab.calls == [1, 2, 3, None] and swanlab.began[0]["mode"] == "online"
    assert capsys.readouterr().out.count("SwanLab failed (ConnectionError: it is down)") == 1


def test_tracker_of_a_resumed_run_continues_its_charts(tmp_path, swanlab):
    for folder, resume in (("a", False), ("a", True), ("b", True), ("b", True), ("a", False)):
        (tmp_path / folder).mkdir(exist_ok=True)
        start_swanlab(tmp_path / folder, report_args(swanlab="online", resume=resume))
    first, again, other, later, new = (one["id"] for one in swanlab.began)
    assert first == again and other == later and len({first, other, new}) == 3
    assert {one["resume"] for one in swanlab.began} == {"allow"}


def test_terminal_shows_each_answer_of_a_group_once_the_best_first(tmp_path, capsys):
    args = report_args(num_generations=9)
    with reported(tmp_path / "run", args, total_steps=1) as report:
        report.step(1, metrics(1), [ROWS[1]] + [ROWS[0]] * 8)
    printed = capsys.readouterr().out
    assert printed.count("two") == printed.count("three") == printed.count("What is 1+1?") == 1
    assert printed.index("7 times") < printed.index("two") < printed.index("three")


@pytest.mark.parametrize("came_from, named, base", [
    ("some/model-1B", "some/model-1B", "some/model-1B"), (str(ROOT / "model"), None, "model"),
    ("/no/such/model", None, "model"), ("a/b/c", None, "c"), ("", None, "Mine")])
def test_a_models_card_names_only_a_base_that_the_hub_takes(
        came_from, named, base, tmp_path, monkeypatch):
    run(tmp_path / "run", [1, 2])
    args = train_grpo.parse_args([])
    args.model_path, args.trainer = "<Mine>", "GRPO"
    monkeypatch.setitem(GIVEN, "<Mine>", SimpleNamespace(name_or_path=came_from))
    write_card(tmp_path, tmp_path / "run", args, train_grpo.parse_args([]))
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == named and f"| base | {base} |" in card.text


def test_tools_words_are_dim_and_in_brackets_and_a_models_are_not(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    answered = ROWS[0] | {"turns": ["50 ", "low\n", "7 ", "yes\n", ""], "tool_tokens": 3}
    shown = one_group(1, [answered, answered, ROWS[1] | {"completion": "‹low⏎›"}])
    for part in ("2 times", "50 \x1b[2m‹low⏎›\x1b[0m7 \x1b[2m‹yes⏎›\x1b[0m", "  ‹low⏎›"):
        assert part in shown


def test_evaluation_is_printed_by_the_first_rank_only(tmp_path, capsys):
    for active in (True, False):
        with reported(tmp_path / "run", report_args(), total_steps=1, active=active) as report:
            capsys.readouterr()
            assert report.evaluation(0, {"measure": "it", "eval/accuracy": 0.5}) == {
                "eval/accuracy": 0.5}
        assert ("50.0%" in capsys.readouterr().out) is active


def test_text_of_a_model_ends_no_run_and_is_not_taken_for_markup(tmp_path, monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, "ascii", errors="replace"))
    text = "[red]苹果[/nothing] :smile:\x1b[2J"
    greedy = SimpleNamespace(columns={"messages": [turns(text)]}, completions=[text], turns=None)
    verdicts = {"right": 1.0, "wrong": 0.5, "not scored": float("nan")}
    with reported(tmp_path, report_args(), total_steps=1) as report:
        for reward in verdicts.values():
            greedy.rewards = torch.tensor([reward])
            report.evaluation(0, {"eval/accuracy": 0.5}, greedy)
        report.step(1, metrics(1), [ROWS[0] | {"completion": text}])
        sys.stdout.flush()
        printed = output.getvalue().decode()
    assert printed.count("[red]??[/nothing] :smile:?[2J") == 2 * 3 + 1
    for verdict in verdicts:
        assert f"{verdict}: [red]" in printed


@pytest.mark.parametrize("steps, half_line, start_step, then, found", [
    ([1, 2, 3, 4, 5], '{"step": 6, "rew', 3, [4, 5], [1, 2, 3, 4, 5]),
    ([1, 2, 3], "", 0, [1], [1]),                   # a new run in an old folder
])
def test_resume_goes_on_after_the_lines_of_the_checkpoint(
        steps, half_line, start_step, then, found, tmp_path):
    run(tmp_path, steps)
    for name in ("metrics", "completions"):
        with open(tmp_path / f"{name}.jsonl", "a") as file:
            file.write(half_line)
    run(tmp_path, then, start_step=start_step, kl=0.7)
    rows = lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == found
    assert [row["step"] for row in rows if "kl" in row] == then
    assert [row["step"] for row in lines(tmp_path / "completions.jsonl")] == sorted(found * 2)


def test_pictures_are_drawn_once_a_minute_and_whatever_ends_the_run(tmp_path, monkeypatch):
    drawn, now = [], [0.0]
    monkeypatch.setattr("run.report.picture.draw_curves", lambda run_dirs, path: drawn.append(
        len(lines(tmp_path / "metrics.jsonl"))))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with pytest.raises(KeyboardInterrupt), reported(
            tmp_path, report_args(), total_steps=9) as report:
        for step, now[0] in enumerate((10, 60, 80, 90), start=1):
            report.step(step, metrics(step), ROWS)
            report.draw()
        raise KeyboardInterrupt
    assert drawn == [1, 3, 4] and "three" in (tmp_path / "report.html").read_text()


def test_headline_has_the_first_and_the_last_of_what_was_recorded(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": step, "reward": step / 4, "step_time": 1.5}
                                       for step in (1, 2, 3, 4)])
    assert Run(tmp_path).headline() == "reward 0.25 → 1.00, 4 steps, 00:06"
    accuracies = [{"step": step, "eval/accuracy": accuracy, "eval/mean_length": 9}
                  for step, accuracy in ((0, 0.25), (2, 0.75), (4, 0.5))]
    for measures, begins in (       # only what the same functions measured is compared
            ("aaa", "held-out accuracy 25.0% → 50.0%"), ("abb", "held-out accuracy 75.0% → 50.0%"),
            ("aab", "reward 0.25 → 1.00"), ([None] * 3, "reward 0.25 → 1.00")):
        write(tmp_path / "eval.jsonl", [row | {"measure": measure}
                                        for row, measure in zip(accuracies, measures)])
        assert Run(tmp_path).headline().startswith(begins), measures
    write(tmp_path / "eval.jsonl", [accuracies[0] | {"measure": "a", "eval/judged": 0.5}])
    assert Run(tmp_path).headline().startswith("only 50.0% of the held-out problems scored")


def test_settings_are_the_main_flags_of_a_run(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 1, "reward": 0.5}])
    assert Run(tmp_path).settings() == ""
    args = tmp_path / "args.json"
    args.write_text('{"seed": 7, "learning_rate": 0.0003, "dtype": "auto", "batch_size": 16}')
    assert Run(tmp_path).settings() == "batch_size 16, learning_rate 0.0003, seed 7"
    args.write_text("{")
    with pytest.raises(UserError, match="args.json"):
        Run(tmp_path)


def test_picture_of_several_runs_and_a_folder_without_a_run_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": null}\n')
    draw_curves([tmp_path / "a", tmp_path / "b"], tmp_path / "picture.png")
    height, width, _ = imread(tmp_path / "picture.png").shape
    assert 1000 <= width <= 3000 and 600 <= height <= 2000
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty"):
        draw_curves([tmp_path / "empty"], tmp_path / "none.png")


# As at the end of the default run: 0.85 on average, now and then a step of 1.
HEALTHY = [{"completions/clipped_ratio": 0.5, "rollout_probs_diff_mean": 5e-5,
            "frac_reward_zero_std": 1.0 if step % 5 < 2 else 0.75} for step in range(1, 46)]


@pytest.mark.parametrize("trouble, advice, warned", [
    ({"completions/clipped_ratio": 0.6}, "--max_gen_len", [3, 23, 43]),
    ({"frac_reward_zero_std": 1.0}, "--num_generations", [5, 25, 45]),
    ({"grad_norm": float("nan")}, "--learning_rate", [3, 23, 43]),
    ({"rollout_probs_diff_mean": 2e-3}, "old or different weights", [3, 23, 43]),
    ({"rollout_probs_diff_mean": 9e-4}, "", []), ({}, "", []),
])
def test_warning_is_repeated_after_20_steps_not_before(trouble, advice, warned, tmp_path, capsys):
    said = []
    with reported(tmp_path, report_args(), total_steps=45) as report:
        for step, healthy in enumerate(HEALTHY, start=1):
            report.step(step, metrics(step, **healthy | (trouble if step >= 3 else {})), [])
            said += [(step, advice in line) for line in capsys.readouterr().out.splitlines()
                     if line.startswith("warning:")]
    assert said == [(step, True) for step in warned]


@pytest.mark.parametrize("difference, warned", [(5e-3, False), (0.02, True)])
def test_sampler_may_be_coarse_but_not_wrong_from_the_start(
        difference, warned, tmp_path, capsys):
    run(tmp_path, [1, 2, 3], rollout_probs_diff_mean=difference)
    assert ("rollout_probs_diff_mean" in capsys.readouterr().out) == warned


def test_smooth_curve_begins_where_the_run_began_and_leaves_a_straight_line_straight():
    line = np.arange(100.0)
    assert smooth(line)[:95] == pytest.approx(line[:95])
    # A window of three, (1/4, 1/2, 1/4) around the second value; of one at the first.
    fall = np.array([8.0, 4.0] + [0.0] * 28)
    assert smooth(fall)[:3] == pytest.approx([8, 4, 1])


def test_phases_are_stacked_with_their_shares_of_the_whole_time(tmp_path):
    write(tmp_path / "metrics.jsonl", [
        {"step": 1, "timing_s/rollout": 2.0, "timing_s/update_policy": 1.0},
        {"step": 2, "timing_s/rollout": 4.0, "timing_s/update_policy": 1.0}])
    ax = Figure().add_subplot()
    draw_time(ax, Run(tmp_path))
    tops = [area.get_paths()[0].get_extents().y1 for area in ax.collections]
    assert tops == [4, 5] and ax.dataLim.bounds == (1, 0, 1, 5)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "update policy 25%", "rollout 75%"]


def test_metrics_of_a_rollout_by_hand():
    nan = float("nan")
    group_a = [(1.0, 1.0, 4, True), (2.0, nan, 6, True), (nan, nan, 9, False)]
    group_b = [(3.0, 2.0, 5, True), (3.0, 3.0, 7, True), (3.0, 4.0, 5, True)]
    rows = [{"reward": reward, "rewards": {"brief": brief}, "length": length, "ended": ended}
            for reward, brief, length, ended in group_a + group_b]
    assert rollout_metrics(rows, 3) == pytest.approx({
        "reward": 12 / 5, "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 1 / 2,
        "completions/mean_length": 6, "completions/min_length": 4, "completions/max_length": 9,
        "completions/clipped_ratio": 1 / 6, "tokens": 36,
        "rewards/brief/mean": 10 / 4, "rewards/brief/std": (5 / 3)**0.5})
    reward = rollout_metrics([rows[2]] * 3, 3)["reward"]
    assert reward != reward


def test_parts_of_a_step_join_over_ranks_by_their_kind_and_updates_are_averaged():
    two_ranks = SimpleNamespace(gather=lambda rows: rows * 2)
    parts = [
        {"loss": 0.0},
        {"loss": 1.5, "entropy": Mean(torch.tensor(6.0), torch.tensor(2)),
         "x_max": torch.tensor(0.25)},
        {"x_max": 0.5}]
    of_step = Metrics(two_ranks, SimpleNamespace(delta=None))
    of_step.parts = parts
    of_step.end_update(torch.tensor(2.0))
    assert of_step.means() == {"loss": 3.0, "entropy": 3.0, "x_max": 0.5, "grad_norm": 2.0}
    of_step.updates = [{"kl": Mean(2.0, 2), "x_max": 2.0}, {"kl": Mean(4.0, 1)}, {"x_max": 1.0}]
    assert of_step.means() == {"kl": 2.5, "x_max": 2.0}


class Bytes:
    """A tokenizer whose ids are bytes; 0 is the EOS."""

    pad_token_id = 0

    def decode(self, ids):
        return bytes(i for i in ids if i).decode(errors="replace")


def test_rollout_is_described_one_row_per_completion():
    chats = [[{"role": "user", "content": "7+3"}]] * 2
    rollout = SimpleNamespace(
        prompts=["q", "q"], completions=["1", "11"],
        columns={"messages": chats, "nums": [[7, 3], None], "reward": ["of the file"] * 2,
                 "step": ["x"] * 2, "tokens": [9] * 2},
        loss_mask=torch.tensor([[1, 0], [1, 1]]), ended=torch.tensor([True, False]),
        rewards=torch.tensor([1.5, 0.0]), advantages=torch.tensor([0.5, -0.5]),
        rewards_per_func={"tag_reward": torch.tensor([0.5, 0.0])},
        sampling_logps=-torch.arange(4.0).reshape(2, 2) / 8, token_ids=lambda: [b"1", b"11"],
        turns=None, extra={"bounded": torch.tensor([[0, 0], [0, 1]])})
    theirs = {"messages": chats[0], "reward": "of the file", "step": "x", "tokens": 9}
    rows = [
        {"prompt": "q", "completion": "1", "length": 1, "ended": True, "reward": 1.5,
         "rewards": {"tag_reward": 0.5}, "advantage": 0.5, "columns": theirs | {"nums": [7, 3]}},
        {"prompt": "q", "completion": "11", "length": 2, "ended": False, "reward": 0.0,
         "rewards": {"tag_reward": 0.0}, "advantage": -0.5, "columns": theirs | {"nums": None}}]
    rows[0] |= {"tokens": ["1"], "token_logps": [0.0]}
    assert describe(rollout, Bytes(), [], 1) == rows        # only the first group has tokens
    rows[1] |= {"tokens": ["1", "1"], "token_logps": [-0.25, -0.375], "token_bounded": [0, 1]}
    rows[0]["token_bounded"] = [0]
    rollout.advantages = torch.tensor([[0.5, 1.5], [-0.5, 0.5]])        # (N, R)
    rows[0]["token_advantages"], rows[1]["token_advantages"] = [0.5], [-0.5, 0.5]
    assert describe(rollout, Bytes(), [], 2) == rows
    rollout.turns, rollout.failed_calls = [["1"], ["1", "1", ""]], [0, 1]
    rollout.completion_mask = rollout.loss_mask
    rollout.loss_mask = torch.tensor([[1, 0], [1, 0]])
    rows[0] |= {"turns": ["1"], "failed_calls": 0, "tool_tokens": 0, "token_drawn": [1]}
    rows[1] |= {"turns": rollout.turns[1], "failed_calls": 1, "tool_tokens": 1,
                "token_drawn": [1, 0], "length": 1}
    assert describe(rollout, Bytes(), [], 2) == rows
    names = ("tokens", "completions/max_length", "tools/call_frequency", "tools/failure_frequency")
    assert [rollout_metrics(rows, 2)[name] for name in names] == [3, 1, 0.5, 1.0]
    assert rollout_metrics(rows[:1], 1)["tools/failure_frequency"] == 0
    rollout.columns |= {"answer": ["9" * 5000] * 2, "tests": [["x" * 5000], "x" * 5000]}
    one, two = (row["columns"] for row in describe(rollout, Bytes(), [], 2))
    assert len(one["answer"]) == 5000 and one["nums"] == [7, 3]
    assert one["tests"] == '["' + "x" * 1998 + " … [5,004 characters in all]"
    assert two["tests"] == "x" * 2000 + " … [5,000 characters in all]"
    ids = [*"a果b".encode(), 0]         # three bytes make one character
    assert token_texts(ids, Bytes(), []) == ["a", "", "", "果", "b", ""]
    assert token_texts(ids[:3], Bytes(), []) == ["a", "", "\ufffd"]     # cut off within a character


@pytest.mark.parametrize("error, words", [
    (UserError("no such folder"), "no such folder"), (OSError("disk full"), "disk full"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "--lora_rank"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."), "--micro_batch_size"),
    (MemoryError(), "--gradient_checkpointing")], ids=["ours", "disk", "gpu", "cpu", "python"])
def test_users_mistake_is_one_line_unless_a_traceback_is_wanted(
        error, words, monkeypatch, capsys):
    @user_errors("train.py")
    def main(error):
        raise error

    monkeypatch.delenv("MINIGRPO_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as exit:
        main(error)
    line, = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and line.startswith("train.py: error: ")
    assert words in line
    with pytest.raises(ValueError, match="not enough values"):
        main(ValueError("not enough values to unpack"))
    monkeypatch.setenv("MINIGRPO_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(error)
