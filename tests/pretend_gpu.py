"""A pretend GPU: tensors that say cuda:0 and compute on the CPU, and a count of what they ask for.

While a PretendGPU is active, every operation on them passes through it. It refuses what CUDA
refuses, tensors of two devices in one operation, and counts

    waits       the CPU needs what the GPU has yet to compute: it stops until all of that is done
    uploads     copies of ordinary memory to the GPU, for which the CPU stops as well

Both are counted by place: the line of ours that caused them, and the operation.
"""
import collections
import ctypes
import functools
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = Path(torch.__file__).resolve().parent.parent    # below ROOT, if .venv is there
# Tensors with gradients ask for the current GPU, which a build of torch for CPUs knows nothing of.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@functools.cache        # a second registration would be an error
def why_not(folder):
    """Compiles GUARD in the folder and loads it. Returns why there is no pretend GPU, or None."""
    if torch.version.cuda or torch.version.hip:
        return "this build of torch is for real GPUs"
    if not (compiler := shutil.which("c++") or shutil.which("g++")):
        return "no C++ compiler"
    torch_folder, library = Path(torch.__file__).parent, folder / "guard.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include",
               f"-L{torch_folder}/lib", "-x", "c++", "-", "-lc10", "-o", str(library)]
    process = subprocess.run(command, input=GUARD, capture_output=True, text=True)
    if process.returncode:
        return f"the guard does not compile: {process.stderr.strip().splitlines()[-1]}"
    ctypes.CDLL(str(library))


class OnGPU(torch.Tensor):
    """A tensor that says cuda:0, around the one that computes, `inner`."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device="cuda:0")

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on a tensor of a PretendGPU that is not active")

    def tolist(self):                       # torch has it for no subclass
        return self.cpu().tolist()


class Generator(torch.Generator):
    """A torch.Generator that may say cuda:0."""
    on_gpu = {}                             # by the address that operations know them by

    def __new__(cls, device="cpu"):
        self = super().__new__(cls)
        if is_cuda(device):
            cls.on_gpu[self._cdata] = self
        return self

    @property
    def device(self):
        return torch.device("cuda:0" if on_cuda(self) else "cpu")


def on_cuda(generator):
    return generator is not None and generator._cdata in Generator.on_gpu


def is_cuda(device):
    return torch.device(device).type == "cuda"


aten = torch.ops.aten
COPY = {aten._to_copy, aten.copy_}
INDEX = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# The sizes of their results depend on what is in a tensor, or they are numbers.
WAIT = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount,
        aten.masked_scatter_backward, aten._unique2, aten.unique_dim, aten.unique_consecutive}


class PretendGPU(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits, self.uploads = collections.Counter(), collections.Counter()

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)       # torch.tensor passes through here, too
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found, kwargs, op = [], dict(kwargs or {}), func.overloadpacket
        inner_args, inner_kwargs = unwrap(args, found), unwrap(kwargs, found)
        wrappers = {id(x.inner): x for x in found if type(x) is OnGPU}
        target = kwargs.get("device")                   # of a copy or a new tensor
        on_gpu = bool(wrappers) if target is None else is_cuda(target)
        if op is aten.copy_:
            on_gpu = type(args[0]) is OnGPU
        if not (wrappers or on_gpu or on_cuda(kwargs.get("generator"))):
            return func(*args, **kwargs)
        if op is aten._fused_sdp_choice:
            return 0                                    # attention from plain operations
        self.check(func, args, kwargs, found, on_gpu)
        self.count(func, args, kwargs, found, on_gpu)
        if target is not None:
            inner_kwargs["device"] = torch.device("cpu")
        result = func(*inner_args, **inner_kwargs)
        return wrap(result, wrappers) if on_gpu else result

    def check(self, func, args, kwargs, found, on_gpu):
        op, generator = func.overloadpacket, kwargs.get("generator")
        # CUDA takes single numbers and indices from the CPU, and nothing else.
        indices = [id(x) for x in args[1] if x is not None] if op in INDEX else []
        strangers = [x for x in found if type(x) is not OnGPU and x.dim() and id(x) not in indices]
        if func._schema.is_mutable and args and type(args[0]) is torch.Tensor:
            strangers.append(args[0])                   # a result on the CPU
        if generator is not None and on_cuda(generator) != on_gpu:
            strangers.append(torch.empty(0))
        if strangers and op not in COPY:
            raise RuntimeError(f"two devices in {func}: " + ", ".join(
                f"{tuple(x.shape)} on {x.device.type}" for x in found))

    def count(self, func, args, kwargs, found, on_gpu):
        op = func.overloadpacket
        if op in COPY:
            waits, upload = not on_gpu, on_gpu and type(found[-1]) is not OnGPU
        elif op in INDEX:       # a mask becomes the indices of what is in it, except for a fill
            fills = len(args) > 2 and type(args[2]) is not OnGPU
            indices = [x for x in args[1] if x is not None]
            waits = not fills and any(type(x) is OnGPU and x.dtype == torch.bool for x in indices)
            upload = any(type(x) is not OnGPU for x in indices)
        else:
            sizes_unknown = op is aten.repeat_interleave and kwargs.get("output_size") is None
            waits, upload = op in WAIT or sizes_unknown, False
        for counter, happens in ((self.waits, waits), (self.uploads, upload)):
            if happens:
                counter[f"{line_of_ours()} {op.__name__}"] += 1


def unwrap(x, found):
    """The same with `inner` in place of each OnGPU; adds all tensors to `found`."""
    if isinstance(x, torch.Tensor):
        found.append(x)
        return x.inner if type(x) is OnGPU else x
    if isinstance(x, dict):
        return {key: unwrap(value, found) for key, value in x.items()}
    return type(x)([unwrap(y, found) for y in x]) if type(x) in (list, tuple) else x


def wrap(x, wrappers):
    """The same with an OnGPU around each tensor: its old one, if it was changed in place."""
    if isinstance(x, torch.Tensor):
        return wrappers[id(x)] if id(x) in wrappers else OnGPU(x)
    return type(x)([wrap(y, wrappers) for y in x]) if isinstance(x, (list, tuple)) else x


def line_of_ours():
    """The innermost one on the stack that is neither torch's nor in this file."""
    frame = sys._getframe()
    while frame := frame.f_back:
        file = Path(frame.f_code.co_filename)
        if ROOT in file.parents and LIBRARIES not in file.parents and file != Path(__file__):
            return f"{file.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"


