"""docs/grpo_on_one_page.py computes what train_grpo.py computes."""
import sys

import pytest
import torch

import train_grpo
from conftest import ROOT, jsonl
from model import load_pretrained

sys.path.insert(0, str(ROOT / "docs"))
import grpo_on_one_page as page  # noqa: E402


@pytest.mark.usefixtures("one_thread")
def test_the_page_takes_the_steps_of_the_script(tmp_path, capsys, monkeypatch):
    texts, losses = [], []
    judge, loss_of = page.combine_rewards, page.grpo_loss

    def spied_judge(prompts, completions, *args, **columns):
        texts.append(completions)
        return judge(prompts, completions, *args, **columns)

    def spied_loss(*args):
        losses.append(loss_of(*args))
        return losses[-1]

    monkeypatch.setattr(page, "combine_rewards", spied_judge)
    monkeypatch.setattr(page, "grpo_loss", spied_loss)
    policy = page.train(steps=2, heldout=20)
    assert "% right" in capsys.readouterr().out
    train_grpo.main(["--sampler", "plain", "--micro_batch_size", "128", "--max_steps", "2",
                     "--eval_interval", "0", "--out_dir", str(tmp_path), "--run_name", "a"])
    rows, metrics = (jsonl(tmp_path / f"a/{name}.jsonl") for name in ("completions", "metrics"))
    # In a third step of this size a CPU's rounding has been seen to draw another token.
    for i, line in enumerate(metrics):
        assert texts[i] == [row["completion"] for row in rows if row["step"] == i + 1]
        assert losses[i].item() == pytest.approx(line["loss"], abs=1e-5)
    for ours, theirs in zip(policy.parameters(), load_pretrained(tmp_path / "a/final").parameters(),
                            strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_its_loss_is_that_of_the_script_once_the_policy_has_moved():
    torch.manual_seed(0)
    old, ref, logps = -torch.rand(3, 16, 5)
    logps.requires_grad_()
    mask = (torch.arange(5) < torch.arange(16)[:, None] % 5 + 1).int()
    advantages = page.group_advantages(torch.randn(16))
    ours = page.grpo_loss(logps, old, advantages, mask, ref)
    theirs, _ = train_grpo.grpo_loss(logps, old, advantages, mask, ref_logps=ref, beta=page.BETA)
    gradients = [torch.autograd.grad(loss, logps)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*gradients)
    assert (gradients[0] == 0).any() and gradients[0].any()     # some tokens are clipped
