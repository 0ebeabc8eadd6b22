"""Writes weights, tokenizers, adapters and checkpoints, for read.py and for transformers.

The Saver decides when; it also resumes a run, and keeps other runs out of its folder.
"""
import json
import os
import shlex
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from report import UserError, reason

from ..lora import adapter_state, adapters, merged_state
from ..processes.shard import whole_state
from ..processes.watch import Stopped, under_torchrun
from .any_model import AnyModel
from .files import FAMILIES, eos_token_ids, read_json
from .read import load_checkpoint

MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
              "decoder_sparse_step", "mlp_only_layers")


def save_pretrained(model, tokenizer, path):
    """Write a folder for load_pretrained, transformers and servers, with adapters merged."""
    path, state = Path(path), merged_state(model)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, AnyModel):
        model.model.save_pretrained(path, state_dict=state)
        for file in path.glob("*.safetensors"):
            file.chmod((path / "config.json").stat().st_mode)       # as in save_tensors
    else:
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_tensors(state, path / "model.safetensors")
        write_json(hub_config(model), path / "config.json")
    generation = model.generation_config | {"eos_token_id": eos_token_ids(model, tokenizer)}
    if tokenizer.pad_token_id is not None:
        generation["pad_token_id"] = tokenizer.pad_token_id
    write_json(generation, path / "generation_config.json")
    save_tokenizer(tokenizer, path)


def save_tensors(state, path):
    """Write a safetensors file. The library would let only its owner read it, and no server."""
    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}, path,
              metadata={"format": "pt"})
    path.chmod(mode)


def write_json(content, path):
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_tokenizer(tokenizer, path):
    """Write the tokenizer's files so that transformers 4 can read them as well as 5.

    transformers 5 writes two things that 4 does not understand, but still reads their old form.
    """
    tokenizer.save_pretrained(path)
    file = Path(path) / "tokenizer_config.json"
    config = read_json(file)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    write_json(config, file)


def hub_config(model):
    """The content of config.json, as a dict; RoPE and dtype are in it for transformers 4 and 5."""
    if isinstance(model, AnyModel):
        return model.model.config.to_dict() | {"architectures": [type(model.model).__name__]}
    ours = vars(model.config).copy()
    model_type = "qwen3_moe" if model.config.num_experts else next(
        kind for kind, (_, switches) in FAMILIES.items() if switches.items() <= ours.items())
    scaling = ours.pop("rope_scaling")
    for name in ("qk_norm", "qkv_bias", *(() if model.config.num_experts else MOE_FIELDS)):
        del ours[name]
    merged = [layer.weight.dtype for layer in adapters(model).values()]
    dtype = str((merged or [next(model.parameters()).dtype])[0]).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[model_type][0]], "model_type": model_type, **ours,
        "hidden_act": "silu", "attention_dropout": 0.0,
        **({"rope_scaling": scaling} if scaling else {}),                       # transformers 4
        "rope_parameters": {**(scaling or {"rope_type": "default"}),            # transformers 5
                            "rope_theta": model.config.rope_theta},
        "dtype": dtype, "torch_dtype": dtype,                           # transformers 5, and 4
    }


def save_adapter(model, path):
    """Write adapter_config.json and adapter_model.safetensors, for PEFT and load_adapter."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(adapter_state(model), path / "adapter_model.safetensors")
    write_json({"peft_type": "LORA", "task_type": "CAUSAL_LM", **model.lora, "lora_dropout": 0.0,
                "bias": "none", "fan_in_fan_out": False, "inference_mode": True},
               path / "adapter_config.json")


def save_checkpoint(folder, model, tokenizer, optimizer_state, reference=None, **progress):
    """Write all that a resume needs: weights, tokenizer, optimizer, progress (step, num_tokens).

    Of a model with adapters only these: the base stays as it was loaded. reference: give it only if
    it changes during training.
    """
    moved = {"reference": reference.state_dict()} if reference is not None else {}
    with written_whole(folder) as new:
        if adapters(model):
            save_adapter(model, new)
        else:
            save_pretrained(model, tokenizer, new)
        torch.save({"optimizer": optimizer_state, **moved, **progress}, new / "optimizer.pt")


@contextmanager
def written_whole(path):
    """A new folder to write into. It takes the place of `path` once all of it is on the disk.

    A crash or a full disk before that leaves `path` as it was; a crash between the two renames
    leaves it as `path`.old. UserError if the disk refuses a file.
    """
    path = Path(path)
    new, old = path.with_suffix(".new"), path.with_suffix(".old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        for name in (*new.iterdir(), new):      # the folder last: it holds the files' names
            sync(name)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        new.rename(path)
        sync(path.parent)
    except BaseException as error:
        is_full = free_space(path) < 1e6
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        # For a full disk torch.save raises RuntimeError, without a reason.
        if not isinstance(error, (OSError, SafetensorError, RuntimeError)):
            raise
        why = "the disk is full" if is_full else reason(error)
        raise UserError(f"{path} could not be written ({why}); "
                        f"{free_space(path) / 1e6:,.0f} MB are free without it: make room, or "
                        "choose another --out_dir") from error
    shutil.rmtree(old, ignore_errors=True)


def free_space(path):
    """Free bytes on the disk of a file or folder, which need not exist yet."""
    folders = Path(path).absolute().parents
    return shutil.disk_usage(next(folder for folder in folders if folder.is_dir())).free


def sync(path):
    """Wait until a file or a folder's list of names is on the disk, not only in memory."""
    if os.name == "nt" and path.is_dir():
        return                              # Windows has no such thing for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        return Stopped(signal, f"after step {step}, which is saved; {go_on()}", together=True)

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
        self.world.watch.advice = f"; the checkpoint of step {step} is whole, {go_on()}"


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
        with suppress(PermissionError):     # on Windows nobody may open it now, not even we
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


def go_on():
    """A sentence with the command that goes on with this run."""
    program, *flags = sys.argv
    if Path(program).name != "train_grpo.py":               # a test, a notebook
        return "go on with:\n    train_grpo.py with the same flags and --resume"
    start, ranks = "python", os.environ.get("LOCAL_WORLD_SIZE")
    if under_torchrun():
        start = f"torchrun --nproc_per_node={ranks}"
        if ranks != os.environ.get("WORLD_SIZE"):
            start = "torchrun (on each node, with its flags)"
    command = shlex.join([program, *flags, *['--resume'] * ('--resume' not in flags)])
    return f"go on with:\n    {start} {command}"
