"""How much memory a GRPO run takes on a GPU, before it is started.

    python -m model.commands.memory                                  the usual sizes
    python -m model.commands.memory Qwen/Qwen3-0.6B out/my_weights   any weights' config.json

A row says what the parameters take (weights, gradients, AdamW's moments, the reference) and the
sampler's cache, the least that a run needs, and the largest --micro_batch_size that fits on GPUs of
so many GiB, of which it may use 92%. All is in GiB, for products in bfloat16 with model/fast and
--gradient_checkpointing. Each peak is that of a step on the meta device, whose tensors have a size
and no numbers. CUDA's context (about half a GiB), fragmentation and an engine (--sampler vllm) come
on top.
"""
import copy
import functools
import math
import weakref
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from errors import COUNT, COUNT_OR_0, Parser, user_errors

from ..fast import pair
from ..lora import with_adapters
from ..model import MiniMindConfig, MiniMindForCausalLM
from ..storage.files import explained, read_config
from ..storage.read import local_path, read_pth

SIZES = {}
for name, hidden_size, intermediate_size, layers, heads in (
        ("0.6B", 1024, 3072, 28, 16), ("1.7B", 2048, 6144, 28, 16),
        ("4B", 2560, 9728, 36, 32), ("8B", 4096, 12288, 36, 32)):
    SIZES[f"Qwen3-{name}"] = MiniMindConfig(
        vocab_size=151936, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=name != "8B")
LEVERS = {"--beta above 0": {"reference": True}, "--beta 0": {},
          "--lora_rank 16": {"lora_rank": 16}}
GPUS = {        # name -> GiB of each, ranks that share a model
    "8": (8, 1), "12": (12, 1), "24": (24, 1), "2x24, --shard 1": (24, 2),
    "80": (80, 1), "8x80, --shard 1": (80, 8)}
USABLE = 0.92       # of a GPU: CUDA's context and fragmentation take the rest
META = torch.device("meta")


# --- a step without numbers -----------------------------------------------------------------------


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors on the meta device: `now`, and the `most` so far."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.known = 0, 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_meta:
                storage = x.untyped_storage()       # views share it
                if storage not in self.known:
                    size = self.known[storage] = storage.nbytes()
                    weakref.finalize(storage, self.free, size)
                    self.now += size
                    self.most = max(self.most, self.now)
        return result

    def free(self, size):
        self.now -= size


class OnMeta(TorchFunctionMode):
    """While it is active, `device` is the meta device, and autocast casts there as it would.

    What the CPU has to know of a tensor is kept beside it (its origin), or made up.
    """

    def __init__(self, device, dtype):
        super().__init__()
        self.device, self.dtype, self.casts = torch.device(device), dtype, dtype != torch.float32

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if on_meta:
            if func == torch.Tensor.device.__get__:
                return self.device
            if func == torch.Tensor.is_cuda.__get__:
                return self.device.type == "cuda"
            if func == torch.Tensor.cpu:
                return args[0].origin
            if func == torch.Tensor.tolist:
                return [0] * args[0].numel()
            if func == torch.Tensor.__bool__:
                return False
            if func == torch.Tensor.split and not any(args[1]):     # to experts: evenly
                return args[0].tensor_split(len(args[1]))
            if func in (F.linear, F.scaled_dot_product_attention) and self.casts:
                args, kwargs = tree_map_only(torch.Tensor, self.cast, (args, kwargs))
            if func == F.scaled_dot_product_attention:      # fused: it keeps no scores
                return attention(*args, **kwargs)
        here = functools.partial(tree_map_only, torch.device, self.of)
        result = func(*here(args), **here(kwargs))
        if func == torch.Tensor.to and result is not args[0] and not on_meta:
            result.origin = args[0]
        return result

    def of(self, device):
        return META if device == self.device else device

    def cast(self, x):
        return x.to(self.dtype) if x.is_floating_point() else x

    def autocast(self, device_type, dtype=None, enabled=True, cache_enabled=False):
        """In place of torch.autocast, which knows no meta device."""
        stack, before = ExitStack(), self.casts
        self.casts = enabled
        stack.callback(setattr, self, "casts", before)
        return stack


def attention(q, keys, values, attn_mask=None, enable_gqa=False, is_causal=False):
    if attn_mask is not None:
        attn_mask = attn_mask.to(q.dtype)
    if keys.shape[1] != q.shape[1]:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, attn_mask=attn_mask, is_causal=is_causal)[0]


