"""Loads models, and chooses what runs them: a Policy is a model with its pair of functions.

`sample` (model/sampler.py) and `token_logps` (train_grpo.py, which hands it over) are the plain
ones. Others wrap or replace them here, once, where the model is loaded.
"""
import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from errors import COUNT_OR_0, GIVEN, POSITIVE, UserError, explained, number
from model import fast
from model.in_memory import WithoutPeft, as_policy, frozen_copy
from model.load import find_weights, load_pretrained
from model.lora import AdaptersOff, with_adapters
from model.model import MiniMindForCausalLM
from model.sampler import sample

from .fsdp import shard

ROWS, MOST_LOGITS = 8, 2**25        # of the comparison of model/fast with the script
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}      # see `checked`


@dataclass(slots=True)
class Policy:
    """A model with its pair of functions, each called with the model as its first argument.

    model: ours, or any causal model of transformers, wrapped by model/transformers_model.py.
    """
    model: torch.nn.Module
    sampler: Callable                   # as model/sampler.sample
    reader: Callable                    # as train_grpo.token_logps
    world: object                       # whose `autocast` gives matrix products their dtype
    entropy_learns: bool = False        # else the entropy is a metric, and has no gradient

    def sample(self, *prompts, **options):
        model = self.model
        with self.world.autocast():
            if hasattr(model, "whole"):     # sharded: FSDP would gather each layer for each token
                model = model.whole(dtype=self.world.matrix_dtype)
            return self.sampler(model, *prompts, **options)

    def token_logps(self, *sequences, with_entropy=False, **options):
        options["with_entropy"] = with_entropy
        with self.world.autocast():
            if hasattr(self.model, "run"):  # sharded: in it FSDP has gathered what is in no layer
                found = self.model.run(self.reader, *sequences, **options)
            else:
                found = self.reader(self.model, *sequences, **options)
        if with_entropy and not self.entropy_learns:
            return found[0], found[1].detach()
        return found


def add_flags(parser):
    flag = parser.group("1. generate").add_argument
    flag("--rollout_batch_size", type=COUNT_OR_0, default=0, help="completions sampled at once, in "
         "training and evaluation: fewer need less memory and more time; 0: all of them")
    flag("--reference_path", help=argparse.SUPPRESS)        # of train(reference=...)
    flag = parser.group("4. update (the optimizer)").add_argument
    flag("--lora_rank", type=COUNT_OR_0, default=0,
         help="train adapters of this rank (LoRA) instead of the weights; 0: the weights")
    flag("--lora_alpha", type=POSITIVE, default=32, help="alpha / rank scales the adapters")
    flag("--gradient_checkpointing", action="store_true", help="less memory, more time")
    flag = parser.group("the machine").add_argument
    flag("--sampler", choices=("fast", "plain", "vllm"), default="fast", help="fast: the sampler "
         "and log-probs of model/fast; plain: the ones to read, same numbers; vllm: an inference "
         "engine samples (docs/requirements-vllm.txt), log-probs are fast's")
    flag("--vllm_gpu_memory_utilization", type=number(float, 0, 1, above=True), default=0.3,
         help="the engine's share of a GPU's memory; it is free while the policy learns")
    flag("--shard", type=int, choices=(0, 1), default=0, help="1: divide weights, gradients and "
         "moments over the processes (FSDP); to sample, the whole model must fit one GPU")


def check(args):
    """The included weights."""
    if args.reference_path and args.beta == 0:
        raise UserError("reference: with beta=0 nothing reads it; leave one of the two out")
    shipped = Path(__file__).resolve().parents[1] / "model/weights"
    if args.from_weight:        # MiniMind's: what a run's args.json keeps is the path
        args.model_path, args.from_weight = find_weights(args.from_weight, args, shipped), None
    kind = "reason" if args.reasoning else "full_sft"
    args.model_path = args.model_path or find_weights(kind, args, shipped)


