"""Whether a run will fit on its GPU: the forecast of model/commands/memory.py beside the card."""
import torch

from model.commands.memory import USABLE, of_rank, step_bytes
from model.model import MiniMindForCausalLM


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
