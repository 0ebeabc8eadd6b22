"""docs/derivation.md: each number again, from the functions or by hand."""
import inspect
import math
import re

import pytest
import torch
from test_docs import PAGES, floats, tables

import train_grpo
from train_grpo import group_advantages, grpo_loss

TEXT = PAGES["docs/derivation.md"]
STEPS, TWO_ANSWERS, BASELINES, WEIGHTS, CASES, ESTIMATES, OPTIMA, AVERAGES = tables(TEXT)


def mean_over_groups(p, low, high, G=8, gradients=(-1.0, 1.0), **options):
    """Of A times the answer's gradient (low's, high's), over all groups of G rewards: exactly."""
    is_high = torch.tensor([[i >> j & 1 for j in range(G)] for i in range(2 ** G)]).double()
    advantages = group_advantages((low + (high - low) * is_high).flatten(), G, **options)
    gradient = gradients[0] + (gradients[1] - gradients[0]) * is_high
    mean = (advantages.view_as(is_high) * gradient).mean(1)                             # (2^G,)
    return (mean * (p * is_high + (1 - p) * (1 - is_high)).prod(1)).sum().item()


def binomial(k, n, p):
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
                    + k * math.log(p) + (n - k) * math.log(1 - p))


def weight(p, G):
    """Of a prompt whose groups' advantages are divided by the std; eps left out."""
    return sum(binomial(k, G, p) * math.sqrt(k * (G - k) * (G - 1) / G ** 3)
               for k in range(1, G)) / (p * (1 - p))


@pytest.mark.parametrize("language", ["", "_zh"])
def test_each_step_stands_beside_a_line_of_its_function(language):
    rows = tables(PAGES[f"docs/derivation{language}.md"])[0]
    assert len(rows) == 8
    for _, _, lines, where in rows:
        name = re.search(r"`(\w+)`", where)[1]
        there = getattr(train_grpo, name)
        source = inspect.getsource(there if callable(there) else train_grpo)
        for line in re.findall(r"`([^`]+)`", lines):
            assert line in " ".join(source.split()), name


def test_the_two_answers():
    terms = []
    for _, pi, r, score, term in TWO_ANSWERS[:2]:
        terms.append(float(pi) * float(r) * float(score))
        assert terms[-1] == pytest.approx(float(term), abs=1e-9)
    z = torch.tensor(0.25).logit().requires_grad_()
    pi = torch.stack((z, -z)).sigmoid()
    for probability, row in zip(pi, TWO_ANSWERS):
        score, = torch.autograd.grad(probability.log(), z, retain_graph=True)
        assert [probability.item(), score.item()] == pytest.approx([float(row[1]), float(row[3])])
    rewards = torch.tensor([float(row[2]) for row in TWO_ANSWERS[:2]])
    mean, total = floats(" ".join(TWO_ANSWERS[2]))[::2]
    direct, = torch.autograd.grad((pi * rewards).sum(), z)      # no logarithm
    assert (pi * rewards).sum().item() == pytest.approx(mean)
    assert [direct.item(), sum(terms)] == pytest.approx([total, total])


def test_a_baseline_changes_the_noise_and_with_a_mean_over_tokens_the_gradient():
    for (_, *promised), shift in zip(BASELINES, (0.0, 10.0, -0.35), strict=True):
        worked, guess = (1.1 + shift) * 0.75, (0.1 + shift) * -0.25
        noise = math.sqrt(0.25 * 0.75) * abs(worked - guess)    # of two values, 1 : 3
        of_sum, of_mean = 0.25 * worked + 0.75 * guess, 0.25 * worked / 50 + 0.75 * guess / 10
        for promise, value in zip(promised, (of_sum, noise, of_mean), strict=True):
            digits = len(promise.partition(".")[2])
            assert float(promise) == pytest.approx(value, abs=0.5001 * 10 ** -digits)


