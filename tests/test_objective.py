"""The objective, against numbers by hand and an independent float64 loop over tokens."""
import math
from pathlib import Path

import pytest
import torch

import train_grpo
from model import MiniMindConfig, MiniMindForCausalLM
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


def test_advantages_divided_by_the_step_or_not_at_all():
    rewards = torch.tensor([1.0, 3.0, NAN, 5.0, 5.0, 8.0])                  # means 2 and 6; of all five 4.4
    std = math.sqrt(sum((r - 4.4) ** 2 for r in (1, 3, 5, 5, 8)) / 4)
    deviations = [-1, 1, 0, -1, -1, 2]
    assert group_advantages(rewards, 3, scale_rewards="none").tolist() == deviations
    assert group_advantages(rewards, 3, scale_rewards="batch").tolist() == pytest.approx([d / (std + 1e-4) for d in deviations])
    assert group_advantages(rewards, 3, scale_rewards="batch", batch_std=2.0).tolist() == pytest.approx([d / 2.0001 for d in deviations])
    with pytest.raises(ValueError, match="scale_rewards"):
        group_advantages(rewards, 3, scale_rewards="all")


def test_equal_rewards_teach_nothing_whatever_their_rounding():
    assert not group_advantages(torch.full((6,), 2.35), 6).any()


def test_mask_ends_with_the_first_eos_and_keeps_it():
    ids = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8], [5, 9, 2, 0]])
    assert completion_mask(ids, 2).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert completion_mask(ids, [2, 9]).tolist()[3] == [1, 1, 0, 0]


def loop_loss(logps, old_logps, advantages, mask, ref_logps, entropy, *, beta=0.0, kl_type="k3", epsilon_low=0.2, epsilon_high=0.2,
              delta=math.inf, loss_type="grpo", level="token", L=None, entropy_coef=0.0):
    """The same formulas, a token at a time, in Python's own float64."""
    rows = [[t for t in range(len(mask[i])) if mask[i][t]] for i in range(len(mask))]
    num_tokens, total = sum(map(len, rows)), 0.0
    for i, tokens in enumerate(rows):
        log_ratios = [logps[i][t] - old_logps[i][t] for t in tokens]
        weight = {"grpo": 1 / len(tokens) / len(rows), "dr_grpo": 1 / L / len(rows) if L else None,
                  "r1": 1 / len(rows)}.get(loss_type, 1 / num_tokens)
        for t, log_ratio in zip(tokens, log_ratios):
            A = advantages[i][t] if isinstance(advantages[i], list) else advantages[i]
            if level == "sequence":
                log_ratio = sum(log_ratios) / len(tokens)
            if loss_type == "r1":
                log_ratio = sum(log_ratios)
            ratio = math.exp(log_ratio)
            if loss_type == "cispo":
                fixed = cispo_weights[i][t] if cispo_weights else min(ratio, epsilon_high)
                policy = -fixed * A * logps[i][t]
            else:
                policy = -min(min(ratio, delta) * A, max(min(ratio, 1 + epsilon_high), 1 - epsilon_low) * A)
            x = ref_logps[i][t] - logps[i][t]
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1, "abs": abs(x)}[kl_type]
            total += weight * (policy / (len(tokens) if loss_type == "r1" else 1) + beta * kl) - entropy_coef * entropy[i][t] / num_tokens
    return total


cispo_weights = []          # what CISPO holds fixed while its gradient is taken


def random_case(seed, N=7, R=9):
    """logps, old_logps, advantages, mask, ref_logps, entropy: EOS at once, full rows, ratios from 1/50 to 50, both signs of A."""
    rng = torch.Generator().manual_seed(seed)
    logps, old_logps, ref_logps = (-2 + torch.randn(N, R, generator=rng, dtype=torch.float64) for _ in range(3))
    lengths = torch.tensor([1, R, 4, 2, R, 6, 3])
    return (logps, old_logps, torch.randn(N, generator=rng, dtype=torch.float64), (torch.arange(R) < lengths[:, None]).int(),
            ref_logps, torch.rand(N, R, generator=rng, dtype=torch.float64))


