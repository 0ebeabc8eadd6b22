"""docs/derivation.md: each number again, from the functions or by hand."""
import itertools
import math
import re

import pytest
import torch

from errors import UserError
from lab.experiments.__main__ import source_of
from lab.experiments.pages import CODE, code_as_now
from pages import PAGES, floats, tables
from reward.baselines import estimate
from run.extensions.losses import KL_TYPES
from train_grpo import family_loss, grpo_loss, k3, kl_penalty, parse_args

# Without the tables that come from runs, which test_experiments.py holds.
TEXT = re.sub("<!-- results: .*?<!-- end -->", "", PAGES["docs/derivation.md"], flags=re.DOTALL)
(STEPS, TWO_ANSWERS, BASELINES, WEIGHTS, CASES, ESTIMATES, OPTIMA, AVERAGES,
 FAMILY) = tables(TEXT)


def mean_over_groups(p, low, high, G=8, gradients=(-1.0, 1.0), **options):
    """Of A times the answer's gradient (low's, high's), over all groups of G rewards: exactly."""
    is_high = torch.tensor([[i >> j & 1 for j in range(G)] for i in range(2 ** G)]).double()
    advantages = estimate((low + (high - low) * is_high).flatten(), G, **options)
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


def value_of(formula, **names):
    """The number that a formula of the page stands for, such as $\\frac{G-1}{G}$."""
    python = re.sub(r"\^\{(.*?)\}", r"**(\1)", formula.strip("$"))
    python = re.sub(r"\\frac\{(.*?)\}\{(.*?)\}", r"((\1)/(\2))", python)
    return eval(python, names)


@pytest.mark.parametrize("language", ["", "zh/"])
def test_code_on_the_page_is_the_scripts(language):
    """Variables may have got other names: `python -m lab.experiments pages` writes these."""
    page = PAGES[f"docs/{language}derivation.md"]
    assert len(CODE.findall(page)) == len(tables(page)[0])
    code_as_now(page, source_of, "derivation.md")
    with pytest.raises(UserError, match="'return 41' does not stand in k3; adapt it"):
        code_as_now("| a | `return 41` | [`k3`](../train_grpo.py) |", source_of, "derivation.md")


def test_names_of_variables_on_a_page_follow_the_code():
    page = "```diff\n-loss = ratio * ratio.min(1)\n+loss = ratio\n```\n"
    source = "r = new / old\nloss = r * r.min(1)\nother = x * y.max(1)\n"
    assert code_as_now(page, lambda name: source, "") == (
        "```diff\n-loss = r * r.min(1)\n+loss = r\n```\n")
    for other in ("x * y.min(1)", "r * r.max(1)"):          # two names; another function
        with pytest.raises(UserError, match="does not stand in the code once"):
            code_as_now(page, lambda name, other=other: f"loss = {other}\n", "")


def test_gradient_of_the_two_answers():
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


def test_baseline_changes_the_noise_and_with_a_mean_over_tokens_the_gradient():
    z = torch.tensor(0.25).logit().requires_grad_()
    logps = torch.zeros(4, 50)              # every token is certain, log 1 = 0, but the first
    logps[:, 0] = torch.stack((z, -z, -z, -z)).sigmoid().log()      # as often as pi has them
    mask = (torch.arange(50) < torch.tensor([[50], [10], [10], [10]])).int()
    for (_, *promised), shift in zip(BASELINES, (0.0, 10.0, -0.35), strict=True):
        worked, guess = (1.1 + shift) * 0.75, (0.1 + shift) * -0.25
        noise = math.sqrt(0.25 * 0.75) * abs(worked - guess)    # of two values, 1 : 3
        of_sum, of_mean = 0.25 * worked + 0.75 * guess, 0.25 * worked / 50 + 0.75 * guess / 10
        for promise, value in zip(promised, (of_sum, noise, of_mean), strict=True):
            digits = len(promise.partition(".")[2])
            assert float(promise) == pytest.approx(value, abs=0.5001 * 10 ** -digits)
        for loss_type, value in (("r1", of_sum), ("grpo", of_mean)):
            loss, _ = family_loss(logps, logps.detach(), torch.tensor([1.1, 0.1, 0.1, 0.1]) + shift,
                                mask, loss_type=loss_type)
            gradient, = torch.autograd.grad(-loss, z, retain_graph=True)
            assert gradient.item() == pytest.approx(value, abs=1e-6)


