"""--shard 1: shards weights, gradients and optimizer state over ranks (ZeRO-3, arXiv 1910.02054).

Each of n ranks stores 1/n of every weight, and AdamW updates that part. In a forward or backward
pass, PyTorch's FSDP gathers the weights of one layer at a time and then frees them. Every rank must
take part in this, so all ranks must run the same number of passes. Sampling would have to gather
all layers for every token, so each rank samples from an unsharded copy of the model instead, which
exists only during sampling.
"""
import copy
import functools

import torch
from torch import nn

from errors import UserError
from model.load import local_path, read_state
from model.transformers_model import AnyModel


def shard(model, world, dtype, path):
    """Shards the model across the ranks, in place, and moves each shard to its rank's device.

    If the weights are on the meta device, each rank reads its shard from the files at `path`.
    dtype: the dtype of gathered layers. The embedding, head and last norm keep their dtype.
    """
    if not isinstance(model, nn.Module):    # there is no reference, or it is lora.AdaptersOff
        return
    if isinstance(model, AnyModel):
        raise UserError("--shard 1 divides the layers of model/model.py's own network, but these "
                        "weights have another architecture; leave --shard out")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(world.device.type, (world.size,))
    blank = copy.deepcopy(model).requires_grad_(False).to("meta")
    inside = Inside(model)
    for module in (*model.model.layers, inside):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=MixedPrecisionPolicy(
            param_dtype=None if module is inside else dtype, reduce_dtype=torch.float32,
            cast_forward_inputs=False))
        # Gradients are summed: each rank's loss is a share of the step's loss. Gloo can't average.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _, state = read_state(local_path(path))
    for name, weight in list(model.named_parameters()):
        if weight.is_meta:                      # one by one, to hold one whole weight at a time
            part = part_of(state[name.replace(".base.", ".")], weight).to(weight.dtype)
            model.load_state_dict({name: part}, assign=True, strict=False)
    model.tie_weights()
    model.whole = functools.partial(whole_model, model, blank)
    # FSDP gathers the weights for `run`, so every rank must call it. model.run = inside would make
    # `inside`, which holds the model, a submodule of the model.
    object.__setattr__(model, "run", inside)


class Inside(nn.Module):
    """Calls a function with the model after FSDP has gathered the embedding, head and last norm."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, function, *args, **options):
        return function(self.model, *args, **options)


# --- whole tensors and their parts; a tensor that isn't sharded is already whole ------------------


def is_sharded(tensor):
    return hasattr(tensor, "full_tensor")


def whole(tensor):
    """Returns the full tensor if `tensor` is sharded, else `tensor`; every rank must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part_of(tensor, like):
    """Returns this rank's shard of the full tensor `tensor` if `like` is sharded, else `tensor`."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements,
                             src_data_rank=None)        # no broadcast: each rank has the tensor


@torch.no_grad()
def whole_model(model, blank, *, dtype=None, device=None, keep=True):
    """Returns an unsharded copy of a sharded model; every rank must call this.

    Only ranks with keep=True get the weights. dtype: the dtype of the layers, if not None.
    """
    weights = {}
    for name, weight in model.named_parameters():
        weight = whole(weight.to(dtype) if dtype and ".layers." in name else weight)
        if keep:
            weights[name] = weight.to(device)
    copied = copy.deepcopy(blank)
    copied.load_state_dict(weights, assign=True, strict=False)      # a tied head is listed once
    copied.tie_weights()
    return copied


def load_parts(model, state):
    """Loads a full state dict into the model; each rank of a sharded model loads its shard."""
    ours = model.state_dict()
    model.load_state_dict({name: part_of(state[name], ours[name]) for name in state})
