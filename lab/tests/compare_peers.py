"""Compares losses, with their gradients, and advantages with TRL's and verl's, in float64. By hand:

    pip install trl==1.16.0 verl==0.9.1
    python lab/tests/compare_peers.py

Their own functions get the same random tensors as ours: ratios from e^-12 to e^12, either sign of
A, completions of one token. A table is printed, which docs/losses.md sums up: for each function
and peer the number of cases and the largest difference, relative to the largest element of the
gradient (or to the largest advantage). Where a peer is not installed, it is left out.

Guards of theirs, and how we go around them. TRL has SAPO's 1.05 in float32: ours gets that. verl
clamps log-ratios to ±20 (GSPO's mean at 10) and k3 to ±10: ratios and references are nearer. Its
dual clip of 3 is always on: ours gets delta 3. It bounds CISPO from below: by 0 here. It adds 1e-8
to lengths: the mask is float32, where that changes nothing. Its GDPO computes in float32, with 1e-8
for our last eps of 1e-4. TRL's advantages are part of its sampling, and can't be called alone.
"""
import itertools
import sys
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import torch  # noqa: E402

import train_grpo  # noqa: E402
from reward.baselines import estimate  # noqa: E402
from run.distributed import World  # noqa: E402
from run.extensions import correction, losses  # noqa: E402
from run.extensions.advantages import gdpo  # noqa: E402
from run.rollout import MicroBatch  # noqa: E402

N, R, L = 6, 8, 20
LENGTHS = torch.tensor([1, R, 4, 2, R, 5])
EPSILONS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
CISPO = {"epsilon_low": 1.0, "epsilon_high": 5.0}


def random_case(seed, scale, per_token=False):
    """logps, old_logps, advantages, mask, ref_logps, entropy; log-ratios are about `scale`."""
    rng = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    logps, mask = -2 + noise(N, R), (torch.arange(R) < LENGTHS[:, None]).float()
    old_logps = logps + (scale * noise(N, R)).clamp(-12, 12)
    advantages = noise(N, R) if per_token else noise(N)
    return (logps, old_logps, advantages, mask, logps + noise(N, R).clamp(-2, 2),
            noise(N, R).exp())


def difference(ours, theirs, inputs):
    """Of the values, and of the gradients with respect to the inputs, relative to the largest."""
    grads = [[torch.zeros_like(x) if grad is None else grad for grad, x in zip(
        torch.autograd.grad(loss, inputs, allow_unused=True), inputs)] for loss in (ours, theirs)]
    largest = max(grad.abs().max().item() for grad in grads[1])
    return max((ours - theirs).abs().item() / max(1, abs(theirs.item())),
               *((a - b).abs().max().item() / largest for a, b in zip(*grads)))


# --- TRL ------------------------------------------------------------------------------------------


def trl_cases():
    for loss_type, level, seed, scale, per_token in itertools.product(
            ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"), ("token", "sequence"),
            range(3), (0.0, 0.3, 4.0), (False, True)):
        if loss_type == "luspo" and level == "token":
            continue
        deltas = (None,) if loss_type in ("cispo", "sapo") else (None, 3.0)
        for delta, (beta, corrected), entropy_coef, threshold in itertools.product(
                deltas, ((0.0, False), (0.3, False), (0.3, True)), (0.0, 0.1), (0.0, 0.1)):
            weights = [torch.ones(N, 1), torch.arange(N)[:, None] / 3, torch.rand(N, R)][seed]
            yield (random_case(seed, scale, per_token), weights, threshold, {
                "loss_type": loss_type, "importance_sampling_level": level, "delta": delta,
                "beta": beta, "use_bias_correction_kl": corrected, "entropy_coef": entropy_coef,
                **(CISPO if loss_type == "cispo" else EPSILONS)})


