"""docs/grpo_on_one_page.py computes what train_grpo.py computes, under the same names."""
import doctest
import inspect
import re
import sys
from statistics import fmean

import pytest
import torch

import train_grpo
from model import load_pretrained
from support import ROOT, jsonl

sys.path.insert(0, str(ROOT / "docs"))
import grpo_on_one_page as page  # noqa: E402

FLAGS = re.search("`python train_grpo.py\\s([^`]+)`", page.__doc__)[1].split()


@pytest.mark.usefixtures("one_thread")
def test_one_page_takes_the_steps_of_the_script(all_prompts, tmp_path, capsys, monkeypatch):
    steps, losses = [], []
    step_of, loss_of = page.grpo_step, page.grpo_loss

    def spied_step(*args):
        steps.append(step_of(*args))
        return steps[-1]

    def spied_loss(*args, **options):
        losses.append(loss_of(*args, **options))
        return losses[-1]

    assert (page.UPDATES, page.B, page.MAX_LEN) == (1, 16, 96)      # as one runs it
    for name, value in {"UPDATES": 2, "B": 2, "MAX_LEN": 40, "grpo_step": spied_step,
                        "grpo_loss": spied_loss}.items():
        monkeypatch.setattr(page, name, value)
    # In a third step of this size a CPU's rounding has been seen to draw another token.
    policy = page.main(2, heldout=5)
    check_report(capsys.readouterr().out, *steps[-1])
    train_grpo.main([*FLAGS, *f"""--num_iterations 2 --batch_size 2 --max_gen_len 40 --max_steps 2
        --eval_interval 0 --run_name a --out_dir {tmp_path}""".split()])
    rows, metrics = (jsonl(tmp_path / f"a/{name}.jsonl") for name in ("completions", "metrics"))
    assert (len(steps), len(losses), len(metrics)) == (2, 4, 2)
    for i, (line, (rollout, _)) in enumerate(zip(metrics, steps)):
        theirs = [row for row in rows if row["step"] == i + 1]
        assert rollout.completions == [row["completion"] for row in theirs]
        assert rollout.rewards.tolist() == pytest.approx([row["reward"] for row in theirs])
        assert rollout.advantages.tolist() == pytest.approx(
            [row["advantage"] for row in theirs], abs=1e-4)
        ours = losses[2 * i:2 * i + 2]
        assert fmean(loss.item() for loss, _ in ours) == pytest.approx(line["loss"], abs=1e-5)
        assert fmean(of["kl"].item() for _, of in ours) == pytest.approx(line["kl"], abs=1e-5)
        assert line["clip_ratio/region_mean"] > 0
    for ours, theirs in zip(policy.parameters(), load_pretrained(tmp_path / "a/final").parameters(),
                            strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def check_report(out, rollout, metrics):
    """The last report's KL, length, and group of the last rollout."""
    length = rollout.lengths.float().mean()
    assert f"KL per token {metrics['kl']:.4f}, tokens per completion {length:.1f}." in out
    group = rollout.rewards.view(-1, page.G).std(1).argmax()
    for name in "rewards", "advantages", "lengths":
        printed = re.search(f"^  {name} +(.*)", out, re.MULTILINE)[1].split()
        expected = getattr(rollout, name).view(-1, page.G)[group].tolist()
        assert [float(number) for number in printed] == pytest.approx(expected, rel=0.01), name


def test_one_page_has_the_names_of_the_script():
    theirs = {*vars(train_grpo), *vars(train_grpo.GRPO), "grpo_step", "report"}
    ours = {name for name, one in vars(page).items()
            if inspect.isfunction(one) and one.__module__ == page.__name__}
    assert len(ours) > 10 and ours - theirs == set()


def test_one_page_has_an_example_of_two_updates_that_is_right():
    assert doctest.testmod(page) == (0, 2)
    # A = 1 and A = -1; p was 0.5: in update 2 ratio = 0.7 / 0.5, and past 1.2 it is constant.
    slopes = []
    for p in 0.5, 0.7:
        for A in 1, -1:
            below, above = (min(q / 0.5 * A, min(q / 0.5, 1.2) * A) for q in (p - 1e-4, p + 1e-4))
            slopes.append(-(above - below) / 2e-4 / 2)
    assert slopes == pytest.approx([-1, 1, 0, 1])


def test_one_page_gives_equal_rewards_no_advantage_at_all():
    torch.manual_seed(0)
    rewards = torch.rand(1000, 1).repeat(1, 7)
    assert (rewards - rewards.mean(1, keepdim=True)).any()      # where a mean is rounded
    assert not page.group_advantages(rewards.flatten(), 7).any()
    mixed = torch.randn(64)
    torch.testing.assert_close(page.group_advantages(mixed, 8),
                               train_grpo.group_advantages(mixed, 8))
