"""The Saver saves and resumes a run, and keeps other runs out of its folder.

After a crash or a full disk at any moment, a complete checkpoint remains. A resumed run must read
the same data and weights as before; the Saver checks this.
"""
import hashlib
import json
import os
import shutil
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from dataset.folders import MARK, claim, mark_of, write_whole
from dataset.jsonl import to_json
from errors import COUNT, GIVEN, UserError, explained, reason
from model.load import (
    load_pretrained,
    local_path,
    read_json,
    read_state,
    read_tensors,
    read_weights,
)
from model.lora import adapter_state, adapters
from model.save import save_adapter, save_pretrained
from model.transformers_model import AnyModel

from .fsdp import load_parts, part_of
from .report.model_card import write_card
from .signals import SIGNALS

LAUNCHER = os.getppid()                     # torchrun, if it started the run
NOT_OF_A_RUN = ("out_dir", "run_name", "resume", "id")   # these only identify the run
PROGRAM = "train_grpo.py"
ID = "the id in args.json"
READ = ".json", ".jinja", ".txt", ".model"      # files of tokenizers and configurations
ELSE = "restore it, or start a new run with another --run_name"


def add_flags(parser):
    flag = parser.group("5. log").add_argument
    flag("--out_dir", default="out", help="folder of all runs; a run writes to out_dir/run_name")
    flag("--run_name", help="name of the run (default: grpo_<name of the weights>)")
    flag("--save_interval", type=COUNT, default=30, help="steps between checkpoints")
    flag("--resume", action="store_true", help="continue the run from its last checkpoint")


def check(args):
    weights = Path(args.model_path).name.removesuffix(".pth").strip("<>")
    args.run_name = args.run_name or f"grpo_{weights}"
    if args.run_name == ".." or Path(args.run_name).name != args.run_name:
        raise UserError(f"--run_name {args.run_name}: it must be a folder name without /")


def flags_of_run(args):
    """Returns the flags with which the run to resume was started."""
    flags = read_json(Path(args.out_dir) / args.run_name / "args.json",
                      "--resume needs the --out_dir and --run_name of an earlier run")
    return {name: value for name, value in flags.items() if name not in NOT_OF_A_RUN}


class Saver:
    """Writes the checkpoints and the final weights of a run into run_dir, on rank 0.

    The folder is locked until the run or its process ends. UserError if another run has locked it,
    or if it was not made by a run (dataset/folders.py). With eval_only, or without a folder,
    nothing is written or locked.
    """

    def __init__(self, run_dir, world, args):
        # An absolute path, because a reward function may change the working directory.
        self.run_dir, self.world, self.args = run_dir and Path(run_dir).absolute(), world, args
        self.writes = world.rank == 0 and run_dir is not None
        self.reads = {ID: uuid.uuid4().hex[:12]}
        if not self.writes or args.eval_only:
            return
        if not args.resume:
            self.run_dir = claim(self.run_dir, PROGRAM, args)
        held = FileLock(self.run_dir / ".lock")     # also unlocked if the process ends
        try:
            held.acquire(blocking=False)
        except Timeout:
            raise UserError(f"{self.run_dir}: another run is writing there; wait until it has "
                            "ended, stop it, or pass another --run_name") from None
        world.cleanup.callback(held.release)

    def resume(self, policy, optimizer, others, num_problems, prompts_per_step):
        """With --resume, restores the checkpoint; returns (steps done, tokens sampled).

        others: {name: what is saved in addition to the policy}. UserError if the run would read
        other data or weights than before.
        """
        args, reads = self.args, {}
        if self.writes and not args.eval_only:
            if args.resume:
                self.reads[ID] = read_json(self.run_dir / "args.json").get("id")
            reads = self.reads | what_is_read(args, num_problems, prompts_per_step)
        self.reads, *_ = self.world.gather([reads])
        if not args.resume:
            return 0, 0
        now = as_saved(args)
        for name, was in flags_of_run(args).items() if self.writes else ():
            if name not in now:         # a flag of an earlier version
                print(f"--{name} was {was} when the run was started, and no longer exists")
            elif now[name] != was:
                print(f"--{name} was {was} when the run was started, and is now {now[name]}")
        return load_checkpoint(self.run_dir / "checkpoint", policy, optimizer, others, self.reads)

    def begin(self):
        """Unless resumed, deletes an earlier run's files; called on rank 0 after the first step."""
        if not self.args.resume:
            for name in mark_of(self.run_dir).get("saved", ()):     # a user's own files stay
                file = self.run_dir / name
                file.unlink(missing_ok=True)
                with suppress(OSError):     # the folder isn't empty
                    file.parent.rmdir()
            mark = {"by": PROGRAM, "id": self.reads[ID]}
            write_whole(self.run_dir / MARK, json.dumps(mark))
        args = as_saved(self.args) | {"id": self.reads[ID]}
        write_whole(self.run_dir / "args.json",
                    json.dumps(args, indent=2, sort_keys=True, ensure_ascii=False))

    def is_due(self, step, last_step, signal):
        """Returns whether to save, and the signal to stop (0: none); the same on all ranks."""
        if step == last_step:
            return True, 0
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:    # torchrun died
            signal = SIGNALS[-1]
        signal = max(self.world.gather([signal]))
        return signal > 0 or step % int(self.args.save_interval) == 0, signal

    def save(self, step, num_tokens, policy, tokenizer, optimizer, others):
        """Writes a checkpoint; all ranks wait until it is complete."""
        if self.run_dir is None:
            return
        optimizer_state = moments_of(policy, optimizer)
        policy = self._whole(policy)
        others = {name: self._whole(model) for name, model in others.items()}
        if self.writes:
            save_checkpoint(
                self.run_dir / "checkpoint", policy, tokenizer, optimizer_state, others, self._swap,
                step=step, num_tokens=num_tokens, reads=self.reads)
        self.world.gather([step])           # other ranks wait until rank 0 has saved

    def save_final(self, policy, tokenizer, defaults):
        """Writes final/, which load_pretrained, transformers and inference servers can load.

        defaults: the flags of a run that is started without any flags.
        """
        if self.run_dir is None:
            return
        policy = self._whole(policy)
        if self.writes:
            with written_whole(self.run_dir / "final", self._put) as folder:
                save_pretrained(policy, tokenizer, folder)
                write_card(folder, self.run_dir, self.args, defaults)
            if adapters(policy):
                with written_whole(self.run_dir / "adapter", self._put) as folder:
                    save_adapter(policy, folder)

    def _put(self, new, path):
        """Moves files into final/ or adapter/; other files there are the user's and are kept."""
        names = files_in(new)
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).replace(path / name)
        self._note(path, names)

    def _swap(self, new, path):
        """Replaces a checkpoint in one step; a user's own files in it are kept."""
        names, saved = files_in(new), mark_of(self.run_dir).get("saved", ())
        for name in files_in(path):
            if name not in names and f"{path.name}/{name}" not in saved:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path / name, new / name)
        swap(new, path)
        self._note(path, names)

    def _note(self, path, names):
        """Marks these files in the folder as written by a run, so the next run may replace them."""
        mark = mark_of(self.run_dir)
        saved = {*mark.get("saved", ()), *(f"{path.name}/{name}" for name in names)}
        write_whole(self.run_dir / MARK, json.dumps(mark | {"saved": sorted(saved)}))

    def _whole(self, model):
        """Returns the model or, if it is sharded, a whole copy on the rank that writes."""
        return model.whole(device="cpu", keep=self.writes) if hasattr(model, "whole") else model


