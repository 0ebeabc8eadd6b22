"""What happens to runs: signals, full disks, two runs in one folder, ranks that die.

tests/chaos.py has many more of them, by hand.
"""
import errno
import json
import multiprocessing
import os
import signal
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

import chaos
import train_grpo
from dataset.jsonl import read_jsonl
from errors import UserError
from reward.child import CHILD
from run.checkpoint import written_whole
from run.distributed import World
from run.report.terminal import drop_lines_after
from run.signals import recorded
from support import START

FLAGS = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--eval_samples", "2",
         "--eval_interval", "0", "--max_steps", "4", "--save_interval", "2", "--run_name", "run",
         "--reward_funcs", "test_reliability:reward"]

pytestmark = pytest.mark.usefixtures("one_thread")
resource = pytest.importorskip("resource", reason="signals, forks and limits as Unix has them")


def reward(prompts, completions, **columns):
    """Calls `reward.act`, if it is set, with the number of the call."""
    reward.calls += 1
    if reward.act is not None:
        reward.act(reward.calls)
    return [float(len(completion)) for completion in completions]


def refused(file, operation):
    raise OSError(refused.number, "refused by the file system")


@pytest.fixture
def judge():
    reward.calls, reward.act = 0, None
    return reward


def run(out, *flags):
    """train_grpo.main with the acting reward; its exit code."""
    try:
        train_grpo.main([*FLAGS, "--out_dir", str(out), *flags])
    except SystemExit as exit:
        return exit.code
    return 0


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}


def at(call, function, *arguments):
    """An `act` that calls the function in this call of the reward."""
    return lambda number: function(*arguments) if number == call else None


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_tells_how_to_go_on(number, judge, tmp_path, capsys):
    before = signal.getsignal(number)
    judge.act = at(3, signal.raise_signal, number)
    assert run(tmp_path) == 128 + number
    said = capsys.readouterr().err
    assert "the step that is running ends" in said
    assert f"stopped by {number.name} after step 3, which is saved; continue with" in said
    assert (tmp_path / "run/curves.png").is_file() and not (tmp_path / "run/final").exists()
    assert signal.getsignal(number) == before
    assert run(tmp_path, "--resume") == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]


def test_a_signal_amid_foreign_mathematics_gives_the_step_up_and_a_resume_makes_it_again(
        judge, tmp_path, capsys):
    def signalled(number):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
            assert CHILD.ask([("math_verify", "x", "x")]) == [None]     # nobody is asked any more

    judge.act = signalled
    assert run(tmp_path, "--save_interval", "3") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM in step 3, which is given up; continue" in capsys.readouterr().err
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2]
    judge.act = None
    assert CHILD.ask([("math_verify", "x", "x")]) == [True]     # a later call in this process
    assert run(tmp_path, "--resume") == 0 and run(tmp_path / "whole") == 0
    for name in ("completions.jsonl", "final/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (
            tmp_path / "whole/run" / name).read_bytes()


def test_ctrl_c_before_the_first_step_leaves_nothing(judge, tmp_path, capsys):
    judge.act = at(1, os.kill, os.getpid(), signal.SIGINT)
    flags = ["--eval_interval", "1", "--eval_reward_funcs", "test_reliability:reward"]
    assert run(tmp_path, *flags) == 130 and "stopped by Ctrl-C" in capsys.readouterr().err
    assert not files(tmp_path / "run")


def test_ctrl_c_saves_where_nobody_reads_any_more(judge, tmp_path, monkeypatch):
    """It ends `| tee log` before the run."""
    def write(text):
        raise BrokenPipeError

    stream = SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False, encoding=None)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    judge.act = at(3, signal.raise_signal, signal.SIGINT)
    assert run(tmp_path) == 130
    assert (tmp_path / "run/checkpoint/optimizer.pt").is_file()


def test_a_worker_thread_leaves_signals_alone(judge, tmp_path):
    thread = threading.Thread(target=run, args=(tmp_path, "--max_steps", "1"))
    thread.start()
    thread.join()
    assert (tmp_path / "run/final").exists()