FAMILY = [
    {},
    {"epsilon_low": 0.1, "epsilon_high": 0.4, "beta": 0.3},
    {"delta": 1.5},
    {"loss_type": "bnpo", "beta": 0.3, "kl_type": "k1"},
    {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1},
    {"loss_type": "dr_grpo", "max_completion_length": 20, "beta": 0.3, "kl_type": "k2", "entropy_coef": 0.1},
    {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.3, "kl_type": "abs"},
    {"loss_type": "r1", "beta": 0.3},
    {"importance_sampling_level": "sequence", "beta": 0.3},
    {"importance_sampling_level": "sequence", "loss_type": "dapo", "delta": 1.5},
    {"importance_sampling_level": "sequence", "loss_type": "dr_grpo", "max_completion_length": 20},
    {"importance_sampling_level": "sequence", "loss_type": "cispo", "epsilon_high": 1.1},
]


@pytest.mark.parametrize("options", FAMILY, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradient_equal_a_loop_over_tokens(options, per_token):
    logps, old_logps, advantages, mask, ref_logps, entropy = random_case(len(str(options)))
    if per_token:
        advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss, _ = grpo_loss(logps.requires_grad_(), old_logps, advantages, mask, ref_logps=ref_logps if "beta" in options else None,
                        entropy=entropy.requires_grad_(), **options)
    loss.backward()
    renamed = {{"importance_sampling_level": "level", "max_completion_length": "L"}.get(name, name): value for name, value in options.items()}
    numbers = [x.tolist() for x in (logps.detach(), old_logps, advantages, mask, ref_logps, entropy.detach())]
    assert loss.item() == pytest.approx(loop_loss(*numbers, **renamed), rel=1e-9)
    if options.get("loss_type") == "cispo":
        level, cap = options.get("importance_sampling_level"), options["epsilon_high"]
        d = (logps - old_logps).detach() * mask
        d = (d.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand_as(d) if level == "sequence" else d
        cispo_weights[:] = d.exp().clamp(max=cap).tolist()
    for i, t in [(0, 0), (1, 3), (2, 3), (2, 4), (4, 8), (6, 1)]:                           # (2, 4) is masked out
        for which, gradient in ((0, logps.grad), (5, entropy.grad if "entropy_coef" in options else torch.zeros(7, 9))):
            bumped = []
            for bump in (1e-6, -1e-6):
                values = [[row[:] for row in x] if k == which else x for k, x in enumerate(numbers)]
                values[which][i][t] += bump
                bumped.append(loop_loss(*values, **renamed))
            assert gradient[i, t].item() == pytest.approx((bumped[0] - bumped[1]) / 2e-6, abs=1e-7)
    cispo_weights.clear()


@pytest.mark.parametrize("options", FAMILY, ids=str)
def test_parts_of_a_step_add_up_to_the_step(options):
    logps, old_logps, advantages, mask, ref_logps, entropy = random_case(3)
    mask[2] = 0                                                             # a completion that is left out still counts as one
    tensors = {"ref_logps": ref_logps, "entropy": entropy}
    whole, whole_metrics = grpo_loss(logps, old_logps, advantages, mask, **tensors, **options)
    parts = [grpo_loss(logps[rows], old_logps[rows], advantages[rows], mask[rows], **{name: x[rows] for name, x in tensors.items()},
                       num_sequences=7, num_tokens=int(mask.sum()), **options) for rows in (slice(0, 1), slice(1, 4), slice(4, 7))]
    assert sum(loss for loss, _ in parts).item() == pytest.approx(whole.item(), rel=1e-12)
    for name, value in whole_metrics.items():
        assert sum(metrics[name] for _, metrics in parts).item() == pytest.approx(value.item(), rel=1e-6)


def test_the_first_ratio_is_1_and_its_gradient_is_the_policy_gradient():
    logps, _, advantages, mask, *_ = random_case(4)
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
    assert metrics == {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5}


def test_clipped_ratios_of_sequences_are_counted_by_sequence():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])                       # the last is left out, and counts
    logps = torch.tensor([0.5, 1.0, 1.5, 1.5]).log()[:, None].expand(4, 3) * mask
    _, metrics = grpo_loss(logps, torch.zeros(4, 3), torch.tensor([-1.0, 1.0, 1.0, 1.0]), mask, importance_sampling_level="sequence")
    assert metrics == {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5}


def test_clipped_tokens_are_counted_by_token_also_where_each_completion_has_only_one():
    mask, tokens = torch.ones(2, 1), {"num_sequences": 4, "num_tokens": 8}
    assert grpo_loss(torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2), mask, **tokens)[1]["clip_ratio/high_mean"] == 2 / 8


