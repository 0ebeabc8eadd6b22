"""The processes that train one model together, and the collectives they use."""
import itertools
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

GROUPS = itertools.count()      # a second one must not find what the first has left in the store


def add_flags(parser):
    flag = parser.group("the machine").add_argument
    flag("--device", help="cuda, cuda:1, mps or cpu; with several processes "
         "each has a GPU of its own (default: cuda if it is there, else cpu)")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of matrix "
         "products; auto: bfloat16 on a GPU that has it, with TF32 for the rest; else float32")
    flag("--seed", type=COUNT_OR_0, default=42, help="of the order of prompts and of sampling")


class World:
    """All processes that torchrun started, or this one alone if it was started without torchrun.

    device, dtype, seed: as the flags have them.
    """

    def __init__(self, device=None, dtype="auto", seed=0):
        self.rank = int(os.environ.get("RANK", 0))          # torchrun sets both
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.seed = choose_device(device, self.size), seed
        self.cleanup = ExitStack()     # cleanup.callback(f) calls f when the run ends, well or not
        self.joined = False            # a group of processes, which it then leaves
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            if torch.cuda.is_initialized():         # by a caller
                self.cleanup.callback(torch.cuda.set_device, torch.cuda.current_device())
            torch.cuda.set_device(self.device)      # what "cuda" means from now on
            if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
                # Shapes are always new: segments that grow leave no holes between them.
                os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            self.cleanup.callback(
                torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")
            # cuDNN's attention makes a plan for each new shape, and here shapes are always new.
            self.cleanup.callback(
                torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
            torch.backends.cuda.enable_cudnn_sdp(False)
        if dtype == "auto":
            has_bfloat16 = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = "bfloat16" if has_bfloat16 else "float32"
        self.matrix_dtype = getattr(torch, dtype)

    @classmethod
    def join(cls, args):
        """The processes that torchrun started, or this one alone, each with a device of its own."""
        world = cls(args.device, args.dtype, args.seed)
        args.shard = int(args.shard and world.size > 1)     # one process has nothing to divide
        world.joined = world.size > 1 and not dist.is_initialized()     # else it is a caller's
        if world.joined:
            on_cuda = world.device.type == "cuda"
            # One rank's rewards may be slow while the others wait. NCCL's own limit is 10 minutes.
            store, rank, size = next(dist.rendezvous("env://"))
            dist.init_process_group(
                "nccl" if on_cuda else "gloo", timeout=timedelta(minutes=30), rank=rank,
                store=dist.PrefixStore(f"group {next(GROUPS)}", store), world_size=size,
                device_id=world.device if on_cuda else None)
        return world

    def autocast(self):
        """Around what runs a network: matrix products are those of --dtype.

        Weights and log-softmax stay float32.
        """
        # No cache: it would keep a copy of every weight, and a forward pass reads a weight once.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False,
                              enabled=self.matrix_dtype == torch.bfloat16)

    def sum(self, tensor):
        """The sum of this tensor over all ranks."""
        if self.size > 1:
            tensor = tensor.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model):
        """Add up the gradients of all ranks.

        A sum rather than a mean, because each rank's loss is already its share of the step's loss.
        """
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                # This rank had nothing to learn from, but the all_reduce needs every rank; and
                # AdamW, to which 0 is a gradient too, moves the same with shards as without.
                parameter.grad = torch.zeros_like(parameter)
            if self.size > 1 and not is_sharded(parameter):     # else FSDP has added them up
                dist.all_reduce(parameter.grad)

    def clip_gradients(self, model, max_norm):
        """Scale the gradient down to `max_norm`, if it is longer; its norm before, on all ranks."""
        return whole(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    def gather(self, rows):
        """The lists of all ranks, joined in rank order, on every rank."""
        lists = [rows] * self.size
        if self.size > 1:
            dist.all_gather_object(lists, rows)
        return [row for rows in lists for row in rows]

    def rng(self, step, *, evaluating=False):
        """The random numbers of this rank at a step; those of an evaluation are others."""
        return rng_of(self.seed, int(evaluating), step, self.rank, device=self.device)

    def check_same_flags(self, args):
        """UserError unless all ranks have the same flags: else one waits for another forever.

        Paths may differ from machine to machine.
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
            if dist.is_initialized():       # vLLM, when it ends, ends all groups
                dist.destroy_process_group()
            # After a sharded run DTensor's caches keep Gloo's threads alive. If Python ends while
            # one frees a tensor, the process aborts (pytorch issue 190489): let them finish.
            if self.device.type == "cpu":
                time.sleep(0.3)