def as_saved(args):
    """Returns the flags for args.json; absolute paths let a run be resumed from elsewhere."""
    flags = to_json(vars(args))
    for name, value in flags.items():
        if name.endswith("_path") and value and Path(value).exists():
            flags[name] = str(Path(value).absolute())
    return flags


def network(model):
    """Returns the module in which torch can look up names: for an AnyModel, the model inside."""
    return model.model if isinstance(model, AnyModel) else model


def what_is_read(args, num_problems, prompts_per_step):
    """Returns {what: hash or number} for all that the flags name, and for the order of prompts.

    Weights are hashed as tensors, not as files. SHA-1 takes 1 s for 1.5 GB.
    """
    found = {"--seed": args.seed, "--shuffle": args.shuffle,
             "the prompts of a step, over all ranks": prompts_per_step,
             "the number of prompts in --data_path": num_problems}
    for flag, path in vars(args).items():
        if flag.endswith("_path") and path:
            parts = parts_of(GIVEN[path]) if path in GIVEN else contents(local_path(path))
            found |= {f"{part} of --{flag}": value for part, value in parts}
    return found


def parts_of(given):
    """Returns [(part, hash)] for a tokenizer, a model or rows."""
    if hasattr(given, "state_dict"):
        return [("the weights", hash_of(given.state_dict()))]
    if hasattr(given, "get_vocab"):
        given = given.get_vocab(), given.chat_template
    text = json.dumps(given, sort_keys=True, default=str)
    return [("the content", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12])]


def hash_of(weights):
    """Returns the hash of a dict of tensors."""
    found = hashlib.sha1(usedforsecurity=False)
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
    return found.hexdigest()[:12]


def contents(path):
    """Yields (part, hash) for a file, or for the weights and the small files in a folder."""
    inside = {file.name: file for file in path.glob("[!.]*")
              if file.suffix in READ and not file.name.endswith(".index.json")}
    for name, file in ({"the file": path} if path.is_file() else inside).items():
        with open(file, "rb") as opened:            # a pipe can be read only once
            yield name, hashlib.file_digest(opened, "sha1").hexdigest()[:12]
    if [*path.glob("model*.safetensors"), *path.glob("pytorch_model*.bin")]:
        yield "the weights", hash_of(read_weights(path))


