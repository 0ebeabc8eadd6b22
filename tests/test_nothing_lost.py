"""What a run must not lose, and mistakes that it must not pass over in silence."""
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import train_grpo
from dataset import last_step_of
from dataset.jsonl import write_jsonl
from errors import UserError
from run.checkpoint import load_checkpoint, save_checkpoint
from support import POLICY, jsonl, write

SMALL = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--beta", "0",
         "--eval_interval", "0", "--device", "cpu"]

pytestmark = pytest.mark.usefixtures("one_thread")


def run(tmp_path, *flags):
    train_grpo.main([*SMALL, "--out_dir", str(tmp_path), "--run_name", "run", *flags])


def test_columns_of_the_data_never_pass_for_a_runs_own_and_no_escape_code_is_printed(
        tmp_path, capsys):
    names = ("step", "tokens", "logps", "length", "turns", "tool_tokens", "failed_calls", "reward")
    rows = [{"prompt": f"What is 1+{i}?", "answer": "2"} | dict.fromkeys(names, "x")
            for i in range(6)]
    data = str(write(tmp_path / "\x1b[2Jdata.jsonl", rows))
    flags = ["--data_path", data, "--save_interval", "1"]
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
    train_grpo.main([*SMALL, "--data_path", "data.jsonl", "--reward_funcs", "moves:judge",
                     "--max_steps", "2", "--out_dir", "out", "--run_name", "run"])
    assert len(jsonl(tmp_path / "out/run/metrics.jsonl")) == 2
    saved = json.loads((tmp_path / "out/run/args.json").read_text())
    assert saved["model_path"] == str(POLICY)
