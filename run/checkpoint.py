"""Saves and resumes runs, and prevents two runs from writing to the same folder.

If a run crashes or the disk fills up during a save, a complete checkpoint still exists. On
--resume, a UserError is raised if the data or the model files have changed.
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
    """Returns the flags of the run to resume, a dict {flag: value} read from its args.json."""
    flags = read_json(Path(args.out_dir) / args.run_name / "args.json",
                      "--resume needs the --out_dir and --run_name of an earlier run")
    return {name: value for name, value in flags.items() if name not in NOT_OF_A_RUN}


class Saver:
    """Saves the checkpoints and the final weights of a run in run_dir; only rank 0 writes files.

    The folder is locked until the run ends. Raises a UserError if another run has locked the
    folder, or if the folder has files but was not created by a run. With eval_only, or if run_dir
    is None, nothing is written or locked.
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
        """With --resume, loads the checkpoint. Returns (steps done, tokens sampled).

        others: {name: model or dict}, which were saved with the policy. Raises a UserError if the
        data or the initial weights are not the same as before.
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
        """Writes args.json after the first step. Deletes an earlier run's files unless resuming."""
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
        """Returns (save, signal): whether to save now, and the signal that ends the run, or 0."""
        if step == last_step:
            return True, 0
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:    # torchrun died
            signal = SIGNALS[-1]
        signal = max(self.world.gather([signal]))
        return signal > 0 or step % int(self.args.save_interval) == 0, signal

    def save(self, step, num_tokens, policy, tokenizer, optimizer, others):
        """Saves a checkpoint. All ranks wait until it is complete."""
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
        """Saves the final weights in run_dir/final, in a format that transformers can load.

        defaults: all flags' default values, with which the model card compares this run's flags.
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
        """Moves new files into the folder `path`, and keeps other files there."""
        names = files_in(new)
        for name in names:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).replace(path / name)
        self._note(path, names)

    def _swap(self, new, path):
        """Replaces a checkpoint by a new one; files that the user added to the old one are kept."""
        names, saved = files_in(new), mark_of(self.run_dir).get("saved", ())
        for name in files_in(path):
            if name not in names and f"{path.name}/{name}" not in saved:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path / name, new / name)
        swap(new, path)
        self._note(path, names)

    def _note(self, path, names):
        """Records that a run has written these files, so the next run may replace them."""
        mark = mark_of(self.run_dir)
        saved = {*mark.get("saved", ()), *(f"{path.name}/{name}" for name in names)}
        write_whole(self.run_dir / MARK, json.dumps(mark | {"saved": sorted(saved)}))

    def _whole(self, model):
        """Returns the model or, if it is sharded, a whole copy with weights only on rank 0."""
        return model.whole(device="cpu", keep=self.writes) if hasattr(model, "whole") else model


def as_saved(args):
    """Returns the flags for args.json, with absolute paths, so --resume works from any folder."""
    flags = to_json(vars(args))
    for name, value in flags.items():
        if name.endswith("_path") and value and Path(value).exists():
            flags[name] = str(Path(value).absolute())
    return flags


def network(model):
    """Returns the model itself or, for an AnyModel (a wrapper), the model inside it."""
    return model.model if isinstance(model, AnyModel) else model


def what_is_read(args, num_problems, prompts_per_step):
    """Returns {name: hash or number} for everything that must be the same when a run is resumed.

    This includes a hash of each file or model that a flag names.
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
    """Returns [(description, hash)] for a model, a tokenizer or a list of rows."""
    if hasattr(given, "state_dict"):
        return [("the weights", hash_of(given.state_dict()))]
    if hasattr(given, "get_vocab"):
        given = given.get_vocab(), given.chat_template
    text = json.dumps(given, sort_keys=True, default=str)
    return [("the content", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12])]


def hash_of(weights):
    """Returns a hash of the names, dtypes, shapes and values of a state dict."""
    found = hashlib.sha1(usedforsecurity=False)
    for name, tensor in sorted(weights.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
    return found.hexdigest()[:12]


def contents(path):
    """Yields (name, hash) for a file or, in a folder, for each small file and for the weights."""
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
    """Replaces a folder by a new one. A crash midway leaves the old folder with the suffix .old."""
    old = path.with_suffix(".old")
    if path.exists():
        delete(old)
        path.rename(old)
    new.rename(path)
    delete(old)


def delete(path):
    """Deletes a folder if it exists. Raises an OSError if something in it can't be deleted."""
    if path.exists():
        shutil.rmtree(path)


def save_checkpoint(folder, model, tokenizer, optimizer_state, others=None, put=swap, **progress):
    """Saves what a run needs to resume: weights, tokenizer, optimizer state, step, num_tokens.

    For a model with adapters, only the adapters are saved, since the base weights never change.
    others: a dict {name: model or dict of numbers} with further things to save.
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
    """Loads a checkpoint into model, optimizer and others. Returns (steps done, tokens sampled).

    If the model is sharded, each rank loads its shard of every tensor. Raises a UserError if the
    inputs in `reads` differ from those in the checkpoint.
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
    """Returns AdamW's state dict, unsharded, with parameter names as keys; call it on all ranks."""
    from torch.distributed.checkpoint import state_dict  # slow to import
    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_dict.get_optimizer_state_dict(network(model), optimizer, options=whole)


def load_moments(model, optimizer, saved):
    """Loads AdamW's moments; options such as the weight decay keep their current values."""
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
    """Loads the adapter weights in the folder `path` into the model's adapters."""
    ours, theirs = adapter_state(model), read_tensors(path / "adapter_model.safetensors")
    for name, tensor in ours.items():
        tensor.copy_(part_of(theirs[name], tensor))


@contextmanager
def written_whole(path, put=swap):
    """Yields a new, empty folder for files, and then calls put(new, path) to move them to `path`.

    If a crash or an error occurs before `put`, `path` is unchanged. A failed write is a UserError.
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
