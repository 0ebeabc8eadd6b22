"""Makes a run's folder, which no other run may write to, and saves and resumes runs.

If a run crashes or the disk fills up during a save, a complete checkpoint still exists. On
--resume, a UserError is raised if the data or the model files have changed.
"""
import hashlib
import json
import re
import shutil
from contextlib import contextmanager, suppress
from errno import ENOLCK, EOPNOTSUPP
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from dataset.folders import is_free, numbered, write_whole
from dataset.jsonl import to_json
from errors import COUNT, GIVEN, UserError, explained, reason
from model.load import local_path, read_json, read_state, read_tensors, read_weights
from model.lora import adapter_state, adapters
from model.save import save_adapter, save_pretrained
from model.transformers_model import AnyModel

from .fsdp import load_parts, part_of
from .report.model_card import write_card

NOT_OF_A_RUN = ("out_dir", "run_name", "save_weight", "resume")     # these only identify the run
SAVED = ("checkpoint", "checkpoint.old", "final")       # one of these exists after the first save
# A folder with one of these belongs to a run. Other files, such as a job's log, may lie there.
WRITTEN = ("args.json", "*.jsonl", "curves.png", "report.html", "checkpoint*", "final", "adapter")
READ = ".json", ".jinja", ".txt", ".model"      # files of tokenizers and configurations
ELSE = "restore it, or start a new run with another --run_name"


def add_flags(parser):
    flag = parser.group("5. log").add_argument
    flag("--out_dir", default="out", help="folder of all runs; a run writes to out_dir/run_name")
    flag("--run_name", help="name of the run's folder, which no other run may have (default: "
         "grpo_<name of the weights>, with a number if that is taken)")
    flag("--save_interval", type=COUNT, default=30, help="steps between checkpoints")
    flag("--resume", action="store_true", help="continue the run --run_name from its last "
         "checkpoint, or start it if there is none (default: the last run with the default name)")


def check(args):
    """Checks --run_name. With --resume, fills it in; a new run gets its name with its folder."""
    for flag in ("run_name", "save_weight"):
        name = getattr(args, flag)
        if name and (name == ".." or Path(name).name != name):
            raise UserError(f"--{flag} {name}: it must be a folder name without /")
    if args.resume:
        args.run_name = args.run_name or newest(args)


def default_name(flags):
    """Returns the name of a run without --run_name. flags: {flag: value}."""
    name = Path(flags.get("model_path", "")).name.removesuffix(".pth").strip("<>")
    return flags.get("save_weight") or f"grpo_{name}"


def newest(args):
    """Returns the name of the last run that has the default name of these flags, or a number after
    it. Raises a UserError if there is none.
    """
    name, found = default_name(vars(args)), []
    for file in Path(args.out_dir).glob("*/args.json"):
        # grpo_reason_128 is a run of reason_128, and no second run of weights called reason.
        if re.fullmatch(rf"{re.escape(name)}(_[1-9]\d*)?", file.parent.name) and (
                default_name(read_json(file, "this is no file of a run")) == name):
            found.append(file)
    if not found:
        raise UserError(f"--resume: {Path(args.out_dir).absolute()} has no run called {name}; pass "
                        "the --out_dir and --run_name of the run to continue")
    return max(found, key=lambda file: file.stat().st_mtime).parent.name


def flags_of_run(args):
    """Returns the flags of the run to resume, {flag: value} from its args.json; {} without one."""
    run_dir = Path(args.out_dir) / args.run_name
    if is_free(run_dir, WRITTEN):
        return {}
    flags = read_json(run_dir / "args.json",
                      "--resume needs the --out_dir and --run_name of an earlier run")
    return {name: value for name, value in flags.items() if name not in NOT_OF_A_RUN}


