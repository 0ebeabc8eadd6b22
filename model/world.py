"""The processes that train one model together, and the collectives they use."""
import os
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from .files import reason
from .shard import is_sharded


class World:
    """All processes that torchrun started, or this one alone if it was started without torchrun.

    device: cuda, mps or cpu, by default the first of these that every process can use.
    """
    watch = None                            # watch.py, if there is one

    def __init__(self, device=None):
        self.rank = int(os.environ.get("RANK") or 0)
        self.size = int(os.environ.get("WORLD_SIZE") or 1)
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)       # processes on this machine
        usable = {      # NCCL needs a GPU for each process, and Gloo cannot sum MPS tensors
            "cuda": torch.cuda.device_count() >= local_size,
            "mps": torch.backends.mps.is_available() and self.size == 1,
            "cpu": True,
        }
        device = device or next(name for name in usable if usable[name])
        if not usable[device]:
            raise ValueError(f"--device {device}: not available to {local_size} process(es) on "
                             "this machine; choose another")
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            # torch's own time limit would end a run whose rank 0 takes long to save.
            dist.init_process_group("nccl" if device == "cuda" else "gloo",
                                    timeout=timedelta(days=1))

    @contextmanager
    def collective(self):
        """Around each collective: here a rank waits for the others, and may wait in vain."""
        if self.watch:
            self.watch.enter_collective()
        try:
            yield
            if self.size > 1 and self.device.type == "cuda":
                torch.cuda.synchronize()    # NCCL only queues its work; the wait is to be in here
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, torch.OutOfMemoryError):
                raise
            # The watch knows which rank is gone, and is about to say so and end this process.
            time.sleep(5 if self.watch else 0)
            raise ValueError(f"lost contact with the other ranks ({reason(error)})") from error
        if self.watch:
            self.watch.leave_collective()

    def sum(self, tensor):
        """The sum of this tensor over all ranks."""
        with self.collective():
            if self.size > 1:
                tensor = tensor.to(self.device if self.device.type == "cuda" else "cpu")
                dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model):
        """Add up the gradients of all ranks.

        A sum rather than a mean, because each rank's loss is already its share of the step's loss.
        """
        with self.collective():
            for parameter in model.parameters():
                if not parameter.requires_grad or is_sharded(parameter):    # those are added up
                    continue
                if parameter.grad is None:
                    # This rank had nothing to learn from, but the all_reduce needs every rank.
                    parameter.grad = torch.zeros_like(parameter)
                if self.size > 1:
                    dist.all_reduce(parameter.grad)

    def gather(self, rows):
        """The lists of all ranks, joined in rank order, on every rank."""
        lists = [rows] * self.size
        with self.collective():
            if self.size > 1:
                dist.all_gather_object(lists, rows)
        return [row for rows in lists for row in rows]

    def agree(self, **values):
        """ValueError unless all ranks have the same values: else one waits for another forever."""
        for rank, others in enumerate(self.gather([values])):
            for name, value in values.items():
                if others[name] != value:
                    raise ValueError(f"{name}: {value} on rank {self.rank}, but {others[name]} on "
                                     f"rank {rank}; give all ranks the same flags and files")

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()
