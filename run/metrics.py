"""The metrics of a step, named as in TRL and verl, and the rows of completions.jsonl."""
import json
import math
import time
from collections import Counter
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch

from dataset.jsonl import is_finite, to_json
from model.load import decode

MOST_CHARACTERS = 2000      # per column of completions.jsonl, where every row repeats it


def rollout_metrics(rows, num_generations, failures=()):
    """Returns the metrics of a step's completions and of their rewards.

    rows: the rows from describe() of all ranks; the completions of a group are adjacent. If no
    reward function scored a completion, its reward is NaN and the reward statistics ignore it.
    Standard deviations are sample standard deviations (n-1).

    failures: for each rank and failing function, (name, number of failures, last reason or None).
    """
    rewards = [row["reward"] for row in rows]
    groups = [rewards[i:i + num_generations] for i in range(0, len(rewards), num_generations)]
    stds = [mean_and_std(group)[1] for group in groups]
    lengths = [row["length"] for row in rows]
    metrics = {
        "reward": mean_and_std(rewards)[0],
        "reward_std": mean_and_std(stds)[0],
        # `not std > 1e-6` also counts a NaN, the std of a group with fewer than two rewards, which
        # gives no learning signal either.
        "frac_reward_zero_std": sum(not std > 1e-6 for std in stds) / len(stds),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - sum(row["ended"] for row in rows) / len(rows),
        "tokens": sum(row["length"] + row.get("tool_tokens", 0) for row in rows),
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
    """Returns (mean, sample std) of the values that aren't NaN; NaN if there are too few values."""
    values = np.array([value for value in values if not math.isnan(value)])
    return (values.mean() if len(values) else math.nan,
            values.std(ddof=1) if len(values) > 1 else math.nan)


class Clock:
    """Measures the time of each phase: clock(name) ends the current phase and starts another.

    clock(None) only ends a phase. The `listeners` are called with the name of each new phase.
    """

    def __init__(self, device):
        self.on_cuda, self.listeners = device.type == "cuda", []
        self.timings, self.running, self.since = Counter(), None, 0.0

    def __call__(self, name):
        if self.on_cuda:
            torch.cuda.synchronize()        # calls return before the GPU has finished
        now = time.perf_counter()
        if self.running:
            self.timings[f"timing_s/{self.running}"] += now - self.since
        self.running, self.since = name, now
        for listener in self.listeners:
            listener(name)

    def taken(self, tokens):
        """Returns metrics of the time since the last call: of each phase, and tokens per second.

        perf/throughput doesn't count the time of evaluations and checkpoints.
        """
        timings, self.timings = self.timings, Counter()
        training = sum(seconds for phase, seconds in timings.items()
                       if phase not in ("timing_s/eval", "timing_s/checkpoint"))
        return {**timings, "step_time": sum(timings.values()),
                "perf/throughput": tokens / max(training, 1e-9)}


# --- metrics of an optimizer step, by their kind --------------------------------------------------
# Each micro-batch on each rank has a part of every metric, and `joined` combines the parts. A plain
# number was divided by the step's totals, so parts add up; for names that end in _max, the largest
# part counts. Parts may be tensors that a GPU is still computing; end_update makes them floats.


class Mean(NamedTuple):
    """A mean, stored as a sum and a count, so that several means can be combined into one."""
    sum: float
    count: float

    def value(self):
        return self.sum / max(self.count, 1)


def by_name(parts):
    """Converts a list of dicts to a dict of lists, {name: [the value in each dict that has it]}."""
    found = {}
    for part in parts:
        for name, metric in part.items():
            found.setdefault(name, []).append(metric)
    return found


def joined(parts):
    """Adds up dicts of metrics, as floats; for names that end in _max, takes the maximum."""
    one = {}
    for name, metrics in by_name(parts).items():
        if name.endswith("_max"):               # np.max keeps a NaN
            one[name] = float(np.max([float(metric) for metric in metrics]))
        elif isinstance(metrics[0], tuple):
            sums = [float(sum(numbers)) for numbers in zip(*metrics)]
            one[name] = type(metrics[0])(*sums)
        else:
            one[name] = float(sum(metrics))
    return one


class Metrics:
    """Collects the metrics of a step from all its micro-batches, ranks and optimizer updates.

    Values from grpo_loss are sums divided by the counts of the whole update, so they can be added.
    """

    def __init__(self, world, args):
        names = ["low", "high", "region"]
        if args.delta is not None:
            names.append("delta")
        # The part of a rank if none of its completions has a gradient: nothing is clipped.
        self.zeros = {"loss": 0.0} | {f"clip_ratio/{name}_mean": 0.0 for name in names}
        self.world, self.parts, self.updates = world, [self.zeros], []

    def add(self, part, logps, entropy, loss, of_loss):
        """Adds the metrics of a micro-batch."""
        self.parts.append({"loss": loss.detach()} | of_loss | drift(part, logps, entropy))

    def end_update(self, grad_norm):
        """Combines the metrics of an optimizer update; every rank must call this."""
        self.updates.append(joined(self.world.gather([joined(self.parts)]))
                            | {"grad_norm": grad_norm.item()})
        self.parts = [self.zeros]

    def means(self):
        """Returns {name: mean over the updates}, or the maximum for names that end in _max.

        If all advantages of an update are 0, the model may not run, and the update then has no
        entropy, for example. Such metrics are averaged over the other updates.
        """
        found = {}
        for name, metrics in by_name(self.updates).items():
            values = [one.value() if isinstance(one, tuple) else one for one in metrics]
            found[name] = max(values) if name.endswith("_max") else fmean(values)
        return found


def describe(rollout, tokenizer, eos_ids, num_generations):
    """Returns a row of completions.jsonl, a dict, for each of the N completions.

    "columns" has the fields of the data, "reward" the total reward, "rewards" the reward from each
    function, and "advantage" the advantage of the first token. Rows of the first group also have
    "tokens" (the text of each token), "token_logps", and, if each token has its own advantage,
    "token_advantages". If a bound has removed the gradient of any of these tokens, they also have
    "token_bounded", which is 1 for such tokens (run/extensions/losses.py). With a tool, all rows
    have "turns", "failed_calls" and "tool_tokens", and rows of the first group have "token_drawn",
    which is 0 for tokens of the tool's answers.
    """
    N = len(rollout.completions)
    lengths, ended = rollout.loss_mask.sum(1).tolist(), rollout.ended.tolist()
    advantages = rollout.advantages.reshape(N, -1).tolist()             # from (N,) or (N, R)
    rows = [{
        "prompt": rollout.prompts[i],
        "completion": rollout.completions[i],
        "length": lengths[i],
        "ended": ended[i],
        "rewards": {name: values[i].item() for name, values in rollout.rewards_per_func.items()},
        "reward": rollout.rewards[i].item(),
        "advantage": advantages[i][0],
        "columns": {name: shortened(name, values[i]) for name, values in rollout.columns.items()},
    } for i in range(N)]
    fields = {"token_logps": rollout.sampling_logps[:num_generations].tolist()}
    if rollout.advantages.dim() == 2:
        fields["token_advantages"] = advantages
    bounded = rollout.extra.get("bounded")
    if bounded is not None and bounded[:num_generations].any():
        fields["token_bounded"] = bounded[:num_generations].tolist()
    if rollout.turns is not None:
        fields["token_drawn"] = rollout.loss_mask[:num_generations].tolist()
        tool_tokens = (rollout.completion_mask - rollout.loss_mask).sum(1).tolist()
        for i, row in enumerate(rows):
            row |= {"turns": rollout.turns[i], "failed_calls": rollout.failed_calls[i],
                    "tool_tokens": tool_tokens[i]}
    for i, ids in enumerate(rollout.token_ids()[:num_generations]):
        rows[i]["tokens"] = token_texts(ids, tokenizer, eos_ids)
        for name, values in fields.items():
            rows[i][name] = [round(value, 4) for value in values[i][:len(ids)]]
    return rows


def shortened(name, value):
    """Returns a column's value or, if its text is long, the start of the text and its length."""
    value = to_json(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # Retraining a reward model needs answer and messages.
    if name in ("answer", "messages") or len(text) <= MOST_CHARACTERS:
        return value
    return f"{text[:MOST_CHARACTERS]} … [{len(text):,} characters in all]"


def token_texts(ids, tokenizer, eos_ids):
    """Returns a list with the text that each token adds to the completion.

    Each token is decoded together with the previous token, because some tokenizers drop a leading
    space. If several tokens form one character, the last token gets it, and the others get "".
    """
    texts, start, end = [], 0, 0        # ids[start:end] is the context of the next token
    for k in range(1, len(ids) + 1):
        context = decode(ids[start:end], tokenizer, eos_ids)
        text = decode(ids[start:k], tokenizer, eos_ids)
        if text.endswith("\ufffd") and k < len(ids):
            texts.append("")
        else:
            texts.append(text[len(context):])
            start, end = end, k
    return texts


@torch.no_grad()
def drift(part, logps, entropy):
    """Returns metrics of a micro-batch that compare the policy, pi_old and the sampler.

    Per token: entropy, in nats; ppo_kl, which is log pi_old - log pi; and rollout_probs_diff, the
    difference between the probabilities of the sampler and the trainer, which should be tiny. Per
    completion: rollout_log_ratio, the absolute value of the sum of log pi_old - log pi_sampler.
    Completions without a gradient are not counted.
    """
    tokens, completions = part.loss_mask.sum(), part.loss_mask.any(1).sum()

    def total(x):
        return (x * part.loss_mask).sum()

    old_logps, sampling_logps = part.old_logps, part.sampling_logps
    log_ratio = ((old_logps - sampling_logps) * part.loss_mask).sum(1).abs()                 # (n,)
    difference = (old_logps.exp() - sampling_logps.exp()).abs() * part.loss_mask
    return {
        "entropy": Mean(total(entropy), tokens),
        "ppo_kl": Mean(total(old_logps - logps), tokens),
        "rollout_probs_diff_mean": Mean(total(difference), tokens),
        "rollout_probs_diff_max": difference.max(),
        "rollout_log_ratio_mean": Mean(log_ratio.sum(), completions),
        "rollout_log_ratio_max": log_ratio.max(),
    }


def formatted(value, spec=".2f"):
    """Formats a number; returns "-" if it is None, NaN or infinite."""
    return format(value, spec) if is_finite(value) else "-"
