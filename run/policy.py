"""Loads models as Policy objects, which sample completions and compute log-probs.

The simple versions of these two functions are `sample` in model/sampler.py and `token_logps` in
train_grpo.py. The flags may select other versions, which are set here when a model is loaded.
"""
import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from errors import COUNT_OR_0, GIVEN, POSITIVE, UserError, explained, number
from model import fast
from model.fast import graphs
from model.in_memory import WithoutPeft, as_policy, frozen_copy
from model.load import find_weights, load_pretrained
from model.lora import AdaptersOff, with_adapters
from model.model import MiniMindForCausalLM
from model.sampler import in_slices, sample

from .fsdp import shard

ROWS, MOST_LOGITS = 8, 2**25        # limits for comparing model/fast with the script
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}      # see `checked`


@dataclass(slots=True)
class Policy:
    """A model, and the functions that sample completions from it and compute log-probs.

    model: a model of model/model.py, or a transformers model wrapped in an AnyModel.
    """
    model: torch.nn.Module
    sampler: Callable                   # called like model/sampler.sample
    reader: Callable                    # called like train_grpo.token_logps
    world: object                       # its `autocast` sets the dtype of matrix products
    entropy_learns: bool = False        # False: the entropy is only a metric, without a gradient
    slow_because: str = ""              # why it samples without CUDA graphs on a GPU

    def sample(self, *prompts, **options):
        model = self.model
        with self.world.autocast():
            if hasattr(model, "whole"):     # else FSDP would gather all layers for every token
                model = model.whole(dtype=self.world.matrix_dtype)
            return self.sampler(model, *prompts, **options)

    def token_logps(self, *sequences, with_entropy=False, **options):
        options["with_entropy"] = with_entropy
        with self.world.autocast():
            if hasattr(self.model, "run"):  # sharded, or without adapters
                found = self.model.run(self.reader, *sequences, **options)
            else:
                found = self.reader(self.model, *sequences, **options)
        if with_entropy and not self.entropy_learns:
            return found[0], found[1].detach()
        return found


def add_flags(parser):
    flag = parser.group("1. generate").add_argument
    flag("--rollout_batch_size", type=COUNT_OR_0, default=0, help="completions sampled at once, in "
         "training and evaluation; fewer need less memory, but more time; 0: all of them")
    flag("--reference_path", help=argparse.SUPPRESS)        # for train(reference=...)
    flag = parser.group("4. update (the optimizer)").add_argument
    flag("--lora_rank", type=COUNT_OR_0, default=0,
         help="train adapters of this rank (LoRA) instead of the weights; 0: train the weights")
    flag("--lora_alpha", type=POSITIVE, default=32, help="adapters are scaled by lora_alpha / rank")
    flag("--gradient_checkpointing", action="store_true",
         help="recompute activations in the backward pass: less memory, more time")
    flag = parser.group("the machine").add_argument
    flag("--sampler", choices=("fast", "plain", "vllm"), default="fast", help="fast: sampler and "
         "log-probs of model/fast; plain: the readable versions, with the same numbers; vllm: an "
         "inference engine samples (docs/requirements-vllm.txt), log-probs are those of fast")
    flag("--vllm_gpu_memory_utilization", type=number(float, 0, 1, above=True), default=0.3,
         help="share of GPU memory for vLLM, which frees it during updates")
    flag("--shard", type=int, choices=(0, 1), default=0, help="1: divide weights, gradients and "
         "moments over the processes (FSDP); the whole model must still fit on one GPU to sample")


def check(args):
    """Sets --model_path to the default weights if it was not passed."""
    if args.reference_path and args.beta == 0:
        raise UserError("reference: with beta=0 it would not be used; leave one of the two out")
    shipped = Path(__file__).resolve().parents[1] / "model/weights"
    if args.from_weight:        # MiniMind's flag; a run's args.json keeps the path instead
        args.model_path, args.from_weight = find_weights(args.from_weight, args, shipped), None
    kind = "reason" if args.reasoning else "full_sft"
    args.model_path = args.model_path or find_weights(kind, args, shipped)


def load_models(args, world, token_logps, engine=None):
    """Returns (policy, reference). By default the reference is a frozen copy; with --beta 0, None.

    Trained weights are float32, so that small updates are not rounded away. Frozen weight matrices
    have the dtype of matrix products. token_logps: the function of this name in train_grpo.py.
    """
    path = args.model_path
    if path in GIVEN:
        model = of_object(path, args, world)
    else:
        model = load_pretrained(path, dtype=torch.float32,
                                matrix_dtype=world.matrix_dtype if args.lora_rank else None,
                                device="meta" if args.shard else world.device)
    if args.num_hidden_layers not in (None, model.config.num_hidden_layers):
        raise UserError(f"--num_hidden_layers {args.num_hidden_layers}: {path} has "
                        f"{model.config.num_hidden_layers} layers; leave the flag out")
    model.model.gradient_checkpointing = args.gradient_checkpointing
    base = model
    if args.lora_rank:          # the reference is the policy without its adapters
        model = with_adapters(
            base, rank=args.lora_rank, alpha=args.lora_alpha, name=path, seed=args.seed)
    policy = policy_of(model, path, world, args, token_logps, engine, learns=True)
    if args.beta == 0:
        return policy, None
    has_peft = getattr(model, "peft", None) is not None
    if args.reference_path or not (args.lora_rank or has_peft):
        reference = load_frozen(args.reference_path or path, world, args, token_logps)
        sizes = [model.config.vocab_size for model in (base, reference.model)]
        if sizes[1] < sizes[0]:
            raise UserError(f"{args.reference_path}: the reference has {sizes[1]} tokens, but the "
                            f"policy {sizes[0]}; pass a reference with the same tokens")
        return policy, reference
    if has_peft:
        base = WithoutPeft(model)
    elif args.shard:            # keeping the base would keep all layers whole on the GPU
        base = AdaptersOff(model)
    return policy, policy_of(base, path, world, args, token_logps)


