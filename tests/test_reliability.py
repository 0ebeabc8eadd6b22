"""What happens to runs: signals, full disks, two runs in one folder, ranks that die.

tests/chaos.py has many more of them, by hand.
"""
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
from errors import UserError
from model.load import choose_device
from reward.child import CHILD
from run.checkpoint import written_whole
from run.distributed import World
from run.report import picture
from run.report.terminal import drop_lines_after
from run.signals import recorded
from support import PLACE, START, files, free_ports, jsonl

FLAGS = ["--batch_size", "2", "--num_generations", "2", "--max_gen_len", "8", "--eval_samples", "2",
         "--eval_interval", "0", "--max_steps", "2", "--save_interval", "1", "--run_name", "run",
         "--reward_funcs", "test_reliability:reward"]

pytestmark = pytest.mark.usefixtures("one_thread")
resource = pytest.importorskip("resource", reason="signals, forks and limits as Unix has them")


def reward(prompts, completions, **columns):
    """Calls `reward.act`, if it is set, with the number of the call."""
    reward.calls += 1
    if reward.act is not None:
        reward.act(reward.calls)
    return [float(len(completion)) for completion in completions]


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


def steps_of(run_dir):
    return [row["step"] for row in jsonl(run_dir / "metrics.jsonl")]


def at(call, function, *arguments):
    """An `act` that calls the function in this call of the reward."""
    return lambda number: function(*arguments) if number == call else None


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_signal_ends_the_step_saves_and_tells_how_to_go_on(number, judge, tmp_path, capsys):
    before = signal.getsignal(number)
    judge.act = at(1, signal.raise_signal, number)
    assert run(tmp_path) == 128 + number
    said = capsys.readouterr().err
    for words in ("the step that is running ends", f"{number.name} after step 1", "--resume"):
        assert words in said
    assert (tmp_path / "run/curves.png").is_file() and not (tmp_path / "run/final").exists()
    assert signal.getsignal(number) == before
    assert run(tmp_path, "--resume") == 0
    assert steps_of(tmp_path / "run") == [1, 2]


EVALUATED = "--eval_interval 1 --eval_reward_funcs test_reliability:reward".split()


@pytest.mark.parametrize("call, flags", [
    (2, []), (7, EVALUATED)], ids=["in the rewards", "in the evaluation after the update"])
def test_signal_amid_foreign_mathematics_gives_the_step_up_and_a_resume_makes_it_again(
        call, flags, judge, tmp_path, capsys):
    def signalled(number):
        if number == call:
            signal.raise_signal(signal.SIGTERM)
            assert CHILD.ask([("math_verify", "x", "x")]) == [None]     # nobody is asked any more

    judge.act = signalled
    assert run(tmp_path, "--save_interval", "9", *flags) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM in step 2, which is given up" in capsys.readouterr().err
    assert steps_of(tmp_path / "run") == [1]
    judge.act = None
    assert run(tmp_path, "--resume") == 0 and run(tmp_path / "whole", *flags) == 0
    assert not CHILD.given_up                       # a later call in this process asks it again
    for name in ("completions.jsonl", "final/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (
            tmp_path / "whole/run" / name).read_bytes(), name


def test_signal_ctrl_c_before_the_first_step_leaves_nothing(judge, tmp_path, capsys):
    judge.act = at(1, os.kill, os.getpid(), signal.SIGINT)
    flags = ["--eval_interval", "1", "--eval_reward_funcs", "test_reliability:reward"]
    assert run(tmp_path, *flags) == 130 and "stopped by Ctrl-C" in capsys.readouterr().err
    assert not files(tmp_path / "run")


def test_signal_ctrl_c_saves_where_nobody_reads_any_more(judge, tmp_path, monkeypatch):
    """It ends `| tee log` before the run."""
    def write(text):
        raise BrokenPipeError

    stream = SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False, encoding=None)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    judge.act = at(1, signal.raise_signal, signal.SIGINT)
    assert run(tmp_path) == 130
    assert (tmp_path / "run/checkpoint/optimizer.pt").is_file()


def test_signals_are_left_alone_by_a_worker_thread(judge, tmp_path):
    thread = threading.Thread(target=run, args=(tmp_path, "--max_steps", "1"))
    thread.start()
    thread.join()
    assert (tmp_path / "run/final").exists()


def test_signal_of_a_hangup_is_ignored_under_nohup(judge, tmp_path):
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


def test_what_a_killed_run_left_half_done_goes_but_not_its_only_checkpoint(judge, tmp_path):
    folder = tmp_path / "run"
    assert run(tmp_path, "--max_steps", "1") == 0
    (folder / "checkpoint").rename(folder / "checkpoint.old")
    for name in ("checkpoint.new", "final.new"):
        (folder / name).mkdir()
        (folder / name / "half_done").touch()
    assert run(tmp_path, "--max_steps", "2", "--resume") == 0
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"checkpoint", "final"}
    assert not [*folder.rglob("half_done")]


