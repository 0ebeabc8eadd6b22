"""How much memory a GRPO run takes, before it is started: what fits on which GPU.

    python -m model.storage.memory                                  the usual sizes
    python -m model.storage.memory Qwen/Qwen3-0.6B out/my_weights   any weights' config.json
    python -m model.storage.memory --rollout_batch_size 16          sampled 16 at a time

A row says what the parameters take (weights, gradients, AdamW's moments, the reference), what the
sampler's cache takes, and what a run needs at least, with --micro_batch_size 1. That is the dearer
of sampling, which has the cache and no gradients, and of learning, which has gradients, activations
and logits and no cache. Then come the largest --micro_batch_size that fits on a GPU and, with
--shard 1, what rank 0 needs of the host's memory when it saves, since it puts all parts together.
All sizes are in GiB, 2**30 bytes, of which a card that is sold as 80 GB has about 80.

The formula counts live tensors of a run with model/fast. On the CPU, in float32 and bfloat16, where
freed memory goes back at once, it came within 2.1% of the peaks measured for the shapes of Qwen3 of
0.6B to 4B, 3.2% for SmolLM2's, and 18% for hidden sizes of 512 and 768 with vocabularies of 6,400
and 64,000 (docs/real_models.md). On a GPU nothing was measured.
"""
import argparse
import functools
import itertools

import torch

from report import reason, user_errors

from ..fast.pair import CHUNK, SMALL
from ..model import MiniMindConfig, MiniMindForCausalLM
from .files import read_config
from .read import local_path

qwen3 = functools.partial(MiniMindConfig, vocab_size=151936, num_hidden_layers=28,
                          num_attention_heads=16, num_key_value_heads=8, head_dim=128)
SIZES = {
    "MiniMind2 (0.1B)": MiniMindConfig(
        vocab_size=6400, hidden_size=768, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=8, num_key_value_heads=2, head_dim=96, qk_norm=False),
    "Qwen2.5-0.5B": MiniMindConfig(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, head_dim=64, qk_norm=False, qkv_bias=True),
    "Qwen3-0.6B": qwen3(hidden_size=1024, intermediate_size=3072),
    "Qwen3-1.7B": qwen3(hidden_size=2048, intermediate_size=6144),
    "Qwen3-4B": qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                      num_attention_heads=32),
    "Qwen3-8B": qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                      num_attention_heads=32, tie_word_embeddings=False),
}
LEVERS = {      # flags -> what they are to peak_bytes
    "--beta above 0": {"reference": True},
    "--beta 0, no reference": {"reference": False},
    "--lora_rank 16": {"reference": True, "lora_rank": 16},
}
GPUS = {        # name -> GiB of each, ranks that share a model
    "8": (8, 1), "24": (24, 1), "80": (80, 1), "8x80, --shard 1": (80, 8)}
USABLE = 0.92               # the rest goes to CUDA itself and to gaps between tensors


def out_of_memory(error):
    """The sentence for an exception that says that memory is short; None for another one."""
    is_cpu = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    if not is_cpu and not isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return None
    return (f"not enough memory ({reason(error)}); lower --micro_batch_size or "
            "--rollout_batch_size, add --gradient_checkpointing, or train adapters, with "
            "--lora_rank 16 (several GPUs: --shard 1)")


def num_parameters(config):
    """Of the model, of the matrices in its layers, and of adapters of rank 1 for these."""
    with torch.device("meta"):
        model = MiniMindForCausalLM(config)
    shapes = {name: layer.weight.shape for name, layer in model.model.layers.named_modules()
              if isinstance(layer, torch.nn.Linear)}
    adapted = [sum(shape) for name, shape in shapes.items() if name.endswith("_proj")
               and ".experts." not in name]
    return (sum(parameter.numel() for parameter in model.parameters()),
            sum(map(torch.Size.numel, shapes.values())), sum(adapted))


def layer_bytes(config, gpu, frozen):
    """Bytes that one layer keeps for its backward pass, per token that it reads, and per position
    of a sequence, whose keys and values attention gathers. frozen: with LoRA, norms don't learn."""
    D, product = config.hidden_size, 2 if gpu else 4        # residuals and norms stay float32
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    F = config.intermediate_size
    if config.num_experts:
        F = config.num_experts_per_tok * config.moe_intermediate_size
    norms = 2 * (4 + 4 * (not frozen)) * D      # input; normalised, for the gradient of the weight
    # What the norms give, for q, k, v, gate and up: autocast converts it for each of them anew.
    inputs = 5 * product * D if gpu else 2 * product * D
    attention = product * 3 * q_size                        # queries, and twice what came of them
    qk_norm = (4 + product * (not frozen)) * (q_size + kv_size) if config.qk_norm else 0
    # 4 F: gate, silu(gate), up, their product. On a GPU each head gets its copy of key and value.
    per_token = norms + inputs + attention + qk_norm + product * 4 * F
    return per_token, product * 2 * (q_size if gpu else kv_size)


