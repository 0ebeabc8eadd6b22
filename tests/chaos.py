"""Chaos: does a run that was killed go on as if nothing had happened? By hand:

    python tests/chaos.py                      50 trials, 16 minutes on 2 cores
    python tests/chaos.py --trials 5 --seed 1

Each trial starts a small run on one process, on two, or divided over two, ends it in one of the
ways below, once or twice, and resumes it. In the end its metrics, evaluations, completions and
final weights must be those of a run that nobody touched, bit for bit, and nothing half-written may
be left.

    operation   SIGKILL before a random one of its file operations
    signal      SIGINT, SIGTERM or SIGHUP at a random moment
    all, rank, launcher     SIGKILL at a random moment for all its processes, for one of two ranks,
                for torchrun alone: its orphans save, and hold the folder until then
"""
import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 6
FLAGS = f"""--batch_size 2 --num_generations 4 --max_gen_len 24 --max_steps {STEPS}
--save_interval 2 --eval_interval 3 --eval_samples 8 --num_iterations 2 --num_minibatches 2
--ref_model_sync_steps 2 --oversample 2 --run_name run --reward_funcs format tag accuracy
--data_path dataset/heldout.jsonl --eval_data_path dataset/heldout.jsonl""".split()
SHARDED = ("--shard", "1")
LORA = (*SHARDED, "--lora_rank", "2", "--ref_model_sync_steps", "0")    # its reference is the base
RUNS = [(1, ()), (2, ()), (1, ()), (2, SHARDED), (1, ()), (2, LORA)]    # (processes, more flags)
WAYS = {1: ["all", "operation", "operation", "signal"],
        2: ["all", "operation", "signal", "rank", "launcher"]}


def start(out, ranks, *flags, die_at=0, log=subprocess.DEVNULL):
    """A run in `out`. die_at: the number of the file operation before which rank 0 is killed."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    script = [__file__, "--child", str(die_at)] if die_at else ["train_grpo.py"]
    return subprocess.Popen(
        [*command, *script, *FLAGS, "--out_dir", str(out), *flags], cwd=ROOT, stdout=log,
        stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})


def complete(out, ranks, *flags, die_at=0):
    """A run to its end: its exit code, and what it has printed."""
    with tempfile.TemporaryFile("w+") as log:
        code = start(out, ranks, *flags, die_at=die_at, log=log).wait(timeout=600)
        log.seek(0)
        return code, log.read()


def child(die_at, flags):
    """The script itself, but rank 0 is killed before its file operation number `die_at`."""
    sys.path.insert(0, str(ROOT))
    import train_grpo

    folder, count = flags[flags.index("--out_dir") + 1], 0

    def hook(event, arguments):
        nonlocal count
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if event == "open" and str(arguments[0]).startswith(folder):
            writes = arguments[1] not in ("r", "rb")
        if writes and os.environ.get("RANK", "0") == "0":
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    train_grpo.main(flags)
    print(f"{count} file operations")


def steps_done(out):
    path = out / "run/metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks_of(process):
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(text) for text in file.read_text().split()] if file.exists() else []


def disaster(way, rng, out, ranks, operations, flags):
    """Start or resume a run, and end it in this way; returns what has happened, as a text."""
    if way == "operation":
        number = rng.randint(1, operations)
        complete(out, ranks, *flags, die_at=number)
        return f"operation {number}"
    process = start(out, ranks, *flags)
    step = rng.randrange(min(steps_done(out), STEPS - 1), STEPS)
    while process.poll() is None and steps_done(out) < step:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.5))
    number = signal.SIGKILL
    children = ranks_of(process)
    rng.shuffle(children)
    victims = {"all": [process.pid, *children], "rank": children[:1]}.get(way, [process.pid])
    if way == "signal":
        number = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim, number)
    process.wait(timeout=600)
    return f"{number.name} for {way} in step {step + 1}"


def resume(out):
    return ["--resume"] if (out / "run/args.json").exists() else []


def finish(out, ranks, *flags):
    """Go on with the command that the user has, until the run is done."""
    for _ in range(40):
        code, text = complete(out, ranks, *flags, *resume(out))
        if code == 0:
            return
        assert "another run is writing there" in text, text[-3000:]     # orphans, still saving
        time.sleep(0.5)
    raise AssertionError("the folder stayed locked")


def result(out):
    """All that a run leaves, but for what a clock has measured."""
    run, clocks = out / "run", ("timing_s", "perf", "step_time")
    lines = [json.loads(line) for name in ("metrics", "eval", "completions")
             for line in (run / f"{name}.jsonl").read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if not key.startswith(clocks)}
             for line in lines]
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    return lines, (run / "final/model.safetensors").read_bytes(), names


def trial(ranks, rng, whole, operations, out, *flags):
    """One run, ended once or twice; returns what has happened. AssertionError if it shows."""
    happened = []
    for _ in range(rng.choice([1, 1, 2])):
        way = rng.choice(WAYS[ranks])
        happened.append(disaster(way, rng, out, ranks, operations, [*flags, *resume(out)]))
    finish(out, ranks, *flags)
    for name, ours, theirs in zip(("lines", "weights", "files"), result(out), whole):
        assert ours == theirs, f"after {happened} the {name} differ"
    return " then ".join(happened)


def unbroken(ranks, out, *flags):
    """What a run that nobody touches leaves, and the number of its file operations."""
    code, text = complete(out, ranks, *flags, die_at=10**9)
    assert code == 0, text[-3000:]
    counts = re.findall(r"(\d+) file operations", text)      # of rank 0; other ranks count none
    return result(out), max(map(int, counts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    survived, wholes = 0, {}                # wholes: of each kind of run, what nobody touched
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.trials):
            rng, out = random.Random(f"{args.seed} {number}"), Path(folder) / str(number)
            ranks, flags = RUNS[number % len(RUNS)]
            if (ranks, flags) not in wholes:
                wholes[ranks, flags] = unbroken(ranks, Path(folder) / f"whole{number}", *flags)
            try:
                happened = trial(ranks, rng, *wholes[ranks, flags], out, *flags)
                survived += 1
            except (AssertionError, subprocess.TimeoutExpired) as error:
                happened = f"FAILED: {error}"
            print(f"{number + 1:>3}  {ranks} ranks {' '.join(flags)}: {happened}", flush=True)
    print(f"{survived} of {args.trials} runs ended as if nothing had happened")
    sys.exit(survived < args.trials)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), sys.argv[3:])
    else:
        main()
