"""The processes that train one model together, and what they tell each other."""
import os

import torch
import torch.distributed as dist


class World:
    """The processes that torchrun started, one rank each, or just this one."""

    def __init__(self, device=None):
        self.rank, self.size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        usable = {"cuda": torch.cuda.device_count() >= on_this_machine,             # nccl wants a GPU for each process
                  "mps": torch.backends.mps.is_available() and self.size == 1,      # gloo cannot add up MPS tensors
                  "cpu": True}
        device = device or next(name for name in usable if usable[name])
        if not usable[device]:
            raise ValueError(f"--device {device}: there is none for each of the {on_this_machine} processes; choose another")
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    def sum(self, tensor):
        """The sum of the ranks' tensors, on every rank."""
        if self.size > 1:
            tensor = tensor.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model):
        """A rank's loss is its share of the step's loss, so the gradients are summed, not averaged."""
        for parameter in model.parameters():
            if parameter.grad is None:          # nothing on this rank had a gradient
                parameter.grad = torch.zeros_like(parameter)
            if self.size > 1:
                dist.all_reduce(parameter.grad)

    def gather(self, rows):
        """The ranks' lists, one behind the other."""
        if self.size == 1:
            return rows
        lists = [None] * self.size
        dist.all_gather_object(lists, rows)
        return [row for rows in lists for row in rows]

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()