def load_models(args, world, token_logps, engine=None):
    """The policy, and its reference, the same weights frozen; None with --beta 0.

    Weights that learn are float32, so that small updates add up. The matrices of frozen ones have
    the dtype in which products read them anyway. token_logps: the script's.
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
        return policy, load_frozen(args.reference_path or path, world, args, token_logps)
    if has_peft:
        base = WithoutPeft(model)
    elif args.shard:            # the base is let go: it would keep every layer whole on the GPU
        base = AdaptersOff(model)
    return policy, policy_of(base, path, world, args, token_logps)


def of_object(name, args, world):
    """A policy that is the model itself. UserError for flags that read its files."""
    theirs = GIVEN[name]
    for flag, asks in {"lora_rank": args.lora_rank, "shard": args.shard,
                       "ref_model_sync_steps": args.ref_model_sync_steps,
                       "sampler='vllm'": args.sampler == "vllm"}.items():
        if asks:
            raise UserError(f"{flag} reads weights from files; give the path of the model, not "
                            f"{name}")
    if isinstance(theirs, torch.nn.Module) and hasattr(theirs, "get_output_embeddings"):
        # Its class may change while it trains.
        head = theirs.get_output_embeddings()
        world.cleanup.callback(setattr, head, "__class__", type(head))
    with explained(name, "it can't be run as a policy", "give another"):
        model = as_policy(theirs, device=world.device, matrix_dtype=world.matrix_dtype)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError(f"{name}: all its weights are frozen; unfreeze those that are to learn "
                        "(PEFT loads adapters frozen, unless is_trainable=True)")
    return model


def load_frozen(path, world, args, token_logps, *, exact=False):
    """A Policy that does not learn: a reference, a teacher. exact: its matrices are float32."""
    if path in GIVEN:
        model = frozen_copy(GIVEN[path], device=world.device, matrix_dtype=world.matrix_dtype)
    else:
        model = load_pretrained(path, dtype=torch.float32,
                                matrix_dtype=None if exact else world.matrix_dtype,
                                device="meta" if args.shard else world.device)
    model.requires_grad_(False)
    return policy_of(model, path, world, args, token_logps)


def policy_of(model, path, world, args, token_logps, engine=None, *, learns=False):
    """The model, divided over the ranks with --shard, with the pair that runs it by the flags.

    path: of the weights, the same on all ranks. engine: what samples it, slices and all.
    """
    sampler, reader = sample, token_logps               # the plain ones
    network = getattr(model, "policy", model)           # of lora.AdaptersOff
    if args.sampler != "plain" and isinstance(network, MiniMindForCausalLM):
        sampler, reader = fast.sample, checked(
            fast.token_logps, token_logps, world, learns)
    if engine is not None:
        sampler = engine
    elif args.rollout_batch_size:
        sampler = in_slices(sampler, args.rollout_batch_size)
    if args.shard:
        shard(model, world, world.matrix_dtype, path)
    return Policy(model, sampler, reader, world)


def checked(fast_logps, plain_logps, world, learns):
    """fast_logps, whose first call is compared with plain_logps on a few of its rows.

    Raises a UserError if the two differ by more than rounding: in float32 by their largest
    difference, in bfloat16 by the mean one, because there rounding can send a token to another
    expert. The policy, which learns, prints by how much. At most ROWS rows and MOST_LOGITS logits
    are compared, because plain_logps holds all logits in memory at once.
    """
    compared = False

    def reader(model, input_ids, attention_mask, R, *, with_entropy=False, **options):
        nonlocal compared
        found = fast_logps(
            model, input_ids, attention_mask, R, with_entropy=with_entropy, **options)
        if compared:
            return found
        compared, V = True, model.config.vocab_size
        short = min(R, max(1, MOST_LOGITS // V))
        rows, T = min(ROWS, max(1, MOST_LOGITS // (short * V))), input_ids.shape[1] - R + short
        with torch.no_grad():
            plain = plain_logps(model, input_ids[:rows, :T], attention_mask[:rows, :T], short,
                                with_entropy=with_entropy, **options)
        ours, theirs = (one[0] if with_entropy else one for one in (found, plain))
        difference = (ours[:rows, :short].detach() - theirs).abs()      # 0 at padding
        if world.matrix_dtype == torch.float32:
            how, difference = "", difference.max().item()
        else:
            tokens = attention_mask[:rows, T - short:T].sum()
            how, difference = " on average", (difference.sum() / tokens).item()
        if not difference <= TOLERANCE[world.matrix_dtype]:
            raise UserError(f"model/fast and token_logps differ by {difference:.1g}{how} in a "
                            "log-probability on this machine; pass --sampler plain, and report it")
        if world.rank == 0 and learns:
            with suppress(OSError):         # nobody may be reading any more
                print(f"model/fast equals token_logps within {difference:.0e}{how}", flush=True)
        return found

    return reader


def in_slices(sampler, most):
    """A sampler for at most `most` completions at a time, but whole groups.

    The cache of keys and values is then that of a slice. sampler: of a slice.
    """
    def joined(of_slices, padding):         # rows of a slice have its length
        return pad_sequence([row for rows in of_slices for row in rows], True, padding)

    def sliced(model, prompt_ids, prompt_mask, *, num_generations, **options):
        parts, prompts = [], max(1, most // num_generations)
        for one in zip(prompt_ids.split(prompts), prompt_mask.split(prompts)):
            parts.append(sampler(model, *one, num_generations=num_generations, **options))
        ids, *others = zip(*parts)      # log-probs, and with a tool which tokens were drawn
        return joined(ids, options["pad_token_id"]), *(joined(other, 0) for other in others)

    return sliced
