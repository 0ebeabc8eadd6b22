"""Distributed training: the class World stands for all processes that train one model."""
import hashlib
import itertools
import json
import os
import time
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from dataset.jsonl import to_json
from errors import COUNT_OR_0, UserError
from model.load import choose_device
from model.sampler import rng_of

from .fsdp import is_sharded, whole

GROUPS = itertools.count()      # a second group must not find the first group's data in the store


def add_flags(parser):
    flag = parser.group("the machine").add_argument
    flag("--device", help="cuda, cuda:1, mps or cpu; several processes each use "
         "their own GPU (default: cuda if available, else cpu)")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="dtype of matrix "
         "products; auto: bfloat16 on GPUs that support it (TF32 where float32 is needed), else "
         "float32")
    flag("--seed", type=COUNT_OR_0, default=42, help="seed of the order of prompts and of sampling")


class World:
    """All processes that torchrun started, or only this process if torchrun was not used.

    device, dtype, seed: the values of --device, --dtype and --seed.
    """

    def __init__(self, device=None, dtype="auto", seed=0):
        self.rank = int(os.environ.get("RANK", 0))          # torchrun sets both
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.seed = choose_device(device, self.size), seed
        self.cleanup = ExitStack()     # cleanup.callback(f) calls f however the run ends
        self.joined = False            # whether it joined a process group that it must leave
        self.cleanup.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            if torch.cuda.is_initialized():         # by a caller
                self.cleanup.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self.device)      # from now on, "cuda" means this device
            if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
                # Shapes change all the time; expandable segments avoid fragmentation.
                os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            self.cleanup.callback(
                torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
            # cuDNN's attention is slow here: it makes a plan for each new shape, and shapes vary.
            self.cleanup.callback(
                torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
            torch.backends.cuda.enable_cudnn_sdp(False)
        if dtype == "auto":
            has_bfloat16 = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if has_bfloat16 else "float32"
        self.matrix_dtype = getattr(torch, dtype)

    @classmethod
    def join(cls, args):
        """Creates the World, and initializes torch.distributed if there are several processes."""
        world = cls(args.device, args.dtype, args.seed)
        args.shard = int(args.shard and world.size > 1)     # one process has nothing to shard
        world.joined = world.size > 1 and not dist.is_initialized()     # else the caller has joined
        if world.joined:
            on_cuda = world.device.type == "cuda"
            # Ranks may wait for another rank's slow rewards; NCCL's default timeout is 10 minutes.
            store, rank, size = next(dist.rendezvous("env://"))
            dist.init_process_group(
                "nccl" if on_cuda else "gloo", timeout=timedelta(minutes=30), rank=rank,
                store=dist.PrefixStore(f"group {next(GROUPS)}", store), world_size=size,
                device_id=world.device if on_cuda else None)
        return world

    def autocast(self):
        """Returns a torch.autocast context in which matrix products are computed in --dtype."""
        # A cache would keep a copy of every weight, although a forward pass uses each one once.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False,
                              enabled=self.matrix_dtype == torch.bfloat16)

    def sum(self, tensor):
        """Returns the sum of this tensor over all ranks."""
        if self.size > 1:
            tensor = tensor.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model):
        """Sums the gradients over all ranks.

        The gradients are not averaged, because each rank's loss is a share of the total loss.
        """
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                # This rank had no rows to train on, but the all_reduce needs every rank. Also, with
                # a gradient of 0 instead of None, AdamW takes the same step, sharded or not.
                parameter.grad = torch.zeros_like(parameter)
            if self.size > 1 and not is_sharded(parameter):     # else FSDP has summed them
                dist.all_reduce(parameter.grad)

    def clip_gradients(self, model, max_norm):
        """Clips the norm of the gradients to `max_norm`, and returns the norm before clipping."""
        return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    def gather(self, rows):
        """Concatenates the lists of all ranks, in rank order; every rank gets the result."""
        lists = [rows] * self.size
        if self.size > 1:
            dist.all_gather_object(lists, rows)
        return [row for rows in lists for row in rows]

    def share(self, model, name):
        """Gives all ranks rank 0's weights of a model object, because theirs may differ."""
        if self.size == 1:
            return
        named = [*model.named_parameters(), *model.named_buffers()]
        tensors = {path: one.data for path, one in named}
        self.check_same(name, [f"{path} {list(x.shape)}" for path, x in tensors.items()],
                        "pass the same model")
        for tensor in tensors.values():
            dist.broadcast(tensor, 0)

    def check_same(self, name, value, advice):
        """Raises a UserError unless all ranks have the same value; name: what it is called."""
        if self.size == 1:
            return
        text = json.dumps(to_json(value), sort_keys=True)
        content = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:12]
        for rank, other in enumerate(self.gather([content])):
            if other != content:
                raise UserError(f"{name} differs between rank {self.rank} and rank {rank}; "
                                f"{advice} in each process")

    def rng(self, step, *, evaluating=False):
        """Returns a random generator that depends on seed, step, rank and `evaluating`."""
        return rng_of(self.seed, int(evaluating), step, self.rank, device=self.device)

    def check_same_flags(self, args):
        """Raises a UserError unless all ranks have the same flags, except for paths.

        With different flags, one rank could wait for another forever.
        """
        flags = {name: value for name, value in to_json(vars(args)).items()
                 if name != "out_dir" and not name.endswith("_path")}
        for rank, others in enumerate(self.gather([flags])):
            for name, value in flags.items():
                if others[name] != value:
                    raise UserError(f"--{name}: {value} on rank {self.rank}, but {others[name]} on "
                                    f"rank {rank}; pass the same flags on all ranks")

    def close(self):
        self.cleanup.close()
        if self.joined:
            self.joined = False
            if dist.is_initialized():       # vLLM destroys all groups when it ends
                dist.destroy_process_group()
            # After a sharded run DTensor's caches keep Gloo's threads alive. If Python exits while
            # one frees a tensor, the process aborts (pytorch issue 190489), so let all finish.
            if self.device.type == "cpu":
                time.sleep(0.3)