def test_groups_mean_shortens_the_gradient_and_the_std_weighs_prompts():
    example = mean_over_groups(0.25, 0.1, 1.1, scale="none", gradients=(-0.25, 0.75))
    assert example == pytest.approx(7 / 8 * 0.1875) and f"{example:.4f}" in TEXT
    # With gradients of -1/(1-p) and 1/p, whose mean is 0, the gradient of p itself is 1.
    head = re.search(r"^\| advantage \| weight \|(.*)\|$", TEXT, re.MULTILINE)[1].split("|")
    for probabilities, plain, scaled, by_mean in zip(
            head, *(row[2:] for row in WEIGHTS), strict=True):
        for p, of_p in zip(floats(probabilities), floats(by_mean), strict=True):
            gradients = (-1 / (1 - p), 1 / p)
            assert mean_over_groups(p, 0.0, 1.0, scale="none",
                                    gradients=gradients) == pytest.approx(float(plain))
            for low, high in ((0.0, 1.0), (-2.0, 5.0)):
                assert mean_over_groups(p, low, high, gradients=gradients) == pytest.approx(
                    float(scaled), abs=0.05)
            maxrl = mean_over_groups(p, 0.0, 1.0, scale="mean", gradients=gradients)
            assert maxrl == pytest.approx(value_of(WEIGHTS[2][1], p=p, G=8))
            assert f"{maxrl:.1f}" == f"{of_p}"
    assert value_of(WEIGHTS[0][1], p=0.5, G=8) == float(WEIGHTS[0][2])
    assert f"up to {float(WEIGHTS[1][-1]) / float(WEIGHTS[1][2]):.1f} times" in TEXT
    for G, times in ((2, 1), (3, 1), (16, 1.9), (64, 3.4), (10 ** 4, 5.0)):
        assert weight(0.01, G) / weight(0.5, G) == pytest.approx(times, abs=0.05)
    assert weight(0.5, G) == pytest.approx(1 / math.sqrt(0.25), rel=1e-3)
    for margin in (0.1, 10.0):
        won, lost = estimate(torch.tensor([2.0 + margin, 2.0]), 2)
        assert f"{won:.2f}" == "0.71" and lost == -won


def test_ratios_product_is_wild():
    assert f"$w$ is {1.1 ** 50:.0f}." in " ".join(TEXT.split())
    x = torch.linspace(-5, 5, 100_001, dtype=torch.float64)         # log-ratios of one token
    chance = (-((x + 0.3 ** 2 / 2) / 0.3) ** 2 / 2).exp()
    chance /= chance.sum()
    assert (chance * x.exp()).sum().item() == pytest.approx(1)
    square = (chance * (2 * x).exp()).sum().item() ** 50
    assert square == pytest.approx(math.exp(50 * 0.3 ** 2))


def test_clip_in_its_four_cases():
    assert len(CASES) == 4
    for A, ratio, _, _, least, promised, _ in CASES:
        logps = torch.tensor([[float(ratio)]]).log().requires_grad_()
        loss, _ = grpo_loss(
            logps, torch.zeros(1, 1), torch.tensor([float(A)]), torch.ones(1, 1), ref_logps=None,
            beta=0.0, epsilon_low=0.2, epsilon_high=0.2, num_sequences=1, num_tokens=1)
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
def test_kl_by_its_estimates(kl_type):
    logits = torch.zeros(2, requires_grad=True)                     # pi = (0.5, 0.5)
    logps, reference = logits.log_softmax(-1), torch.tensor([0.9, 0.1]).log()
    estimate = kl_penalty(logps, reference, kl_type=kl_type)
    mean = (estimate * logps.exp().detach()).sum()
    mean.backward()
    _, values, of_mean, _, gradient, _ = map(floats, row(ESTIMATES, kl_type))
    assert estimate.tolist() == pytest.approx(values, abs=6e-3)
    assert mean.item() == pytest.approx(of_mean[0], abs=6e-4)
    assert logits.grad[0].item() == pytest.approx(gradient[0], abs=6e-4)