def test_the_four_estimates_of_the_kl():
    logps, ref_logps = torch.tensor([-1.0]), torch.tensor([-1.5])           # x = -0.5
    for kl_type, value in (("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) + 0.5 - 1), ("abs", 0.5)):
        assert kl_penalty(logps, ref_logps, kl_type=kl_type).item() == pytest.approx(value, abs=1e-6)
    assert kl_penalty(torch.tensor([-200.0]), torch.tensor([0.0])).isfinite()               # e^200 is not
    drifted = torch.tensor([0.0], requires_grad=True)
    kl_penalty(drifted, torch.tensor([-50.0])).backward()
    assert drifted.grad.item() == pytest.approx(1.0)                        # the pull back is still there, 50 nats away


def test_cispo_caps_from_above_only_and_never_loses_a_gradient():
    logps = torch.tensor([8.0, 0.1]).log()[:, None].requires_grad_()
    loss, metrics = grpo_loss(logps, torch.zeros(2, 1), torch.tensor([1.0, 1.0]), torch.ones(2, 1), loss_type="cispo", epsilon_high=5.0)
    loss.backward()
    assert logps.grad[:, 0].tolist() == pytest.approx([-5 / 2, -0.1 / 2])
    assert metrics["clip_ratio/high_mean"] == 0.5 and metrics["clip_ratio/low_mean"] == 0


@pytest.mark.parametrize("options", [{"loss_type": "ppo"}, {"loss_type": "dr_grpo"}, {"importance_sampling_level": "word"}, {"kl_type": "k4", "beta": 1}])
def test_a_choice_that_is_not_there_is_refused(options):
    logps = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="choose|give"):
        grpo_loss(logps, logps, torch.ones(2), torch.ones(2, 3), ref_logps=logps, **options)


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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("prompt_length", [1, 4])
def test_token_logps_read_nothing_twice_and_no_padding_and_have_the_gradients_of_whole_sequences(prompt_length, checkpointing):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(vocab_size=9, hidden_size=16, intermediate_size=24, num_hidden_layers=3, head_dim=4,
                                               initializer_range=0.3)).double()
    prompts = torch.tensor([[0, 0, 3, 4], [5, 6, 7, 8], [0, 1, 5, 4], [5, 6, 7, 4]])[:, 4 - prompt_length:]
    prompt_ids = prompts[[0, 1, 0, 2, 3, 1]]                    # the last two begin alike
    mask = torch.arange(5) < torch.tensor([[2], [5], [1], [5], [3], [4]])
    ids, attention_mask = torch.cat((prompt_ids, torch.randint(1, 9, (6, 5)) * mask), 1), torch.cat((prompt_ids > 0, mask), 1).long()
    ids, attention_mask, mask = (torch.cat((x, x[3:4])) for x in (ids, attention_mask, mask))       # one completion twice
    weight = torch.randn(2, 7, 5) * mask
    tokens = []                                                 # that go through the second layer, pass by pass
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: tokens.append(len(inputs[0])))

    def gradients(logps, entropy):
        model.zero_grad()
        (weight[0] * logps + weight[1] * entropy).sum().backward()
        return [parameter.grad for parameter in model.parameters()]
    log_probs = model(ids, attention_mask)[:, prompt_length - 1:-1].log_softmax(-1)
    expected = log_probs.gather(-1, ids[:, prompt_length:, None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)
    whole = gradients(*expected)
    tokens.clear()
    model.model.gradient_checkpointing = checkpointing
    found = token_logps(model, ids, attention_mask, 5, with_entropy=True)
    assert tokens == ([1 + 3 + 2] if prompt_length > 1 else []) + [int(mask[:6].sum())]     # [5, 6, 7] once
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, (theirs * mask).float(), rtol=0, atol=1e-6)
    for ours, theirs in zip(gradients(*found), whole):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max().item())
    assert len(tokens) == (2 if prompt_length > 1 else 1) * (1 + checkpointing)


@pytest.mark.parametrize("longer", [2, 5])
def test_token_logps_of_a_prompt_of_one_token_beside_a_longer_one(tiny_policy, longer):
    _, model = tiny_policy
    ids = torch.tensor([[0] * (longer - 1) + [3, 5, 6], [4, 7, 2, 9, 8][:longer] + [5, 6]])
    mask = (ids != 0).int()
    logps = token_logps(model, ids, mask, 2)
    logps.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for row, P in enumerate((1, longer)):
        torch.testing.assert_close(logps[row:row + 1], token_logps(model, ids[row:row + 1, -P - 2:], mask[row:row + 1, -P - 2:], 2))
    model.zero_grad()


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