def test_the_groups_mean_shortens_the_gradient_and_the_std_weighs_prompts():
    example = mean_over_groups(0.25, 0.1, 1.1, scale_rewards="none", gradients=(-0.25, 0.75))
    assert example == pytest.approx(7 / 8 * 0.1875) and f"{example:.4f}" in TEXT
    # With gradients of -1/(1-p) and 1/p, whose mean is 0, the gradient of p itself is 1.
    head = re.search(r"^\| p \|(.*)\|$", TEXT, re.MULTILINE)[1].split("|")
    for probabilities, plain, scaled, by_mean in zip(
            head, *(row[1:] for row in WEIGHTS), strict=True):
        for p, of_p in zip(floats(probabilities), floats(by_mean), strict=True):
            gradients = (-1 / (1 - p), 1 / p)
            assert mean_over_groups(p, 0.0, 1.0, scale_rewards="none",
                                    gradients=gradients) == pytest.approx(float(plain))
            for low, high in ((0.0, 1.0), (-2.0, 5.0)):
                assert mean_over_groups(p, low, high, gradients=gradients) == pytest.approx(
                    float(scaled), abs=0.05)
            maxrl = mean_over_groups(p, 0.0, 1.0, scale_rewards="mean", gradients=gradients)
            assert maxrl == pytest.approx((1 - (1 - p) ** 7) / p) and f"{maxrl:.1f}" == f"{of_p}"
    assert f"up to {float(WEIGHTS[1][-1]) / float(WEIGHTS[1][1]):.1f} times" in TEXT
    for G, times in ((2, 1), (16, 1.9), (64, 3.4), (10 ** 4, 5.0)):
        assert weight(0.01, G) / weight(0.5, G) == pytest.approx(times, abs=0.05)
        assert G == 2 or f"{times} times" in " ".join(TEXT.split())
    assert weight(0.5, G) == pytest.approx(1 / math.sqrt(0.25), rel=1e-3)
    for margin in (0.1, 10.0):
        won, lost = group_advantages(torch.tensor([2.0 + margin, 2.0]), 2)
        assert f"±{won:.2f}" in TEXT and lost == -won


def test_the_product_of_ratios_is_wild():
    assert f"make {1.1 ** 50:.0f}." in TEXT


def test_the_four_cases_of_the_clip():
    assert len(CASES) == 4
    for A, ratio, _, _, least, promised, _ in CASES:
        logps = torch.tensor([[float(ratio)]]).log().requires_grad_()
        loss, _ = grpo_loss(logps, torch.zeros(1, 1), torch.tensor([float(A)]), torch.ones(1, 1))
        loss.backward()
        assert [-loss.item(), -logps.grad.item()] == pytest.approx([float(least), float(promised)])
    for A, ratio, free, clipped, least, *_ in [[float(x) for x in row[:5]] for row in CASES]:
        bounded = max(0.8, min(1.2, ratio))
        assert [free, clipped] == pytest.approx([ratio * A, bounded * A])
        assert least == min(free, clipped)


def row(table, start):
    """The cells of the row that begins so."""
    return next(row for row in table if row[0].startswith(start))


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_the_estimates_of_the_kl(kl_type):
    logits = torch.zeros(2, requires_grad=True)                     # pi = (0.5, 0.5)
    logps, reference = logits.log_softmax(-1), torch.tensor([0.9, 0.1]).log()
    estimate = train_grpo.kl_penalty(logps, reference, kl_type=kl_type)
    mean = (estimate * logps.exp().detach()).sum()
    mean.backward()
    _, values, of_mean, gradient, _ = map(floats, row(ESTIMATES, kl_type))
    assert estimate.tolist() == pytest.approx(values, abs=6e-3)
    assert mean.item() == pytest.approx(of_mean[0], abs=6e-4)
    assert logits.grad[0].item() == pytest.approx(gradient[0], abs=6e-4)


def test_where_the_kl_leads():
    best = 0.1 * math.exp(1 / 0.5)
    assert f"0.1 e² = {best:.3f}" in TEXT
    best /= best + 0.9                                              # pi*
    # k3 ends at pi_i = beta pi_ref_i / (c - r_i), where c makes it add up to 1: a quadratic.
    c = (1.5 + math.sqrt(1.5 ** 2 - 4 * 0.45)) / 2
    for (name, right, value), expected in zip(OPTIMA, (1.0, best, 0.05 / (c - 1)), strict=True):
        kl = sum(p * math.log(p / ref) for p, ref in ((expected, 0.1), (1 - expected, 0.9)) if p)
        assert float(right) == pytest.approx(expected, abs=6e-4), name
        assert floats(value)[0] == pytest.approx(expected - 0.5 * kl, abs=6e-4), name
    assert floats(OPTIMA[1][2])[0] == pytest.approx(0.5 * math.log(0.1 * math.exp(2) + 0.9),
                                                    abs=6e-4)      # beta log Z


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "r1"])
def test_the_weight_of_a_token(loss_type):
    mask = (torch.arange(40) < torch.tensor([[10], [40]])).int()
    logps = torch.full((2, 40), -1.0, requires_grad=True)
    loss, _ = grpo_loss(logps, logps.detach(), torch.tensor([1.0, -1.0]), mask,
                        loss_type=loss_type, max_completion_length=96)
    loss.backward()
    promised = [floats(cell)[-1] for cell in row(AVERAGES, f"`{loss_type}`")[1:3]]
    assert [-logps.grad[0, 0], logps.grad[1, 0]] == pytest.approx(promised, abs=6e-5)
