"""Experts for a step of sampling on a GPU: no shape depends on the data, so nothing is waited for.

Each token goes through all experts, and those that the router did not choose weigh 0. That costs
little: such a step waits for weights to arrive, and the tokens of a batch together need most of
them anyway. With their weights side by side, all experts are one wide SwiGLU.
"""
import torch
import torch.nn.functional as F


def all_experts(mlp):
    """A MixtureOfExperts as a function of x (n, D).

    The weights are joined where they are copied anyway: converted under autocast.
    """
    experts, weight = mlp.experts, mlp.experts[0].gate_proj.weight
    autocast = torch.is_autocast_enabled(weight.device.type)
    dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
    router = mlp.gate.weight.to(dtype)

    def shares(x):
        """The weight of each expert for each token, (n, E)."""
        weights, chosen = mlp.route(F.linear(x, router))
        return weights.new_zeros(len(x), len(experts)).scatter(1, chosen, weights)

    def one_by_one(x):
        by_expert = zip(experts, shares(x).split(1, 1))
        return sum(expert(x) * share for expert, share in by_expert).to(x.dtype)

    if weight.dtype == dtype:
        return one_by_one
    gate_up = torch.cat([expert.gate_proj.weight.to(dtype) for expert in experts]
                        + [expert.up_proj.weight.to(dtype) for expert in experts])  # (2*E*F, D)
    down = torch.cat([expert.down_proj.weight.to(dtype) for expert in experts], 1)  # (D, E*F)

    def at_once(x):
        gate, up = F.linear(x, gate_up).chunk(2, -1)                            # (n, E*F)
        hidden = (F.silu(gate) * up).unflatten(1, (len(experts), -1))           # (n, E, F)
        hidden = hidden * shares(x)[..., None].to(dtype)
        return F.linear(hidden.flatten(1), down)
    return at_once
