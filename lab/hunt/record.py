"""Trains the right page and those with a bug for 40 steps each, and writes runs.jsonl.

    python -m lab.hunt.record

Runs that the file has already are kept, so delete it to record all of them again.
"""
import torch

from dataset.jsonl import read_jsonl, rounded, to_line
from model import fast
from reward import accuracy_reward

from .__main__ import BUGS, RUNS, source_of
from .checks import page_of

STEPS = 40
# To save time, model/fast replaces the page's sampler and token_logps: its numbers are the same up
# to rounding, and 0 at padding. Two bugs change token_logps or read padding, so they keep the
# page's own.
OWN_LOGPS = [i for i, bug in enumerate(BUGS, start=1) if bug["en"]["name"] in (
    "logits shifted by one", "padding is trained under the KL")]


def trained(number):
    """A line of runs.jsonl: series, and the group of the last step whose rewards differ most."""
    page = page_of(source_of(number))
    step_of, clip, norms = page.grpo_step, torch.nn.utils.clip_grad_norm_, []
    series = {name: [] for name in ("reward", "right", "length", "kl", "grad_norm", "held_out")}
    line = {"bug": number, "series": series}

    def clip_grad_norm_(*args):
        norms.append(clip(*args))
        return norms[-1]

    def grpo_step(state, batch, step, lr):
        rollout, metrics = step_of(state, batch, step, lr)
        answers = [text for text in batch["columns"]["answer"] for _ in range(page.G)]
        right = accuracy_reward(rollout.prompts, rollout.completions, answer=answers)
        for name, value in {"reward": rollout.rewards.mean(), "right": sum(right) / len(right),
                            "length": rollout.lengths.float().mean(), "kl": metrics["kl"],
                            "grad_norm": norms[-1]}.items():
            series[name].append(rounded(float(value)))
        if step == STEPS:
            first = int(rollout.rewards.view(-1, page.G).std(1).argmax()) * page.G
            columns = rollout.rewards, rollout.advantages, rollout.lengths
            line["question"] = batch["columns"]["messages"][first // page.G][-1]["content"]
            line["group"] = [[rollout.completions[i], *(rounded(float(x[i])) for x in columns)]
                             for i in range(first, first + page.G)]
        return rollout, metrics

    def report(step, state, unseen, *_):
        answered = page.generate(state, unseen, page.rng_of(page.SEED, 1), 1)
        right = page.compute_rewards(answered, [accuracy_reward], [1.0])
        series["held_out"].append(rounded(float(right.mean())))

    page.grpo_step, page.report, page.sample = grpo_step, report, fast.sample
    if number not in OWN_LOGPS:
        page.token_logps = fast.token_logps
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    page.main(last_step=STEPS)
    torch.nn.utils.clip_grad_norm_ = clip
    return line


def main():
    done = {line["bug"] for line in read_jsonl(RUNS)}
    for number in range(len(BUGS) + 1):
        if number not in done:
            with open(RUNS, "a", encoding="utf-8") as file:
                file.write(to_line(trained(number)))
            print(number, flush=True)


if __name__ == "__main__":
    main()
