"""What runs a model: its backend, set once where the model is loaded.

`sample` (model/sampler.py) and `token_logps` (train_grpo.py) are the plain ones. Their first lines
go to a model's own_sample and own_token_logps, if it has them. These are functions, not methods:
copies of a model, as LoRA makes them, share them.
"""
import copy
import functools
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from errors import COUNT_OR_0, number
from model import fast
from model.commands.memory import USABLE, of_rank, step_bytes
from model.model import MiniMindForCausalLM
from model.sampler import sample
from model.storage.read import find_weights, load_pretrained, sized

from .processes.shard import shard
from .processes.world import rank_and_size


def add_flags(parser):
    flag = parser.group("1. ask").add_argument
    flag("--rollout_batch_size", type=COUNT_OR_0, default=0, help="completions sampled at once, in "
         "training and evaluation: fewer need less memory and more time; 0: all of them")
    flag = parser.group("the machine").add_argument
    flag("--sampler", choices=("fast", "plain", "vllm"), help="fast: the sampler and log-probs of "
         "model/fast, measured on CPUs only; plain: the ones to read, same numbers; vllm: an "
         "inference engine samples (requirements-vllm.txt), log-probs are fast's (default: fast)")
    flag("--vllm_gpu_memory_utilization", type=number(float, 0, 1, above=True), default=0.3,
         help="the engine's share of a GPU's memory; it is free while the policy learns")
    flag("--shard", type=int, choices=(0, 1), default=0, help="1: divide weights, gradients and "
         "moments over the processes (FSDP); to sample, the whole model must fit one GPU")


def fill_in(args):
    """The shipped weights, model/fast, and no shards of a single process."""
    if args.sampler is None:
        args.sampler = "plain" if args.fast == 0 else "fast"
    shipped = Path(__file__).resolve().parents[1] / "model/weights"
    kind = "reason" if args.reasoning else "full_sft"
    args.model_path = args.model_path or str(
        find_weights(sized(kind, args), args.out_dir, shipped))
    args.shard = int(args.shard and rank_and_size()[1] > 1)


def load_frozen(path, world, args, *, matrix_dtype="products"):
    """A model that does not learn, with its backend: a reference, a teacher.

    matrix_dtype: of its matrices, by default the dtype in which products read them anyway; None as
    in the file, in float32.
    """
    matrix_dtype = world.matrix_dtype if matrix_dtype == "products" else matrix_dtype
    model = load_pretrained(path, dtype=torch.float32, matrix_dtype=matrix_dtype,
                            device="meta" if args.shard else world.device)
    model.requires_grad_(False)
    return with_backend(model, path, world, args)


def with_backend(model, path, world, args, engine=None):
    """The model, divided over the ranks with --shard, and with what runs it by the flags.

    path: of the weights, the same on all ranks. engine: what samples it, slices and all.
    """
    own_sample = own_token_logps = None                 # the plain ones
    network = getattr(model, "policy", model)           # of lora.AdaptersOff
    if args.sampler != "plain" and isinstance(network, MiniMindForCausalLM):
        own_sample, own_token_logps = fast.sample, fast.token_logps     # they know our own network
    if engine is not None:
        own_sample = engine
    elif args.rollout_batch_size:
        own_sample = in_slices(own_sample, args.rollout_batch_size, world)
    if args.shard:
        shard(model, world, world.matrix_dtype, path)
        own_sample, own_token_logps = of_a_whole(own_sample, world), within(own_token_logps, model)
    else:                                               # sharded, there is one copy
        world.agree(**{f"checksum of the weights of {path}": checksum(model)})
    model.own_sample, model.own_token_logps = own_sample, own_token_logps
    return model


def checksum(model):
    """A number that is another one, almost surely, for other weights."""
    integers = {2: torch.int16, 4: torch.int32}
    return sum(int(weight.detach().view(integers[weight.element_size()]).sum(dtype=torch.int64))
               for weight in model.parameters())


def in_slices(own_sample, most, world):
    """A sampler for at most `most` completions at a time, but whole groups.

    The cache of keys and values is then that of a slice. own_sample: of a slice; None: the plain.
    """
    def joined(of_slices, padding):         # rows of a slice have its length
        return pad_sequence([row for rows in of_slices for row in rows], True, padding)

    def sliced(model, prompt_ids, prompt_mask, *, num_generations, **options):
        model = copy.copy(model)            # the same weights, with the sampler of a slice
        model.own_sample, parts = own_sample, []
        prompts = max(1, most // num_generations)
        for one in zip(prompt_ids.split(prompts), prompt_mask.split(prompts)):
            world.alive()
            parts.append(sample(model, *one, num_generations=num_generations, **options))
        ids, *others = zip(*parts)      # log-probs, and with a tool which tokens were drawn
        return joined(ids, options["pad_token_id"]), *(joined(other, 0) for other in others)

    return sliced


def of_a_whole(own_sample, world):
    """A sampler of a sharded model: of a whole copy, which lives as long as it runs.

    FSDP would gather every layer for every token.
    """
    def sample_whole(model, *prompts, **options):
        whole = model.whole(dtype=world.matrix_dtype)
        whole.own_sample = own_sample
        return sample(whole, *prompts, **options)

    return sample_whole


def within(own_token_logps, model):
    """The log-probs of a sharded model: within it FSDP has gathered what is in no layer."""
    if own_token_logps is None:         # the plain ones call the model
        if isinstance(model, MiniMindForCausalLM):
            model.forward = functools.partial(model.run, type(model).forward)
        return None
    return lambda model, *sequences, **options: model.run(own_token_logps, *sequences, **options)


# --- whether a run will fit on its GPU ------------------------------------------------------------


def forecast(t):
    """A sentence for the first lines of a run; none on a CPU, and none for other networks.

    t: the bundle that train_grpo.prepare returns. Prompts and completions are taken to be as long
    as they may be.
    """
    args, world = t.args, t.world
    if world.device.type != "cuda" or not isinstance(t.policy, MiniMindForCausalLM):
        return ""
    step = step_bytes(
        t.policy.config, num_prompts=t.num_prompts, num_generations=args.num_generations,
        prompt_length=args.max_seq_len, completion_length=args.max_gen_len,
        micro_batch_size=args.micro_batch_size, reference=t.reference is not None,
        lora_rank=args.lora_rank, rollout_batch_size=args.rollout_batch_size,
        checkpointing=args.gradient_checkpointing, dtype=world.matrix_dtype, device=world.device)
    card = torch.cuda.get_device_properties(world.device).total_memory
    if args.sampler == "vllm":
        step["sampling"] = args.vllm_gpu_memory_utilization * card
    peak, of = of_rank(step, world.size if args.shard else 1)["peak"], card / 2**30
    text = f"about {peak / 2**30:,.1f} of {of:,.1f} GiB, if all texts are as long as they may be"
    if peak <= USABLE * card:
        return text
    return f"{text}: it may not fit; what helps: {', '.join(helps(args, step))}"


def helps(args, step):
    """The flags that lower the peak of this run, the cheapest first."""
    if step["sampling"] > step["learning"] + step["gradients"]:
        yield ("a lower --vllm_gpu_memory_utilization" if args.sampler == "vllm" else
               "a lower --rollout_batch_size" if args.rollout_batch_size else
               f"--rollout_batch_size {2 * args.num_generations}")
    else:
        if not args.gradient_checkpointing:
            yield "--gradient_checkpointing"
        yield "a lower --micro_batch_size"
    if args.beta and not args.lora_rank:
        yield "--beta 0"
    if not args.lora_rank:
        yield "--lora_rank 16"
    yield "a lower --max_gen_len"
