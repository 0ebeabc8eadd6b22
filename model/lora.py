"""LoRA: the policy is a frozen base plus small trainable matrices (Hu et al., arXiv 2106.09685).

    W x   becomes   W x + (alpha / rank) B (A x)        A (rank, in), B (out, rank), B = 0 at first

Only A and B have gradients and optimizer states. So each parameter of a bfloat16 base takes 2 bytes
of memory instead of 16. The base is also the reference model, which needs no extra memory.

A small rank is enough, because the policy learns only about one bit from each completion: whether
it was good ("LoRA Without Regret", Schulman et al., Thinking Machines Lab, 2025). Adapters of rank
1 already give a 0.6B model 630,000 trainable parameters. That article recommends ten times the
learning rate of full training; in our runs, three times learned faster (docs/real_models.md).
"""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from errors import UserError

from .model import Head


class LoRALinear(nn.Module):
    """A linear layer plus an adapter. The adapter is not merged, since bfloat16 would round it."""

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
        """Returns the weight with the adapter merged into it, in the dtype of the base."""
        update = self.scale * self.lora_B.detach() @ self.lora_A.detach()
        return (self.weight.float() + update).to(self.weight.dtype)


def with_adapters(base, *, rank, alpha, name="", seed=0):
    """Returns a policy with new LoRA adapters that shares the weights of `base`, now frozen.

    All linear layers get an adapter, except the head, experts and routers. name: the path or hub id
    of the base, for adapter_config.json.
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
    """The reference of a policy that is sharded with FSDP: the policy with its adapters off."""

    def __init__(self, policy):
        self.policy = policy

    def run(self, function, *args, **options):
        LoRALinear.enabled = False
        try:
            return self.policy.run(function, *args, **options)
        finally:
            LoRALinear.enabled = True


def adapters(model):
    """Returns {layer name: LoRALinear} for all layers with an adapter."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoRALinear)}


def merged_state(model):
    """Returns the model's state dict, with all adapters merged into the weights."""
    layers = adapters(model)
    merged = {f"{name}.weight": layer.merged() for name, layer in layers.items()}
    dtype = next((layer.weight.dtype for layer in layers.values()), None)
    return {name: tensor.to(dtype) for name, tensor in (base_state(model) | merged).items()}


def base_state(model):
    """Returns the state dict of the base model, without the adapters."""
    return {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()
            if ".lora_" not in name}


def adapter_state(model):
    """Returns the state dict of the adapters, with the parameter names that PEFT uses."""
    return {f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach()
            for name, layer in adapters(model).items() for part in ("lora_A", "lora_B")}
