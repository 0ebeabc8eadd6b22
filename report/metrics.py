"""The metrics of a step, named as in TRL and verl, and the rows of completions.jsonl."""
import math
import warnings
from statistics import fmean

import numpy as np
import torch


def rollout_metrics(rows, num_generations, failures=(), *, warn=True):
    """The metrics that follow from a step's completions and their rewards.

    rows: describe()'s rows of the completions of all ranks, the completions of a group adjacent.
    It reads "length", "ended", "reward", "rewards" and a tool's fields. A completion that no reward
    function judged has reward NaN and is left out of the reward statistics. Standard deviations are
    sample standard deviations (n-1).

    failures, of all ranks: (reward function, how often it has failed, what failed now or None).
    warn: of a step without any reward.
    """
    rewards = [row["reward"] for row in rows]
    if warn and all(map(math.isnan, rewards)):
        reasons = "".join(dict.fromkeys(
            f"; {name} {reason}" for name, _, reason in failures if reason))
        # Not warn(), which says the same thing only once.
        warnings.warn_explicit(
            "no completion of this step has a reward, because every reward function returned None "
            f"or failed{reasons}: nothing is learned from it", UserWarning, __file__, 0)
    groups = [rewards[i:i + num_generations] for i in range(0, len(rewards), num_generations)]
    stds = [mean_and_std(group)[1] for group in groups]
    lengths = [row["length"] for row in rows]
    metrics = {
        "reward": mean_and_std(rewards)[0],
        "reward_std": mean_and_std(stds)[0],
        # Not `std <= 1e-6`: a NaN counts too, since a group with fewer than two rewards
        # has nothing to compare.
        "frac_reward_zero_std": sum(not std > 1e-6 for std in stds) / len(stds),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - sum(row["ended"] for row in rows) / len(rows),
        "tokens": sum(row["length"] + row.get("tool_tokens", 0) for row in rows),   # computed
    }
    if "tool_tokens" in rows[0]:
        calls = sum(len(row["turns"]) // 2 for row in rows)
        failed = sum(row["failed_calls"] for row in rows)
        metrics |= {"tools/call_frequency": calls / len(rows),
                    "tools/failure_frequency": failed / max(calls, 1)}
    for name in rows[0]["rewards"]:
        mean, std = mean_and_std([row["rewards"][name] for row in rows])
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    peak = torch.cuda.max_memory_allocated()    # 0 without CUDA
    if peak:
        metrics["perf/peak_memory"] = peak / 2**30      # in GiB, on rank 0's device
    for name, count, _ in failures:
        metrics[f"rewards/{name}/failed"] = metrics.get(f"rewards/{name}/failed", 0) + count
    return metrics


def mean_and_std(values):
    """Mean and sample std, ignoring NaNs. The mean of no value is NaN, as is the std of one."""
    values = np.array([value for value in values if not math.isnan(value)])
    return (values.mean() if len(values) else math.nan,
            values.std(ddof=1) if len(values) > 1 else math.nan)


def training_time(row):
    """The seconds of a step without its evaluation and checkpoint, from its timing_s/<phase>."""
    return sum(value or 0.0 for name, value in row.items() if name.startswith("timing_s/")
               and name not in ("timing_s/eval", "timing_s/checkpoint"))


def no_clips(delta):
    """The share of a rank, or of a step, that reads no completion: nothing is clipped."""
    names = ["low", "high", "region"]
    if delta is not None:
        names.append("delta")
    return {"loss": 0.0} | {f"clip_ratio/{name}_mean": 0.0 for name in names}


def sum_metrics(shares, world):
    """The metrics of an optimizer step from those of its micro-batches, of all ranks.

    Each has its share of the loss and of its metrics, so these add up; of a maximum (*_max) take
    the largest. Those of drift() are then divided by the number of tokens, or of completions.
    """
    total = combine(world.gather([combine(shares, sum)]), sum)
    num_tokens = max(total.pop("tokens", 0), 1)
    divisors = dict.fromkeys(PER_TOKEN, num_tokens)
    divisors["rollout_log_ratio_mean"] = max(total.pop("completions", 0), 1)
    squares = total.pop("rollout_probs_diff_squares", None)
    if squares is not None:             # the sample std; rounding may bring the variance below 0
        variance = squares - total["rollout_probs_diff_mean"]**2 / num_tokens
        total["rollout_probs_diff_std"] = math.sqrt(max(variance, 0.0) / max(num_tokens - 1, 1))
    squares = total.pop("rollout_is_squares", None)
    if squares is not None:             # a share: 1 if all weights are equal, 0 if all are 0
        share = total["rollout_is_mean"]**2 / (num_tokens * squares or 1)
        total["rollout_is_eff_sample_size"] = share
    return {name: value / divisors.get(name, 1) for name, value in total.items()}


def mean_metrics(updates):
    """The mean of each metric over a step's updates; of a maximum (*_max), the largest.

    An update whose advantages are all 0 has no token, hence no entropy, say: average over the
    updates that have one.
    """
    return combine(updates, fmean)


def combine(parts, how):
    """Each metric of the parts that have it: the largest of a maximum, others by `how`; floats.

    A GPU is still at work on the values of the parts: only the result is waited for.
    """
    values = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    combined = {}
    for name, of_name in values.items():
        if name.endswith("_max"):
            combined[name] = float(torch.stack([torch.as_tensor(one) for one in of_name]).amax())
        else:
            combined[name] = float(how(of_name))
    return combined


def describe(rollout, tokenizer, num_generations):
    """A row of completions.jsonl for each of the N completions; "columns" are those of its data.

    "reward" is the total and "rewards" each function's own; "advantage" is the first token's.
    The first group also has "tokens", which together are the completion (the EOS that ends it is an
    empty text), "token_logps", and where each token has an advantage of its own "token_advantages".
    With a tool rows also have "turns", "failed_calls" and "tool_tokens", and tokens "token_drawn",
    0 for a tool's.
    """
    N = len(rollout.completions)
    lengths, ended = rollout.mask.sum(1).tolist(), rollout.ended.tolist()
    advantages = rollout.advantages.reshape(N, -1).tolist()             # from (N,) or (N, R)
    rows = [{
        "prompt": rollout.prompts[i],
        "completion": rollout.completions[i],
        "length": lengths[i],
        "ended": ended[i],
        "rewards": {name: values[i].item() for name, values in rollout.rewards_per_func.items()},
        "reward": rollout.rewards[i].item(),
        "advantage": advantages[i][0],
        "columns": {name: values[i] for name, values in rollout.columns.items()},
    } for i in range(N)]
    fields = {"token_logps": rollout.sampling_logps[:num_generations].tolist()}
    if rollout.advantages.dim() == 2:
        fields["token_advantages"] = advantages
    if rollout.turns is not None:
        fields["token_drawn"] = rollout.mask[:num_generations].tolist()
        tool_tokens = (rollout.attention - rollout.mask).sum(1).tolist()
        for i, row in enumerate(rows):
            row |= {"turns": rollout.turns[i], "failed_calls": rollout.failed_calls[i],
                    "tool_tokens": tool_tokens[i]}
    for i, ids in enumerate(rollout.token_ids()[:num_generations]):
        rows[i]["tokens"] = token_texts(ids, tokenizer)
        for name, values in fields.items():
            rows[i][name] = [round(value, 4) for value in values[i][:len(ids)]]
    return rows


def token_texts(ids, tokenizer):
    """What each token adds to the text.

    Tokens are decoded after their predecessor, since some tokenizers drop a leading space. One that
    holds a part of a character adds nothing, and the last of its parts the whole character.
    """
    texts, start, end = [], 0, 0        # ids[start:end] is the context of the next token
    for k in range(1, len(ids) + 1):
        context = tokenizer.decode(ids[start:end], skip_special_tokens=True)
        text = tokenizer.decode(ids[start:k], skip_special_tokens=True)
        if text.endswith("\ufffd") and k < len(ids):
            texts.append("")
        else:
            texts.append(text[len(context):])
            start, end = end, k
    return texts


PER_TOKEN = ("entropy", "ppo_kl", "rollout_probs_diff_mean", "rollout_is_mean", "teacher_kl")


@torch.no_grad()
def drift(part, logps, old_logps, entropy):
    """A micro-batch's share of the metrics that tell how far the distributions have moved.

    Sums over its tokens, which sum_metrics divides by the number of "tokens": entropy, in nats;
    ppo_kl, log pi_old - log pi; rollout_probs_diff, between the probabilities of sampler and
    trainer, and its square: 0 up to rounding, or one of the two is wrong; rollout_is, the weight
    between the two, and its square, for Kish's effective sample size, (sum w)² / sum w², as a share
    of the tokens (verl's); teacher_kl, log pi_old - log pi_teacher. Over "completions":
    rollout_log_ratio, the absolute log of the product of a completion's weights, before any bound.
    Completions without a gradient are in no micro-batch, and so not in these means.
    """
    log_ratio = ((old_logps - part.sampling_logps) * part.mask).sum(1).abs()            # (n,)
    difference = (old_logps.exp() - part.sampling_logps.exp()).abs() * part.mask
    values = {"entropy": entropy, "ppo_kl": old_logps - logps,
              "rollout_probs_diff_mean": difference}
    if part.teacher_logps is not None:
        values["teacher_kl"] = old_logps - part.teacher_logps
    if part.sampler_weights is not None:
        values["rollout_is_mean"] = part.sampler_weights
        values["rollout_is_squares"] = part.sampler_weights.square()
    sums = {name: (value * part.mask).sum() for name, value in values.items()}
    return sums | {"tokens": part.mask.sum(), "rollout_probs_diff_max": difference.max(),
                   "rollout_probs_diff_squares": difference.square().sum(),
                   "completions": part.mask.any(1).sum(), "rollout_log_ratio_max": log_ratio.max(),
                   "rollout_log_ratio_mean": log_ratio.sum()}
