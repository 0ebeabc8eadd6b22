"""A run, and a command, writes only where nobody else has; a resume goes on with the same."""
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import train_grpo
from dataset import last_step_of
from dataset.folders import new_folder
from dataset.jsonl import write_jsonl
from errors import UserError
from run.checkpoint import Saver, load_checkpoint, save_checkpoint
from run.distributed import World
from support import POLICY, ROOT, files, jsonl, refusal, write

JUDGE = ROOT / "reward/weights/reward_128"
ROWS = [{"prompt": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(12)]
FLAGS = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--device", "cpu",
         "--eval_interval", "0", "--save_interval", "1", "--max_steps", "1"]

pytestmark = pytest.mark.usefixtures("one_thread")


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda mine: mine.write_text("text"), lambda mine: shutil.copytree(POLICY, mine / "final"),
    lambda mine: mine.symlink_to("nowhere"), lambda mine: (mine / ".git").mkdir(parents=True)])
def test_a_folder_that_has_anything_is_refused(make, tmp_path):
    mine, link = tmp_path / "mine", tmp_path / "link"
    make(mine)
    link.symlink_to(mine)
    before = files(tmp_path)
    for path in (mine, link):
        with pytest.raises(UserError, match=f"--save {path.name}: .* exists and is not empty"):
            new_folder(path, "--save")
    assert files(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert [new_folder(tmp_path / name, "").is_dir() for name in ("empty", "a/new")] == [True] * 2


def start(out, *flags):
    """Starts a run with these flags, as its first step does. Returns the name of its folder."""
    world = World("cpu")
    saver = Saver(world, train_grpo.parse_args(["--out_dir", str(out), *flags]))
    saver.begin()
    world.cleanup.close()
    return saver.run_dir.name


def test_run_names_are_numbered_and_resume_takes_the_newest(tmp_path):
    first, second, third = names = [f"grpo_reason_128{end}" for end in ("", "_2", "_3")]
    assert [start(tmp_path) for _ in names] == names
    shutil.rmtree(tmp_path / second)
    (tmp_path / "grpo_reason_128_notes").mkdir()
    assert start(tmp_path, "--resume") == third
    assert start(tmp_path) == second == start(tmp_path, "--resume")
    assert start(tmp_path, "--resume", "--run_name", first) == first == start(tmp_path, "--resume")
    assert json.loads((tmp_path / third / "args.json").read_text())["run_name"] == third
    # A run of weights called reason, which is not the one hundred and twenty-eighth of them.
    shutil.copytree(POLICY, tmp_path / "reason")
    other = "--model_path", str(tmp_path / "reason")
    assert start(tmp_path, *other) == "grpo_reason"
    start(tmp_path)
    assert start(tmp_path, *other, "--resume") == "grpo_reason"


def test_run_names_are_taken_by_what_a_run_writes_and_by_nothing_else(tmp_path):
    for name in ("grpo_reason_128", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "slurm.log").write_text("job 1")
    assert start(tmp_path) == "grpo_reason_128"
    assert start(tmp_path, "--run_name", "mine") == "mine"
    assert start(tmp_path, "--save_weight", "mine") == "mine_2"         # MiniMind's alias
    assert {path.read_text() for path in tmp_path.glob("*/slurm.log")} == {"job 1"}


@pytest.mark.parametrize("error", [
    NotImplementedError(), OSError(errno.ENOLCK, "none"), OSError(errno.EOPNOTSUPP, "none")])
def test_locks_that_a_file_system_lacks_are_no_reason_to_stop(error, tmp_path):
    with patch("filelock.FileLock.acquire", side_effect=error):
        names = [start(tmp_path, *flags) for flags in ([], [], ["--run_name", "x"], ["--resume"])]
    assert names == ["grpo_reason_128", "grpo_reason_128_2", "x", "grpo_reason_128_2"]
    broken = OSError(errno.EIO, "a broken disk")
    with patch("filelock.FileLock.acquire", side_effect=broken), pytest.raises(OSError, match="br"):
        start(tmp_path)


@pytest.mark.parametrize("flags", [
    ["--reasoning", "1"], *(["@" + str(path)] for path in sorted(ROOT.glob("dataset/*.txt")))])
def test_commands_of_the_pages_can_be_given_twice(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    first, second = (start(tmp_path, *flags) for _ in range(2))
    assert first.startswith("grpo_") and second == f"{first}_2"


def test_resume_starts_a_new_run_and_keeps_what_a_user_has_put_in_its_folders(tmp_path, capsys):
    data, run = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out/run"
    flags = [*FLAGS, "--out_dir", str(run.parent), "--run_name", "run", "--data_path", data,
             "--resume"]
    train_grpo.main(flags)
    printed = capsys.readouterr().out
    assert printed.startswith(f"--resume: {run} has no checkpoint yet")
    assert f"python -m model.chat {run / 'final'}" in printed
    assert "--resume --run_name run --max_steps" in printed
    (run / "checkpoint/notes").mkdir()
    for file in (run / "final/own.gguf", run / "checkpoint/notes/why.txt"):
        file.write_text("mine")
    train_grpo.main([*flags, "--max_steps", "3"])
    assert "no checkpoint yet" not in capsys.readouterr().out
    assert (run / "final_2/own.gguf").read_text() == "mine"
    assert (run / "checkpoint_2/notes/why.txt").read_text() == "mine"
    assert {path.name for path in run.iterdir() if path.is_dir()} == {
        "checkpoint", "checkpoint_2", "final", "final_2"}


# --- resumes --------------------------------------------------------------------------------------


def permuted(folder):
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor.flip(0).contiguous()
    save_file(weights, folder / "model.safetensors")


def edited(name, old, new):
    def change(where):
        path = where / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    return change


CHANGES = {
    "the weights of --model_path": lambda where: permuted(where / "weights"),
    "tokenizer.json of --model_path": edited("weights/tokenizer.json", "false", "true"),
    "config.json of --model_path": edited("weights/config.json", "10000.0", "20000.0"),
    "the weights of --reward_model_path": lambda where: permuted(where / "judge"),
    "the file of --data_path": edited("data.jsonl", '"answer": "1"', '"answer": "2"'),
    "the file of --eval_data_path": edited("heldout.jsonl", "What", "Was")}
OTHERS = {"the prompts of a step": ["--batch_size", "4"], "--seed": ["--seed", "7"],
          "--shuffle": ["--shuffle", "0"], "from another model": ["--lora_rank", "4"]}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A run of one step, and all that it has read."""
    where = tmp_path_factory.mktemp("run")
    shutil.copytree(POLICY, where / "weights")
    shutil.copytree(JUDGE, where / "judge")
    write(where / "data.jsonl", ROWS)
    write(where / "heldout.jsonl", ROWS)
    with patch("run.report.picture.draw_curves"):
        train_grpo.main(flags_of(where))
    return where


def flags_of(where):
    return [*FLAGS, "--out_dir", str(where / "out"), "--run_name", "run", "--reward_funcs", "rm",
            "--model_path", str(where / "weights"), "--reward_model_path", str(where / "judge"),
            "--data_path", str(where / "data.jsonl"),
            "--eval_data_path", str(where / "heldout.jsonl")]


@pytest.mark.parametrize("what", [*CHANGES, *OTHERS])
def test_resume_refuses_what_is_another_and_names_it(what, a_run, tmp_path):
    where = shutil.copytree(a_run, tmp_path / "where")
    if what in CHANGES:
        CHANGES[what](where)
    before = files(where)
    line = refusal("train_grpo", *flags_of(where), "--resume", "--max_steps", "2",
                   *OTHERS.get(what, []))
    assert what in line and "start a new run" in line
    assert files(where) == before


def test_resume_takes_what_has_moved(a_run, tmp_path):
    where = shutil.copytree(a_run, tmp_path / "moved")
    (where / "out/run").rename(where / "out/renamed")
    weights = load_file(where / "weights/model.safetensors")        # and saved in another order
    save_file(dict(reversed(weights.items())), where / "weights/model.safetensors")
    train_grpo.main([*flags_of(where), "--run_name", "renamed", "--resume", "--max_steps", "2",
                     "--learning_rate", "1e-5"])
    flags = json.loads((where / "out/renamed/args.json").read_text())
    assert flags["learning_rate"] == 1e-5
    assert len(jsonl(where / "out/renamed/metrics.jsonl")) == 2


# --- what a run must not lose, and mistakes that it must not pass over in silence -----------------


def run(tmp_path, *flags):
    train_grpo.main([*FLAGS, "--beta", "0", "--out_dir", str(tmp_path), "--run_name", "run",
                     *flags])


def test_columns_of_the_data_never_pass_for_a_runs_own_and_no_escape_code_is_printed(
        tmp_path, capsys):
    names = ("step", "tokens", "logps", "length", "turns", "tool_tokens", "failed_calls", "reward")
    rows = [{"prompt": f"What is 1+{i}?", "answer": "2"} | dict.fromkeys(names, "x")
            for i in range(6)]
    data = str(write(tmp_path / "\x1b[2Jdata.jsonl", rows))
    flags = ["--data_path", data]
    run(tmp_path, *flags, "--max_steps", "2")
    run(tmp_path, *flags, "--max_steps", "3", "--resume")
    lines = jsonl(tmp_path / "run/completions.jsonl")
    assert [line["step"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 4
    for line in lines:
        assert {line["columns"][name] for name in names} == {"x"}
    assert (tmp_path / "run/report.html").exists()
    printed = capsys.readouterr().out
    assert "·[2Jdata.jsonl" in printed and "\x1b" not in printed
    assert json.loads((tmp_path / "run/args.json").read_text())["data_path"] == data


def test_rewards_that_judge_nothing_are_named_once_with_the_columns_there_are(tmp_path, capsys):
    rows = [{"prompt": f"What is 1+{i}?", "result": "2"} for i in range(5)]
    data = str(write(tmp_path / "data.jsonl", rows))
    run(tmp_path, "--data_path", data, "--max_steps", "2")
    printed = capsys.readouterr().out
    assert printed.count("accuracy_reward scored none of the 4 completions") == 1
    assert "messages, result" in printed and "nan%" not in printed
    assert "format_reward scored" not in printed


def test_resume_has_the_flags_of_the_run_but_for_those_that_are_given(
        tmp_path, capsys, monkeypatch):
    data = str(write(tmp_path / "data.jsonl", [{"prompt": f"{i}?"} for i in range(9)]))
    run(tmp_path, "--max_steps", "1", "--reward_funcs", "tag", "--data_path", data, "--seed", "7")
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)             # the same file by another path is no change
    train_grpo.main(["--out_dir", str(tmp_path), "--run_name", "run", "--resume",
                     "--max_steps", "2", "--learning_rate", "1e-4", "--data_path", "data.jsonl"])
    said = capsys.readouterr().out
    assert "--max_steps was 1 when" in said and "--learning_rate was 0.0003 when" in said
    assert said.count(" when the run was ") == 2
    assert len(jsonl(tmp_path / "run/metrics.jsonl")) == 2
    flags = json.loads((tmp_path / "run/args.json").read_text())
    assert (flags["seed"], flags["reward_funcs"], flags["data_path"]) == (7, ["tag"], data)


def a_step(policy):
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("change", [
    lambda moment: moment[..., :1], lambda moment: moment[:0], lambda moment: torch.zeros(()),
    lambda moment: moment[None],
    lambda moment: moment[:1].expand(len(moment))])
def test_resume_refuses_an_optimizer_of_other_shapes_before_it_is_read(
        change, tiny_policy, tmp_path):
    tokenizer, policy = tiny_policy
    optimizer = a_step(policy)
    saved = get_optimizer_state_dict(policy, optimizer)
    moments = saved["state"]["model.norm.weight"]
    moments["exp_avg"] = change(moments["exp_avg"])
    save_checkpoint(tmp_path / "checkpoint", policy, tokenizer, saved, step=1, num_tokens=1)
    with pytest.raises(UserError, match="checkpoint is missing, broken.* start a new run"):
        load_checkpoint(tmp_path / "checkpoint", policy, optimizer)


def test_resume_keeps_the_options_of_the_flags_not_those_in_the_file(tiny_policy, tmp_path):
    tokenizer, policy = tiny_policy
    optimizer = a_step(policy)
    saved = get_optimizer_state_dict(policy, optimizer)
    saved["param_groups"][0] |= {"amsgrad": True, "weight_decay": 9.0}
    save_checkpoint(tmp_path / "checkpoint", policy, tokenizer, saved, step=1, num_tokens=1,
                    reads={})
    load_checkpoint(tmp_path / "checkpoint", policy, optimizer)
    group, = optimizer.param_groups
    assert not group["amsgrad"] and group["weight_decay"] == 0.01


def test_a_run_needs_a_prompt_for_each_process():
    args = train_grpo.parse_args(["--batch_size", "1"])
    with pytest.raises(UserError, match="1 prompts are too few for 2 processes"):
        last_step_of(1, 1, SimpleNamespace(size=2), args)


def test_what_was_there_stays_until_all_of_a_file_is_written(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [{"old": 1}])
    with pytest.raises(ZeroDivisionError):
        write_jsonl(path, ({"new": 1 / i} for i in (1, 0)))
    assert jsonl(path) == [{"old": 1}]
    assert write_jsonl("/dev/null", [{}]) == 1 and not Path("/dev/null").is_file()


def test_a_reward_that_changes_the_folder_moves_no_file(tmp_path, own_module, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own_module("moves", "import os\n\n\ndef judge(completions, **columns):\n"
               "    os.chdir('/')\n    return [1.0] * len(completions)\n")
    write(tmp_path / "data.jsonl", [{"prompt": f"{i}?"} for i in range(4)])
    train_grpo.main([*FLAGS, "--data_path", "data.jsonl", "--reward_funcs", "moves:judge",
                     "--max_steps", "2", "--out_dir", "out", "--run_name", "run"])
    assert len(jsonl(tmp_path / "out/run/metrics.jsonl")) == 2
    saved = json.loads((tmp_path / "out/run/args.json").read_text())
    assert saved["model_path"] == str(POLICY)