def peak_bytes(config, counts, *, num_prompts, num_generations, prompt_length, completion_length,
               micro_batch_size, reference, gradient_checkpointing, gpu, lora_rank=0,
               rollout_batch_size=0, ranks=1):
    """Bytes by purpose, and the "peak": what always is there, plus the dearer of sample and learn.

    counts: num_parameters(config); gpu: products in bfloat16, else in float32 on the CPU. What
    learns is float32; matrices that don't are stored as products read them. rollout_batch_size:
    completions sampled at once, 0 for all. ranks: of a sharded run; the bytes are those of one.
    """
    N, T = num_prompts * num_generations, prompt_length + completion_length
    D, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    rows, product = min(micro_batch_size, N), 2 if gpu else 4
    chunk = min(rows * completion_length, max(CHUNK, SMALL // V))           # tokens in the head
    logits = chunk * V * 4
    at_once = min(rollout_batch_size or N, N)
    per_token, per_position = layer_bytes(config, gpu, bool(lora_rank))
    prompts = -(-rows // num_generations)           # each is read once for its completions
    tokens = rows * completion_length + prompts * prompt_length
    bias = rows * completion_length * T * (2 if gpu else 0)     # autocast's copy in each layer
    one_layer = tokens * per_token + rows * T * per_position + bias
    n, matrices, adapters = counts[0], counts[1], lora_rank * counts[2]
    frozen = product * matrices + 4 * (n - matrices)
    trained = adapters if lora_rank else n
    weights = frozen + 4 * adapters if lora_rank else 4 * n
    # LoRA's merged weights, which have a tied head beside the embedding.
    merged = product * (n + config.tie_word_embeddings * V * D) * bool(lora_rank)
    converted = 2 * matrices * (gpu and not lora_rank)      # autocast's copies for the products
    cached = at_once * config.num_key_value_heads * config.head_dim * T
    # Where completions part after their first token, the prompt's keys and values are copied.
    parted = (1 - 1 / num_generations) * prompt_length / T
    parts = {
        "host": weights + max(8 * trained, merged),     # of rank 0 of several, when it saves
        "weights": weights / ranks,
        "moments": 8 * trained / ranks,
        "reference": frozen * (reference and not lora_rank) / ranks,    # LoRA's is the base
        "gradients": 4 * trained / ranks,
        "converted weights": converted / (L if gradient_checkpointing else 1) * (ranks == 1),
        "sampler's weights": converted if gpu else 4 * n,   # on a CPU all are packed
        "cache": (1 + parted) * 2 * L * cached * product,
        "activations": L * tokens * 4 * D if gradient_checkpointing else L * one_layer,
        # Log-softmax, probabilities; what autograd needs of their product, if there is one chunk.
        "logits": logits * (2 if rows * completion_length > chunk else 3),
    }
    gathered = 0
    if ranks > 1:       # the sampler has the model whole; learning has this layer and the next
        packed = 0 if gpu else parts["sampler's weights"]
        parts["sampler's weights"] = frozen + 4 * adapters + packed
        gathered = 2 * product * matrices / L + 4 * (n - matrices)
    always = parts["weights"] + parts["moments"] + parts["reference"]
    sampling = parts["sampler's weights"] + parts["cache"] + 4 * at_once * V * 4
    recomputed = one_layer * gradient_checkpointing
    head = 0 if lora_rank else 4 * V * D                # the gradient of head or embedding
    # Two copies of the logits and the head's gradient; where there is one chunk, before that three
    # copies; or a layer that is computed again.
    dearest = max(2 * logits + head, parts["logits"], recomputed)
    micro_batch = parts["activations"] + dearest + parts["converted weights"] + gathered
    # At the end the embedding's gradient and, where it is the head too, the head's are added up.
    ending = parts["gradients"] + 2 * config.tie_word_embeddings * head + gathered
    # The first micro-batch of a step finds no gradients yet: they grow as its activations go.
    later = micro_batch + parts["gradients"] if rows < N else 0
    learning = max(micro_batch, ending, later)
    return parts | {"peak": int(always + max(sampling, learning))}


def report(name, config, run):
    """Print a row for each choice of levers, as the top of this file describes it."""
    sizes = [2**i for i in range((run["num_prompts"] * run["num_generations"]).bit_length())]
    counts = num_parameters(config)
    for (flags, levers), recompute in itertools.product(LEVERS.items(), (False, True)):
        found = {(size, ranks): peak_bytes(
            config, counts, micro_batch_size=size, gradient_checkpointing=recompute, ranks=ranks,
            **levers, **run) for size in sizes for ranks in (1, 8)}
        least = {part: taken / 2**30 for part, taken in found[1, 1].items()}
        least["parameters"] = sum(
            least[part] for part in ("weights", "gradients", "moments", "reference"))
        fits = [max((size for size in sizes if found[size, ranks]["peak"] <= USABLE * gpu * 2**30),
                    default="-") for gpu, ranks in GPUS.values()]
        words = f"{name}, {flags}" + ", --gradient_checkpointing" * recompute
        print(f"{words:66}" + "".join(f"{least[part]:12.1f}" for part in (
            "parameters", "cache", "peak")) + "".join(f"{size:>17}" for size in fits)
            + f"{least['host']:12.1f}")


@user_errors("model.storage.memory")
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m model.storage.memory", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*",
                        help="folders or hub ids of weights (default: the usual sizes)")
    for flag, default, unit in (
            ("--num_prompts", 8, "per step"), ("--num_generations", 8, "of each"),
            ("--prompt_length", 256, "tokens"), ("--completion_length", 1024, "tokens"),
            ("--rollout_batch_size", 0, "completions sampled at once, 0 for all")):
        parser.add_argument(flag, type=int, default=default, help=f"{unit} (default: {default})")
    args = vars(parser.parse_args(argv))
    configs = {path: read_config(local_path(path, weights=False))
               for path in args.pop("paths")} or SIZES
    print(f"{args['num_prompts']} prompts x {args['num_generations']} completions, "
          f"{args['prompt_length']} + {args['completion_length']} tokens, bfloat16 products; GiB, "
          "and the largest --micro_batch_size that fits\n")
    print(f"{'':66}" + "".join(f"{name:>12}" for name in ("parameters", "cache", "at least"))
          + "".join(f"{name:>17}" for name in GPUS) + f"{'their host':>12}")
    for name, config in configs.items():
        report(name, config, args | {"gpu": True})


if __name__ == "__main__":
    main()
