"""Metrics of one step, by the names that TRL and verl gave them, and the rows of completions.jsonl."""
import math


def rollout_metrics(rows, num_generations):
    """rows: {"length", "ended", "reward", "rewards": {name: value}} of the completions of all ranks, groups adjacent.

    An unjudged completion has reward NaN and is left out; ValueError if there is no other. Standard deviations have n-1.
    """
    rewards = [row["reward"] for row in rows]
    if all(math.isnan(reward) for reward in rewards):
        raise ValueError("no completion of this step was judged, as every reward function returned None or failed; "
                         "check that --reward_funcs fit the data")
    groups = [rewards[i:i + num_generations] for i in range(0, len(rewards), num_generations)]
    stds = [mean_and_std(group)[1] for group in groups]
    lengths = [row["length"] for row in rows]
    metrics = {
        "reward": mean_and_std(rewards)[0],
        "reward_std": mean_and_std(stds)[0],
        "frac_reward_zero_std": sum(not std > 1e-6 for std in stds) / len(stds),       # NaN too: nothing to compare
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - sum(row["ended"] for row in rows) / len(rows),
        "tokens": sum(lengths),
    }
    for name in rows[0]["rewards"]:
        mean, std = mean_and_std([row["rewards"][name] for row in rows])
        metrics |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    return metrics


def mean_and_std(values):
    """Mean and sample standard deviation of what is not NaN; NaN where there is too little."""
    values = [value for value in values if not math.isnan(value)]
    mean = sum(values) / len(values) if values else math.nan
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) if len(values) > 1 else math.nan
    return mean, std


def add_metrics(metrics, more):
    """Of two parts of a step: shares of a mean add up, of two maxima the larger one counts."""
    return metrics | {name: max(metrics.get(name, 0.0), value) if name.endswith("_max") else metrics.get(name, 0.0) + value
                      for name, value in more.items()}


def mean_metrics(updates):
    """Of a step's updates: their mean, of maxima the largest. An update that had nothing to learn from lacks most."""
    names = dict.fromkeys(name for metrics in updates for name in metrics)
    values = {name: [metrics[name] for metrics in updates if name in metrics] for name in names}
    return {name: max(of_name) if name.endswith("_max") else sum(of_name) / len(of_name) for name, of_name in values.items()}


def describe(rollout, batch, completions, rewards, per_function, *, num_generations):
    """A row of completions.jsonl for each completion: prompt, text, every reward, and the advantage of its first token."""
    lengths, ended = rollout.mask.sum(1).tolist(), rollout.ended.tolist()
    answers = batch["columns"].get("answer") or [None] * len(batch["prompts"])
    return [{
        "prompt": batch["prompts"][i // num_generations],
        "messages": batch["columns"]["messages"][i // num_generations],
        "answer": answers[i // num_generations],
        "completion": completions[i],
        "length": lengths[i],
        "ended": ended[i],
        "rewards": {name: values[i].item() for name, values in per_function.items()},
        "reward": rewards[i].item(),
        "advantage": rollout.advantages[i].flatten()[0].item(),
    } for i in range(len(completions))]