# --- a checkpoint ---------------------------------------------------------------------------------


def files_in(folder):
    return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]


def swap(new, path):
    """Replaces a folder by a new one; a crash between the two renames leaves the former as .old."""
    old = path.with_suffix(".old")
    if path.exists():
        delete(old)
        path.rename(old)
    new.rename(path)
    delete(old)


def delete(path):
    """Deletes a folder; raises an OSError if something can't be deleted."""
    if path.exists():
        shutil.rmtree(path)


def save_checkpoint(folder, model, tokenizer, optimizer_state, others=None, put=swap, **progress):
    """Writes what a resume needs: weights, tokenizer, optimizer, progress (step, num_tokens).

    For a model with adapters, only the adapters are saved, since the base never changes. others:
    {name: anything else that changes, a model or a dict of numbers}.
    """
    moved = {name: other if isinstance(other, dict) else other.state_dict()
             for name, other in (others or {}).items()}
    with written_whole(folder, put) as new:
        if adapters(model):
            save_adapter(model, new)
        else:
            save_pretrained(model, tokenizer, new)
        torch.save({"optimizer": optimizer_state, **moved, **progress}, new / "optimizer.pt")


def load_checkpoint(folder, model, optimizer, others=None, reads=None):
    """Restores weights, optimizer and others in place; returns (steps done, tokens sampled).

    Saved tensors are whole; each rank of a sharded model takes its part. UserError if the run that
    saved them read other data or weights than `reads` says.
    """
    if not folder.exists():     # after a crash between the two renames in swap
        folder = folder.with_suffix(".old")
    where = f"--resume: {folder}"
    with explained(where, "this checkpoint is missing, broken, or from another model", ELSE):
        saved = read_tensors(folder / "optimizer.pt")
        for what, was in saved.get("reads", {ID: None}).items():
            if reads and reads.get(what) != was:
                raise UserError(f"{where}: {what} was {was} when this run was started, but is now "
                                f"{reads.get(what, 'missing')}; {ELSE}")
        if adapters(model):
            load_adapter(model, folder)
        elif isinstance(model, AnyModel) and model.peft:
            from peft import set_peft_model_state_dict
            saved_adapters = read_tensors(folder / "adapter_model.safetensors")
            set_peft_model_state_dict(model.peft, saved_adapters)
        elif isinstance(model, AnyModel):
            model.load_state_dict(load_pretrained(folder).state_dict())
        else:
            load_parts(model, read_state(folder)[1])
        load_moments(model, optimizer, saved["optimizer"])
        for name, other in (others or {}).items():
            if isinstance(other, dict):
                other.update(saved[name])
            else:
                load_parts(other, saved[name])
        return int(saved["step"]), int(saved["num_tokens"])


def moments_of(model, optimizer):
    """Returns AdamW's state as whole tensors, by parameter name; every rank must call this."""
    from torch.distributed.checkpoint import state_dict  # slow to import
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_dict.get_optimizer_state_dict(network(model), optimizer, options=whole)


def load_moments(model, optimizer, saved):
    """Loads AdamW's moments; options such as the weight decay are still set by the flags."""
    from torch.distributed.checkpoint import state_dict
    whole = state_dict.StateDictOptions(full_state_dict=True)
    if 0 in saved["state"]:         # earlier versions keyed moments by number, as optimizers do
        names = [name for name, _ in network(model).named_parameters()]
        saved = {"state": {names[i]: moments for i, moments in saved["state"].items()},
                 "param_groups": [saved["param_groups"][0] | {"params": names}]}
    options = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    state_dict.set_optimizer_state_dict(network(model), optimizer, saved, options=whole)
    optimizer.param_groups[0].update(options)
    for weight, moments in optimizer.state.items():     # the fused step doesn't check shapes
        for name in ("exp_avg", "exp_avg_sq"):
            shape, stride, dtype = moments[name].shape, moments[name].stride(), moments[name].dtype
            if (shape, stride, dtype) != (weight.shape, weight.stride(), weight.dtype):
                raise ValueError(f"{name} has another shape or dtype than its weight")


@torch.no_grad()
def load_adapter(model, path):
    """Copies an adapter into the model, in place."""
    ours, theirs = adapter_state(model), read_tensors(path / "adapter_model.safetensors")
    for name, tensor in ours.items():
        tensor.copy_(part_of(theirs[name], tensor))


@contextmanager
def written_whole(path, put=swap):
    """Yields a new folder to write into, and then calls put(new, path).

    A crash or a full disk before `put` leaves `path` as it was. UserError if writing fails.
    """
    new = path.with_suffix(".new")
    try:
        delete(new)
        new.mkdir(parents=True)
        yield new
        put(new, path)
        delete(new)
    # If the disk is full, torch.save raises a RuntimeError that gives no reason.
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(new, ignore_errors=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(f"{path} could not be written ({reason(error)}; {free:,.0f} MB are free "
                        "without it); fix this, or pass another --out_dir") from error
