"""A run, and a command, writes only where nobody else has; a resume goes on with the same."""
import errno
import json
import shutil
from unittest.mock import patch

import pytest
from safetensors.torch import load_file, save_file

import train_grpo
from dataset.folders import new_folder
from errors import UserError
from run.checkpoint import Saver
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
