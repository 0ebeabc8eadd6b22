"""What stays exact where matrix products are in bfloat16, and weights for a sampler that is not."""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train_grpo
from model import fast, load_pretrained
from model.model import Head
from run.extensions.correction import (
    CORRECTIONS,
    SamplerCorrection,
    near_sampler,
    sampler_weights,
)
from run.rollout import MicroBatch
from steps import arguments, gradient, loop_loss, random_case, state_of
from support import POLICY, SMALL, jsonl
from train_grpo import family_loss, token_logps

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_logits_are_products_in_float32_under_autocast_too(stored):
    model = load_pretrained(POLICY, dtype=torch.float32)
    model.lm_head.weight.data = model.lm_head.weight.data.to(stored)
    ids, mask = torch.randint(3, 280, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    read = []
    model.model.norm.register_forward_hook(lambda norm, inputs, hidden: read.append(hidden))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(ids, mask)
        decoding = fast.shared_rows.Decoding(model, ids, mask, 2, 4)
        sampled = decoding.step(ids[:, 0])
        fast_logps = fast.token_logps(model, ids, mask, 4)
    with torch.no_grad():       # the hook has seen these hidden states: the second is the prompts'
        of_plain, _, of_sampled, of_nodes = (
            F.linear(hidden.float(), model.lm_head.weight.float()) for hidden in read)
    assert torch.equal(plain, of_plain) and torch.equal(sampled, of_sampled)
    assert torch.isin(fast_logps, of_nodes.log_softmax(-1)).all()


def test_the_head_in_chunks_is_float32_with_its_gradients_too(monkeypatch):
    head, row = Head(64, 500, bias=False), torch.arange(40).repeat(2)
    hidden, tokens = torch.randn(40, 64, requires_grad=True), torch.randint(500, (80,))
    found = []
    for chunk in (40, 7):
        monkeypatch.setattr(fast.reading, "CHUNK_LOGITS", 0)
        monkeypatch.setattr(fast.reading, "CHUNK_TOKENS", chunk)
        with torch.autocast("cpu", torch.bfloat16, enabled=chunk == 7):
            logps, entropy = fast.reading.log_probs(head, hidden, row, tokens, temperature=0.7,
                                            with_entropy=True)
            gradients = torch.autograd.grad((logps * torch.arange(80)).sum() + entropy.sum(),
                                            (hidden, head.weight))
        found.append((logps, entropy, *gradients))
    for whole, in_chunks in zip(*found, strict=True):
        assert (whole - in_chunks).abs().max() <= 1e-5 * whole.abs().max() > 0


# --- the first ratio ------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [
    "--sampler plain --supervision process --entropy_coef 0.1 --loss_type dapo",
    "--lora_rank 4 --gradient_checkpointing --mask_truncated_completions --beta 0 "
    "--max_gen_len 40",
    "--importance_sampling_level sequence --sampler_correction token_truncate --kl_in_reward",
])
def test_ratios_are_exactly_1_while_the_policy_has_not_moved(
        flags, tmp_path, own_module, monkeypatch):
    own_module("uneven", "def reward(completion_ids, **columns):\n"
               "    return [float(sum(ids) % 5) for ids in completion_ids]\n")
    calls, compute_loss = [], train_grpo.GRPO.compute_loss

    def spy(state, part, logps, entropy):
        calls.append((logps - part.old_logps)[part.loss_mask.bool()].abs().max().item())
        return compute_loss(state, part, logps, entropy)

    monkeypatch.setattr(train_grpo.GRPO, "compute_loss", spy)
    monkeypatch.setattr(train_grpo, "lr_at", lambda *args, **options: 0.0)
    train_grpo.main([*SMALL, *"""--dtype bfloat16 --micro_batch_size 2 --max_steps 1 --batch_size 2
        --num_iterations 2 --num_minibatches 3 --max_gen_len 20 --run_name still --eval_interval 0
        --reward_funcs uneven:reward --out_dir""".split(), str(tmp_path), *flags.split()])
    assert len(calls) >= 6 and max(calls) == 0
    (metrics,) = jsonl(tmp_path / "still/metrics.jsonl")
    assert metrics["ppo_kl"] == 0 and metrics["timing_s/old_logps"] > 0