def test_under_nohup_a_hangup_is_ignored(judge, tmp_path):
    judge.act = at(1, os.kill, os.getpid(), signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(tmp_path, "--max_steps", "1") == 0
    signal.signal(signal.SIGHUP, before)


def test_signals_of_a_process_that_a_reward_forks_are_its_own(judge, tmp_path):
    def fork(call):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM        # and SIGINT did nothing

    judge.act = fork
    assert run(tmp_path, "--max_steps", "1") == 0


# --- writing --------------------------------------------------------------------------------------


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "checkpoint"
    with written_whole(folder) as new:
        (new / "file").write_text("first")
        assert not folder.exists()
    with written_whole(folder) as new:
        (new / "file").write_text("second")
        assert files(folder) == {"file": b"first"}
    with pytest.raises(UserError, match="checkpoint could not be written .* MB are free"):
        with written_whole(folder) as new:
            (new / "file").write_text("third")
            raise OSError(28, "No space left on device")
    assert files(tmp_path) == {"checkpoint/file": b"second"}
    for error, why in ((OSError(22, "Invalid argument"), "Invalid argument"), (RuntimeError(
            "[enforce fail at inline.cc:7] . open file failed: Not a directory"), "Not a dir")):
        with pytest.raises(UserError, match=f"written .*{why}.*; fix this"):
            with written_whole(folder):
                raise error


def test_what_a_killed_run_left_half_done_goes_but_not_its_only_checkpoint(tmp_path):
    folder = tmp_path / "run"
    assert run(tmp_path, "--max_steps", "1") == 0
    (folder / "checkpoint").rename(folder / "checkpoint.old")
    for name in ("checkpoint.new", "final.new"):
        (folder / name).mkdir()
    assert run(tmp_path, "--max_steps", "2", "--resume") == 0
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"checkpoint", "final"}


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(judge, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    judge.act = at(3, resource.setrlimit, resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert run(tmp_path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "run/checkpoint could not be written" in said and "Traceback" not in said
    assert not (tmp_path / "run/checkpoint.new").exists()
    judge.act = None
    assert run(tmp_path, "--resume") == 0


def test_a_run_whose_folder_is_in_use_touches_nothing(judge, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run/.lock"):
        assert run(tmp_path) == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert not files(tmp_path / "run")
    assert run(tmp_path) == 0               # and the lock of a failed run is lifted


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_is_no_reason_to_stop(number, judge, tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr(refused, "number", number, raising=False)
    ends = [run(tmp_path), run(tmp_path), run(tmp_path, "--resume")]
    assert ends == ([2, 2, 2] if number == errno.EIO else [0, 2, 0])   # EIO: a broken disk


def test_a_run_that_fails_in_its_first_step_leaves_a_free_name_and_none_takes_a_taken_one(
        judge, tmp_path, capsys):
    def interrupted():
        raise KeyboardInterrupt

    judge.act = at(1, sys.exit, "no")
    assert run(tmp_path) == 2 and not files(tmp_path / "run")
    judge.act = at(3, interrupted)          # in its second step, before the first checkpoint
    assert run(tmp_path) == 130 and len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 1
    before, judge.act = files(tmp_path / "run"), None
    assert run(tmp_path) == 2 and files(tmp_path / "run") == before
    assert "has the files of a run; choose another name, delete it, or" in capsys.readouterr().err
    assert run(tmp_path, "--resume") == 0   # it starts again
    assert [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]


def test_lines_after_a_step_are_cut_off_with_half_a_line_at_the_end(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [f'{{"step": {n}}}\n' for n in (1, 1, 2, 3)]
    for step, text, kept in ((2, "".join(lines), 3), (9, "".join(lines) + '{"step": 4', 4),
                             (0, lines[0], 0)):
        path.write_text(text)
        drop_lines_after(step, path)
        assert path.read_text() == "".join(lines[:kept])


# --- several ranks --------------------------------------------------------------------------------


def test_each_rank_has_a_gpu_and_a_time_limit(monkeypatch):
    began, current = {}, []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **options: began.update(
        options, backend=kind))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if "SIZE" in name else "1")
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 1, 2)]))
    before = torch.get_float32_matmul_precision()
    args = train_grpo.parse_args(["--dtype", "bfloat16"])
    for theirs, kept in (("", "expandable_segments:True"), ("max_split_size_mb:9",) * 2):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        if theirs:                                              # what the user set, stays
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", theirs)
        World(None, "bfloat16").cleanup.close()
        assert os.environ["PYTORCH_ALLOC_CONF"] == kept
    current.clear()
    world = World.join(args)
    assert world.device == current.pop() == torch.device("cuda:1")
    assert torch.get_float32_matmul_precision() == "high"
    world.cleanup.close()
    assert torch.get_float32_matmul_precision() == before
    assert (began["backend"], began["device_id"]) == ("nccl", torch.device("cuda:1"))
    assert began["timeout"] == timedelta(minutes=30)
    args = train_grpo.parse_args(["--device", "cpu"])
    assert World.join(args).device.type == "cpu" and not current and began["backend"] == "gloo"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert train_grpo.parse_args(["--device", "cuda:1"]).device == "cuda:1"
    assert World("cuda:1").device == torch.device("cuda:1")
    with pytest.raises(UserError, match="--device cuda:2 is not available"):
        World("cuda:2")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if "SIZE" in name else "1")
    assert World("cuda:0").device == torch.device("cuda:1")     # each process has its own
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert World().device.type == "cpu"         # nobody has run it on a Mac's GPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in (None, "cuda"):
        with pytest.raises(UserError, match="2 process.es. on a machine with 1 GPU"):
            World(device)


def test_under_torchrun_a_mistake_on_one_rank_is_on_record(tmp_path, monkeypatch):
    def mistake():
        raise UserError("its sentence")

    assert recorded(mistake) is mistake
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(UserError):
        recorded(mistake)()
    page = json.loads((tmp_path / "error.json").read_text())["message"]
    assert page["message"] == "UserError: its sentence"


def test_a_run_killed_at_a_file_operation_goes_on_as_if_nothing_had_happened(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    flags = [*chaos.FLAGS, "--max_steps", "4", "--out_dir"]
    # While the last checkpoint is written: the one before is there to go on from.
    child = multiprocessing.get_context(START).Process(
        target=chaos.child, args=(35, [*flags, str(killed)]))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert (killed / "run/checkpoint.new/config.json").exists()
    assert (killed / "run/checkpoint/optimizer.pt").exists()
    assert not (killed / "run/final").exists()
    train_grpo.main([*flags, str(killed), "--resume"])
    train_grpo.main([*flags, str(whole)])
    assert chaos.result(killed) == chaos.result(whole)