class Saver:
    """Saves the checkpoints and the final weights of a run in run_dir; only rank 0 writes files.

    A new run makes a new folder, which is locked until the run ends. run_dir is None without
    out_dir. With eval_only, nothing is written or locked.
    """

    def __init__(self, world, args):
        self.world, self.args, self.run_dir, self.reads = world, args, None, {}
        self.writes = world.rank == 0 and args.out_dir is not None and not args.eval_only
        if self.writes:
            args.run_name = self._make_folder(args)
        args.run_name = world.gather([args.run_name])[0]        # as rank 0 says
        if args.out_dir is not None and args.run_name:
            # An absolute path, because a reward function may change the working directory.
            self.run_dir = Path(args.out_dir).absolute() / args.run_name

    def _make_folder(self, args):
        """Makes and locks a run's folder, or locks that of the run to resume. Returns its name."""
        own = Path(args.out_dir) / (args.run_name or default_name(vars(args)))
        if args.run_name and not args.resume and not is_free(own, WRITTEN):
            raise UserError(f"--run_name {args.run_name}: {own.absolute()} has the files of a run; "
                            "choose another name, delete it, or continue its run with --resume")
        for folder in [own] if args.run_name else numbered(own, WRITTEN):
            is_new = not folder.exists()
            with suppress(FileExistsError):
                folder.mkdir(parents=True, exist_ok=not is_new)
                if self._lock(folder, otherwise=is_new or bool(args.run_name)):
                    return folder.name
        raise UserError(f"{own.absolute()}: another run is writing there; wait until it has ended, "
                        "stop it, or pass another --run_name")

    def _lock(self, folder, otherwise):
        """Locks a folder until the run ends. Returns whether this succeeded.

        otherwise: what to return if the file system has no locks. Of two runs that start together
        there, the one that made the folder takes it.
        """
        held = FileLock(folder / ".lock")           # also unlocked if the process ends
        try:
            held.acquire(blocking=False)
        except Timeout:
            return False
        except (NotImplementedError, OSError) as error:     # filelock raises the first for ENOSYS
            if getattr(error, "errno", ENOLCK) not in (ENOLCK, EOPNOTSUPP):
                raise
            return otherwise
        self.world.cleanup.callback(held.release)
        return True

    def resume(self, policy, optimizer, others, num_problems, prompts_per_step):
        """With --resume, loads the checkpoint. Returns (steps done, tokens sampled).

        others: {name: model or dict}, which were saved with the policy. Raises a UserError if the
        data or the initial weights are not the same as before. A run that was killed before its
        first checkpoint starts again.
        """
        args = self.args
        reads, before = {}, {}
        if self.writes:
            reads = what_is_read(args, num_problems, prompts_per_step)
        self.reads = self.world.gather([reads])[0]      # rank 0's
        if not args.resume:
            return 0, 0
        if self.writes:
            before = flags_of_run(args)
        now = as_saved(args)
        was = before.pop("trainer", now["trainer"])
        if was != now["trainer"]:
            raise UserError(f"--resume: the trainer of {self.run_dir} is {was}, and here it is "
                            f"{now['trainer']}; continue it from the file that passes {was} as the "
                            "trainer, or start a new run")
        for name, was in before.items():
            if now.get(name, was) != was:
                print(f"--{name} was {was} when the run was started, and is now {now[name]}")
        if not any((self.run_dir / name).exists() for name in SAVED):
            if self.writes:
                print(f"--resume: {self.run_dir} has no checkpoint yet, so this run begins with "
                      "step 1")
            return 0, 0
        return load_checkpoint(self.run_dir / "checkpoint", policy, optimizer, others, self.reads)

    def begin(self):
        """Writes args.json. A run calls this after its first step, so a mistake leaves no files."""
        if self.writes:
            write_whole(self.run_dir / "args.json", json.dumps(
                as_saved(self.args), indent=2, sort_keys=True, ensure_ascii=False))

    def save(self, step, num_tokens, policy, tokenizer, optimizer, others):
        """Saves a checkpoint. All ranks wait until it is complete."""
        if self.run_dir is None:
            return
        optimizer_state = moments_of(policy, optimizer)
        policy = self._whole(policy)
        others = {name: self._whole(model) for name, model in others.items()}
        if self.writes:
            save_checkpoint(
                self.run_dir / "checkpoint", policy, tokenizer, optimizer_state, others, step=step,
                num_tokens=num_tokens, reads=self.reads)
        self.world.gather([step])           # other ranks wait until rank 0 has saved

    def save_final(self, policy, tokenizer, defaults):
        """Saves the final weights in run_dir/final, in a format that transformers can load.

        defaults: all flags' default values, with which the model card compares this run's flags.
        """
        if self.run_dir is None:
            return
        policy = self._whole(policy)
        if self.writes:
            with written_whole(self.run_dir / "final") as folder:
                save_pretrained(policy, tokenizer, folder)
                write_card(folder, self.run_dir, self.args, defaults)
            if adapters(policy):
                with written_whole(self.run_dir / "adapter") as folder:
                    save_adapter(policy, folder)

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
    text = json.dumps(to_json(given), sort_keys=True)
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


def swap(new, path):
    """Replaces a folder by a new one. A crash midway leaves the old folder with the suffix .old."""
    old = path.with_suffix(".old")
    discard(old, new, path)
    if path.exists():
        path.rename(old)
    new.rename(path)
    discard(old, path, path)


def discard(old, new, path):
    """Deletes the old folder; if it has files that the new one lacks, renames it to path_2 instead.

    So files that a user has put there are kept.
    """
    ours, theirs = ({file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
                    for folder in (new, old))
    if theirs - ours:
        old.rename(next(numbered(path)))
    elif old.exists():
        shutil.rmtree(old)


def save_checkpoint(folder, model, tokenizer, optimizer_state, others=None, **progress):
    """Saves what a run needs to resume: weights, tokenizer, optimizer state, step, num_tokens.

    For a model with adapters, only the adapters are saved, since the base weights never change.
    others: a dict {name: model or dict of numbers} with further things to save.
    """
    moved = {name: other if isinstance(other, dict) else other.state_dict()
             for name, other in (others or {}).items()}
    with written_whole(folder) as new:
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
        for what, was in saved["reads"].items():
            if reads and reads.get(what) != was:
                raise UserError(f"{where}: {what} was {was} when this run was started, but is now "
                                f"{reads.get(what, 'missing')}; {ELSE}")
        if adapters(model):
            load_adapter(model, folder)
        elif isinstance(model, AnyModel) and model.peft:
            from peft import set_peft_model_state_dict
            saved_adapters = read_tensors(folder / "adapter_model.safetensors")
            set_peft_model_state_dict(model.peft, saved_adapters)
        elif isinstance(model, AnyModel):       # into the class that has saved it
            theirs, info = type(model.model).from_pretrained(
                folder, dtype="auto", local_files_only=True, output_loading_info=True)
            if info["missing_keys"]:
                raise ValueError(f"{min(info['missing_keys'])} is missing")
            model.load_state_dict(theirs.state_dict())
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
def written_whole(path):
    """Yields a new, empty folder for files, and then renames it to `path`.

    If a crash or an error occurs before that, `path` is unchanged. A failed write is a UserError.
    """
    new = path.with_suffix(".new")
    try:
        if new.exists():
            shutil.rmtree(new)
        new.mkdir(parents=True)
        yield new
        swap(new, path)
    # If the disk is full, torch.save raises a RuntimeError that gives no reason.
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(new, ignore_errors=True)
        free = shutil.disk_usage(path.parent).free / 1e6
        raise UserError(f"{path} could not be written ({reason(error)}; {free:,.0f} MB are free "
                        "without it); fix this, or pass another --out_dir") from error