def test_the_parts_of_a_step_by_hand(six, policy):
    six.old_logps, six.ref_logps = None, None
    six.advantages = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0, 6.0])

    def found(**flags):
        """The parts that the losses are computed of."""
        parts = []
        state = state_of(policy, arguments(num_minibatches=2, micro_batch_size=2, **flags),
                         optimizer=torch.optim.SGD(policy.parameters(), lr=0.0))
        compute_loss = state.compute_loss
        state.compute_loss = lambda part, *read: parts.append(part) or compute_loss(part, *read)
        state.update_policy(six)
        return parts

    def numbers(parts):
        return [(part.num_sequences, part.num_tokens, part.advantages.tolist()) for part in parts]

    # Lengths 3, 12 (cut off), 5 (no advantage); 1, 7, 12 (cut off).
    assert numbers(found(mask_truncated_completions=True)) == [(3, 8, [1]), (3, 8, [4, 5])]
    assert numbers(found(entropy_coef=0.1)) == [
        (3, 20, [1, 2]), (3, 20, [0]), (3, 20, [4, 5]), (3, 20, [6])]
    # Sharded ranks read every row, as often as the others; no token of one left out counts.
    parts = found(entropy_coef=0.1, mask_truncated_completions=True, shard=1)
    assert [part.loss_mask.sum(1).tolist() for part in parts] == [[3, 0], [5], [1, 7], [0]]


# --- weights between sampler and trainer ----------------------------------------------------------


CORRECTION = "--sampler_correction"


@pytest.mark.parametrize("flags, expected", [
    (f"{CORRECTION} token_mask", [2, 0.5, 0.25, 1]),
    (f"{CORRECTION} token_truncate --sampler_ratio 0 1.5", [1.5, 0.5, 0.25, 1]),
    (f"{CORRECTION} token_truncate --sampler_ratio 0.4 3", [2, 0.5, 0.4, 1]),
    (f"{CORRECTION} token_mask --sampler_ratio 0.4 1.5", [0, 0.5, 0, 1]),
    (f"{CORRECTION} sequence_truncate --sampler_ratio 0.4 3", [0.4]),
    (f"{CORRECTION} sequence_mask --sampler_ratio 0.4 3", [0]),
    (f"{CORRECTION} sequence_mask --loss_type r1", [0.25]),
])
def test_correction_weights_by_hand(six, flags, expected):
    six.loss_mask = torch.tensor([[1, 1, 1, 0]])
    six.sampling_logps = torch.tensor([[0.1, 0.4, 0.8, 0.1]]).log()
    six.old_logps = torch.tensor([[0.2, 0.2, 0.2, 0.2]]).log()  # ratios 2, 1/2, 1/4; no token
    args = arguments(*flags.split())
    weights = sampler_weights(six, args.sampler_correction, *args.sampler_ratio)
    assert weights[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("correction", CORRECTIONS[1:])
@pytest.mark.parametrize("loss_type, level", [
    ("grpo", "token"), ("dppo", "token"), ("bnpo", "sequence"), ("r1", "token")])
def test_correction_of_a_loss_and_its_gradient_equal_a_loop(loss_type, level, correction):
    logps, old_logps, advantages, mask, ref_logps = random_case(5)
    if loss_type == "r1" and "token" in correction:
        return                                      # refused: one ratio per completion
    sampling_logps = old_logps + 0.5 * torch.randn(old_logps.shape).double()
    weighted = torch.zeros_like(logps)
    for i, A in enumerate(advantages.tolist()):
        ratios = [math.exp(old_logps[i, t] - sampling_logps[i, t]) for t in range(mask[i].sum())]
        for t, w in enumerate(ratios):
            w = math.prod(ratios) if "sequence" in correction else w
            clipped = min(max(w, 0.7), 1.4)
            weighted[i, t] = A * (clipped if "truncate" in correction else w * (w == clipped))
    part = MicroBatch(None, None, None, None, mask, sampling_logps, ref_logps, advantages, {},
                      old_logps=old_logps)

    class Uncorrected:
        args = SimpleNamespace(sampler_correction=correction, sampler_ratio=[0.7, 1.4],
                               off_policy_mask_threshold=0)

        def compute_loss(self, part, logps, entropy):
            return family_loss(logps, part.old_logps, part.advantages, mask, ref_logps=ref_logps,
                               beta=0.3, loss_type=loss_type, importance_sampling_level=level)

    class Corrected(SamplerCorrection, Uncorrected):
        pass

    loss, _ = Corrected().compute_loss(part, logps.requires_grad_(), None)
    loss.backward()
    again = logps.detach().requires_grad_()
    expected, _ = loop_loss(
        again, old_logps, weighted[:, 0] if loss_type == "r1" else weighted, mask, ref_logps,
        beta=0.3, loss_type=loss_type, level=level)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logps.grad, again.grad, rtol=1e-12, atol=1e-12)


