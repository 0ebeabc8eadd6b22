"""A GPU that is not there: tensors lie on the CPU, and some say cuda:0.

Two modes of torch. PretendGPU answers what Python asks: on which device a tensor is, or is to be.
Kernels sees every operation, also those of a backward pass and of layers that it computes again. It
refuses what CUDA refuses, tensors of two devices in one operation. Not shown: whether CUDA's own
kernels agree, how long they take, how much memory. With torchrun it runs the script on as many such
GPUs, and Gloo has NCCL's rules:

    torchrun --nproc_per_node=2 tests/pretend_gpu.py --max_steps 2
"""
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, CUDA = torch.device("cpu"), torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
Tensor = torch.Tensor
REAL = SimpleNamespace(all_reduce=dist.all_reduce, init_process_group=dist.init_process_group)
COPIES = {"copy_", "_to_copy"}


def tensors(*x):
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def on_gpu(x):
    return getattr(x.untyped_storage(), "on_gpu", False)        # a view shares it


def put(result, there):
    for x in tensors(result):
        x.untyped_storage().on_gpu = there


class PretendGPU(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.late = []              # collectives that have been called, and not come to an end
        self.stays = False          # whether what is being made is on the GPU

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, there = func.__name__, kwargs or {}, any(map(on_gpu, tensors(args, kwargs)))
        if there and func == Tensor.device.__get__:
            return CUDA
        if func is torch.device or name in ("_parse_to", "_has_compatible_shallow_copy_type"):
            return func(*args, **kwargs)
        if func == Tensor.cpu:
            func, name, args = Tensor.to, "to", (*args, CPU)
        targets = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
        stays = targets[0].type == "cuda" if targets else there
        if there and kwargs.get("enable_gqa") and kwargs.get("attn_mask") is not None:
            raise RuntimeError("its fused attention takes no mask where heads share keys")
        generator = kwargs.get("generator")
        if generator is not None and (generator.device.type == "cuda") != stays:
            raise RuntimeError(f"a generator of another device in {name}")
        moves = name == "to" and stays != there
        if moves:
            args = args[0].clone(), *args[1:]
        before, self.stays = self.stays, stays
        result = func(*tree_map_only(torch.device, real, args),
                      **tree_map_only(torch.device, real, kwargs))
        self.stays = before
        for x in tensors(result):       # some are made where Kernels does not see it
            if moves or name in ("tensor", "new_tensor") or not hasattr(
                    x.untyped_storage(), "on_gpu"):
                put(x, stays)
        return result

    def synchronize(self):
        """What was called first ends first."""
        while self.late:
            tensor, others, work = self.late.pop(0)
            work.wait()
            with torch._C._DisableTorchDispatch():
                tensor.data.copy_(others)

    def all_reduce(self, tensor, *args, **options):
        """NCCL's: it takes contiguous tensors of the GPU, and returns before the sum is there."""
        if not on_gpu(tensor) or not tensor.is_contiguous():
            raise RuntimeError("NCCL takes contiguous tensors of the GPU")
        others = tensor.detach().clone()
        self.late.append((tensor, others, REAL.all_reduce(others, async_op=True)))


class Kernels(TorchDispatchMode):
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gpu.synchronize()
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        used = tensors(args, kwargs)
        there = any(map(on_gpu, used))
        if there:
            # CUDA takes single numbers and indices from the CPU, and nothing else.
            indices = tensors(args[1]) if name.startswith("index") and isinstance(
                args[1], (list, tuple)) else []
            others = tensors(args[:1], args[2:], kwargs) if indices else used
            if name not in COPIES and any(x.dim() and not on_gpu(x) for x in others):
                raise RuntimeError(f"two devices in {name}")
        stays = there if used else self.gpu.stays
        if name == "copy_":
            stays = on_gpu(args[0])
        result = func(*args, **kwargs)
        put(result, stays)
        return result


def real(device):
    return CPU if device.type == "cuda" else device


class Generator(torch.Generator):
    device = None

    def __new__(cls, device=CPU):
        generator = super().__new__(cls)
        generator.device = torch.device(device)
        return generator


@contextmanager
def pretend_gpu(monkeypatch):
    """What torch.cuda says of the machine is patched; yields the PretendGPU."""
    monkeypatch.setattr(torch.cuda, "device_count",
                        lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: SimpleNamespace(total_memory=24 * 2**30))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    monkeypatch.setattr(Tensor, "is_cuda", property(on_gpu))
    monkeypatch.setattr(torch, "Generator", Generator)
    autocast, is_enabled, dtype = (
        torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: is_enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: dtype("cpu"))
    monkeypatch.setattr(torch.autocast, "__init__", lambda self, device_type, *args, **options:
        autocast(self, "cpu", *args, **options))
    gpu, run_backward = PretendGPU(), torch.autograd._engine_run_backward

    def backward(*args, **options):
        with gpu:               # else what the backward pass calls in Python would not be seen
            return run_backward(*args, **options)

    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(dist, "all_reduce", gpu.all_reduce)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, *, timeout, device_id:
        REAL.init_process_group({"nccl": "gloo"}[backend], timeout=timeout))
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", backward)
    # It compares devices, of which only the second pass would hear the pretended one.
    monkeypatch.setitem(torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default",
                        lambda tensor: None)
    with Kernels(gpu), gpu:
        yield gpu


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import train_grpo

    with pytest.MonkeyPatch.context() as patch, pretend_gpu(patch):
        train_grpo.main(["--device", "cuda", *sys.argv[1:]])