def test_kl_pulls_as_hard_as_the_page_says():
    """What stands before the gradient of log pi, at 20 times pi_ref and at a twentieth."""
    sentence = re.search(r"under the reference, (k3 .*? -19.*?)\. ", " ".join(TEXT.split()))[1]
    k3, k2, k3_rare, k2_rare = floats(re.sub(r"k[23]", "", sentence))
    for times, kl_type, promised in ((20, "k3", k3), (20, "k2", k2), (1 / 20, "k3", k3_rare),
                                     (1 / 20, "k2", k2_rare)):
        logp = torch.tensor(times).log().requires_grad_()           # the reference's is 0
        kl_penalty(logp, torch.zeros(()), kl_type=kl_type).backward()
        assert logp.grad.item() == pytest.approx(promised, abs=6e-3)
    hundredth = kl_penalty(torch.tensor(0.01).log(), torch.zeros(()))
    assert f"contributes {hundredth:.0f}." in " ".join(TEXT.split())


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3", "k3+", "abs"])
@pytest.mark.parametrize("moved", [0.0, 0.7])
def test_kl_is_corrected_by_the_ratio_for_k1_and_k3_and_no_other(kl_type, moved):
    """By the first logit, on average over what pi_old draws, here two tokens."""
    logits = torch.tensor([moved, 0.0], dtype=torch.float64, requires_grad=True)
    logps, old = logits.log_softmax(0), torch.tensor([0.5, 0.5]).double()
    reference = torch.tensor([0.9, 0.1]).double().log()
    kl = KL_TYPES[kl_type](reference - logps, k3)
    drawn = (old * (logps - old.log()).exp() * kl).sum()
    exact = (logps.exp() * (logps - reference)).sum()
    found, of_kl = (torch.autograd.grad(value, logits, retain_graph=True)[0][0].item()
                    for value in (drawn, exact))
    options = {"ref_logps": reference[:, None], "use_bias_correction_kl": True, "kl_type": kl_type,
               "beta": 1.0, "loss_type": "bnpo", "importance_sampling_level": "token"}
    args = logps[:, None], old.log()[:, None], torch.zeros(2), torch.ones(2, 1)
    if kl_type in ("k1", "k3"):
        assert found == pytest.approx(of_kl, abs=1e-12)
        ours, = torch.autograd.grad(family_loss(*args, **options)[0], logits)
        assert ours[0].item() == pytest.approx(of_kl, abs=1e-12)
        return
    assert abs(found - of_kl) > 0.1
    if not moved and kl_type != "abs":
        assert f"{found:.3f}" in " ".join(TEXT.split())
    with pytest.raises(UserError, match="a gradient that is not the KL's; pass --kl_type k1 or k3"):
        parse_args(["--use_bias_correction_kl", "--kl_type", kl_type])


