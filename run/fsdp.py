"""Weights, gradients and moments divided over the ranks: --shard 1 (ZeRO-3, arXiv 1910.02054).

Each of n ranks keeps 1/n of every weight, and AdamW updates that part. For a forward or backward
pass PyTorch's FSDP gathers a layer at a time, in the dtype of the matrix products, and frees it
again; gradients are added up as they are scattered. So all ranks must make the same number of
passes. Sampling would gather all layers for every single token: it gets a copy of the whole model
instead, which lives as long as the rollout.
"""
import copy
import functools

import torch
from torch import nn

from errors import UserError
from model.load import local_path, read_state
from model.transformers_model import AnyModel


def shard(model, world, dtype, path):
    """Divides the model over the ranks, in place, and moves each part to its rank's device.

    Of weights on the meta device a rank reads no more than its part, from `path`. dtype: in which
    the layers are gathered. Embedding, head and last norm stay as they are.
    """
    if not isinstance(model, nn.Module):    # there is no reference, or it is lora.AdaptersOff
        return
    if isinstance(model, AnyModel):
        raise UserError("--shard 1 divides the layers of model/model.py's own network, and these "
                        "weights are of another; leave the flag out")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(world.device.type, (world.size,))
    blank = copy.deepcopy(model).requires_grad_(False).to("meta")
    inside = Inside(model)
    for module in (*model.model.layers, inside):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(
            param_dtype=None if module is inside else dtype, reduce_dtype=torch.float32,
            cast_forward_inputs=False))
        # A sum: the loss of a rank is its share of the step's. And Gloo cannot average.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _, state = read_state(local_path(path))
    for name, weight in list(model.named_parameters()):
        if weight.is_meta:                      # one by one, since each takes some room for a while
            part = part_of(state[name.replace(".base.", ".")], weight).to(weight.dtype)
            model.load_state_dict({name: part}, assign=True, strict=False)
    model.tie_weights()
    model.whole = functools.partial(whole_model, model, blank)
    # FSDP gathers what it reads, so every rank takes part. As an attribute of Python's, since torch
    # would make `inside`, which holds the model, a module of the model.
    object.__setattr__(model, "run", inside)


class Inside(nn.Module):
    """Calls a function of a model; in it FSDP has gathered what is in no layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, function, *args, **options):
        return function(self.model, *args, **options)


# --- whole tensors and their parts; what isn't sharded is whole already ---------------------------


def is_sharded(tensor):
    return hasattr(tensor, "full_tensor")


def whole(tensor):
    """All parts of a sharded tensor, put together: every rank takes part."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part_of(tensor, like):
    """This rank's part of a whole tensor, if `like` is sharded."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements,
                             src_data_rank=None)        # a copy: each rank can read the whole


@torch.no_grad()
def whole_model(model, blank, *, dtype=None, device=None, keep=True):
    """A sharded model as a whole one; every rank takes part, and those that `keep` it get it.

    dtype: of the layers' weights, None as they are.
    """
    weights = {}
    for name, weight in model.named_parameters():
        weight = whole(weight.to(dtype) if dtype and ".layers." in name else weight)
        if keep:
            weights[name] = weight.to(device)
    copied = copy.deepcopy(blank)
    copied.load_state_dict(weights, assign=True, strict=False)      # a tied head has one name
    copied.tie_weights()
    return copied


def load_parts(model, state):
    """Copy this rank's part of each tensor of a state dict into the model."""
    ours = model.state_dict()
    model.load_state_dict({name: part_of(state[name], ours[name]) for name in state})