def backward(loss):
    """Tensor.backward: torch's nodes, called in order. Its engine wants the streams of a GPU."""
    edges, found = collections.Counter(), [loss.grad_fn]
    for node in found:                      # grows
        for target, _ in node.next_functions:
            if target is not None and not edges[target]:
                found.append(target)
            edges[target] += 1
    received, ready = {loss.grad_fn: [torch.ones_like(loss)]}, [loss.grad_fn]
    while ready:
        node = ready.pop()
        gradients = received.pop(node)
        if hasattr(node, "variable"):
            accumulate(node.variable, gradients[0])
            continue
        sent = node(*gradients)
        sent = sent if isinstance(sent, tuple) else (sent,)
        for (target, number), gradient in zip(node.next_functions, sent):
            if target is None:
                continue
            inputs = target._input_metadata
            slots = received.setdefault(target, [None] * len(inputs))
            if gradient is not None:        # a formula leaves it broadcast, in any dtype
                gradient = gradient.sum_to_size(inputs[number].shape).to(inputs[number].dtype)
                slots[number] = gradient if slots[number] is None else slots[number] + gradient
            edges[target] -= 1
            if not edges[target]:
                ready.append(target)


def accumulate(variable, gradient):
    if gradient is not None and variable.grad is None:
        variable.grad = gradient.clone()
    elif gradient is not None:
        variable.grad += gradient


def install(monkeypatch):
    """What the script finds when it asks torch for a GPU."""
    # An optimizer imports this, which then misses what is replaced here.
    importlib.import_module("torch._dynamo")

    def no_op(*args, **kwargs):
        pass

    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "_lazy_init": no_op,
        "set_device": no_op, "synchronize": no_op, "is_bf16_supported": lambda **_: True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)     # its tensors have no wrappers
    monkeypatch.setattr(torch.Tensor, "backward", torch.no_grad()(backward))
    # Checkpointing asks which backward pass it is in.
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    # A module that moves keeps its parameters, so that tied ones stay tied.
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    # A number from the GPU in a list, and a tensor that is pickled, are copies; torch's own code
    # for that passes no mode by.
    _device_constructors()                  # finds torch.tensor by its identity, once
    tensor, save = torch.tensor, torch.save
    monkeypatch.setattr(torch, "tensor", lambda data, **options: tensor(
        [x.item() if type(x) is OnGPU else x for x in data] if type(data) is list else data,
        **options))
    monkeypatch.setattr(torch, "save", lambda data, *args, **options: save(
        tree_map(lambda x: x.cpu() if type(x) is OnGPU else x, data), *args, **options))