def test_kl_leads_to_the_optima_of_the_page():
    best = 0.1 * math.exp(1 / 0.5)
    assert f"0.1e^2={best:.3f}" in TEXT
    assert f"a factor of {math.exp(1 / 0.3):.0f}" in " ".join(TEXT.split())
    best /= best + 0.9                                              # pi*
    assert f"gets {best:.3f}" in " ".join(TEXT.split())
    # k3 ends at pi_i = beta pi_ref_i / (c - r_i), where c makes it add up to 1: a quadratic.
    c = (1.5 + math.sqrt(1.5 ** 2 - 4 * 0.45)) / 2
    for (name, right, value), expected in zip(OPTIMA, (1.0, best, 0.05 / (c - 1)), strict=True):
        kl = sum(p * math.log(p / ref) for p, ref in ((expected, 0.1), (1 - expected, 0.9)) if p)
        assert float(right) == pytest.approx(expected, abs=6e-4), name
        assert floats(value)[0] == pytest.approx(expected - 0.5 * kl, abs=6e-4), name
    assert floats(OPTIMA[1][2])[0] == pytest.approx(0.5 * math.log(0.1 * math.exp(2) + 0.9),
                                                    abs=6e-4)      # beta log Z


@pytest.mark.parametrize("loss_type, right", [("dr_grpo", 0.451), ("grpo", 0.715)])
def test_k2_leads_where_depends_on_how_tokens_are_averaged(loss_type, right):
    """The right answer has 50 tokens, the wrong one 10; the first one decides. Where is it 0?"""
    assert f"{right}" in " ".join(TEXT.split()).partition("Sums only.")[2]
    slopes = []
    for p in (right - 1e-3, right + 1e-3):
        z = torch.tensor(p, dtype=torch.float64).logit().requires_grad_()
        slope = 0.0
        for logp, chance, ref, reward, length in (
                (z.sigmoid().log(), p, 0.1, 1.0, 50), ((-z).sigmoid().log(), 1 - p, 0.9, 0.0, 10)):
            logps, refs = (torch.zeros(1, 50, dtype=torch.float64) for _ in range(2))
            logps[0, 0], refs[0, 0] = logp, math.log(ref)
            loss, _ = family_loss(logps, logps.detach(), torch.tensor([reward - p]).double(),
                                (torch.arange(50) < length)[None].int(), ref_logps=refs, beta=0.5,
                                kl_type="k2", loss_type=loss_type, max_completion_length=50)
            slope += chance * torch.autograd.grad(loss, z)[0].item()
        slopes.append(slope)
    assert slopes[0] < 0 < slopes[1]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "r1"])
def test_weight_of_a_token(loss_type):
    mask = (torch.arange(40) < torch.tensor([[10], [40]])).int()
    logps = torch.full((2, 40), -1.0, requires_grad=True)
    loss, _ = family_loss(logps, logps.detach(), torch.tensor([1.0, -1.0]), mask,
                        loss_type=loss_type, max_completion_length=96)
    loss.backward()
    promised = [floats(cell)[-1] for cell in row(AVERAGES, f"`{loss_type}`")[1:3]]
    assert [-logps.grad[0, 0], logps.grad[1, 0]] == pytest.approx(promised, abs=6e-5)


# --- what the family climbs -----------------------------------------------------------------------
# A policy over 15 answers of up to 3 tokens ("." ends one), whose groups are all enumerated.

ANSWERS = [answer for n in (1, 2, 3) for answer in map("".join, itertools.product("xy.", repeat=n))
           if "." not in answer[:-1] and (n == 3 or answer[-1] == ".")]
PREFIXES = sorted({answer[:t] for answer in ANSWERS for t in range(3)})
TOKENS = torch.tensor([[3 * PREFIXES.index(answer[:t]) + "xy.".index(answer[t:t + 1] or ".")
                        for t in range(3)] for answer in ANSWERS])
MASK = torch.tensor([[t < len(answer) for t in range(3)] for answer in ANSWERS]).int()
RANDOM = torch.Generator().manual_seed(1)
FEATURES, THETA, REWARDS = (torch.randn(size, generator=RANDOM).double()
                            for size in ((3 * len(PREFIXES), 3), 3, len(ANSWERS)))
THREE_VALUES = torch.tensor([answer.count("x") % 3 for answer in ANSWERS]).double()
RIGHT = (THREE_VALUES == 1).double()
SHORT = 1 / MASK.sum(1).double()                                                    # s = 1 / |o|
NONE, PASSK = {"scale": "none"}, {"baseline": "grpo_passk"}
grad, jacobian = torch.func.grad, torch.func.jacrev


