"""LoRA: the policy is a frozen base plus small trainable matrices (Hu et al., arXiv 2106.09685).

    W x   becomes   W x + (alpha / rank) B (A x)        A (rank, in), B (out, rank), B = 0 at first

Only A and B have gradients and moments, so a parameter of the base takes 2 bytes in bfloat16
instead of 16. The base is also the reference model of the KL, so no copy of its weights is needed.

A small rank is enough, because a completion tells the policy little more than whether it was good,
about one bit ("LoRA Without Regret", Schulman et al., Thinking Machines Lab, 2025), while rank 1 of
a 0.6B model already has 630,000 parameters. The learning rate should be about ten times that of
full training.
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from errors import UserError

from .model import Head


class LoRALinear(nn.Module):
    """A linear layer and its adapter, kept apart because a bfloat16 matrix would round B A away."""

    enabled = True                          # False: all instances skip their adapters

    def __init__(self, base, rank, alpha, generator):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        outputs, inputs = base.weight.shape
        device = "cpu" if base.weight.is_meta else base.weight.device       # shard() reads the base
        bound = 1 / math.sqrt(inputs)
        A = (torch.rand(rank, inputs, generator=generator) * 2 - 1) * bound
        self.lora_A = nn.Parameter(A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=device))

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        if not self.enabled:
            return self.base(x)
        return self.base(x) + F.linear(self.scale * F.linear(x, self.lora_A), self.lora_B)

    def merged(self):
        """Returns the weight of the equivalent plain linear layer, in the base's dtype."""
        update = self.scale * self.lora_B.detach() @ self.lora_A.detach()
        return (self.weight.float() + update).to(self.weight.dtype)


def with_adapters(base, *, rank, alpha, name="", seed=0):
    """Returns a policy that shares every weight with `base`, now frozen, and adds adapters.

    All linear layers get an adapter, except the head, experts and routers. name: where the base was
    loaded from, for adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    base.requires_grad_(False)
    policy = copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})
    for path, layer in list(policy.named_modules()):
        if (isinstance(layer, nn.Linear) and not isinstance(layer, Head)
                and ".experts." not in path and not path.endswith(".gate")):
            policy.set_submodule(path, LoRALinear(layer, rank, alpha, generator))
    found = dict.fromkeys(path.rpartition(".")[2] for path in adapters(policy))
    if not found:
        raise UserError(f"--lora_rank: {name} has no layer of the class nn.Linear to adapt; leave "
                        "--lora_rank out to train all weights")
    policy.lora = {"r": rank, "lora_alpha": alpha, "target_modules": list(found),
                   "base_model_name_or_path": str(name)}
    return policy


class AdaptersOff:
    """The reference of a sharded policy: its own base, since FSDP would copy a separate base."""

    def __init__(self, policy):
        self.policy = policy

    def run(self, function, *args, **options):
        LoRALinear.enabled = False
        try:
            return self.policy.run(function, *args, **options)
        finally:
            LoRALinear.enabled = True


def adapters(model):
    """Returns {name of the layer: LoRALinear}; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoRALinear)}


def merged_state(model):
    """Returns the state dict of the equivalent model without adapters."""
    layers = adapters(model)
    merged = {f"{name}.weight": layer.merged() for name, layer in layers.items()}
    dtype = next((layer.weight.dtype for layer in layers.values()), None)
    return {name: tensor.to(dtype) for name, tensor in (base_state(model) | merged).items()}


def base_state(model):
    """Returns the state dict of the base, without the adapters."""
    return {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()
            if ".lora_" not in name}


def adapter_state(model):
    """Returns only the adapters' tensors, by PEFT's names and without copying them."""
    return {f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach()
            for name, layer in adapters(model).items() for part in ("lora_A", "lora_B")}
