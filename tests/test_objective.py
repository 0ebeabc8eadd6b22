"""The objective and its log-probabilities: numbers by hand, and an independent float64 loop."""
import doctest
import itertools
import math
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch

import train_grpo
from errors import UserError
from model import fast
from reward.baselines import estimate
from run.extensions import losses
from run.extensions.advantages import gdpo
from run.extensions.losses import LOSS_TYPES
from sampling import one_batch, wide
from steps import arguments, loop_loss, random_case, state_of
from train_grpo import (
    World,
    completion_mask,
    family_loss,
    group_advantages,
    grpo_loss,
    kl_penalty,
)

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_docstrings_of_the_script_are_right():
    assert doctest.testmod(train_grpo) == (0, 1)


# Groups of three; the second has two rewards, the third one, with nothing to compare it to.
REWARDS = torch.tensor([1.0, 2, 6, 4, NAN, 1, NAN, NAN, 7, 5, 5, NAN])
DEVIATIONS = {
    "grpo": [-2, -1, 3, 1.5, 0, -1.5, 0, 0, 0, 0, 0, 0],                # from the group's mean
    "rloo": [-3, -1.5, 4.5, 3, 0, -3, 0, 0, 0, 0, 0, 0],                # from that of the others
    "grpo_passk": [0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 0, 0],                 # of the best, from the next
}
# Squared deviations add up to 14 and 4.5.
STDS = torch.tensor([math.sqrt(14 / 2)] * 3 + [math.sqrt(4.5)] * 3 + [0.0] * 6)
DIVISORS = [("group", None, STDS + 1e-4), ("none", None, 1.0), ("batch", 2.0, 2.0001),
            ("batch", None, stdev([1, 2, 6, 4, 1, 7, 5, 5]) + 1e-4)]    # scale, batch_std, divisor


@pytest.mark.parametrize("estimator, deviations", DEVIATIONS.items())
def test_advantages_stay_within_their_group_and_leave_out_the_unjudged(estimator, deviations):
    for scale, batch_std, divisor in DIVISORS:
        advantages = estimate(REWARDS, 3, baseline=estimator, scale=scale, batch_std=batch_std)
        torch.testing.assert_close(advantages, torch.tensor(deviations) / divisor)
        if (estimator, scale) == ("grpo", "group"):
            assert torch.equal(group_advantages(REWARDS, 3), advantages)


def test_maxrl_divides_by_the_mean_of_rewards_from_0_to_1():
    rewards = torch.tensor([1.0, 0, 0, 0, NAN, 0, 1, 1, 0, 0, 0, 0]).double()
    advantages = estimate(rewards, 4, scale="mean")     # means 1/4, 2/3, 0
    expected = torch.tensor([3, -1, -1, -1, 0, -1, 0.5, 0.5, 0, 0, 0, 0]).double()
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
    for reward in (-0.1, 1.5):
        rewards[0] = reward
        with pytest.raises(UserError, match=rf"--scale_rewards mean .* {reward}; pass"):
            estimate(rewards, 4, scale="mean")


def test_gdpo_normalises_each_function_in_its_group_and_then_their_sum_over_the_step():
    def normalised(values):
        judged = [value for value in values if value == value]
        mean, std = fmean(judged), stdev(judged) if len(judged) > 1 else 0.0
        return [(value - mean) / (std + 1e-4) if value == value else 0.0 for value in values]

    each = {"a": [1.0, 0, 0, 1, 1, 0, NAN, 0], "b": [30.0, 10, NAN, 20, 7, 7, NAN, 7],
            "c": [NAN, NAN, NAN, 0.5, 0.1, 0.2, NAN, 0.6]}
    weights = [1.0, 0.5, 2.0]
    total = [0.0] * 8
    for values, weight in zip(each.values(), weights):
        for i, value in enumerate(normalised(values[:4]) + normalised(values[4:])):
            total[i] += weight * value
    total[6] = NAN                                              # nobody judged it
    per_func = {name: torch.tensor(each[name], dtype=torch.float64) for name in each}
    rollout = SimpleNamespace(
        rewards=torch.stack([*per_func.values()]).nanmean(0), rewards_per_func=per_func,
        loss_mask=torch.ones(8, 1))
    args = SimpleNamespace(num_generations=4, reward_weights=weights)
    found = gdpo(rollout, args, World("cpu"))
    expected = torch.tensor(normalised(total), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", DEVIATIONS)
def test_equal_rewards_teach_nothing_whatever_their_rounding(estimator):
    rewards = torch.full((6,), 2.35)
    assert not estimate(rewards, 6, baseline=estimator).any()
    assert not group_advantages(rewards, 6).any()


def test_mask_ends_with_the_first_eos_and_keeps_it():
    ids = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8], [5, 9, 2, 0]])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert completion_mask(ids, 2).tolist() == expected
    assert completion_mask(ids, [2, 9]).tolist()[3] == [1, 1, 0, 0]