def tree(theta):
    """log pi of each answer's tokens, (15, 3)."""
    return (FEATURES @ theta).view(-1, 3).log_softmax(1).flatten()[TOKENS] * MASK


def mean(theta, values):
    """E[values], which are one for each answer."""
    return tree(theta).sum(1).exp() @ values


def covariance(theta, r, s):
    return mean(theta, r * s) - mean(theta, r) * mean(theta, s)


def all_groups(n, G):
    return torch.cartesian_prod(*[torch.arange(n)] * G)                             # (n^G, G)


def update(rewards, G, loss_type="dr_grpo", logps_of=tree, mask=MASK, **options):
    """-grad family_loss, averaged over all groups, as a function of the weights."""
    groups = all_groups(len(mask), G)
    rows = groups.flatten()
    advantages = estimate(rewards[rows], G, eps=1e-300, **options)

    def surrogate(theta, old_theta):
        old = logps_of(old_theta)
        chances = old.sum(1)[groups].sum(1).exp().repeat_interleave(G)
        return -family_loss(logps_of(theta)[rows], old[rows], chances * advantages, mask[rows],
                          loss_type=loss_type, max_completion_length=1, num_sequences=G)[0]
    return lambda theta: grad(surrogate)(theta, theta)


def close(a, b, tolerance=1e-12):
    return a.dtype == b.dtype == torch.float64 and torch.allclose(a, b, rtol=0, atol=tolerance)


def curl(field):
    """[a, b]: the derivative by weight a of the part for b, minus that by b of the part for a."""
    derivatives = jacobian(field)(THETA)
    return derivatives.T - derivatives


def factor(member, G):
    """What stands before the gradient in this row of the page's table."""
    formula = re.split(r"\\nabla|\(E", row(FAMILY, member)[1])[0]
    return value_of(formula, G=G, p=mean(THETA, RIGHT).item(), W=lambda p: weight(p, G))


def test_sums_over_tokens_climb_what_the_page_says():
    of_r, of_p = grad(mean)(THETA, REWARDS), grad(mean)(THETA, RIGHT)
    assert of_p.abs().min() > 1e-3
    assert close(update(REWARDS, 3, **NONE)(THETA), factor("sum over tokens, no std", 3) * of_r)
    assert close(update(REWARDS, 3, baseline="rloo", **NONE)(THETA), of_r)
    assert close(update(RIGHT, 4)(THETA), factor("sum, with the std", 4) * of_p)
    assert curl(update(RIGHT, 4)).abs().max() < 1e-12 < 1e-4 < (
        curl(update(THREE_VALUES, 3)).abs().max())

    def pass_at(theta, k):
        return 1 - (1 - mean(theta, RIGHT)) ** k

    def best(theta, rewards, groups):
        return tree(theta).sum(1)[groups].sum(1).exp() @ rewards[groups].amax(1)

    maxrl = update(RIGHT, 3, scale="mean")(THETA)
    assert close(maxrl, factor("sum, MaxRL", 3) * of_p)
    assert close(maxrl, grad(pass_at)(THETA, 1) + grad(pass_at)(THETA, 2) / 2)
    passk = update(RIGHT, 3, **PASSK, **NONE)(THETA)
    assert close(passk, factor("sum, `grpo_passk`", 3) * of_p)
    assert close(passk, grad(pass_at)(THETA, 3) / 3)
    for rewards in (REWARDS, THREE_VALUES):         # without ties, and with
        assert close(update(rewards, 3, **PASSK, **NONE)(THETA),
                     grad(best)(THETA, rewards, all_groups(15, 3)) / 3)


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
def test_large_groups_climb_arcsin_and_log(p):
    x = torch.tensor(p)
    arcsin, log = grad(lambda p: 2 * p.sqrt().arcsin())(x).item(), grad(torch.log)(x).item()
    assert weight(p, 3000) == pytest.approx(arcsin, rel=1e-3)
    assert sum((1 - p) ** (k - 1) for k in range(1, 3000)) == pytest.approx(log)


