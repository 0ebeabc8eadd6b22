"""What --dtype, --shard and --rollout_batch_size make of the two functions that run the policy.

main passes the sampler through `for_sampling` and token_logps through `for_learning`. Neither
function knows of any of this, so one of your own needs nothing of it either. `sampler_weights` are
for a sampler that is not quite the policy.
"""
import torch
import torch.nn.functional as F


def for_sampling(sample, world, args):
    """`sample` for this run: in slices, in the precision of matrix products, of a whole model."""
    sample = in_slices(sample, args.rollout_batch_size)
    return precision(world)(of_whole_model(sample, world) if args.shard else sample)


def for_learning(token_logps, world, args):
    """`token_logps` for this run: in the precision of matrix products, within a sharded model."""
    return precision(world)(within_shards(token_logps, world) if args.shard else token_logps)


def precision(world):
    """Matrix products in bfloat16 where --dtype says so; weights and log-softmax stay float32.

    A context, or a decorator of functions.
    """
    # No cache: it would keep a copy of every weight, and a forward pass reads a weight once.
    return torch.autocast(world.device.type, torch.bfloat16, cache_enabled=False,
                          enabled=world.matrix_dtype == torch.bfloat16)


def in_slices(sample, most):
    """The sampler for at most `most` completions at a time, but whole groups; 0: all at once.

    The cache of keys and values is then that of a slice.
    """
    def sliced(model, prompt_ids, prompt_mask, *, num_generations, **options):
        prompts = max(1, most // num_generations)
        slices = zip(prompt_ids.split(prompts), prompt_mask.split(prompts))
        parts = [sample(model, ids, mask, num_generations=num_generations, **options)
                 for ids, mask in slices]
        longest = max(ids.shape[1] for ids, _ in parts)
        return tuple(
            torch.cat([F.pad(part, (0, longest - part.shape[1]), value=padding) for part in column])
            for column, padding in zip(zip(*parts), (options["pad_token_id"], 0.0)))

    return sliced if most else sample


def of_whole_model(sample, world):
    """The sampler for a sharded model: it reads a copy of the whole, which it keeps while it runs.

    Otherwise every layer would be gathered for every single token.
    """
    def sample_whole(model, *args, **options):
        return sample(model.whole(dtype=world.matrix_dtype), *args, **options)

    return sample_whole


def within_shards(token_logps, world):
    """`token_logps` for a sharded model: FSDP gathers a layer when it is read, on all ranks."""
    def logps_within(model, *args, **options):
        with world.collective():
            return model.run(token_logps, *args, **options)

    return logps_within


def sampler_weights(part, old_logps, args):
    """Truncated importance weights min(pi_old / pi_sampler, C), (n, R), or (n, 1) by completion.

    For a sampler that rounds differently than the trainer, or more coarsely: --rollout_is_threshold
    C, verl's rollout_is, TRL's vllm_importance_sampling_correction. Their level is that of the
    loss's ratio: the product of the two is pi / pi_sampler. They weight the advantage, with which
    both bounds scale; the KL and the entropy keep weight 1, as in TRL. Without a threshold: ones.
    """
    if not args.rollout_is_threshold:
        return torch.ones_like(old_logps[:, :1])
    log_ratio = (old_logps - part.sampling_logps) * part.mask                           # (n, R)
    if args.loss_type == "r1":
        log_ratio = log_ratio.sum(1, keepdim=True)
    elif args.importance_sampling_level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / part.mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp().clamp(max=args.rollout_is_threshold)
