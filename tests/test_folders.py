"""A run, and a command, writes only where nobody else has; a resume goes on with the same."""
import json
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

import train_grpo
from dataset.folders import new_folder
from errors import UserError
from run import checkpoint
from run.distributed import World
from support import ROOT, jsonl, write

POLICY, JUDGE = ROOT / "model/weights/reason_128", ROOT / "reward/weights/reward_128"
ROWS = [{"prompt": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(12)]
SMALL = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--device", "cpu",
         "--eval_interval", "0", "--save_interval", "1", "--run_name", "run"]

pytestmark = pytest.mark.usefixtures("one_thread")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def refused(capsys, program, *flags):
    """The sentence in which a command ends."""
    sys.argv = [program, *map(str, flags)]
    with pytest.raises(SystemExit, match="2"):
        if program == "train_grpo":
            train_grpo.main()
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__")
    return capsys.readouterr().err.splitlines()[-1]


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


def test_commands_leave_what_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(JUDGE, "my")
    shutil.copytree(POLICY, "weights")
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "chats.jsonl", [{"conversations": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    (tmp_path / "README").write_text("text")
    before, data = files(tmp_path), ("--data_path", "train.jsonl")
    for words, *command in (
            ("--save my: ", "reward.train_reward_model", "--data", "my/pairs.jsonl",
             "--save", "my", "--init", "weights", "--heldout", "my/pairs.jsonl"),
            ("--save weights: ", "model.train_sft", "--init", "weights",
             "--save", "weights", "--data", "chats.jsonl"),
            ("--save weights: ", "lab.tasks.tokenizer", "--data", "chats.jsonl", "--save",
             "weights"),
            ("train.jsonl exists", "lab.tasks.arithmetic", "--out_dir", "."),
            ("chats.jsonl exists", "lab.tasks.pairs", "--sample", "weights", "--prompts",
             "train.jsonl", "--save", "chats.jsonl"),
            ("README exists, but is not a picture", "run.report.picture", "x", "-o", "README"),
            ("--run_name my: ", "train_grpo", *SMALL, *data, "--out_dir", ".", "--run_name",
             "my")):
        assert words in refused(capsys, *command), command
    assert files(tmp_path) == before


def test_runs_are_numbered_and_a_resume_goes_on_with_the_last(tmp_path, capsys):
    data, out = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out"
    flags = [*SMALL[:-2], "--out_dir", str(out), "--data_path", data, "--max_steps", "1"]
    for _ in range(3):
        train_grpo.main(flags)
    names = ["grpo_reason_128", "grpo_reason_128_2", "grpo_reason_128_3"]
    assert sorted(path.name for path in out.iterdir()) == names
    shutil.rmtree(out / names[1])
    (out / "grpo_reason_128_notes").mkdir()
    train_grpo.main([*flags, "--resume", "--max_steps", "2"])
    train_grpo.main(flags)
    assert {name: len(jsonl(out / name / "metrics.jsonl")) for name in names} == dict(
        zip(names, (1, 1, 2)))
    train_grpo.main([*flags, "--resume", "--run_name", names[0], "--max_steps", "3"])
    assert len(jsonl(out / names[0] / "metrics.jsonl")) == 3
    assert json.loads((out / names[2] / "args.json").read_text())["run_name"] == names[2]


def test_a_name_is_taken_by_what_a_run_writes_and_by_nothing_else(tmp_path, capsys):
    data, out = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out"
    flags = [*SMALL[:-2], "--out_dir", str(out), "--data_path", data, "--max_steps", "1"]
    for name in ("grpo_reason_128", "mine"):
        (out / name).mkdir(parents=True)
        (out / name / "slurm.log").write_text("job 1")
    train_grpo.main(flags)
    train_grpo.main([*flags, "--run_name", "mine"])
    assert {path.name for path in out.iterdir()} == {"grpo_reason_128", "mine"}
    assert {(path / "slurm.log").read_text() for path in out.iterdir()} == {"job 1"}
    assert "--run_name mine: " in refused(capsys, "train_grpo", *flags, "--run_name", "mine")
    train_grpo.main([*flags, "--save_weight", "mine"])          # MiniMind's alias
    assert len(jsonl(out / "mine_2/metrics.jsonl")) == 1


def test_resume_starts_a_named_run_that_is_new_and_else_needs_one(tmp_path, capsys):
    data, out = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out"
    flags = [*SMALL[:-2], "--out_dir", str(out), "--data_path", data, "--max_steps", "1"]
    assert f"{out} has no run called grpo_reason_128" in refused(
        capsys, "train_grpo", *flags, "--resume")
    train_grpo.main([*flags, "--resume", "--run_name", "x"])
    assert capsys.readouterr().out.startswith(f"--resume: {out / 'x'} has no checkpoint yet")
    train_grpo.main([*flags, "--resume", "--run_name", "x", "--max_steps", "2"])
    assert "no checkpoint yet" not in capsys.readouterr().out
    assert len(jsonl(out / "x/metrics.jsonl")) == 2
    # A run of weights called reason, which is not the one hundred and twenty-eighth of them.
    shutil.copytree(POLICY, tmp_path / "reason")
    train_grpo.main([*flags, "--model_path", str(tmp_path / "reason")])
    train_grpo.main(flags)
    train_grpo.main([*flags, "--model_path", str(tmp_path / "reason"), "--resume", "--max_steps",
                     "2"])
    assert [len(jsonl(out / name / "metrics.jsonl"))
            for name in ("grpo_reason", "grpo_reason_128")] == [2, 1]
    printed = capsys.readouterr().out
    assert f"python -m model.chat {out / 'grpo_reason/final'}" in printed
    assert "--resume --run_name grpo_reason --max_steps" in printed


def test_without_locks_the_run_that_made_the_folder_has_it(tmp_path, monkeypatch):
    def no_lock(*options, **named):
        raise NotImplementedError("this file system has no locks")

    monkeypatch.setattr(checkpoint.FileLock, "acquire", no_lock)
    world = SimpleNamespace(rank=0, gather=lambda values: values)
    names = [checkpoint.Saver(world, SimpleNamespace(
        out_dir=tmp_path, run_name=name, save_weight=None, model_path="a/b", resume=False,
        eval_only=False)).run_dir.name for name in (None, None, "mine")]
    assert names == ["grpo_b", "grpo_b_2", "mine"]


@pytest.mark.parametrize("flags", [
    ["--reasoning", "1"], *(["@" + str(path)] for path in sorted(ROOT.glob("dataset/*.txt")))])
def test_a_command_of_the_pages_can_be_given_twice(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = []
    for _ in range(2):
        args = train_grpo.parse_args([*flags, "--out_dir", str(tmp_path), "--device", "cpu"])
        run_dir = checkpoint.Saver(World("cpu"), args).run_dir
        (run_dir / "args.json").write_text("{}")
        names.append(run_dir.name)
    assert names[0].startswith("grpo_") and names[1] == f"{names[0]}_2"


def test_a_users_files_in_a_folder_that_is_replaced_are_kept(tmp_path):
    data, run = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out/run"
    flags = [*SMALL, "--out_dir", str(run.parent), "--data_path", data]
    train_grpo.main([*flags, "--max_steps", "1"])
    (run / "checkpoint/notes").mkdir()
    for file in (run / "final/own.gguf", run / "checkpoint/notes/why.txt"):
        file.write_text("mine")
    train_grpo.main([*flags, "--max_steps", "3", "--resume"])
    assert (run / "final_2/own.gguf").read_text() == "mine"
    assert (run / "checkpoint_2/notes/why.txt").read_text() == "mine"
    assert {path.name for path in run.iterdir() if path.is_dir()} == {
        "checkpoint", "checkpoint_2", "final", "final_2"}
    moved = run.rename(tmp_path / "moved")
    train_grpo.main([*flags, "--out_dir", str(tmp_path), "--run_name", "moved", "--resume",
                     "--max_steps", "4"])
    assert len(jsonl(moved / "metrics.jsonl")) == 4


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
FLAGS = {"the prompts of a step": ["--batch_size", "4"], "--seed": ["--seed", "7"],
         "--shuffle": ["--shuffle", "0"]}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A run of one step, and all that it has read."""
    where = tmp_path_factory.mktemp("run")
    shutil.copytree(POLICY, where / "weights")
    shutil.copytree(JUDGE, where / "judge")
    write(where / "data.jsonl", ROWS)
    write(where / "heldout.jsonl", ROWS)
    train_grpo.main(flags_of(where))
    return where


def flags_of(where):
    return [*SMALL, "--out_dir", str(where / "out"), "--max_steps", "1", "--reward_funcs", "rm",
            "--model_path", str(where / "weights"), "--reward_model_path", str(where / "judge"),
            "--data_path", str(where / "data.jsonl"),
            "--eval_data_path", str(where / "heldout.jsonl")]


@pytest.mark.parametrize("what", [*CHANGES, *FLAGS])
def test_a_resume_refuses_what_is_another_and_names_it(what, a_run, tmp_path, capsys):
    where = shutil.copytree(a_run, tmp_path / "where")
    if what in CHANGES:
        CHANGES[what](where)
    before = files(where)
    line = refused(capsys, "train_grpo", *flags_of(where), "--resume", "--max_steps", "2",
                   *FLAGS.get(what, []))
    assert f"{what}" in line and " was " in line and files(where) == before


def test_a_resume_takes_what_has_moved(a_run, tmp_path):
    where = shutil.copytree(a_run, tmp_path / "moved")
    weights = load_file(where / "weights/model.safetensors")        # and saved in another order
    save_file(dict(reversed(weights.items())), where / "weights/model.safetensors")
    train_grpo.main([*flags_of(where), "--resume", "--max_steps", "2", "--learning_rate", "1e-5"])
    flags = json.loads((where / "out/run/args.json").read_text())
    assert flags["learning_rate"] == 1e-5 and len(jsonl(where / "out/run/metrics.jsonl")) == 2