SEQUENCE = {"importance_sampling_level": "sequence"}
CORRECTED = {"use_bias_correction_kl": True}
DR_GRPO = {"loss_type": "dr_grpo", "max_completion_length": 20}
FAMILY = [
    {},
    {"epsilon_low": 0.1, "epsilon_high": 0.4, "beta": 0.3},
    {"delta": 1.5},
    {"loss_type": "bnpo", "beta": 0.3, "kl_type": "k1"},
    {"loss_type": "dapo", "epsilon_high": 0.28},
    DR_GRPO | {"beta": 0.3, "kl_type": "k2"},
    {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.3, "kl_type": "abs"},
    {"loss_type": "dppo", "epsilon_low": 0.1, "epsilon_high": 0.2, "beta": 0.3},
    {"loss_type": "r1", "beta": 0.3},
    SEQUENCE | {"beta": 0.3},
    SEQUENCE | {"loss_type": "dapo", "delta": 1.5},
    SEQUENCE | {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "sapo", "beta": 0.3, "kl_type": "k3+"},
    {"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.3, "beta": 0.3} | CORRECTED,
    SEQUENCE | {"loss_type": "luspo", "beta": 0.3} | CORRECTED,
    {"beta": 0.3} | CORRECTED,
    {"loss_type": "r1", "beta": 0.3} | CORRECTED,
    {"loss_type": "sapo", "loss_options": ["tau_good=0.7", "tau_bad=2"]},
    {"loss_type": "dppo", "loss_options": ["largest_weight=1.5"]},
]


@pytest.mark.parametrize("options", FAMILY, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradient_equal_a_loop_over_tokens(options, per_token):
    case = random_case(len(str(options)))
    logps, old_logps, advantages, mask, ref_logps = case
    if per_token:
        rng = torch.Generator().manual_seed(1)
        advantages = torch.randn(mask.shape, generator=rng, dtype=torch.float64)
        if options.get("loss_type") == "r1":
            with pytest.raises(ValueError, match=r"r1 has one ratio per completion.*\(N,\)"):
                family_loss(logps, old_logps, advantages, mask, ref_logps=ref_logps, **options)
            return
    loss, metrics = family_loss(
        logps.requires_grad_(), old_logps, advantages, mask, ref_logps=ref_logps, **options)
    loss.backward()
    short = {"importance_sampling_level": "level", "max_completion_length": "L",
             "use_bias_correction_kl": "corrected"}
    numbers = dict(option.split("=") for option in options.get("loss_options", ()))
    inputs = logps.detach().requires_grad_(), old_logps, advantages, mask, ref_logps
    expected, kl = loop_loss(*inputs, **{
        short.get(name, name): options[name] for name in options if name != "loss_options"},
        **{name: float(number) for name, number in numbers.items()})
    expected.backward()
    exactly = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(loss, expected, **exactly)
    torch.testing.assert_close(metrics["kl"], kl, **exactly)        # without beta it is only seen
    torch.testing.assert_close(logps.grad, inputs[0].grad, **exactly)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_the_general_loss_is_the_scripts_on_the_default_to_the_bit(per_token, reference):
    for seed, dtype in itertools.product(range(20), (torch.float32, torch.float64)):
        far = (1, 40)[seed % 2]     # with ratios that are held at e^80, and KLs beyond x = 20
        logps, old_logps, A, mask, ref_logps = (x.to(dtype) for x in random_case(seed))
        A, found = A[:, None] * logps if per_token else A, []
        for loss_of in (grpo_loss, family_loss):
            leaf = logps.clone().requires_grad_()
            loss, metrics = loss_of(
                leaf, far * old_logps, A, mask.int(), ref_logps=far * ref_logps if reference else
                None, beta=0.3 * reference, epsilon_low=0.1, epsilon_high=0.4, num_sequences=11,
                num_tokens=40)
            loss.backward()
            found.append({"loss": loss, "gradient": leaf.grad} | metrics)
        ours, theirs = found
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (seed, name)


@pytest.mark.parametrize("drift", [1e-4, 3e-4, 1e-3, 1e-2])
def test_k3_keeps_its_digits_in_float32_where_the_policies_are_close(drift):
    x = drift * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    exact = x.double()
    series = sum(exact ** n / math.factorial(n) for n in range(2, 9)).mean()
    found = kl_penalty(torch.zeros(10_000), x)
    assert found.min() >= 0
    assert found.double().mean().item() == pytest.approx(series.item(), rel=1e-3)


def clip_ratios(low, high):
    return {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high}


@pytest.mark.parametrize("loss_type", [None, *LOSS_TYPES, "r1"])
def test_a_log_ratio_of_100_and_infinities_under_the_mask_do_no_harm(loss_type):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    loss_of, common, each = grpo_loss, {"epsilon_high": 5.0 if loss_type == "cispo" else 0.2}, [{}]
    if loss_type:                               # None: the script's
        loss_of, common = family_loss, common | {"loss_type": loss_type, "max_completion_length": 9}
        each = [SEQUENCE, *({"kl_type": name} for name in losses.KL_TYPES),
                *({"kl_type": name} | CORRECTED for name in losses.CORRECTED)]
    for infinite, beta, options in itertools.product(
            ((), (0,), (1,), (2,), (0, 1, 2)), (0.0, 0.1), each):
        logps, old_logps, ref_logps = (
            torch.full((3, 4), value).masked_fill(mask == 0, -math.inf if i in infinite else 0)
            for i, value in enumerate((-0.1, -100.1, -1.0)))
        loss, metrics = loss_of(
            logps.requires_grad_(), old_logps, torch.ones(3), mask, epsilon_low=0.2, beta=beta,
            ref_logps=ref_logps if beta else None, num_sequences=3, num_tokens=5,
            **common, **options)
        loss.backward()
        for numbers in (loss, logps.grad, *metrics.values()):
            assert numbers.isfinite().all(), (infinite, beta, options)
        if not beta:        # CISPO caps the weight of log pi, but no token loses its gradient
            assert logps.grad.equal((-1.0 if loss_type == "cispo" else 0.0) * mask)


@pytest.mark.parametrize("options, low, high", [
    ({}, 3 / 6, 2 / 6),
    (SEQUENCE, 1 / 4, 1 / 4),                   # of all completions
    ({"loss_type": "r1"}, 1 / 4, 1 / 4),
    (SEQUENCE | {"num_sequences": 8}, 1 / 8, 1 / 8),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, 0, 2 / 6),            # a cap from above only
    ({"loss_type": "dppo", "epsilon_low": 0.4, "epsilon_high": 0.6}, 3 / 6, 0),     # pi_old is 1
    ({"loss_type": "sapo"}, 0, 0),
    ({"loss_type": "gmpo", "epsilon_high": 0.41, "epsilon_low": 0.69}, 3 / 6, 0),   # in log space
    ({"num_sequences": 8, "num_tokens": 12}, 3 / 12, 2 / 12),           # of a step with more parts
], ids=["token", "sequence", "one action", "part by completion", "cispo", "dppo", "sapo", "gmpo",
        "part"])
def test_clipped_tokens_count_by_token_and_clipped_completions_by_completion(options, low, high):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])   # the last one is left out
    logps = torch.tensor([0.5, 1.0, 1.5, 1.5]).log()[:, None].expand(4, 3) * mask
    advantages = torch.tensor([-1.0, 1.0, 1.0, 1.0])
    _, metrics = family_loss(logps, torch.zeros(4, 3), advantages, mask, **options)
    assert metrics == pytest.approx(clip_ratios(low, high))
    # What has no advantage is not clipped.
    for far in (logps - 2, logps + 2):
        metrics = family_loss(far, torch.zeros(4, 3), torch.zeros(4), mask, **options)[1]
        assert metrics == pytest.approx(clip_ratios(0, 0))


