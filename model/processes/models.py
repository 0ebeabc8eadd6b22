"""The policy, its reference and its teacher, as the flags of a run want them."""
from functools import partial

import torch

from report import UserError
from report.text import to_json

from ..lora import AdaptersOff, with_adapters
from ..storage.any_model import AnyModel
from ..storage.files import eos_token_ids
from ..storage.read import load_pretrained, load_tokenizer
from .shard import shard


def load_models(args, world):
    """Tokenizer, policy, and reference, which is None with --beta 0; the same on all ranks.

    Weights that learn are float32, so that small updates add up. The matrices of frozen ones have
    the dtype in which products read them anyway.
    """
    # Else some rank waits for the others, or learns something else, unnoticed.
    world.agree(**{f"--{name}": value for name, value in to_json(vars(args)).items()
                   if name != "out_dir" and not name.endswith("_path")})
    products, reference = world.matrix_dtype, None
    load = partial(load_pretrained, args.model_path, dtype=torch.float32,
                   device="meta" if args.shard else world.device)
    policy = load(matrix_dtype=products if args.lora_rank else None)
    layers = policy.config.num_hidden_layers
    if args.num_hidden_layers not in (None, layers):
        raise UserError(f"--num_hidden_layers {args.num_hidden_layers}: {args.model_path} has "
                        f"{layers} layers; leave the flag out")
    policy.model.gradient_checkpointing = args.gradient_checkpointing
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.config.vocab_size)
    if not eos_token_ids(policy, tokenizer):
        raise UserError(f"{tokenizer_path}: no EOS token to end an answer with; give another "
                        "--tokenizer_path")
    if args.lora_rank:
        reference, policy = policy, with_adapters(
            policy, rank=args.lora_rank, alpha=args.lora_alpha, name=args.model_path,
            seed=args.seed)
        if args.shard:      # the base is let go: it would keep every layer whole on the GPU
            reference = AdaptersOff(policy)
    elif args.beta > 0:
        reference = load(matrix_dtype=None if args.ref_model_sync_steps else products)
        reference.requires_grad_(False)
    if args.shard:
        for model in (policy, reference):
            shard(model, world, products, args.model_path)
    else:                                   # sharded, there is one copy
        world.agree(**{"checksum of the weights": checksum(policy)})
    return tokenizer, policy, reference if args.beta > 0 else None


def checksum(model):
    """A number that is another one, almost surely, for other weights."""
    integers = {2: torch.int16, 4: torch.int32}
    return sum(int(weight.detach().view(integers[weight.element_size()]).sum(dtype=torch.int64))
               for weight in model.parameters())


def load_teacher(args, world, tokenizer):
    """The frozen model of --teacher_path, or None; UserError if its tokens are not the policy's."""
    path, products = args.teacher_path, world.matrix_dtype
    if not path:
        return None
    teacher = load_pretrained(path, dtype=torch.float32, matrix_dtype=products,
                              device="meta" if args.shard else world.device)
    advice = "give a --teacher_path whose tokenizer is the policy's"
    if load_tokenizer(path, teacher.config.vocab_size, advice).get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{path}: its tokens are not the policy's; {advice}")
    if isinstance(teacher, AnyModel) and args.sampler != "plain":
        raise UserError(f"--teacher_path {path} is of an architecture that model/fast does not "
                        "know; add --sampler plain")
    teacher.requires_grad_(False)
    if args.shard:
        shard(teacher, world, products, path)
    else:
        world.agree(**{"checksum of the teacher": checksum(teacher)})
    return teacher


@torch.no_grad()
def sync_reference(reference, policy, step, args):
    """Now and then reference <- alpha policy + (1 - alpha) reference (TR-DPO, arXiv 2404.09656)."""
    if args.ref_model_sync_steps and step % args.ref_model_sync_steps == 0:
        for theirs, ours in zip(reference.parameters(), policy.parameters()):
            theirs.lerp_(ours, args.ref_model_mixup_alpha)
