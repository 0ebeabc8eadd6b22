"""Expected updates: each against an expectation that is enumerated in another way."""
import itertools
import math
from functools import cache

import pytest
import torch

from lab.experiments import estimators
from lab.experiments.answers import PROMPTS, Answers, Tiny, fewer_numbers, flat, sampled
from lab.experiments.estimators import (
    RATIOS,
    STEP,
    advantages_of,
    aim_weights,
    by_itself,
    by_value,
    cosine,
    degrees,
    expected_update,
    inner,
    mean_advantages,
    on_policy,
    random_steps,
    resampled,
    stale,
    weights_in,
)
from support import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
TWO, FOUR = "two values", "four values"
LIMIT = 5       # of the length: a run has 7


@pytest.fixture(scope="module")
def tiny():
    tiny = Tiny(1, LIMIT)
    tiny.token_gradients = cache(tiny.token_gradients)          # its weights stay as they are
    return tiny


@pytest.fixture(scope="module")
def answers(tiny):
    return tiny.answers()


def by_autograd(tiny, objective):
    """The gradient of objective(pi(o) of each prompt's answers (4, 63)), through the network."""
    shares = tiny.logps().sum(1).exp().view(len(PROMPTS), -1)
    return flat(torch.autograd.grad(objective(shares), list(tiny.policy.parameters())))


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-10)


# --- what is enumerated ---------------------------------------------------------------------------


def test_answers_of_the_tiny_policy_are_all_there_are(tiny, answers):
    shares = answers.shares[0].view(len(PROMPTS), -1)
    assert close(shares.sum(1), torch.ones(4).double())
    texts = {(int(number), tuple(ids[2:2 + length])) for number, ids, length in zip(
        tiny.prompt, tiny.ids.tolist(), tiny.length.tolist())}
    assert len(texts) == 4 * 63 and (0, (1, 0)) in texts and (3, (2,) * LIMIT) in texts
    right = {(int(number), tuple(ids[2:2 + length])) for number, ids, length, reward in zip(
        tiny.prompt, tiny.ids.tolist(), tiny.length.tolist(), tiny.rewards[TWO]) if reward}
    assert (0, (1, 0)) in right and (1, (1, 2, 1, 0)) in right and (0, (1, 1, 0)) not in right
    assert (0, (1, *(2,) * (LIMIT - 1))) not in right           # it was cut off
    assert tiny.rewards[FOUR].unique().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.parametrize("kind", [TWO, FOUR])
def test_gradient_of_all_answers_is_that_of_the_expected_reward(tiny, answers, kind):
    rewards = tiny.rewards[kind].view(len(PROMPTS), -1)
    assert close(answers.mean_gradient(tiny.rewards[kind], 0),
                 by_autograd(tiny, lambda shares: (shares * rewards).sum(1).mean()))
    few = fewer_numbers(answers.gradients)
    assert few.shape[1] <= len(few) and close(few @ few.T, answers.gradients @ answers.gradients.T)


def test_samples_have_shares_lengths_rewards_and_sketches():
    lots = sampled(ROOT / "model/weights/reason_128", prompts=2, each=4, seed=1)
    for share in lots.shares:
        assert [share[lots.prompt == prompt].sum().item() for prompt in (0, 1)] == [1, 1]
    assert 5 < lots.length.min() and lots.length.max() <= lots.limit == 96
    assert set(lots.rewards[TWO].tolist()) <= {0, 1} and lots.gradients.shape[1] == 4096
    assert lots.gradients.norm(dim=1).min() > 0


# --- expected updates -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["none", "group", "mean"])
@pytest.mark.parametrize("baseline", ["grpo", "rloo", "grpo_passk"])
def test_mean_advantages_are_those_of_all_groups(scale, baseline):
    values, shares = torch.tensor([0, 0.25, 1]).double(), torch.tensor([0.5, 0.2, 0.3]).double()
    expected = torch.zeros(3).double()
    for group in itertools.product(range(3), repeat=4):
        advantage = advantages_of(values[list(group)], 4, scale, baseline)[0]
        expected[group[0]] += shares[list(group[1:])].prod() * advantage
    assert close(mean_advantages(values, shares, 4, scale, baseline), expected)