def of_object(name, args, world):
    """Prepares a model object as a policy. Raises a UserError for flags that need model files."""
    theirs = GIVEN[name]
    for flag, asks in {"lora_rank": args.lora_rank, "shard": args.shard,
                       "ref_model_sync_steps": args.ref_model_sync_steps,
                       "sampler='vllm'": args.sampler == "vllm"}.items():
        if asks:
            raise UserError(f"{flag} reads weights from files; pass the path of the model instead "
                            f"of {name}")
    if isinstance(theirs, torch.nn.Module) and hasattr(theirs, "get_output_embeddings"):
        # The head's class may change during training, and is restored at the end.
        head = theirs.get_output_embeddings()
        if head is not None:
            world.cleanup.callback(setattr, head, "__class__", type(head))
    with explained(name, "it cannot be run as a policy", "pass another model"):
        model = as_policy(theirs, device=world.device, matrix_dtype=world.matrix_dtype)
    world.share(model, name)
    world.cleanup.callback(setattr, model.model, "gradient_checkpointing", False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"{name}: all its weights are frozen; unfreeze those to be trained (PEFT "
                        "loads adapters frozen unless you pass is_trainable=True)")
    return model


def load_frozen(path, world, args, token_logps, *, exact=False):
    """Loads a reference or teacher as a frozen Policy. With exact=True, weights are float32."""
    if path in GIVEN:
        model = frozen_copy(GIVEN[path], device=world.device, matrix_dtype=world.matrix_dtype)
        world.share(model, path)
    else:
        model = load_pretrained(path, dtype=torch.float32,
                                matrix_dtype=None if exact else world.matrix_dtype,
                                device="meta" if args.shard else world.device)
    model.requires_grad_(False)
    return policy_of(model, path, world, args, token_logps)


def policy_of(model, path, world, args, token_logps, engine=None, *, learns=False):
    """Returns a Policy with the functions that the flags select. With --shard 1, shards the model.

    path: the path of the weights. engine: vLLM's sampler, which replaces the default sampler.
    """
    sampler, reader = sample, token_logps               # the plain pair
    lacking = ""
    network = getattr(model, "policy", model)           # the model in lora.AdaptersOff
    if args.sampler != "plain" and isinstance(network, MiniMindForCausalLM):
        sampler = fast.sample
        reader = checked(fast.token_logps, token_logps, world, learns)
        if learns and engine is None and world.device.type == "cuda":
            lacking = graphs.lacking(network, world.matrix_dtype, world.device)
            engine = None if lacking else graphs_of(args, world)
    if engine is not None:
        sampler = engine
    elif args.rollout_batch_size:
        sampler = in_slices(sampler, args.rollout_batch_size)
    if args.shard:
        shard(model, world, world.matrix_dtype, path)
    return Policy(model, sampler, reader, world, slow_because=lacking)


def graphs_of(args, world):
    """Returns a sampler with CUDA graphs, whose memory is freed when the run ends."""
    rollout = args.batch_size * args.accumulation_steps * args.num_generations
    sampler = graphs.Graphs(args.rollout_batch_size or rollout, TOLERANCE[world.matrix_dtype])
    world.cleanup.callback(sampler.free)
    return sampler


def checked(fast_logps, plain_logps, world, learns):
    """Returns fast_logps; its first call also compares a few rows with those from plain_logps.

    Raises a UserError if the results differ by more than rounding. In float32, the largest
    difference counts. In bfloat16, the mean difference counts, because rounding can send a token to
    another expert. If `learns` is True (for the policy), the difference is printed. Only a few
    rows are compared, because plain_logps holds all logits in memory at once.
    """
    compared = False

    def reader(model, input_ids, attention_mask, R, *, with_entropy=False, **options):
        nonlocal compared
        found = fast_logps(
            model, input_ids, attention_mask, R, with_entropy=with_entropy, **options)
        if compared:
            return found
        compared = True
        V = model.config.vocab_size
        short = min(R, max(1, MOST_LOGITS // V))
        rows = min(ROWS, max(1, MOST_LOGITS // (short * V)))
        T = input_ids.shape[1] - R + short
        with torch.no_grad():
            plain = plain_logps(model, input_ids[:rows, :T], attention_mask[:rows, :T], short,
                                with_entropy=with_entropy, **options)
        ours, theirs = (one[0] if with_entropy else one for one in (found, plain))
        apart = (ours[:rows, :short].detach() - theirs).abs()           # 0 at padding
        if world.matrix_dtype == torch.float32:
            how = ""
            difference = apart.max().item()
        else:
            how = " on average"
            difference = (apart.sum() / attention_mask[:rows, T - short:T].sum()).item()
        if not difference <= TOLERANCE[world.matrix_dtype]:
            raise UserError(f"log-probs of model/fast and token_logps differ by {difference:.1g}"
                            f"{how} on this machine; pass --sampler plain, and report this")
        if world.rank == 0 and learns:
            with suppress(OSError):         # the pipe's reader may have exited
                print(f"model/fast equals token_logps within {difference:.0e}{how}", flush=True)
        return found

    return reader
