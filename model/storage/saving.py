"""Saves a run, resumes it, and keeps other runs out of its folder."""
import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from report import UserError

from ..lora import adapters
from ..processes.shard import whole_state
from ..processes.watch import Stopped, under_torchrun
from .read import load_checkpoint
from .write import save_adapter, save_checkpoint, save_pretrained, written_whole


class Saver:
    """Writes the checkpoints and the final weights of a run into run_dir; rank 0 does.

    The folder is locked until the run ends, or its process does, whatever ends it. UserError if
    another run has it, or if the weights to start from are in it. args are those of the script;
    with eval_only nothing is written, and nothing locked.
    """

    def __init__(self, run_dir, world, args):
        self.run_dir, self.world, self.args = Path(run_dir), world, args
        self.writes, self.saved_at = world.rank == 0, time.monotonic()
        if not self.writes or args.eval_only:
            return
        weights = Path(args.model_path).resolve()
        if not args.resume and self.run_dir.resolve() in (weights, *weights.parents):
            raise UserError(f"--model_path {args.model_path} is in {run_dir}, where the new run "
                            "would replace it; choose another --run_name")
        world.watch.at_end(lock(self.run_dir))
        for name in ("checkpoint", "final", "adapter"):     # of a run that was killed as it saved
            shutil.rmtree(self.run_dir / f"{name}.new", ignore_errors=True)
            if (self.run_dir / name).exists():              # whole, so nobody needs the one before
                shutil.rmtree(self.run_dir / f"{name}.old", ignore_errors=True)

    def resume(self, policy, optimizer, reference):
        """Restores the run's checkpoint if asked to; returns (steps done, tokens sampled)."""
        if not self.args.resume:
            return 0, 0
        done, num_tokens = load_checkpoint(self.run_dir / "checkpoint", policy, optimizer,
                                           reference)
        self._advise(done)
        return done, num_tokens

    def is_due(self, step, last_step):
        """Is it time to save? And has a signal asked to stop? The same answers on every rank.

        It is time at each interval, at the end, and if the run is to stop. The second answer is the
        number of the signal, or 0.
        """
        every, minutes = self.args.save_interval, (time.monotonic() - self.saved_at) / 60
        due = minutes >= float(every[:-1]) if every.endswith("m") else step % int(every) == 0
        wishes = self.world.gather([(due, self.world.watch.signal or 0)])
        signal = max(number for _, number in wishes) if step < last_step else 0
        return wishes[0][0] or step == last_step or signal > 0, signal      # by rank 0's clock

    def save(self, step, num_tokens, policy, tokenizer, optimizer, reference):
        """Write a checkpoint; all ranks wait until it is whole."""
        policy, optimizer_state = self._whole(policy), whole_state(optimizer, self.writes)
        reference = self._whole(reference) if self.args.ref_model_sync_steps else None
        if self.writes:
            save_checkpoint(
                self.run_dir / "checkpoint", policy, tokenizer, optimizer_state, reference,
                step=step, num_tokens=num_tokens)
        self.world.gather([step])           # the others wait until rank 0 has saved
        self.saved_at = time.monotonic()
        self._advise(step)

    def stopped(self, step, signal):
        """The exception that ends a run which a signal has asked to stop, on all ranks."""
        return Stopped(signal, f"after step {step}, which is saved; go on with:\n"
                       f"    {resume_command()}", together=True)

    def save_final(self, policy, tokenizer):
        """Write final/, which load_pretrained, transformers and inference servers can load."""
        policy = self._whole(policy)
        if self.writes:
            with written_whole(self.run_dir / "final") as folder:
                save_pretrained(policy, tokenizer, folder)
            if adapters(policy):
                with written_whole(self.run_dir / "adapter") as folder:
                    save_adapter(policy, folder)

    def _whole(self, model):
        """The model itself or, if it is sharded, a whole copy of it for the rank that writes."""
        return model.whole(device="cpu", keep=self.writes) if hasattr(model, "whole") else model

    def _advise(self, step):
        self.world.watch.advice = (f"; the checkpoint of step {step} is whole, go on with:\n"
                                   f"    {resume_command()}")


def lock(run_dir):
    """Locks a run's folder; returns the function that unlocks it. The end of the process does too.

    If nothing was written into the folder meanwhile, that function also removes the folder.
    """
    file, missing = run_dir / ".lock", [folder for folder in (run_dir, *run_dir.parents)
                                        if not folder.exists()]
    held = FileLock(file)

    def unlock():
        with suppress(OSError):
            if list(run_dir.iterdir()) == [file]:
                file.unlink()
                for folder in missing:
                    folder.rmdir()
        held.release()

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        held.acquire(blocking=False)
        file.write_text(f"{os.getpid()}\n")
    except Timeout:
        holder = "unknown"
        with suppress(OSError):             # it has just ended
            holder = file.read_text().strip() or holder
        raise UserError(
            f"{run_dir}: another run is writing there, process {holder}; wait until it has ended, "
            "stop it, or choose another --run_name") from None
    except OSError as error:
        raise UserError(f"{run_dir}: cannot be written to ({error.strerror}); choose another "
                        "--out_dir") from error
    return unlock


def resume_command():
    """The command that goes on with this run."""
    program, *flags = sys.argv
    if Path(program).name != "train_grpo.py":               # a test, a notebook
        return "train_grpo.py with the same flags and --resume"
    start, ranks = "python", os.environ.get("LOCAL_WORLD_SIZE")
    if under_torchrun():
        start = f"torchrun --nproc_per_node={ranks}"
        if ranks != os.environ.get("WORLD_SIZE"):
            start = "torchrun (on each node, with its flags)"
    return f"{start} {shlex.join([program, *flags, *['--resume'] * ('--resume' not in flags)])}"
