"""What is measured at the end of a run, with its weights: see `measure` in experiments.toml."""
import json
from types import SimpleNamespace

import torch

import train_grpo
from dataset import read_prompts
from dataset.jsonl import read_jsonl
from model import eos_token_ids, fast, load_pretrained, load_tokenizer, rng_of
from reward import accuracy_reward
from run.distributed import World
from run.policy import Policy
from train_grpo import k3

PROMPTS, EACH, AT_ONCE = 512, 2, 64


def finished(run_dir):
    """What GRPO.generate reads of a state, with a run's flags, final policy and tokenizer."""
    torch.set_num_threads(1)
    args = SimpleNamespace(**json.loads((run_dir / "args.json").read_text(encoding="utf-8")))
    model = load_pretrained(run_dir / "final", dtype=torch.float32)
    tokenizer = load_tokenizer(args.model_path, model.config.vocab_size)
    return SimpleNamespace(
        args=args, tokenizer=tokenizer, eos_ids=eos_token_ids(model, tokenizer),
        policy=Policy(model, fast.sample, fast.token_logps, World("cpu")))


@torch.no_grad()
def exact_kl(run_dir):
    """How far a run's policy went from its reference, in nats per token, without an estimate.

    At each prefix of what the policy writes now, 1,024 answers to training prompts, both give a
    probability to each token v of the vocabulary; the KL there is a sum over all of them:

        kl/exact      mean over prefixes of sum_v pi(v) (log pi(v) - log pi_ref(v))
        kl/k3         the mean of k3 over the very tokens that were sampled
        kl/largest    the largest `kl` that the run logged at a step
    """
    state = finished(run_dir)
    reference = load_pretrained(state.args.model_path, dtype=torch.float32)
    collate, problems, _ = read_prompts(state.args, state.tokenizer)
    rng, exact, estimate, tokens = rng_of(state.args.seed, 2), 0.0, 0.0, 0
    for start in range(0, PROMPTS, AT_ONCE):
        batch = collate(problems[start:start + AT_ONCE])
        rollout = train_grpo.GRPO.generate(state, batch, rng, EACH)
        ids, attention, R = rollout.sequences()
        logps, ref_logps = (
            model(ids, attention, logits_to_keep=R + 1)[:, :-1].log_softmax(-1)         # (N, R, V)
            for model in (state.policy.model, reference))
        x = ref_logps - logps
        exact += ((logps.exp() * -x).sum(-1) * rollout.loss_mask).sum().item()
        sampled = x.gather(-1, rollout.completion_ids[..., None]).squeeze(-1)           # (N, R)
        estimate += (k3(sampled) * rollout.loss_mask).sum().item()
        tokens += rollout.loss_mask.sum().item()
    largest = max(row["kl"] for row in read_jsonl(run_dir / "metrics.jsonl"))
    return {"kl/exact": [exact / tokens], "kl/k3": [estimate / tokens], "kl/largest": [largest]}


def temperatures(run_dir):
    """Accuracy of the final policy sampled at 0.25, 0.5 and 1, on its evaluation's problems."""
    state, found = finished(run_dir), {}
    collate, _, heldout = read_prompts(state.args, state.tokenizer)
    for state.args.temperature in (0.25, 0.5, 1.0):
        right, rng = [], rng_of(state.args.seed, 3)
        for start in range(0, len(heldout), 250):
            batch = collate(heldout[start:start + 250])
            rollout = train_grpo.GRPO.generate(state, batch, rng, EACH)
            right += accuracy_reward(rollout.prompts, rollout.replies, **rollout.columns)
        found[f"right at {state.args.temperature}"] = [sum(right) / len(right)]
    return found


MEASURES = {"exact_kl": exact_kl, "temperatures": temperatures}