def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(judge, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    judge.act = at(2, resource.setrlimit, resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
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


def test_a_run_that_fails_in_its_first_step_leaves_a_free_name_and_none_takes_a_taken_one(
        judge, tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    judge.act = at(1, sys.exit, "no")
    assert run(tmp_path) == 2 and not files(tmp_path / "run")
    judge.act = at(3, interrupted)          # in its second step, before the first checkpoint
    assert run(tmp_path, "--save_interval", "9") == 130 and steps_of(tmp_path / "run") == [1]
    before, judge.act = files(tmp_path / "run"), None
    assert run(tmp_path) == 2 and files(tmp_path / "run") == before
    assert run(tmp_path, "--resume") == 0   # it starts again
    assert steps_of(tmp_path / "run") == [1, 2]


def test_lines_after_a_step_are_cut_off_with_half_a_line_at_the_end(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", [f'{{"step": {n}}}\n' for n in (1, 1, 2, 3)]
    for step, text, kept in ((2, "".join(lines), 3), (9, "".join(lines) + '{"step": 4', 4),
                             (0, lines[0], 0)):
        path.write_text(text)
        drop_lines_after(step, path)
        assert path.read_text() == "".join(lines[:kept])
    path.write_text(lines[0] + "\n" + lines[2])         # a line that cannot be read stays
    with pytest.raises(UserError, match="metrics.jsonl, line 2: not a step"):
        drop_lines_after(1, path)
    assert path.read_text() == lines[0] + "\n" + lines[2]


# --- several ranks --------------------------------------------------------------------------------


def test_device_of_each_rank_is_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name, ranks, gpus, device in (
            ("cuda:1", 1, 2, "cuda:1"), (None, 2, 2, "cuda:1"), ("cuda:0", 2, 2, "cuda:1"),
            ("cpu", 2, 2, "cpu"), (None, 2, 0, "cpu"), (None, 1, 0, "cpu"), ("mps", 1, 0, "mps"),
            ("cuda:2", 1, 2, None), (None, 2, 1, None), ("cuda", 2, 1, None), ("mps", 2, 0, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        if device:
            assert choose_device(name, ranks) == torch.device(device), (name, ranks, gpus)
        else:
            with pytest.raises(UserError, match=rf"not available for {ranks} proc.* {gpus} GPU"):
                choose_device(name, ranks)


def test_gpus_are_joined_by_nccl_for_rewards_of_half_an_hour(monkeypatch):
    began, before = {}, torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: began.update(
        options, backend=backend))
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(dist.HashStore(), 1, 2)]))
    for name, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1122"):
        monkeypatch.setenv(name, value)
    for users, kept in ((None, "expandable_segments:True"), ("max_split_size_mb:9",) * 2):
        monkeypatch.setattr(os, "environ", {**os.environ, "PYTORCH_ALLOC_CONF": users})
        if users is None:
            del os.environ["PYTORCH_ALLOC_CONF"]
        world = World.join(train_grpo.parse_args(["--dtype", "bfloat16"]))
        assert os.environ["PYTORCH_ALLOC_CONF"] == kept         # what the user set stays
        assert torch.get_float32_matmul_precision() == "high"
        world.cleanup.close()
        assert torch.get_float32_matmul_precision() == before
    assert began["backend"] == "nccl" and began["timeout"] == timedelta(minutes=30)
    assert began["device_id"] == torch.device("cuda:1")


def two_runs(rank, port):
    """What a rank of torchrun does that trains twice."""
    os.environ |= zip(PLACE, (str(rank), "2", "localhost", str(port)))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for _ in range(2):
        args = train_grpo.parse_args(["--device", "cpu"])
        world = World.join(args)
        torch.manual_seed(world.rank)
        model = torch.nn.Linear(2, 2)
        world.share(model, "<Linear>")
        assert len(set(world.gather([model.weight.sum().item()]))) == 1
        world.check_same("<list>", [1, 2], "pass the same")
        with pytest.raises(UserError, match="<list> differs between rank"):
            world.check_same("<list>", [rank], "pass the same prompts")
        world.check_same_flags(args)
        args.beta = rank / 2
        with pytest.raises(UserError, match=f"--beta: {rank / 2} on rank {rank}, but"):
            world.check_same_flags(args)
        assert world.sum(torch.ones(1)).item() == 2 and dist.is_initialized()
        world.close()
        assert not dist.is_initialized()


def test_ranks_of_torchrun_make_a_new_group_for_a_second_run_and_stop_if_they_differ():
    port, = free_ports(1)
    agents = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(two_runs, (agents.port,), 2, start_method=START)


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


def killed(flags):
    """A run that dies when its second checkpoint is written, and would replace the first one."""
    def hook(event, arguments):
        if event == "os.rename" and str(arguments[0]).endswith("run/checkpoint"):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    picture.draw_curves = lambda run_dirs, path: path.touch()
    sys.addaudithook(hook)
    train_grpo.main(flags)


def test_resume_after_a_kill_at_a_file_operation_ends_as_if_nothing_had_happened(tmp_path):
    flags = [*chaos.FLAGS, *"--max_steps 2 --save_interval 1 --max_gen_len 8 --out_dir".split()]
    child = multiprocessing.get_context(START).Process(
        target=killed, args=([*flags, str(tmp_path / "killed")],))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    run_dir = tmp_path / "killed/run"
    assert (run_dir / "checkpoint.new/optimizer.pt").exists()
    assert (run_dir / "checkpoint/optimizer.pt").exists() and not (run_dir / "final").exists()
    train_grpo.main([*flags, str(tmp_path / "killed"), "--resume"])
    train_grpo.main([*flags, str(tmp_path / "whole")])
    for ours, theirs in zip(chaos.result(tmp_path / "killed"), chaos.result(tmp_path / "whole")):
        assert ours == theirs