def backward(loss):
    """loss.backward(), in which OnMeta stays active: a checkpoint computes layers again there."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True)


def step_bytes(config, *, num_prompts, num_generations, prompt_length, completion_length,
               micro_batch_size=1, reference=False, lora_rank=0, rollout_batch_size=0,
               checkpointing=True, dtype=torch.bfloat16, device="cuda"):
    """Bytes: what is there always, gradients, and the most beside them in sampling and in learning.

    rollout_batch_size: 0 for all. What learns is float32, other matrices have the dtype. Every
    completion is `completion_length` long.
    """
    N, P, R = num_prompts * num_generations, prompt_length, completion_length
    V, counted, here = config.vocab_size, Bytes(), OnMeta(device, dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (num_prompts, P), generator=generator)
    with ExitStack() as stack:
        for owner, name, value in (
                (torch, "autocast", here.autocast), (torch.amp, "autocast", here.autocast),
                (torch, "is_autocast_enabled", lambda _=None: here.casts),
                (torch, "get_autocast_dtype", lambda _: dtype)):
            stack.enter_context(patch.object(owner, name, value))
        # A checkpoint compares devices, and would hear of both.
        stack.enter_context(patch.dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns,
                                       default=lambda tensor: None))
        stack.enter_context(counted)
        with META:
            policy = MiniMindForCausalLM(config)
        frozen = frozen_copy(policy, dtype) if reference or lora_rank else None
        if lora_rank:           # the base is the reference too
            policy = with_adapters(frozen, rank=lora_rank, alpha=1).to(META)
        policy.model.gradient_checkpointing = checkpointing
        weights = counted.most = counted.now
        stack.enter_context(here)

        at_once = min(rollout_batch_size or N, N)
        with torch.no_grad():
            some = prompts[:math.ceil(at_once / num_generations)].to(here.device)
            decoding = pair.Decoding(policy, some, torch.ones_like(some), at_once, R)
            cache = decoding.cache.untyped_storage().nbytes()
            decoding.length = P + R - 1
            logits = decoding.step(torch.zeros(at_once, dtype=torch.long, device=here.device))
            pair.next_token(logits, 1.0, None, True)
            sampling, counted.most = counted.most - weights, 0
        del decoding, logits, some

        rows = torch.arange(min(micro_batch_size, N)) // num_generations
        ids = torch.cat((prompts[rows], torch.randint(
            V, (len(rows), R), generator=generator)), 1)
        mask = torch.ones_like(ids)
        for _ in range(2 if len(rows) < N else 1):      # beside the gradients of the first one
            logps = pair.token_logps(policy, ids.to(here.device), mask.to(here.device), R,
                                     with_entropy=True)[0]
            backward((logps - logps.detach()).exp().sum())
            del logps
        gradients = counted.now - weights
        learning = counted.most - weights - gradients
    layer = sum(weight.numel() for weight in policy.model.layers[0].parameters())
    layers = layer * config.num_hidden_layers
    outside = sum(weight.numel() for weight in policy.parameters()) - layers
    moments = 2 * sum(weight.nbytes for weight in policy.parameters() if weight.requires_grad)
    return {"always": weights + moments, "gradients": gradients, "cache": cache,
            "sampling": sampling, "learning": learning, "layer": layer, "layers": layers,
            "outside": outside}


def of_rank(step, ranks=1):
    """Bytes of the "parameters", of the "cache" and at the "peak"; ranks: that share the model."""
    always, gradients = step["always"] / ranks, step["gradients"] / ranks
    sampling, learning = step["sampling"], step["learning"] + gradients
    if ranks > 1:       # to sample, a copy of all; to learn, what is in no layer, and two layers
        sampling += 2 * step["layers"] + 4 * step["outside"]
        learning += 4 * step["layer"] + 4 * step["outside"]
    return {"parameters": always + gradients, "cache": step["cache"],
            "peak": always + max(sampling, learning)}


def frozen_copy(model, dtype):
    """Its matrices have the dtype of products, as those of a model that does not learn."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for weight in frozen.model.layers.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.to(dtype)
    return frozen


# --- the command ----------------------------------------------------------------------------------


@user_errors("model.commands.memory")
def main(argv=None):
    parser = Parser(prog="python -m model.commands.memory", description=__doc__)
    parser.add_argument("paths", nargs="*", help="folders or hub ids (default: the usual sizes)")
    for flag, default in (("--num_prompts", 8), ("--num_generations", 8), ("--prompt_length", 256),
                          ("--completion_length", 1024)):
        parser.add_argument(flag, type=COUNT, default=default, help="of the run")
    parser.add_argument("--rollout_batch_size", type=COUNT_OR_0, default=0, help="0: all at once")
    run = vars(parser.parse_args(argv))
    configs = {}
    for path in run.pop("paths"):
        folder = local_path(path, weights=False)
        configs[path] = read_pth(folder)[0] if folder.is_file() else read_config(folder)
    sizes = [2**i for i in range((run["num_prompts"] * run["num_generations"]).bit_length())]
    print(" " * 40 + "".join(f"{name:>16}" for name in ("parameters", "cache", "at least", *GPUS)))
    for model, config in (configs or SIZES).items():
        for flags, levers in LEVERS.items():
            step = functools.cache(functools.partial(step_bytes, config, **levers, **run))
            with explained(model, "no model has this configuration", "choose other weights"):
                row = [f"{part / 2**30:.1f}" for part in of_rank(step()).values()]
                row += [largest(sizes, step, GiB, ranks) for GiB, ranks in GPUS.values()]
            print(f"{model + ', ' + flags:40}" + "".join(f"{cell:>16}" for cell in row))


def largest(sizes, step, GiB, ranks):
    """The largest --micro_batch_size that fits, or -: found by halves, since a smaller one fits."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        peak = of_rank(step(micro_batch_size=sizes[middle]), ranks)["peak"]
        low, high = (middle + 1, high) if peak <= USABLE * GiB * 2**30 else (low, middle)
    return sizes[low - 1] if low else "-"


if __name__ == "__main__":
    main()
