"""How much memory a GRPO run takes on a GPU, before it is started.

    python -m model.commands.memory                                  the usual sizes
    python -m model.commands.memory Qwen/Qwen3-0.6B out/my_weights   any weights' config.json

A row says what the parameters take (weights, gradients, AdamW's moments, the reference) and the
sampler's cache, the least that a run needs, and the largest --micro_batch_size that fits on GPUs of
so many GiB, of which it may use 92%. All is in GiB, for products in bfloat16 with model/fast and
--gradient_checkpointing. docs/real_models.md says how rough it is.
"""
import functools
import math

import torch

from errors import COUNT, COUNT_OR_0, Parser, user_errors

from ..fast.pair import CHUNK_LOGITS, CHUNK_TOKENS
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
LEVERS = {"--beta above 0": {"reference": 1}, "--beta 0": {}, "--lora_rank 16": {"lora_rank": 16}}
GPUS = {        # name -> GiB of each, ranks that share a model
    "8": (8, 1), "24": (24, 1), "80": (80, 1), "8x80, --shard 1": (80, 8)}


def num_parameters(config):
    """Of the model, of the matrices in its layers, and of adapters of rank 1 for these."""
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    shapes = {name: layer.weight.shape for name, layer in model.model.layers.named_modules()
              if isinstance(layer, torch.nn.Linear)}
    adapted = sum(sum(shape) for name, shape in shapes.items()
                  if name.endswith("_proj") and ".experts." not in name)
    return (sum(weight.numel() for weight in model.parameters()),
            sum(shape.numel() for shape in shapes.values()), adapted)


def peak_bytes(config, counts, *, num_prompts, num_generations, prompt_length, completion_length,
               micro_batch_size=1, reference=0, lora_rank=0, rollout_batch_size=0, ranks=1):
    """Bytes of the "parameters", of the "cache", and at the "peak", of sampling or of learning.

    counts: num_parameters(config); reference: 1 or 0; rollout_batch_size: 0 for all; ranks: of a
    sharded run, the bytes are those of one. What learns is float32, other matrices are bfloat16.
    """
    D, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    n, matrices, adapters = counts[0], counts[1], lora_rank * counts[2]
    frozen = 2 * matrices + 4 * (n - matrices)
    if lora_rank:           # the base is the reference too
        weights, trained, copies, head = frozen + 4 * adapters, adapters, 0, 0
    else:                   # autocast copies the matrices; the head has a gradient of its own
        weights, trained, copies, head = 4 * n, n, 2 * matrices, 4 * V * D
        weights += reference * frozen
    always, gradients = (weights + 8 * trained) / ranks, 4 * trained / ranks
    at_once = rollout_batch_size or num_prompts * num_generations
    # Keys and values; those of the prompt twice, since completions copy them as they part.
    positions = at_once * (2 * prompt_length + completion_length)
    cache = 4 * L * config.num_key_value_heads * config.head_dim * positions
    sampling = cache + 16 * at_once * V + (copies if ranks == 1 else frozen + 4 * adapters)
    prompts = math.ceil(micro_batch_size / num_generations)         # each is read once
    tokens = micro_batch_size * completion_length + prompts * prompt_length
    activations = tokens * (24 * D + 12 * config.num_attention_heads * config.head_dim
                            + 8 * config.intermediate_size)         # of a layer
    chunk = max(CHUNK_TOKENS, CHUNK_LOGITS // V)
    logits = 12 * V * min(micro_batch_size * completion_length, chunk) + head
    learning = L * tokens * 4 * D + max(logits, activations) + copies / L
    if ranks > 1:           # this layer and the next, whole
        learning += 4 * matrices / L + 4 * (n - matrices)
    return {"parameters": always + gradients, "cache": cache,
            "peak": always + max(sampling, learning + gradients)}


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
    for name, config in (configs or SIZES).items():
        with explained(name, "no model has this configuration", "choose other weights"):
            counts = num_parameters(config)
        for flags, levers in LEVERS.items():
            peak = functools.partial(peak_bytes, config, counts, **levers, **run)
            row = [f"{part / 2**30:.1f}" for part in peak().values()]
            for gpu, ranks in GPUS.values():
                fits = [size for size in sizes if peak(micro_batch_size=size, ranks=ranks)["peak"]
                        <= 0.92 * gpu * 2**30]
                row.append(max(fits, default="-"))
            print(f"{name + ', ' + flags:40}" + "".join(f"{cell:>16}" for cell in row))


if __name__ == "__main__":
    main()
