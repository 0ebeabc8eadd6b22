"""lab/check_grpo/check_grpo.py on rollouts: right ones have no bug, broken ones the right one."""
from functools import cache

import pytest
import torch

import train_grpo
from check_grpo import check_batch, main
from dataset import read_prompts
from model import load_pretrained, sampler
from reward.baselines import estimate
from run.policy import Policy
from support import ROOT
from train_grpo import World, group_advantages

pytestmark = pytest.mark.usefixtures("one_thread")
next_token = sampler.next_token


def fewer(logits, k, p):
    """The logits of a top-k and top-p."""
    probs = logits.softmax(-1).topk(k).values
    least = probs.where(probs.cumsum(-1) - probs < p, 1.0).amin(-1, keepdim=True)
    return logits.where(logits.softmax(-1) >= least, -1e9)


@cache
def loaded(*flags):
    args = train_grpo.parse_args([*flags, "--device=cpu", "--beta=0", "--max_gen_len=32"])
    state = train_grpo.load(args, World("cpu", "float32", 3))
    collate, problems, _ = read_prompts(args, state.tokenizer)
    return state, collate(problems[:8])


def rollout(monkeypatch, flags=(), k=0, p=1.0, temperature=1.0, dtype="float32", trainer=None):
    """What check_batch takes of 64 completions of eight prompts; and the Rollout."""
    (state, asked), world = loaded(*flags), World("cpu", dtype, 3)
    monkeypatch.setattr(sampler, "next_token", lambda logits, _, *rest: next_token(
        fewer(logits, k, p) if k else logits, temperature, *rest))
    monkeypatch.setattr(state.policy, "world", world)
    found = state.generate(asked, world.rng(1))
    model = load_pretrained(trainer) if trainer else state.policy.model
    policy = Policy(model, None, train_grpo.token_logps, state.world)
    rewards = state.compute_rewards(found, state.reward_funcs, state.args.reward_weights)[0]
    return {"completion_ids": found.completion_ids, "mask": found.loss_mask, "rewards": rewards,
            "sampler_logps": found.sampling_logps, "num_generations": 8,
            "trainer_logps": state.compute_logps(policy, found),
            "advantages": group_advantages(rewards, 8), "eos_token_ids": state.eos_ids}, found


@pytest.mark.parametrize("bugs, options", [
    (["another temperature"], {"temperature": 1.3}), (["another temperature"], {"temperature": .7}),
    (["top-k or top-p"], {"k": 20}), (["top-k or top-p"], {"k": 99, "p": 0.9}),
    (["stale weights"], {"trainer": ROOT / "model/weights/full_sft_128"}),
    ([], {"dtype": "bfloat16"}), ([], {"flags": ("@dataset/guess.txt",)})])
def test_sampler_that_differs_is_said_how(bugs, options, monkeypatch):
    batch, found = rollout(monkeypatch, **options)
    report = check_batch(batch)
    assert report.bugs == bugs and ("sampler" in report.facts) == ("dtype" in options), report
    if found.turns:
        assert check_batch(batch | {"mask": found.completion_mask}).bugs == ["tool's words trained"]


def test_masks_and_advantages_are_judged(monkeypatch, tmp_path):
    batch, _ = rollout(monkeypatch)
    mask, r, a = batch["mask"], batch["rewards"], batch["advantages"]
    last, step = mask.cumsum(1) == mask.sum(1, keepdim=True), torch.arange(mask.shape[1])
    crossed = group_advantages(r.view(8, 8).T.flatten(), 8).view(8, 8).T.flatten()
    right = [estimate(r, 8, scale="none", baseline=name)
             for name in ("grpo", "rloo", "grpo_passk")] + [r - 1, a[:, None] * mask, step * mask]
    for name, bugs, *values in (
            ("mask", ["EOS not trained"], mask * ~last), ("mask", ["padding trained"], mask | 1),
            ("advantages", ["groups misordered"], crossed), ("advantages", [], a, *right),
            ("advantages", ["advantages not of these rewards"], a.flip(0), a.roll(8), -a),
            *((name, [], None) for name in batch)):
        for value in values:
            assert check_batch(batch | {name: value}).bugs == bugs, (name, bugs, value)
    torch.save(batch, tmp_path / "batch.pt")
    monkeypatch.setattr("sys.argv", ["check_grpo.py", str(tmp_path / "batch.pt")])
    with pytest.raises(SystemExit, match="0"):
        main()