def fades(ratio, advantages, logps, mask, **options):
    """A bound that calls tokens low or high although they keep a gradient."""
    return -ratio * advantages, {"low": ratio < 0.9, "high": ratio > 1.1}


@pytest.mark.parametrize("options, rises, falls", [     # tokens of A = 1, of A = -1
    ({"loss_type": "bnpo"}, "100", "010"), ({"loss_type": "bnpo", "delta": 1.3}, "100", "110"),
    (SEQUENCE | {"epsilon_high": 0.003}, "111", "000"), ({"loss_type": "sapo"}, "000", "000"),
    ({"loss_type": "cispo", "epsilon_high": 1.2}, "000", "000"),        # a cap removes nothing
    ({"loss_type": "dppo", "epsilon_low": 0.1, "epsilon_high": 0.3}, "000", "010"),
    ({"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}, "100", "010"),
    ({"loss_type": "test_objective:fades"}, "000", "000")], ids=str)
def test_bounded_marks_the_tokens_that_lose_their_gradient(options, rises, falls):
    d = torch.tensor([0.5, -0.5, 0.01, 5.0]).expand(3, 4)       # the last is padding
    logps = (math.log(0.4) + d).requires_grad_()        # pi - pi_old: 0.26, -0.16, 0.004
    mask, marks = torch.tensor([[1, 1, 1, 0]]).expand(3, 4), torch.zeros(3, 4).int()
    given = (logps - d).detach(), torch.tensor([1.0, -1, 0]), mask
    loss, metrics = family_loss(
        logps, *given, beta=0.1, ref_logps=given[0] - 1, bounded=marks, **options)
    assert metrics.pop("clip_ratio/delta_mean", 0) == pytest.approx(("delta" in options) / 9)
    assert ["".join(map(str, row)) for row in marks.tolist()] == [f"{rises}0", f"{falls}0", "0000"]
    marked, = torch.autograd.grad(loss, logps)
    loss, _ = family_loss(logps, *given, beta=0.1, ref_logps=given[0] - 1, **options)
    assert torch.equal(marked, *torch.autograd.grad(loss, logps))       # marks change no gradient


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dppo", "gmpo", "r1"])
def test_completions_that_are_all_masked_out_have_loss_0(loss_type):
    logps = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = family_loss(logps, logps.detach(), torch.ones(2), torch.zeros(2, 3).int(),
                                loss_type=loss_type, ref_logps=logps.detach(), beta=0.1)
    loss.backward()
    assert loss == 0 and not logps.grad.any() and not any(metrics.values())


def test_k3_has_the_kl_as_its_mean_and_the_gradient_of_the_kl_reversed():
    logits, reference = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double() * 2
    logps, ref_logps = logits.requires_grad_().log_softmax(0), reference.log_softmax(0)
    mean = (logps.exp().detach() * kl_penalty(logps, ref_logps)).sum()      # over all that pi draws
    kl, reversed_kl = ((p.exp() * (p - q)).sum() for p, q in (
        (logps, ref_logps), (ref_logps, logps)))
    torch.testing.assert_close(mean, kl, rtol=1e-12, atol=1e-12)
    found, expected = (torch.autograd.grad(x, logits, retain_graph=True)[0]
                       for x in (mean, reversed_kl))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_k3_overflows_nowhere_and_still_pulls_back_50_nats_away():
    far = torch.tensor([-200.0], dtype=torch.float64, requires_grad=True)       # e^200 is infinite
    kl = kl_penalty(far, torch.tensor([0.0]))
    assert kl.item() == pytest.approx(math.exp(20) * (1 + 180) - 200 - 1, rel=1e-12)
    kl.backward()
    assert far.grad.item() == pytest.approx(1 - math.exp(20), rel=1e-12)
    drifted = torch.tensor([0.0], requires_grad=True)
    kl_penalty(drifted, torch.tensor([-50.0])).backward()
    assert drifted.grad.item() == pytest.approx(1.0)


OWN_LOSSES = """
def quarter(ratio, advantages, logps, mask, *, epsilon_low, scale=0.25, **unused):
    nowhere = ratio < 0
    return -scale * ratio * advantages, {"low": nowhere, "high": ratio > 1 + epsilon_low}

def constant(logps, old_logps, advantages, mask, *, num_sequences=None, **options):
    return logps.sum() * 0 + num_sequences, {"seen": mask.sum()}
"""


def test_loss_of_ones_own_as_a_bound_and_as_a_whole(own_module, monkeypatch):
    own_module("own_losses", OWN_LOSSES)
    logps, old_logps, advantages, mask, *_ = random_case(1)
    names = [f"own_losses:{name}" for name in ("quarter", "constant")]
    assert [train_grpo.parse_args(["--loss_type", name]).loss_type for name in names] == names
    found, metrics = family_loss(logps, old_logps, advantages, mask, loss_type=names[0])
    rows = [-0.25 * a * (row.exp() * of_row).sum() / of_row.sum() for a, row, of_row in zip(
        advantages, logps - old_logps, mask) if of_row.any()]
    assert found.item() == pytest.approx(sum(rows).item() / len(mask), rel=1e-12)
    high = ((logps - old_logps).exp() > 1.2) * mask
    assert metrics["clip_ratio/high_mean"].item() == pytest.approx((high.sum() / mask.sum()).item())
    loss, metrics = family_loss(logps, old_logps, advantages, mask, loss_type=names[1],
                                num_sequences=7)
    assert loss == 7 and metrics == {"seen": mask.sum()}


@pytest.mark.parametrize("loss_type, option", [
    ("sapo", "tau_bad=3"), ("dppo", "largest_weight=2"), ("own_losses:quarter", "scale=0.5")])
def test_loss_options_are_numbers_of_the_loss(loss_type, option, own_module):
    own_module("own_losses", OWN_LOSSES)
    *case, _ = random_case(1)

    def loss_by(option):
        args = arguments("--loss_type", loss_type, "--loss_options", option)
        return state_of(None, args, bounded=None).grpo_loss(*case)[0]

    found = loss_by(option)
    assert found == family_loss(*case, loss_type=loss_type, loss_options=[option])[0]
    assert found != family_loss(*case, loss_type=loss_type)[0]
    with pytest.raises(UserError, match=f"width.*{option.partition('=')[0]}"):
        loss_by("width=0.2")


def test_cells_with_the_objective_and_the_log_probabilities_run_after_import_torch():
    source = Path(train_grpo.__file__).read_text(encoding="utf-8")
    source = source[source.index("# --- the objective"):source.index("# --- rewards")]
    names, logits = {}, torch.randn(4, 4, 9)
    exec("import torch\n" + source, names)
    ids, options = torch.tensor([[7, 5, 2, 2]] * 4), {"epsilon_low": 0.2, "epsilon_high": 0.2}
    advantages = names["group_advantages"](torch.tensor([0.1, 1.1, 1.0, 0.1]), 4)
    mask = names["completion_mask"](ids[:, 1:], 2)
    logps = names["token_logps"](lambda *_, **keep: logits.requires_grad_(), ids, ids.ne(0), 3)
    logps.retain_grad()
    names["grpo_loss"](logps, logps.detach(), advantages, mask, ref_logps=logps.detach(), beta=0.1,
                       num_sequences=4, num_tokens=8, **options)[0].backward()
    assert (logps.grad[:, :2] != 0).all() and (logps.grad[:, 2] == 0).all()


@pytest.fixture(params=["plain", "fast"])
def token_logps(request):
    """Each of the two that main chooses between."""
    return {"plain": train_grpo.token_logps, "fast": fast.token_logps}[request.param]


BATCHES = {     # (prompt, completion) of each sequence
    "one sequence": [([3, 4, 5], [6, 7, 8])],
    "nothing shared, padding on both sides": [([3, 4], [1, 2, 5, 2]), ([8, 6, 1], [3])],
    "a prompt of one token beside longer ones": [
        ([5], [6, 7]), ([5, 6, 7, 8], [1]), ([5, 6], [7, 8])],
}
for seed in range(3):       # two letters: equal prompts and completions, and ones that begin others
    letters = torch.Generator().manual_seed(seed)
    BATCHES[f"random {seed}"] = [
        tuple(torch.randint(1, 3, (length,), generator=letters).tolist() for length in lengths)
        for lengths in torch.randint(1, 6, (14, 2), generator=letters).tolist()]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_token_logps_and_their_gradients_are_those_of_whole_sequences(
        token_logps, batch, checkpointing):
    model = wide(vocab_size=9, hidden_size=16, intermediate_size=24, head_dim=4,
                 initializer_range=0.3).double()        # rounding then hides no mistake
    ids, attention_mask, R = one_batch(batch)
    weight = torch.randn(2, len(batch), R)
    expected, objective = torch.zeros(2, len(batch), R, dtype=torch.float64), 0.0
    for i, (prompt, completion) in enumerate(batch):        # each on its own: no padding
        sequence, n = torch.tensor([prompt + completion]), len(completion)
        logits = model(sequence)[0, len(prompt) - 1:-1]                             # (n, V)
        distributions = (logits / 0.7).log_softmax(-1)
        logps = distributions.gather(-1, sequence[0, -n:, None])[:, 0]
        entropy = -(distributions.exp() * distributions).sum(-1)
        expected[:, i, :n] = torch.stack((logps, entropy)).detach()
        objective += (weight[0, i, :n] * logps + weight[1, i, :n] * entropy).sum()
    whole = torch.autograd.grad(objective, [*model.parameters()])
    model.model.gradient_checkpointing = checkpointing
    found = torch.stack(token_logps(
        model, ids, attention_mask, R, temperature=0.7, with_entropy=True))
    torch.testing.assert_close(found, expected.float(), rtol=0, atol=1e-6)
    alone = token_logps(model, ids, attention_mask, R, temperature=0.7)
    torch.testing.assert_close(alone, found[0])
    found = torch.autograd.grad((weight * found).sum(), [*model.parameters()])
    for ours, theirs in zip(found, whole):
        atol = 2e-6 * theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
