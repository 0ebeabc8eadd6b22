"""docs/grpo_on_one_page.py computes what train_grpo.py computes, under the same names."""
import doctest
import inspect
import re
import sys

import pytest
import torch

import train_grpo
from model import load_pretrained
from support import ROOT, jsonl

sys.path.insert(0, str(ROOT / "docs"))
import grpo_on_one_page as page  # noqa: E402

FLAGS = re.search("`python train_grpo.py\\s([^`]+)`", page.__doc__)[1].split()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("last_step, updates, prompts, flags", [
    (1, 1, 4, []), (2, 2, 2, ["--num_iterations", "2"])])
def test_the_page_takes_the_steps_of_the_script(
        last_step, updates, prompts, flags, all_prompts, tmp_path, capsys, monkeypatch):
    steps, losses = [], []
    step_of, loss_of = page.grpo_step, page.grpo_loss

    def spied_step(*args):
        steps.append(step_of(*args))
        return steps[-1]

    def spied_loss(*args, **options):
        losses.append(loss_of(*args, **options))
        return losses[-1]

    assert (page.UPDATES, page.B) == (1, 16)        # with which the page is run by hand
    monkeypatch.setattr(page, "UPDATES", updates)
    monkeypatch.setattr(page, "B", prompts)
    monkeypatch.setattr(page, "grpo_step", spied_step)
    monkeypatch.setattr(page, "grpo_loss", spied_loss)
    policy = page.main(last_step, heldout=5)
    check_report(capsys.readouterr().out, last_step, *steps[-1])
    train_grpo.main([*FLAGS, *flags, "--batch_size", str(prompts), "--max_steps", str(last_step),
                     "--eval_interval", "0", "--out_dir", str(tmp_path), "--run_name", "a"])
    rows, metrics = (jsonl(tmp_path / f"a/{name}.jsonl") for name in ("completions", "metrics"))
    assert len(losses) == last_step * updates and len(metrics) == last_step
    # In a third step of this size a CPU's rounding has been seen to draw another token.
    for i, (line, (rollout, _)) in enumerate(zip(metrics, steps)):
        theirs = [row for row in rows if row["step"] == i + 1]
        assert rollout.completions == [row["completion"] for row in theirs]
        assert rollout.rewards.tolist() == pytest.approx([row["reward"] for row in theirs])
        assert rollout.advantages.tolist() == pytest.approx(
            [row["advantage"] for row in theirs], abs=1e-4)
        ours = losses[i * updates:(i + 1) * updates]
        assert sum(loss.item() for loss, _ in ours) / updates == pytest.approx(
            line["loss"], abs=1e-5)
        assert sum(of["kl"].item() for _, of in ours) / updates == pytest.approx(
            line["kl"], abs=1e-5)
        assert (line["clip_ratio/region_mean"] > 0) == (updates > 1)
    for ours, theirs in zip(policy.parameters(), load_pretrained(tmp_path / "a/final").parameters(),
                            strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def check_report(out, last_step, rollout, metrics):
    """What it prints: two reports, the second with a group of the last rollout."""
    reported = re.findall(r"^step (\d): [\d.]+% of held-out", out, re.MULTILINE)
    assert reported == ["0", str(last_step)]
    assert out.count("What is 24 + 33*8? '") == 2
    length = rollout.lengths.float().mean()
    assert f"KL per token {metrics['kl']:.4f}, tokens per completion {length:.1f}." in out
    rewards, advantages, lengths = (
        [float(number) for number in re.search(f"^  {name} +(.*)", out, re.MULTILINE)[1].split()]
        for name in ("rewards", "advantages", "lengths"))
    groups = rollout.rewards.view(-1, page.G)
    i = groups.tolist().index(rewards) * page.G     # two decimals at most: printed as they are
    assert groups[i // page.G].std() == groups.std(1).max() > 0
    assert lengths == rollout.lengths[i:i + page.G].tolist()
    assert advantages == pytest.approx(rollout.advantages[i:i + page.G].tolist(), rel=0.01)


def test_it_has_the_names_of_the_script_in_its_order_and_so_are_their_parameters():
    """A method of GRPO has `self` where the page has `state`; grpo_step is its `step`."""
    def functions(owner, module):
        for name, one in vars(owner).items():
            if one is train_grpo.GRPO and owner is train_grpo:
                yield from (({"step": "grpo_step"}.get(name, name), parameters)
                            for name, parameters in functions(one, module))
            elif inspect.isfunction(one) and one.__module__ == module.__name__:
                yield name, [{"self": "state"}.get(parameter, parameter)
                             for parameter in inspect.signature(one).parameters]

    ours, theirs = (dict(functions(module, module)) for module in (page, train_grpo))
    assert list(ours)[-2:] == ["main", "report"] and len(ours) > 10
    del ours["main"], ours["report"]
    assert list(ours) == [name for name in theirs if name in ours]
    for name, parameters in ours.items():
        assert parameters == [one for one in theirs[name] if one in parameters] != []


def test_its_example_of_two_updates_is_right():
    assert doctest.testmod(page) == (0, 2)
    # A = 1 and A = -1; p was 0.5: in update 2 ratio = 0.7 / 0.5, and past 1.2 it is constant.
    slopes = []
    for p in 0.5, 0.7:
        for A in 1, -1:
            below, above = (min(q / 0.5 * A, min(q / 0.5, 1.2) * A) for q in (p - 1e-4, p + 1e-4))
            slopes.append(-(above - below) / 2e-4 / 2)
    assert slopes == pytest.approx([-1, 1, 0, 1])


def test_equal_rewards_have_no_advantage_at_all():
    torch.manual_seed(0)
    rewards = torch.rand(1000, 1).repeat(1, 7)
    assert (rewards - rewards.mean(1, keepdim=True)).any()      # where a mean is rounded
    assert not page.group_advantages(rewards.flatten(), 7).any()
    mixed = torch.randn(64)
    torch.testing.assert_close(page.group_advantages(mixed, 8),
                               train_grpo.group_advantages(mixed, 8))