@pytest.mark.parametrize("average", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("scale", ["none", "group"])
def test_an_expected_update_is_the_mean_over_all_pairs_of_answers(tiny, answers, average, scale):
    mine = tiny.prompt == 1
    rewards, shares = tiny.rewards[FOUR][mine], answers.shares[0][mine]
    pairs = torch.cartesian_prod(torch.arange(len(shares)), torch.arange(len(shares)))
    advantages = advantages_of(rewards[pairs].flatten(), 2, scale, "grpo").view(-1, 2)
    lengths = tiny.length[mine] if average == "grpo" else torch.full_like(tiny.length[mine], LIMIT)
    weights = shares[pairs].prod(1, keepdim=True) * advantages / (2 * lengths[pairs])
    of_answers = torch.zeros_like(shares).index_add(0, pairs.flatten(), weights.flatten())
    one = Answers(torch.zeros(len(shares)).long(), tiny.length[mine], [shares],
                  answers.gradients[mine], {FOUR: rewards}, LIMIT)
    update = expected_update(one, FOUR, 2, (average, scale, "grpo"), 0, None)
    assert close(update, of_answers @ answers.gradients[mine])


@pytest.mark.parametrize("scale, baseline, aim", [
    ("none", "grpo", lambda p: p), ("group", "grpo", lambda p: 2 * p.sqrt().asin()),
    ("mean", "grpo", lambda p: p.log()), ("none", "grpo_passk", lambda p: 1 - (1 - p) ** 8)])
def test_aims(tiny, answers, scale, baseline, aim):
    rewards = tiny.rewards[TWO].view(len(PROMPTS), -1)
    weights = by_value(aim_weights, answers, TWO, 0, 8, scale, baseline)
    assert close(answers.mean_gradient(weights, 0), by_autograd(
        tiny, lambda shares: aim((shares * rewards).sum(1)).mean()))


def test_a_step_has_whole_groups_and_bnpo_its_own_divisor(tiny, answers):
    steps = random_steps(answers, 0, 8, 500, torch.Generator().manual_seed(0))
    assert steps.shape == (500, STEP)
    prompts = tiny.prompt[steps].view(-1, 8)
    assert (prompts == prompts[:, :1]).all() and len(prompts.unique()) == 4
    found = torch.bincount(steps.flatten(), minlength=len(tiny.prompt)) / steps.numel()
    assert (found - answers.shares[0] / 4).abs().max() < 0.01
    arm = "bnpo", "none", "grpo"
    weights = weights_in(answers, steps, TWO, 8, *arm)
    advantages = advantages_of(tiny.rewards[TWO][steps[3]], 8, "none", "grpo")
    assert close(weights[3], advantages / tiny.length[steps[3]].sum())
    # Where answers alike in prompt, reward and length have one gradient, the mean over steps is it.
    alike = torch.stack((tiny.prompt, tiny.rewards[TWO], tiny.length)).unique(
        dim=1, return_inverse=True)[1]
    one_hot = torch.nn.functional.one_hot(alike).double()
    simple = Answers(tiny.prompt, tiny.length, answers.shares, one_hot, tiny.rewards, LIMIT)
    by_hand = torch.zeros(one_hot.shape[1]).double().index_add(
        0, alike[steps].flatten(), weights.flatten() / 500)
    assert close(expected_update(simple, TWO, 8, arm, 0, steps), by_hand)


def test_noise_is_left_out_of_angles_between_two_lots():
    rng = torch.Generator().manual_seed(0)
    signal = torch.nn.functional.normalize(torch.randn(20000, generator=rng), dim=0)
    lots = [[signal + 0.01 * torch.randn(20000, generator=rng) for _ in (0, 1)] for _ in (0, 1)]
    assert lots[0][0].norm() > 1.7                                      # most of it is noise
    assert inner(lots[0], lots[0]) == pytest.approx(1, abs=0.1)
    assert cosine(lots[0], lots[1]) == pytest.approx(1, abs=0.1)
    assert degrees([torch.tensor([1.0, 0])], [torch.tensor([1.0, 1])]) == pytest.approx(45)


def test_study_on_policy_says_the_same(answers, monkeypatch):
    monkeypatch.setattr(estimators, "SIMULATED", 256)
    few = Answers(answers.prompt, answers.length, answers.shares,
                  fewer_numbers(answers.gradients), {TWO: answers.rewards[TWO]}, LIMIT)
    found = {arm: numbers for _, arm, numbers in on_policy(few, seed=0)}
    exact = found["dr_grpo", "none", "grpo"]
    assert exact["angle/8"] < 1e-4 and exact["length/8"] == pytest.approx(7 / 8)
    assert found["dr_grpo", "none", "REINFORCE"]["length/2"] == pytest.approx(1)
    assert found["dr_grpo", "none", "grpo_passk"]["aim/32"] < 1e-4
    assert found["bnpo", "none", "grpo"]["angle/8"] < 3 < found["grpo", "none", "grpo"]["angle/8"]
    # Of one answer's update, A g / L, the variance is known; a step of 128 in groups of 2 is near.
    reinforce = found["dr_grpo", "none", "REINFORCE"]
    square = (answers.shares[0] / 4 * answers.rewards[TWO] * answers.gradients.pow(2).sum(1)).sum()
    truth = answers.mean_gradient(answers.rewards[TWO], 0)
    assert reinforce["noise/2"] == pytest.approx(
        math.sqrt((square - truth @ truth) / STEP) / truth.norm(), rel=0.25)


# --- after the policy has moved -------------------------------------------------------------------


def test_ratios_product_stays_exact_and_all_begin_exact(monkeypatch):
    monkeypatch.setattr(estimators, "UPDATES", (0, 4))
    tiny = Tiny(2, 3)
    reference = tiny.logps().detach()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in tiny.policy.parameters():
            weight += 0.2 * torch.randn_like(weight)
    before = tiny.logps().detach()
    found = {(file, arm): series for file, arm, series in stale(tiny, reference)}
    for name in RATIOS:
        assert found["stale", name]["bias"][0] < 1e-8
    moved = found["stale", "product of ratios"]
    assert max(moved["bias"]) < 1e-8 and moved["moved"][0] == 0 < moved["moved"][1]
    assert found["stale", "ratio per token"]["bias"][1] > 1e-3
    for name, exact in (("k1", False), ("k2", True), ("k3", False), ("corrected k3", True)):
        assert (found["stale_kl", name]["bias"][0] < 1e-8) is exact
    share, moves = before.sum(1).exp()[:, None], tiny.logps().detach() - before     # after 5
    distance = ((share * moves.pow(2)).sum() / (share * tiny.mask).sum()).sqrt()
    assert moved["moved"][1] < distance


def test_bound_that_moves_the_policy_itself_starts_from_the_same_policy_at_each_rate(monkeypatch):
    monkeypatch.setattr(estimators, "RATES", (1e-4, 3e-4, 1e-4))
    monkeypatch.setattr(estimators, "TUNED", {
        "free": RATIOS["ratio per token"], "product": RATIOS["product of ratios"],
        "tight": ("grpo", "token", {"epsilon_low": 1e-3, "epsilon_high": 1e-3})})
    tiny = Tiny(2, 2)
    before = tiny.logps().detach()
    found = dict(by_itself(tiny, before))
    assert torch.equal(tiny.logps(), before)
    for series in found.values():
        assert series["moved"][0] == series["moved"][2] < series["moved"][1]
    assert found["tight"]["moved"][0] < found["free"]["moved"][0] / 2
    assert max(found["product"]["bias"]) < 1e-8
    assert 1e-3 < found["free"]["bias"][0] < found["free"]["bias"][1]


def test_kl_is_that_of_each_prefix(tiny):
    """Against autograd of that KL, where how often the policy comes to a prefix is held fixed."""
    torch.manual_seed(0)
    whole = torch.randn(3, *tiny.mask.shape).double().log_softmax(0)    # a reference of no network
    prefixes = [tuple(ids[:2 + t]) for ids in tiny.ids.tolist() for t in range(LIMIT)]
    number = torch.tensor([sorted({*prefixes}).index(prefix) for prefix in prefixes])
    whole = whole.flatten(1)[:, number].view(3, *tiny.mask.shape)       # by prefix alone
    ref_logps = whole.gather(0, tiny.ids[None, :, 2:]).squeeze(0) * tiny.mask
    logps = tiny.logps()
    reach = logps.detach().cumsum(1).exp() / logps.detach().exp()       # pi(prefix)
    pi = tiny.policy(tiny.ids)[:, 1:-1].log_softmax(-1).permute(2, 0, 1)            # (3, n, R)
    kl = (pi.exp() * (pi - whole)).sum(0)
    first = torch.tensor([prefixes.index(prefix) == i for i, prefix in enumerate(prefixes)])
    counted = first.view_as(tiny.mask) * tiny.mask * reach / len(PROMPTS)
    truth = flat(torch.autograd.grad((counted * kl).sum(), list(tiny.policy.parameters())))
    weights = logps.detach().sum(1).exp()[:, None] / len(PROMPTS) * (logps.detach() - ref_logps)
    gradients, index = tiny.token_gradients()
    assert close(torch.einsum("nr,nrd->d", weights, gradients[index]), truth)


def test_parts_by_prompt_add_up_and_a_bootstrap_of_the_truth_with_itself_is_0(answers):
    rewards = answers.rewards[FOUR]
    parts = answers.by_prompt(rewards, 0)
    assert parts.shape[0] == len(PROMPTS) and close(parts.sum(0), answers.mean_gradient(rewards, 0))
    assert resampled([parts], [parts], draws=20) == pytest.approx([0, 0], abs=1e-3)
    least, most = resampled([answers.by_prompt(answers.length, 0)], [parts], draws=100)
    assert 0 < least < degrees([answers.mean_gradient(answers.length, 0)], [parts.sum(0)]) < most
