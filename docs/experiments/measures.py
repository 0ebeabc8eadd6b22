"""What is measured at the end of a run, with its weights: see `measure` in experiments.toml."""
import json
from types import SimpleNamespace

import torch

import train_grpo
from dataset.jsonl import read_jsonl
from model import fast, load_pretrained, load_tokenizer, rng_of
from reward import accuracy_reward
from run.processes.world import World
from train_grpo import KL_TYPES

PROMPTS, EACH, AT_ONCE = 512, 2, 64


def finished(run_dir):
    """Arguments, final policy and tokenizer of a run."""
    torch.set_num_threads(1)
    args = SimpleNamespace(**json.loads((run_dir / "args.json").read_text(encoding="utf-8")))
    policy = load_pretrained(run_dir / "final", dtype=torch.float32)
    policy.own_sample = fast.sample
    return args, policy, load_tokenizer(args.model_path, policy.config.vocab_size)


@torch.no_grad()
def exact_kl(run_dir):
    """How far a run's policy went from its reference, in nats per token, without an estimate.

    At each prefix of what the policy writes now, 1,024 answers to training prompts, both give a
    probability to each token v of the vocabulary; the KL there is a sum over all of them:

        kl/exact      mean over prefixes of sum_v pi(v) (log pi(v) - log pi_ref(v))
        kl/k3         the mean of k3 over the very tokens that were sampled
        kl/largest    the largest `kl` that the run logged at a step
    """
    args, policy, tokenizer = finished(run_dir)
    reference = load_pretrained(args.model_path, dtype=torch.float32)
    collate, problems, _ = train_grpo.read_prompts(args, tokenizer)
    rng, exact, k3, tokens = rng_of(args.seed, 2), 0.0, 0.0, 0
    for start in range(0, PROMPTS, AT_ONCE):
        batch = collate(problems[start:start + AT_ONCE])
        rollout = train_grpo.generate(policy, batch, tokenizer, rng, World("cpu"), args, EACH)
        ids, attention, R = rollout.sequences()
        logps, ref_logps = (
            model(ids, attention, logits_to_keep=R + 1)[:, :-1].log_softmax(-1)         # (N, R, V)
            for model in (policy, reference))
        x = ref_logps - logps
        exact += ((logps.exp() * -x).sum(-1) * rollout.mask).sum().item()
        sampled = x.gather(-1, rollout.completion_ids[..., None]).squeeze(-1)           # (N, R)
        k3 += (KL_TYPES["k3"](sampled) * rollout.mask).sum().item()
        tokens += rollout.mask.sum().item()
    largest = max(row["kl"] for row in read_jsonl(run_dir / "metrics.jsonl"))
    return {"kl/exact": [exact / tokens], "kl/k3": [k3 / tokens], "kl/largest": [largest]}


def temperatures(run_dir):
    """Accuracy of the final policy sampled at 0.25, 0.5 and 1, on its evaluation's problems."""
    args, policy, tokenizer = finished(run_dir)
    collate, _, heldout = train_grpo.read_prompts(args, tokenizer)
    found, world = {}, World("cpu")
    for args.temperature in (0.25, 0.5, 1.0):
        right, rng = [], rng_of(args.seed, 3)
        for start in range(0, len(heldout), 250):
            batch = collate(heldout[start:start + 250])
            rollout = train_grpo.generate(policy, batch, tokenizer, rng, world, args, EACH)
            right += accuracy_reward(rollout.prompts, rollout.replies, **rollout.columns)
        found[f"right at {args.temperature}"] = [sum(right) / len(right)]
    return found


MEASURES = {"exact_kl": exact_kl, "temperatures": temperatures}