def test_mean_over_tokens_is_no_gradient():
    def parts(r):
        return grad(mean)(THETA, r), mean(THETA, SHORT) * grad(mean)(THETA, r) + (
            grad(covariance)(THETA, r, SHORT))

    of_s = grad(mean)(THETA, SHORT)
    for rewards in (RIGHT, REWARDS):
        field, (of_r, both) = update(rewards, 3, "grpo", **NONE), parts(rewards)
        assert close(field(THETA), factor("mean over tokens, no std", 3) * both)
        expected = 2 / 3 * (torch.outer(of_s, of_r) - torch.outer(of_r, of_s))
        assert close(curl(field), expected) and expected.abs().max() > 1e-4
    field = update(RIGHT, 4, "grpo")
    assert close(field(THETA), factor("mean, with the std", 4) * parts(RIGHT)[1])
    assert curl(field).abs().max() > 1e-4


def three_answers(pi, lengths):
    """Two are right. grad E[r], E[s] grad E[r], grad Cov(r, s) and the last two's sum, (3, 4).

    Their logits are the weights, so grad E[f] = pi (f - E[f]). The sum is twice grpo's, G = 2.
    """
    pi, lengths, r = torch.tensor([pi, lengths, [1, 1, 0]], dtype=torch.float64)
    of_r, of_s, of_rs = (pi * (f - pi @ f) for f in (r, 1 / lengths, r / lengths))
    first = pi @ (1 / lengths) * of_r
    most = int(lengths.max())
    field = update(r, 2, "grpo", lambda logits: torch.nn.functional.pad(    # the first one decides
        logits.log_softmax(0)[:, None], (0, most - 1)),
        (torch.arange(most) < lengths[:, None]).int(), **NONE)
    return torch.stack((of_r, first, of_rs - pi @ r * of_s - first, 2 * field(pi.log())), 1)


def angle(table):
    return math.degrees(math.acos(torch.cosine_similarity(table[:, 0], table[:, 3], dim=0)))


def test_mean_over_tokens_of_the_three_answers():
    table = torch.tensor([[0.125, 0.0041, 0.0056, 0.0097], [0.125, 0.0041, -0.0056, -0.0016],
                          [-0.25, -0.0081, 0, -0.0081]]).double()
    exact = three_answers([0.25, 0.25, 0.5], [10, 100, 100])
    assert close(exact, table, 5.1e-5) and f"{angle(exact):.0f}" == "39"
    exact = three_answers([0.05, 0.75, 0.2], [10, 1000, 1000])
    assert close(exact[:, 1] + exact[:, 2], exact[:, 3])
    assert f"The sum of both terms is then {angle(exact):.0f}° away" in " ".join(TEXT.split())


@pytest.mark.parametrize("step", [1e-2, 1e-3])
def test_ratio_per_token_leaves_out_first_order_terms(step):
    old, theta = tree(THETA), THETA + step
    weighted = old.sum(1).exp() * REWARDS           # each answer as often as pi_old writes it
    d = tree(theta) - old                           # (15, 3)

    def surrogate(theta, loss_type):
        return -family_loss(tree(theta), old, weighted, MASK, loss_type=loss_type, epsilon_low=9,
                          epsilon_high=9, max_completion_length=1, num_sequences=1)[0]

    def first_order(theta):
        return (weighted[:, None] * (d.sum(1, keepdim=True) - d) * tree(theta)).sum()

    exact = grad(mean)(theta, REWARDS)
    assert close(grad(surrogate)(theta, "r1"), exact)
    missing = exact - grad(surrogate)(theta, "dr_grpo")
    assert (missing - grad(first_order)(THETA)).norm() < 5 * step * missing.norm()
    assert missing.norm() > 0.1 * step