def test_off_policy_mask_leaves_out_bad_completions_that_the_policy_has_left(six, policy):
    six.old_logps = None
    six.advantages = torch.tensor([1.0, -0.5, -0.3, -1.2, 0.0, 0.1])
    # The means of log pi_sampler - log pi; those above 0.5 with A < 0 are rows 1 and 3.
    left = torch.tensor([9.0, 0.51, 0.49, 9.0, 9.0, -9.0])
    uneven = torch.tensor([1.5, 0.5]).repeat(6, 6)
    uneven = uneven / ((uneven * six.loss_mask).sum(1) / six.lengths)[:, None]
    logps, six.sampling_logps = six.sampling_logps, six.sampling_logps + left[:, None] * uneven
    kept = torch.tensor([1.0, 0, -0.3, 0, 0, 0.1])

    def advantages():
        return near_sampler(six, logps, 0.5).advantages

    assert advantages()[:, 0].tolist() == kept.tolist()
    masked, _ = gradient(policy, six, token_logps, off_policy_mask_threshold=0.5)
    expected, _ = gradient(policy, replace(six, advantages=kept), token_logps)
    assert (masked - expected).norm() < 1e-6 * expected.norm()
    six.advantages = six.advantages[:, None].repeat(1, 12)
    six.advantages[1, 3] = 2.0                                  # a good token of a bad completion
    assert advantages()[1].tolist() == [0, 0, 0, 2.0, *[0] * 8]


@pytest.mark.parametrize("loss_type, level, correction, moved", [
    ("grpo", "token", "token_truncate", False), ("grpo", "token", "sequence_mask", True),
    ("cispo", "token", "token_mask", False), ("sapo", "token", "token_truncate", True),
    ("dppo", "token", "token_mask", True), ("bnpo", "sequence", "sequence_truncate", True),
    ("r1", "token", "sequence_truncate", True)])
def test_correction_weighs_the_policy_term_alone(six, policy, loss_type, level, correction, moved):
    options = {"loss_type": loss_type, "beta": 0.1, "epsilon_high": 5.0,
               "importance_sampling_level": level}
    old_logps = six.old_logps if moved else six.sampling_logps
    ratios, bounds = torch.tensor([0.5, 1.0, 2.5]).repeat(6, 4), (0.6, 2.0)
    six.sampling_logps = old_logps - ratios.log()
    weights = sampler_weights(replace(six, old_logps=old_logps), correction, *bounds)
    six.old_logps = old_logps if moved else None        # None: computed in the update
    weighted, metrics = gradient(policy, six, token_logps, sampler_correction=correction,
                                 sampler_ratio=bounds, **options)
    counted = six.loss_mask.bool()
    each = weights.expand(6, 12)[counted]
    share = each.mean() ** 2 / each.square().mean()
    of_completions = (ratios.log() * counted).sum(1).abs()
    for name, value in {"is_mean": each.mean(), "is_eff_sample_size": share,
                        "log_ratio_mean": of_completions.mean(),
                        "log_ratio_max": of_completions.max()}.items():
        assert metrics[f"rollout_{name}"] == pytest.approx(value.item(), rel=1e-4), name
    six.advantages = (six.advantages[:, None] * weights).squeeze(1)
    expected, metrics = gradient(policy, six, token_logps, **options)
    assert "rollout_is_mean" not in metrics
    assert (weighted - expected).norm() < 1e-4 * expected.norm()