def trl_loss(case, weights, threshold, options):
    from trl import GRPOTrainer
    logps, old_logps, advantages, mask, ref_logps, entropy = case
    trainer = SimpleNamespace(
        **options, model=Mock(training=True), max_completion_length=L, aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=threshold or None, use_vllm=True, use_adaptive_entropy=False,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, current_gradient_accumulation_steps=1,
        vllm_importance_sampling_correction=True, _entropy_bonus_enabled=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **rest: (logps, entropy, None),
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=False, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        args=SimpleNamespace(
            delta=options["delta"], use_bias_correction_kl=options["use_bias_correction_kl"],
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1))
    ids = torch.zeros(N, R, dtype=torch.long)
    return GRPOTrainer._compute_loss(trainer, trainer.model, {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old_logps,
        "ref_per_token_logps": ref_logps, "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights.double()})


def our_loss(case, weights, threshold, options):
    logps, old_logps, advantages, mask, ref_logps, entropy = case
    if threshold:
        part = MicroBatch(None, None, None, None, mask, old_logps, ref_logps, advantages, {})
        state = SimpleNamespace(args=SimpleNamespace(off_policy_mask_threshold=threshold))
        advantages = correction.near_sampler(
            lambda part, *read: part.advantages, state, part, logps, entropy)
    advantages = weights.double() * advantages.view(N, -1)
    bonus = options["entropy_coef"] * (entropy * mask).sum() / mask.sum()   # as --entropy_coef has
    options = {name: value for name, value in options.items() if name != "entropy_coef"}
    return train_grpo.family_loss(logps, old_logps, advantages, mask, ref_logps=ref_logps,
                              max_completion_length=L, **options)[0] - bonus


def with_trl():
    """Each with and without delta, KL, corrected KL, entropy bonus, weights, off-policy mask."""
    for case, weights, threshold, options in trl_cases():
        inputs = case[0].requires_grad_(), case[5].requires_grad_()
        per_answer = options["importance_sampling_level"] == "sequence"
        name = f"`{options['loss_type']}`{', a ratio per answer' if per_answer else ''}"
        taus = {"tau_good": 1.0, "tau_bad": torch.tensor(1.05).item()}      # theirs are in float32
        with patch.dict(losses.POLICY_LOSSES, sapo=partial(losses.soft_gate, **taus)):
            both = [loss(case, weights, threshold, options) for loss in (our_loss, trl_loss)]
        yield name, difference(*both, inputs)


# --- verl -----------------------------------------------------------------------------------------

# Ours -> its policy loss and, where it takes one, its average.
VERL = {
    "grpo": ("vanilla", "seq-mean-token-mean"), "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"), "gspo": ("gspo", "seq-mean-token-mean"),
    "r1": ("vanilla", "seq-mean-token-sum"), "cispo": ("cispo", "token-mean"),
    "dppo": ("dppo_tv", "token-mean"), "sapo": ("sapo", None), "gmpo": ("geo_mean", None)}


def verl_losses():
    from verl.trainer.ppo import core_algos as verl
    from verl.workers.config import ActorConfig
    for (name, (policy_loss, average)), seed, scale in itertools.product(
            VERL.items(), range(12), (0.0, 0.3, 4.0)):
        logps, old_logps, advantages, mask, *_ = random_case(seed, scale)
        options = dict(CISPO if name == "cispo" else EPSILONS, loss_type=name)
        if policy_loss == "vanilla":
            options["delta"] = 3.0
        if name == "gspo":
            options |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        if name == "r1":            # the same at ratio 1: verl's ratios are those of tokens
            old_logps = logps
        config = Mock(
            spec=ActorConfig, clip_ratio=0.2, clip_ratio_low=options["epsilon_low"], tau_pos=1.0,
            clip_ratio_high=options["epsilon_high"] - (name == "cispo"), tau_neg=1.05,
            global_batch_info={"loss_scale_factor": L} if name == "dr_grpo" else {})
        config.get.side_effect = {"clip_ratio_c": 20.0 if name == "dppo" else 3.0}.get
        old_logps = old_logps.detach().clone()
        theirs, _ = verl.get_policy_loss_fn(policy_loss)(
            old_logps, logps.requires_grad_(), advantages[:, None].expand(N, R), mask,
            average or "token-mean", config)
        ours, _ = train_grpo.family_loss(logps, old_logps, advantages, mask,
                                         max_completion_length=L, **options)
        if name == "r1":            # their value is a sum over tokens
            theirs, ours = theirs - theirs.detach(), ours - ours.detach()
        shown = {"gspo": "`grpo`, a ratio per answer", "r1": "`r1`, gradients at ratio 1"}
        yield shown.get(name, f"`{name}`"), difference(ours, theirs, (logps,))


def verl_kls():
    from verl.trainer.ppo import core_algos as verl
    for kl_type, seed in itertools.product(("k1", "k2", "k3", "k3+", "abs"), range(12)):
        logps, _, _, mask, ref_logps, _ = random_case(seed, 1.0)
        ours, theirs = (kl(logps.requires_grad_(), ref_logps, **{flag: kl_type}) for kl, flag in (
            (train_grpo.kl_penalty, "kl_type"), (verl.kl_penalty, "kl_penalty")))
        yield f"KL `{kl_type}`", difference((ours * mask).sum(), (theirs * mask).sum(), (logps,))


def verl_advantages():
    from verl.trainer.ppo import core_algos as verl
    for seed, (name, scale) in itertools.product(
            range(12), (("grpo", "group"), ("rloo", "none"), ("grpo_passk", "group"))):
        _, _, rewards, *_ = random_case(seed, 0.0)
        theirs, _ = verl.get_adv_estimator_fn(name)(
            token_level_rewards=rewards[:, None].clone(), response_mask=torch.ones(N, 1),
            index=[0, 0, 0, 1, 1, 1], epsilon=1e-4, config={"norm_adv_by_std_in_grpo": True})
        ours = estimate(rewards, 3, baseline=name, scale=scale)
        yield f"advantages `{name}`", relative(ours, theirs[:, 0])


def relative(ours, theirs):
    return (ours - theirs).abs().max().item() / theirs.abs().max().item()


def verl_gdpo():
    from verl.trainer.ppo import core_algos as verl
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        rewards = dict(zip("ab", torch.randn(2, N, generator=rng)))
        theirs, _ = verl.get_adv_estimator_fn("gdpo")(
            token_level_rewards=torch.zeros(N, 1), response_mask=torch.ones(N, 1), epsilon=1e-4,
            index=[0, 0, 0, 1, 1, 1], norm_adv_by_std_in_grpo=True,
            config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
            non_tensor_batch=rewards,
            batch={"prompts": torch.zeros(N, 1), "attention_mask": torch.ones(N, 2).long()})
        rollout = SimpleNamespace(rewards=rewards["a"], rewards_per_func=rewards,
                                  loss_mask=torch.ones(N, 1))
        state = SimpleNamespace(world=World("cpu"), args=SimpleNamespace(
            num_generations=3, reward_weights=[1.0, 0.5]))
        ours = gdpo(state, rollout)
        yield "advantages GDPO, float32", relative(ours, theirs[:, 0])


def main():
    peers, found = {}, defaultdict(lambda: defaultdict(list))
    for peer, differences in (("trl", with_trl()), ("verl", verl_losses()), ("verl", verl_kls()),
                              ("verl", verl_advantages()), ("verl", verl_gdpo())):
        try:
            for name, size in differences:
                found[name][peer].append(size)
            peers[peer] = f"{peer} {version(peer)}"
        except ImportError as error:
            print(f"{peer} is left out: {error}")
    print(f"| ours | {' | '.join(peers.values())} |", "|---" * (1 + len(peers)) + "|", sep="\n")
    for name, of_peers in found.items():
        cells = [f"{len(sizes)} cases, {max(sizes):.0e}".replace(" 0e+00", " 0") if sizes else "-"
                 for sizes in (of_peers[peer] for peer in peers)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
