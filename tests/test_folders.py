"""A run, and a command, writes only where nobody else has; a resume goes on with the same."""
import json
import runpy
import shutil
import sys
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_grpo
from dataset.folders import MARK, claim
from errors import UserError
from model import load_pretrained
from support import ROOT, jsonl, write

POLICY, JUDGE = ROOT / "model/weights/reason_128", ROOT / "reward/weights/reward_128"
ROWS = [{"prompt": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(12)]
SMALL = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--device", "cpu",
         "--eval_interval", "0", "--save_interval", "1", "--run_name", "run"]

pytestmark = pytest.mark.usefixtures("one_thread")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def ours(folder, by="x"):
    claim(folder, by, Namespace())
    return folder


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


@pytest.mark.parametrize("make, words", [
    (lambda mine: mine.write_text("text"), "mine is a file"),
    (lambda mine: shutil.copytree(POLICY, mine / "final"), "holds final, which x did not write"),
    (lambda mine: ours(mine, "y"), "which x did not write"),
    (lambda mine: (ours(mine) / ".git").mkdir(), "mine holds .git"),
    (lambda mine: shutil.copytree(ours(mine), mine / "final"), "mine/final, a folder of x"),
    (lambda mine: (ours(mine) / "log").symlink_to(mine), "mine holds log, which x did not write"),
    (lambda mine: ours(mine.parent), "is in .*theirs, a folder of x; choose a new folder")])
def test_a_folder_that_is_anybody_elses_is_refused(make, words, tmp_path):
    mine, link = tmp_path / "theirs/mine", tmp_path / "link"
    mine.parent.mkdir()
    make(mine)
    link.symlink_to(mine)
    before = files(tmp_path)
    for path in (mine, link):
        with pytest.raises(UserError, match=words):
            claim(path, "x", Namespace())
    assert files(tmp_path) == before


def test_commands_leave_what_they_read_and_what_they_did_not_write(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(JUDGE, "my")
    shutil.copytree(POLICY, "weights")
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "chats.jsonl", [{"conversations": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}])
    (tmp_path / "README").write_text("text")
    before, data = files(tmp_path), ("--data_path", "train.jsonl")
    for words, *command in (
            ("my holds --data my/pairs", "reward.train_reward_model", "--data", "my/pairs.jsonl",
             "--save", "my", "--init", "weights", "--heldout", "my/pairs.jsonl"),
            ("weights holds --init weights", "model.train_sft", "--init", "weights",
             "--save", "weights", "--data", "chats.jsonl"),
            ("weights holds", "lab.tasks.tokenizer", "--data", "chats.jsonl", "--save", "weights"),
            ("train.jsonl exists", "lab.tasks.arithmetic", "--out_dir", "."),
            ("chats.jsonl exists", "lab.tasks.pairs", "--sample", "weights", "--prompts",
             "train.jsonl", "--save", "chats.jsonl"),
            ("README exists, but is not a picture", "run.report.picture", "x", "-o", "README"),
            ("my holds", "train_grpo", *SMALL, *data, "--out_dir", ".", "--run_name", "my"),
            ("weights holds --teacher_path weights", "train_grpo", *SMALL, *data, "--out_dir", ".",
             "--run_name", "weights", "--teacher_path", "weights")):
        assert words in refused(capsys, *command), command
    assert files(tmp_path) == before


def test_a_run_replaces_its_own_files_and_no_others(tmp_path):
    data, run = str(write(tmp_path / "data.jsonl", ROWS)), tmp_path / "out/run"
    flags = [*SMALL, "--out_dir", str(run.parent), "--data_path", data, "--max_steps", "1"]
    train_grpo.main(flags)
    own = [run / "final/own.gguf", run / "checkpoint/notes/why.txt"]
    (run / "checkpoint/notes").mkdir()
    for file in own:
        file.write_text("mine")
    (run / MARK).unlink()                   # a run of an earlier version has none
    train_grpo.main([*flags, "--lora_rank", "2"])
    assert (run / "adapter/adapter_model.safetensors").exists()
    assert not (run / "checkpoint/model.safetensors").exists()
    train_grpo.main(flags)
    assert not (run / "adapter").exists() and [file.read_text() for file in own] == ["mine"] * 2
    assert not (run / "checkpoint/adapter_model.safetensors").exists()
    moved = run.rename(tmp_path / "moved")
    train_grpo.main([*flags, "--out_dir", str(tmp_path), "--run_name", "moved", "--resume",
                     "--max_steps", "2"])
    assert len(jsonl(moved / "metrics.jsonl")) == 2


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
    "the file of --eval_data_path": edited("heldout.jsonl", "What", "Was"),
    "the id in args.json": edited("out/run/args.json", '"id": "', '"id": "0')}
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


def test_a_resume_takes_what_has_moved_and_a_run_without_hashes(a_run, tmp_path):
    where = shutil.copytree(a_run, tmp_path / "moved")
    weights = load_file(where / "weights/model.safetensors")        # and saved in another order
    save_file(dict(reversed(weights.items())), where / "weights/model.safetensors")
    train_grpo.main([*flags_of(where), "--resume", "--max_steps", "2", "--learning_rate", "1e-5"])
    flags = json.loads((where / "out/run/args.json").read_text())
    assert flags["learning_rate"] == 1e-5 and len(jsonl(where / "out/run/metrics.jsonl")) == 2


def test_a_run_of_an_earlier_version_is_resumed(a_run, tmp_path, capsys):
    """It has no id, no hashes and no mark, flags that are gone, and an optimizer by number."""
    metrics = []
    for name in ("now", "earlier"):
        where, run = shutil.copytree(a_run, tmp_path / name), tmp_path / name / "out/run"
        if name == "earlier":
            saved = torch.load(run / "checkpoint/optimizer.pt", weights_only=True)
            del saved["reads"]
            names = load_pretrained(POLICY).state_dict()
            of_number = {list(names).index(one): moments
                         for one, moments in saved["optimizer"]["state"].items()}
            group = saved["optimizer"]["param_groups"][0] | {"params": sorted(of_number)}
            saved["optimizer"] = {"state": of_number, "param_groups": [group]}
            torch.save(saved, run / "checkpoint/optimizer.pt")
            flags = json.loads((run / "args.json").read_text()) | {"fast": 1}
            del flags["id"]
            (run / "args.json").write_text(json.dumps(flags))
            (run / MARK).unlink()
        train_grpo.main([*flags_of(where), "--resume", "--max_steps", "2"])
        metrics.append(jsonl(run / "metrics.jsonl")[1]["grad_norm"])
    assert metrics[0] == metrics[1] and "--fast was 1" in capsys.readouterr().out
