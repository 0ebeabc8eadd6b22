"""The objective, against numbers by hand and an independent float64 loop over tokens."""
import math
from pathlib import Path

import pytest
import torch

import train_grpo
from train_grpo import completion_mask, group_advantages, grpo_loss, kl_penalty, token_logps

NAN = float("nan")


def test_the_worked_example_of_the_docstring():
    # rewards 0.1 1.1 1.0 0.1: mean 0.575, squared deviations add up to 0.9075, std = sqrt(0.9075 / 3) = 0.55
    expected = [(r - 0.575) / (0.55 + 1e-4) for r in (0.1, 1.1, 1.0, 0.1)]
    advantages = group_advantages(torch.tensor([0.1, 1.1, 1.0, 0.1]), 4)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)
    assert repr(advantages) in group_advantages.__doc__


def test_advantages_stay_within_their_group_and_leave_out_the_unjudged():
    advantages = group_advantages(torch.tensor([1.0, 3.0, NAN, 5.0, 5.0, 5.0, NAN, NAN, 7.0]), 3)
    std = math.sqrt(2)
    assert advantages.tolist() == pytest.approx([-1 / (std + 1e-4), 1 / (std + 1e-4), 0, 0, 0, 0, 0, 0, 0], abs=1e-6)


def test_mask_ends_with_the_first_eos_and_keeps_it():
    ids = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8], [5, 9, 2, 0]])
    assert completion_mask(ids, 2).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert completion_mask(ids, [2, 9]).tolist()[3] == [1, 1, 0, 0]


def loop_loss(logps, old_logps, advantages, mask, ref_logps, beta, low, high):
    """The same formula, a token at a time, in Python's own float64."""
    total = 0.0
    for i, advantage in enumerate(advantages):
        tokens = [t for t in range(len(mask[i])) if mask[i][t]]
        for t in tokens:
            ratio = math.exp(logps[i][t] - old_logps[i][t])
            bounded = max(min(ratio, 1 + high), 1 - low)
            x = ref_logps[i][t] - logps[i][t]
            total += (-min(ratio * advantage, bounded * advantage) + beta * (math.exp(x) - x - 1)) / len(tokens) / len(advantages)
    return total


def random_case(seed, N=7, R=9):
    rng = torch.Generator().manual_seed(seed)
    logps, old_logps, ref_logps = (-2 + torch.randn(N, R, generator=rng, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([1, R, 4, 2, R, 6, 3])
    return logps, old_logps, torch.randn(N, generator=rng, dtype=torch.float64), (torch.arange(R) < lengths[:, None]).int(), ref_logps


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_a_loop_over_tokens(seed):
    logps, old_logps, advantages, mask, ref_logps = random_case(seed)
    options = {"beta": 0.3, "epsilon_low": 0.1, "epsilon_high": 0.4}
    loss, _ = grpo_loss(logps.requires_grad_(), old_logps, advantages, mask, ref_logps=ref_logps, **options)
    loss.backward()
    numbers = [x.tolist() for x in (logps.detach(), old_logps, advantages, mask, ref_logps)]
    assert loss.item() == pytest.approx(loop_loss(*numbers, 0.3, 0.1, 0.4), rel=1e-9)
    for i, t in [(0, 0), (1, 3), (2, 3), (2, 4), (4, 8), (6, 1)]:                           # (2, 4) is masked out
        bumped = [[row[:] for row in numbers[0]] for _ in range(2)]
        bumped[0][i][t] += 1e-6
        bumped[1][i][t] -= 1e-6
        up, down = (loop_loss(values, *numbers[1:], 0.3, 0.1, 0.4) for values in bumped)
        assert logps.grad[i, t].item() == pytest.approx((up - down) / 2e-6, abs=1e-7)


def test_parts_of_a_step_add_up_to_the_step():
    logps, old_logps, advantages, mask, ref_logps = random_case(3)
    whole, whole_metrics = grpo_loss(logps, old_logps, advantages, mask, ref_logps=ref_logps, beta=0.1)
    parts = [grpo_loss(logps[rows], old_logps[rows], advantages[rows], mask[rows], ref_logps=ref_logps[rows], beta=0.1,
                       num_sequences=7, num_tokens=int(mask.sum())) for rows in (slice(0, 1), slice(1, 4), slice(4, 7))]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    for name, value in whole_metrics.items():
        assert sum(metrics[name] for _, metrics in parts).item() == pytest.approx(value.item(), rel=1e-6)


def test_the_first_ratio_is_1_and_its_gradient_is_the_policy_gradient():
    logps, _, advantages, mask, _ = random_case(4)
    logps.requires_grad_()
    loss, metrics = grpo_loss(logps, logps.detach(), advantages, mask)
    loss.backward()
    assert loss.item() == pytest.approx(-advantages.mean().item(), rel=1e-12)
    assert torch.allclose(logps.grad, -advantages[:, None] * mask / mask.sum(1, keepdim=True) / 7)
    assert metrics["clip_ratio/region_mean"] == 0


def test_a_clipped_token_has_no_gradient_and_is_counted():
    old, mask = torch.zeros(4, 1), torch.ones(4, 1)
    logps = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()[:, None].requires_grad_()
    loss, metrics = grpo_loss(logps, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), mask)
    loss.backward()
    # ratio 1.5 with A > 0 and 0.5 with A < 0 have gone far enough; the other two are still pushed back
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 1.5 + 0.8) / 4, rel=1e-6)
    assert logps.grad[:, 0].tolist() == pytest.approx([0, -0.5 / 4, 1.5 / 4, 0])
    assert metrics["clip_ratio/region_mean"] == 0.5


def test_kl_is_k3_and_survives_extremes():
    assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5])).item() == pytest.approx(math.exp(-0.5) + 0.5 - 1, abs=1e-6)
    assert kl_penalty(torch.tensor([-200.0]), torch.tensor([0.0])).isfinite()


def test_token_logps_are_those_of_a_softmax_with_temperature(tiny_policy):
    tokenizer, model = tiny_policy
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 2, 0]])
    attention_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
    logps, entropy = token_logps(model, ids, attention_mask, 3, temperature=0.7, with_entropy=True)
    for i, row in enumerate(([5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 2, 0])):
        probabilities = (model(torch.tensor([row])).double() / 0.7).softmax(-1)[0]
        start = len(row) - 3
        for t in range(3 - i):                              # the last token of the second row is padding
            distribution = probabilities[start + t - 1]
            assert logps[i, t].item() == pytest.approx(distribution[row[start + t]].log().item(), abs=1e-5)
            assert entropy[i, t].item() == pytest.approx(-(distribution * distribution.log()).sum().item(), abs=1e-5)


def test_the_objective_runs_as_one_notebook_cell():
    source = Path(train_grpo.__file__).read_text(encoding="utf-8")
    imports = source[source.index("\nimport "):source.index("\nHERE = ")]
    cell = source[source.index("# --- the objective"):source.index("# --- log-probabilities")]
    for above in (imports, "import torch\n"):               # more than torch it does not need
        names = {}
        exec(above + cell, names)
    logps = torch.randn(4, 3, requires_grad=True)
    loss, _ = names["grpo_loss"](logps, logps.detach(), names["group_advantages"](torch.tensor([0.1, 1.1, 1.0, 0.1]), 4),
                                 names["completion_mask"](torch.tensor([[5, 2, 2]] * 4), 2))
    loss.backward()
    assert (logps.grad[:, :2] != 0).all() and (logps.grad[:, 2] == 0).all()

