"""Group Relative Policy Optimization, from scratch.

GRPO (DeepSeekMath, arXiv 2402.03300) teaches a language model from rewards alone, without a critic: it answers each
prompt several times, and each answer is judged against its siblings. Answers better than their group's average become
more likely, worse ones less.

    A_i     = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)                      advantage of answer i within its group
    ratio_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)                           how far the policy moved since sampling
    loss    = - mean over answers of mean over tokens of
                [ min(ratio_t A_i, clip(ratio_t, 1-epsilon_low, 1+epsilon_high) A_i) - beta KL_t(pi || pi_ref) ]

One step, for B prompts and G = num_generations answers to each:
    1. ask        sample G completions of every prompt                                             model/sampler.py
    2. judge      rewards, then advantages within each group                                       reward/
    3. remember   log-probabilities under the reference, and under the old policy if there is more than one update
    4. learn      clipped gradient steps on micro-batches
    5. report     metrics, a progress bar, pictures, weights                                       report/

Letters: B prompts, G generations per prompt, N = B*G completions; P prompt tokens, R completion tokens, T = P + R;
V vocabulary.

    python train_grpo.py                                          the default task: minutes on a laptop without a GPU
    torchrun --nproc_per_node=2 train_grpo.py --reasoning 1       on two processes
    python train_grpo.py --help                                   every flag

Where we differ from the papers and from other code, on purpose:
  - std is the sample standard deviation (n-1) plus eps = 1e-4, as in TRL; the paper specifies neither.
  - log-probabilities are float32 and those of the distribution that was sampled: the same temperature, no top-k or
    top-p, exact masks and positions under padding. pi_old is computed by the training code, not taken from the sampler,
    so that the first ratio is exactly 1.
  - averages run over the whole optimizer step, all micro-batches and ranks, so that neither micro_batch_size nor the
    number of processes changes the gradient. Gradients are summed over the ranks in plain sight, without a wrapper.
  - with one update per rollout, the default, the clip never acts, and the printed loss of `grpo` is just beta * KL, about
    0: the advantages of a group cancel in its value, though not in its gradient. Watch the reward.
"""
import argparse
import copy
import functools
import json
import math
import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dataset import PromptCollator, PromptDataset, batches_of_steps, read_heldout, steps_per_epoch
from model import (SharedPrompts, World, discard_checkpoint, eos_token_ids, find_weights, in_precision, load_checkpoint,
                   load_pretrained, load_tokenizer, sample, save_checkpoint, save_pretrained)
from report import Report, add_metrics, describe, mean_metrics, rollout_metrics
from reward import accuracy_reward, combine_rewards, judge_steps, load_reward_funcs, process_advantages

HERE = Path(__file__).parent

# --- the objective ----------------------------------------------------------------------------------------------------
# Three independent choices make the family: which ratio (importance_ratio), how it is bounded (clipped_policy_loss,
# cispo_policy_loss), how tokens are averaged (average). grpo_loss composes them.


def nanstd(x):
    """Sample standard deviation (n-1) along the last dimension, which stays, of all that is not NaN; 0 of one number."""
    deviation = (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    judged = (~x.isnan()).sum(-1, keepdim=True)
    return (deviation.pow(2).sum(-1, keepdim=True) / (judged - 1).clamp(min=1)).sqrt()


def group_advantages(rewards, num_generations, *, scale_rewards="group", batch_std=None, eps=1e-4):
    """How much better each completion is than its siblings, in standard deviations of its group.

        A = (r - mean(group)) / (std(group) + eps)           std with n-1; DeepSeekMath, section 4.1.2

    scale_rewards "batch" divides by the std of all rewards instead, `batch_std` if it is given; "none" does not divide: an
    easy or hopeless group, with little spread, then does not weigh as much as any other (Dr. GRPO, arXiv 2503.20783).
    rewards (N,) with the G completions of one prompt adjacent -> (N,). NaN marks a completion that no reward judged: it
    is left out of mean and std and gets advantage 0. Four answers to `7 + 3*7`: a wrong one, one that is right and well
    formatted, one that is right, another wrong one:

    >>> group_advantages(torch.tensor([0.1, 1.1, 1.0, 0.1]), 4)
    tensor([-0.8635,  0.9544,  0.7726, -0.8635])
    """
    groups = rewards.view(-1, num_generations)                                          # (B, G)
    groups = groups - groups.nan_to_num(float("-inf")).amax(1, keepdim=True)            # equal rewards: exactly 0
    advantages = (groups - groups.nanmean(1, keepdim=True)).nan_to_num(0.0)             # (B, G)
    if scale_rewards == "group":
        advantages = advantages / (nanstd(groups) + eps)
    elif scale_rewards == "batch":
        advantages = advantages / ((nanstd(rewards) if batch_std is None else batch_std) + eps)
    elif scale_rewards != "none":
        raise ValueError(f"scale_rewards is {scale_rewards!r}; choose group, batch or none")
    return advantages.view(-1)


def completion_mask(completion_ids, eos_token_id):
    """(N, R): 1 up to and including the first EOS, all 1 where there is none. The EOS is trained: stopping is a skill."""
    eos = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).int()                                      # (N, R)
    return (is_eos.cumsum(1) - is_eos == 0).int()           # no EOS before this token


def kl_penalty(logps, ref_logps, *, kl_type="k3"):
    """An estimate of KL(pi || pi_ref) for each token that pi sampled, from x = log pi_ref - log pi alone; (N, R).

        k1  -x             unbiased; as a loss its expected gradient on policy is 0, so it belongs into the reward
        k2  x^2 / 2        biased, yet the mean of its gradient on policy is the gradient of the KL
        k3  e^x - x - 1    unbiased and never negative: GRPO's; the mean of its gradient is that of KL(pi_ref || pi)
        abs |x|

    x is clamped at 20 in k3, only because e^x would overflow. There is no clamp below and none on the result (verl has
    both): a clamp removes the gradient, the pull back, exactly where the policy has drifted furthest.
    """
    x = ref_logps - logps
    if kl_type == "k1":
        return -x
    if kl_type == "k2":
        return x.pow(2) / 2
    if kl_type == "k3":
        x = x.clamp(max=20)
        return x.exp() - x - 1
    if kl_type == "abs":
        return x.abs()
    raise ValueError(f"kl_type is {kl_type!r}; choose k1, k2, k3 or abs")


def importance_ratio(logps, old_logps, mask, *, level="token"):
    """First choice: pi / pi_old of each token, (N, R), or one number for each completion, (N, 1).

        token       exp(d_t),  d = log pi - log pi_old        PPO and GRPO
        sequence    exp(mean of d over the completion)        GSPO, arXiv 2507.18071, equation 7
        product     exp(sum of d over the completion)         DeepSeek-R1 as printed: the completion is one action
    """
    log_ratio = (logps - old_logps) * mask                                              # (N, R)
    if level == "token":
        return log_ratio.exp()
    log_ratio = log_ratio.sum(1, keepdim=True)                                          # (N, 1)
    if level == "sequence":
        log_ratio = log_ratio / mask.sum(1, keepdim=True).clamp(min=1)
    elif level != "product":
        raise ValueError(f"importance_sampling_level is {level!r}; choose token or sequence")
    return log_ratio.exp()


def clipped_policy_loss(ratio, advantages, *, epsilon_low, epsilon_high, delta=None):
    """Second choice: PPO's bound, -min(ratio A, clip(ratio) A), and where the clip holds the policy back, low and high.

    Once a ratio has moved past epsilon in the direction that its advantage favours, the clip removes its gradient. It
    does nothing against a bad token (A < 0) whose ratio is large: `delta`, above 1 + epsilon_high, caps that one
    (INTELLECT-2; the same as the constant c of the dual clip, Ye et al. 2020, in verl).
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(capped * advantages, clipped * advantages)
    return loss, (ratio < 1 - epsilon_low) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)


def cispo_policy_loss(ratio, advantages, logps, *, epsilon_high):
    """Second choice: CISPO's -sg[min(ratio, epsilon_high)] A log pi (MiniMax-M1, arXiv 2506.13585), and where it caps A > 0.

    The ratio is a weight without gradient, sg, and epsilon_high the cap itself: no token ever loses its gradient.
    """
    weight = ratio.detach().clamp(max=epsilon_high)
    capped = (ratio > epsilon_high) & (advantages > 0)
    return -weight * advantages * logps, torch.zeros_like(capped), capped


def average(per_token, mask, *, loss_type, num_sequences, num_tokens, max_completion_length=None):
    """Third choice: from one number a token to one number.

        grpo                 mean over completions of the mean over tokens: a token of a long completion counts less
        bnpo, dapo, cispo    mean over all tokens of the step: a long completion counts more
        dr_grpo              sum over tokens / (completions * L), L = max_completion_length: a constant, no bias by length
        r1                   mean over completions of the sum over tokens
    """
    if loss_type in ("bnpo", "dapo", "cispo"):
        return (per_token * mask).sum() / num_tokens
    per_sequence = (per_token * mask).sum(1)                                            # (N,)
    if loss_type == "grpo":
        per_sequence = per_sequence / mask.sum(1).clamp(min=1)
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type dr_grpo divides by max_completion_length; give it")
        per_sequence = per_sequence / max_completion_length
    elif loss_type != "r1":
        raise ValueError(f"loss_type is {loss_type!r}; choose grpo, bnpo, dr_grpo, dapo, cispo or r1")
    return per_sequence.sum() / num_sequences


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps=None, beta=0.0, kl_type="k3", epsilon_low=0.2,
              epsilon_high=0.2, delta=None, loss_type="grpo", importance_sampling_level="token",
              max_completion_length=None, entropy=None, entropy_coef=0.0, num_sequences=None, num_tokens=None):
    """The loss of GRPO and its family, and metrics as detached scalars.

    logps, old_logps (N, R); ref_logps (N, R), or None without a reference; advantages (N,) or (N, R); mask (N, R);
    entropy (N, R), whose mean over all tokens is added to what is maximised (verl averages it like the rest).
    num_sequences and num_tokens are totals of the whole optimizer step, over all micro-batches and ranks (None: this
    call is the whole step): losses and metrics of the parts then add up to those of the step. Masked-out rows count in
    num_sequences. With loss_type cispo, epsilon_high is a cap above 1, 5 say.

        the paper's GRPO  the defaults                    GSPO   importance_sampling_level sequence
        Dr. GRPO          dr_grpo, scale_rewards none     CISPO  cispo
        DAPO              dapo, epsilon_high 0.28         R1     r1; its KL is the sum of the tokens', not the completion's
    """
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]           # (N, 1) or (N, R)
    num_sequences = len(mask) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    level = "product" if loss_type == "r1" else importance_sampling_level
    ratio = importance_ratio(logps, old_logps, mask, level=level)                       # (N, R) or (N, 1)
    if loss_type == "cispo":
        per_token, low, high = cispo_policy_loss(ratio, advantages, logps, epsilon_high=epsilon_high)
    else:
        per_token, low, high = clipped_policy_loss(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high,
                                                   delta=delta)
    if loss_type == "r1":
        per_token = per_token / mask.sum(1, keepdim=True).clamp(min=1)      # one term, though all tokens are added up
    clipped = {"low": low, "high": high, "region": low | high}
    metrics = {f"clip_ratio/{name}_mean": (where * mask).sum() / num_tokens if level == "token" or where.shape[1] > 1
               else where.sum() / num_sequences for name, where in clipped.items()}
    if beta or ref_logps is not None:
        kl = kl_penalty(logps, ref_logps, kl_type=kl_type)                              # (N, R)
        per_token = per_token + beta * kl
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens
    loss = average(per_token, mask, loss_type=loss_type, num_sequences=num_sequences, num_tokens=num_tokens,
                   max_completion_length=max_completion_length)
    if entropy_coef:
        loss = loss - entropy_coef * (entropy * mask).sum() / num_tokens
    return loss, metrics


# --- log-probabilities ------------------------------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0, with_entropy=False):
    """log pi(token | all before) of the last R = num_completion_tokens of input_ids (N, T): (N, R) in float32.

    With `with_entropy` also the entropy of each of these distributions, (N, R), in nats. Both are 0 at padding.
    """
    P = input_ids.shape[1] - num_completion_tokens
    # What is there twice goes through the model once: whole sequences, N' of N, and all of their prompts but the last token.
    sequences, copies = torch.stack((input_ids, attention_mask)).unique(dim=1, return_inverse=True)     # (2, N', T), (N,)
    input_ids, attention_mask = sequences
    wanted, cache = attention_mask[:, P:].bool(), None                                  # (N', R)
    if P > 1:
        prompts, rows = sequences[:, :, :P - 1].unique(dim=1, return_inverse=True)
        cache = SharedPrompts()
        model(*prompts, logits_to_keep=1, cache=cache)
        cache = cache.for_rows(rows)
    # Logits at position t predict token t+1: an input is as real as the token behind it, and the last token is no input.
    real = torch.cat((attention_mask[:, :P - 1], attention_mask[:, P:]), dim=1)         # (N', P - 1 + R)
    logits = model(input_ids[:, P - 1:-1], real, logits_to_keep=wanted, cache=cache)    # (n, V), n tokens wanted
    all_logps = (logits.float() / temperature).log_softmax(-1)
    sampled = all_logps.gather(-1, input_ids[:, P:][wanted][:, None])[:, 0]             # (n,)
    logps = torch.zeros_like(wanted, dtype=torch.float32).masked_scatter(wanted, sampled)      # (N', R)
    if not with_entropy:
        return logps[copies]
    entropy = -(all_logps.exp() * all_logps).sum(-1)                                    # (n,)
    return logps[copies], torch.zeros_like(logps).masked_scatter(wanted, entropy)[copies]


@dataclass
class Rollout:
    """What one rank sampled in one step; a micro-batch is some of its rows."""
    prompt_ids: torch.Tensor                    # (N, P) padded on the left, each prompt G times
    prompt_mask: torch.Tensor                   # (N, P)
    completion_ids: torch.Tensor                # (N, R) padded on the right
    mask: torch.Tensor                          # (N, R)
    ended: torch.Tensor                         # (N,) False: cut off at the length limit
    sampling_logps: torch.Tensor                # (N, R) as the sampler computed them
    advantages: torch.Tensor = None             # (N,) or (N, R)
    old_logps: torch.Tensor = None              # (N, R); None: the policy has not moved since it sampled
    ref_logps: torch.Tensor = None              # (N, R); None: no reference model

    def rows(self, index):
        """Some of the completions, without the columns that hold nothing but padding."""
        P, R = (int(mask[index].sum(1).max()) for mask in (self.prompt_mask, self.mask))

        def cut(x):
            return x[index] if x.dim() == 1 else x[index, :R]

        ours = {name: None if x is None else cut(x) for name, x in vars(self).items()}
        return Rollout(**ours | {"prompt_ids": self.prompt_ids[index, -P:], "prompt_mask": self.prompt_mask[index, -P:]})

    def logps(self, model, *, temperature, with_entropy=False):
        """token_logps of the completions under a model."""
        input_ids = torch.cat((self.prompt_ids, self.completion_ids), dim=1)                # (N, T)
        attention_mask = torch.cat((self.prompt_mask, self.mask), dim=1)                    # (N, T)
        return token_logps(model, input_ids, attention_mask, self.mask.shape[1], temperature=temperature,
                           with_entropy=with_entropy)

    def decode(self, tokenizer):
        """The completions as token ids, through the EOS, and as texts, without it."""
        ids = [row[mask.bool()].tolist() for row, mask in zip(self.completion_ids.cpu(), self.mask.cpu())]
        return ids, tokenizer.batch_decode(ids, skip_special_tokens=True)


# --- the first four steps ---------------------------------------------------------------------------------------------


def ask(model, batch, *, num_generations, **sampling):
    """Step 1: G completions of each prompt of the batch, as a Rollout."""
    device = next(model.parameters()).device
    prompt_ids, prompt_mask = batch["prompt_ids"].to(device), batch["prompt_mask"].to(device)       # (B, P)
    completion_ids, logps = sample(model, prompt_ids, prompt_mask, num_generations=num_generations, **sampling)
    mask = completion_mask(completion_ids, sampling["eos_token_id"])
    last_ids = completion_ids.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]                # (N,)
    ended = torch.isin(last_ids, torch.tensor(sampling["eos_token_id"], device=device))
    return Rollout(prompt_ids.repeat_interleave(num_generations, 0), prompt_mask.repeat_interleave(num_generations, 0),
                   completion_ids, mask, ended, logps)


def judge(rollout, batch, tokenizer, reward_funcs, reward_weights, *, num_generations):
    """Step 2, first half: the completions as texts, their rewards (N,), and each function's own {name: (N,)}."""
    def for_each_completion(items):
        return [item for item in items for _ in range(num_generations)]                     # a a a b b b

    ids, completions = rollout.decode(tokenizer)
    replies = [opened + rest for opened, rest in zip(for_each_completion(batch["opened"]), completions)]
    columns = {name: for_each_completion(values) for name, values in batch["columns"].items()}
    rewards, per_function = combine_rewards(for_each_completion(batch["prompts"]), replies, reward_funcs,
                                            reward_weights, completion_ids=ids, **columns)
    return completions, rewards, per_function


def compare(rollout, rewards, tokenizer, world, *, num_generations, scale_rewards, supervision, total_weight, kl_coef):
    """Step 2, second half: advantages, (N,); with process supervision (N, R), from the steps that reward/process.py judges.

    With kl_coef the KL is a part of the reward, -kl_coef * sum of k1(old, reference), rather than a term of the loss.
    """
    if kl_coef:
        kl = kl_penalty(rollout.old_logps, rollout.ref_logps, kl_type="k1")                 # (N, R)
        rewards = rewards - kl_coef * (kl * rollout.mask).sum(1).cpu()
    if supervision == "process":
        ids, completions = rollout.decode(tokenizer)
        # A step earns 0 or 1; the mean of the rewards, rather than their sum, puts the outcome on the same scale.
        step_rewards, step_ends = judge_steps(completions, ids, tokenizer, (rewards / total_weight).tolist())
        return process_advantages(step_rewards, step_ends, num_generations, rollout.mask)
    batch_std = nanstd(torch.tensor(world.gather(rewards.tolist())))
    advantages = group_advantages(rewards, num_generations, scale_rewards=scale_rewards, batch_std=batch_std)
    return advantages.to(rollout.mask.device)


@torch.no_grad()
def remember(model, rollout, *, micro_batch_size, temperature):
    """Step 3: log-probabilities of the rollout's tokens under a frozen policy, the old one or the reference, (N, R)."""
    logps = torch.zeros_like(rollout.sampling_logps)
    for rows in torch.arange(len(logps), device=logps.device).split(micro_batch_size):
        part = rollout.rows(rows)
        logps[rows, :part.mask.shape[1]] = part.logps(model, temperature=temperature)
    return logps


def learn(model, optimizer, rollout, world, *, num_iterations=1, num_minibatches=1, **options):
    """Step 4: `num_iterations` passes over the rollout, each cut into `num_minibatches` optimizer steps; mean metrics."""
    all_rows = torch.arange(len(rollout.mask), device=rollout.mask.device)
    minibatches = [rows for rows in all_rows.tensor_split(num_minibatches) if len(rows)]
    return mean_metrics([update(model, optimizer, rollout, rows, world, **options) for rows in minibatches * num_iterations])


def update(model, optimizer, rollout, rows, world, *, micro_batch_size, temperature, grad_clip,
           mask_truncated_completions=False, **objective):
    """One optimizer step on these rows of every rank's rollout, and its metrics over all ranks."""
    counted = rows[rollout.ended[rows]] if mask_truncated_completions else rows
    # Where the advantage is 0 and nothing else is in the loss, there is no gradient: such a row only counts in the averages.
    has_gradient = (rollout.advantages.view(len(rollout.mask), -1) != 0).any(1)
    if rollout.ref_logps is not None or objective.get("entropy_coef"):
        has_gradient[:] = True
    learned = counted[has_gradient[counted]]
    num_sequences, num_tokens, num_learned = world.sum(torch.tensor(
        [len(rows), rollout.mask[counted].sum(), rollout.mask[learned].sum()])).clamp(min=1).tolist()
    metrics = {"loss": 0.0}
    optimizer.zero_grad()
    for part in map(rollout.rows, learned.split(micro_batch_size) if len(learned) else ()):
        logps, entropy = part.logps(model, temperature=temperature, with_entropy=True)
        if not objective.get("entropy_coef"):
            entropy = entropy.detach()                      # at once: what its gradient would need is freed
        # Before it has moved, the policy is the one that sampled: the ratio is 1, but its gradient is not 0.
        old_logps = logps.detach() if part.old_logps is None else part.old_logps
        loss, of_part = grpo_loss(logps, old_logps, part.advantages, part.mask, ref_logps=part.ref_logps, entropy=entropy,
                                  num_sequences=num_sequences, num_tokens=num_tokens, **objective)
        loss.backward()
        of_part |= {"loss": loss.detach(), **drift(logps, old_logps, part, entropy, num_learned)}
        metrics = add_metrics(metrics, of_part)
    world.sum_gradients(model)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    if grad_norm.isfinite():        # the same number on every rank: all of them take the step, or none
        optimizer.step()
    shares = world.gather([{name: float(value) for name, value in metrics.items()}])
    return functools.reduce(add_metrics, shares) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def drift(logps, old_logps, part, entropy, num_tokens):
    """A micro-batch's share of the metrics that say how far distributions have moved: means over tokens, and one maximum.

    entropy, in nats; ppo_kl, the mean of log pi_old - log pi, from the policy that sampled to this one; and between the
    sampler's probabilities and the trainer's, rollout_probs_diff: 0 but for rounding, or one of the two is wrong.
    """
    difference = (old_logps.exp() - part.sampling_logps.exp()).abs() * part.mask
    means = {"entropy": entropy, "ppo_kl": old_logps - logps, "rollout_probs_diff_mean": difference}
    means = {name: (value * part.mask).sum() / num_tokens for name, value in means.items()}
    return means | {"rollout_probs_diff_max": difference.max()}


@torch.no_grad()
def sync_reference(reference, policy, *, alpha):
    """reference <- alpha policy + (1 - alpha) reference, weight by weight (TR-DPO, arXiv 2404.09656)."""
    for theirs, ours in zip(reference.parameters(), policy.parameters()):
        theirs.lerp_(ours, alpha)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(model, problems, collate, world, *, num_generations, batch_size, **sampling):
    """Held-out accuracy over all ranks: the mean over k = num_generations samples, any of the k right (pass@k), greedy."""
    sums = torch.zeros(5)
    mine = problems[world.rank::world.size]
    for start in range(0, len(mine), batch_size):
        batch = collate(mine[start:start + batch_size])
        correct = {}
        for greedy, k in ((False, num_generations), (True, 1)):
            rollout = ask(model, batch, num_generations=k, greedy=greedy, **sampling)
            answers = [answer for answer in batch["columns"]["answer"] for _ in range(k)]
            openings = [opening for opening in batch["opened"] for _ in range(k)]
            replies = [opening + rest for opening, rest in zip(openings, rollout.decode(collate.tokenizer)[1])]
            scores = accuracy_reward(None, replies, answers)
            correct[greedy] = torch.tensor(scores).view(-1, k)                              # (B, k)
            if not greedy:
                length = rollout.mask.sum().item() / k
        sums += torch.tensor([len(correct[True]), correct[False].mean(1).sum(), correct[True].sum(),
                              correct[False].amax(1).sum(), length])
    count, *sums = world.sum(sums).tolist()
    names = ("eval/accuracy", "eval/greedy_accuracy", f"eval/pass@{num_generations}", "eval/mean_length")
    return {name: value / count for name, value in zip(names, sums)}


# --- arguments --------------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to each sentence, where there is one to tell, and says what a value is rather than its name again."""

    def _get_default_metavar_for_optional(self, action):
        return {int: "INT", float: "FLOAT"}.get(action.type, "TEXT")

    def _get_help_string(self, action):
        return action.help if action.default in (None, argparse.SUPPRESS) else f"{action.help} (default: %(default)s)"


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        formatter_class=HelpFormatter, usage="%(prog)s [flags]", description="Group Relative Policy Optimization. "
        "Without flags a small model learns arithmetic, in minutes, on a laptop.")

    flag = parser.add_argument_group("the six that matter first").add_argument
    flag("--reasoning", type=int, choices=(0, 1), default=1,
         help="1: start from reason_* weights, reward format and tags, let the reward model score the answer once more; "
              "0: start from full_sft_* weights, no format")
    flag("--num_generations", type=int, default=8, help="G, completions per prompt: the group that each is compared with")
    flag("--batch_size", type=int, default=16, help="prompts per rank in one step, times accumulation_steps")
    flag("--learning_rate", type=float, default=3e-4, help="AdamW's, at its peak; real models want about 1e-6")
    flag("--max_gen_len", type=int, default=96, help="tokens of a completion at most")
    flag("--beta", type=float, default=0.02,
         help="weight of the KL penalty that holds the policy near the reference; 0: no reference model")

    flag = parser.add_argument_group("1. ask: weights, prompts, sampling").add_argument
    flag("--model_path", help="weights of Qwen3, Qwen2.5, Llama, Qwen3-MoE: a folder or hub id; or MiniMind's .pth (default:"
                              " reason_<hidden_size> or full_sft_<hidden_size>, looked up in out_dir, then model/weights)")
    flag("--tokenizer_path", help="a folder or hub id with the tokenizer, if it is not with the weights")
    flag("--hidden_size", type=int, default=128, help="picks the weights by their name")
    flag("--num_hidden_layers", type=int, help="refuse weights with another number of layers")
    flag("--use_moe", type=int, choices=(0, 1), default=0, help="1: pick the weights whose name ends in _moe")
    flag("--data_path", help="the training prompts, a jsonl file; with one of your own nothing is evaluated unless "
                             "eval_data_path is given too (default: dataset/train.jsonl)")
    flag("--max_seq_len", type=int, default=66, help="tokens of a prompt at most")
    flag("--overlong_prompts", choices=("cut", "drop"), default="cut",
         help="of a prompt longer than max_seq_len keep the last tokens, or leave it out, counted at the start")
    flag("--system_prompt", help="a text put before chats without a system turn; r1: a built-in one that asks for the tags")
    flag("--num_workers", type=int, default=0, help="processes that read prompts ahead")
    flag("--temperature", type=float, default=1.0, help="of sampling, in training and in evaluation")

    flag = parser.add_argument_group("2. judge: rewards").add_argument
    flag("--reward_funcs", nargs="+", metavar="NAME",
         help="format, tag, rm, accuracy, overlong, repetition, or module:function of your own "
         "(default: format tag rm accuracy with --reasoning 1, rm accuracy with 0)")
    flag("--reward_weights", nargs="+", type=float, metavar="W", help="one for each of reward_funcs (default: all 1)")
    flag("--reward_model_path", help="a folder with a reward model (default: reward_<hidden_size>, looked up in out_dir, "
                                     "then in reward/weights), or owner/name on the hub: a ...ForSequenceClassification "
                                     "with one label, internlm/internlm2-1_8b-reward and its like, or a likelihood of "
                                     "python -m reward.train_reward_model")
    flag("--reward_model_device", help="where the reward model runs, cpu or cuda:1 (default: where the policy does)")
    flag("--reward_model_scale", type=float, default=1.0, help="the reward model's score is multiplied by it, then clipped")
    flag("--reward_model_clip", type=float, default=3.0, help="bounds the score from above and below; 0: no bound")
    flag("--reward_model_answer_share", type=float, default=0.6,
         help="with --reasoning 1, the weight of the answer's own score; the whole reply's has the rest")
    flag("--reward_timeout", type=float, default=0, help="seconds that a reward function may take for one step before its "
         "rewards are given up, as if it had failed; 0: no limit")
    flag("--scale_rewards", choices=("group", "batch", "none"), default="group",
         help="what advantages are divided by: the std of their group, of the whole step, or nothing (Dr. GRPO)")
    flag("--supervision", choices=("outcome", "process"), default="outcome",
         help="outcome: one reward for a completion; process: also one for each line of arithmetic in it, 1 if right")
    flag("--kl_in_reward", action="store_true",
         help="subtract beta * KL (k1) from the reward, not from the objective; rewards are logged without it")

    flag = parser.add_argument_group("3. remember: the reference").add_argument
    flag("--ref_model_sync_steps", type=int, default=0,
         help="move the reference towards the policy every so many steps; 0: never")
    flag("--ref_model_mixup_alpha", type=float, default=0.6, help="by which share of the way")

    flag = parser.add_argument_group("4. learn: the objective").add_argument
    flag("--loss_type", choices=("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "r1"), default="grpo",
         help="how tokens are averaged; cispo and r1 also bound and take the ratio in their own way")
    flag("--importance_sampling_level", choices=("token", "sequence"), default="token",
         help="the ratio of each token, or one for each completion (GSPO; its epsilons are about 3e-4)")
    flag("--epsilon_low", type=float, default=0.2, help="the ratio is clipped at 1 - epsilon_low")
    flag("--epsilon_high", type=float, help="the ratio is clipped at 1 + epsilon_high (default: 0.2); with cispo it is "
         "capped at epsilon_high (default: 5)")
    flag("--delta", type=float, help="cap on the ratio where the advantage is negative: the dual clip (default: none)")
    flag("--kl_type", choices=("k1", "k2", "k3", "abs"), help="estimate of the KL (default: k3; k1 in the reward)")
    flag("--entropy_coef", type=float, default=0.0, help="adds so many times the mean entropy to what is maximised")
    flag("--mask_truncated_completions", action="store_true", help="learn nothing from completions that never ended")
    flag("--num_iterations", type=int, default=1, help="passes over each rollout")
    flag("--num_minibatches", type=int, default=1, help="optimizer steps in each pass. With one of one the ratio stays 1, "
         "and no clip acts")

    flag = parser.add_argument_group("4. learn: the optimizer").add_argument
    flag("--accumulation_steps", type=int, default=1, help="multiplies the prompts of a step")
    flag("--micro_batch_size", type=int, default=64,
         help="completions that go through the model at once in steps 3 and 4: changes the memory, never the result")
    flag("--gradient_checkpointing", action="store_true",
         help="compute activations twice instead of keeping them: less memory, more time")
    flag("--epochs", type=int, default=1, help="how often the prompts are read")
    flag("--max_steps", type=int, default=120, help="steps at most; 0: as many as the epochs have")
    flag("--warmup_steps", type=int, default=3, help="steps over which the learning rate rises; then a cosine to a tenth")
    flag("--weight_decay", type=float, default=0.0, help="AdamW's")
    flag("--grad_clip", type=float, default=1.0, help="the norm of the gradient at most")

    flag = parser.add_argument_group("5. report: evaluation, logs, weights").add_argument
    flag("--eval_data_path", help="held-out problems with answers, a jsonl file (default: dataset/heldout.jsonl)")
    flag("--eval_interval", type=int, help="steps between evaluations; one also runs before and after; 0: none "
         "(default: 30; 0 with a data_path of your own and no eval_data_path)")
    flag("--eval_samples", type=int, default=1000, help="held-out problems per evaluation")
    flag("--eval_batch_size", type=int, default=256, help="held-out problems that are answered at once")
    flag("--num_generations_eval", type=int, default=2, help="k, samples per problem, for eval/accuracy and eval/pass@k")
    flag("--eval_only", action="store_true", help="evaluate the weights and stop")
    flag("--out_dir", default="out", help="a run writes to out_dir/run_name")
    flag("--run_name", help="the run's folder (default: grpo_<name of the weights>)")
    flag("--log_interval", type=int, default=1, help="steps between lines of progress where there is no terminal")
    flag("--save_interval", type=int, default=30, help="steps between checkpoints and pictures")
    flag("--resume", action="store_true", help="go on from the run's checkpoint, exactly as if it had never stopped")
    flag("--swanlab", choices=("disabled", "offline", "local", "online"), default="disabled",
         help="track with SwanLab; only online wants an account")
    flag("--use_wandb", action="store_true", help="the same as --swanlab online")
    flag("--wandb_project", default="MiniGRPO", help="the project in SwanLab")

    flag = parser.add_argument_group("the machine").add_argument
    flag("--device", choices=("cuda", "mps", "cpu"), help="(default: the first of these that is there)")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
         help="of matrix products; weights and log-probabilities stay float32; auto: bfloat16 on GPUs made for it")
    flag("--seed", type=int, default=42, help="of the order of prompts and of sampling")
    flag("--ddp", action="store_true", help="ignored: use torchrun")

    args = parser.parse_args(argv)
    check_args(args, parser)
    return args


def check_args(args, parser):
    """Refuses what can't work, by the flag's name, and fills in the defaults that depend on other flags."""
    if args.eval_interval is None:          # the arithmetic problems say nothing about another task
        args.eval_interval = 0 if args.data_path and not args.eval_data_path else 30
    for name in ("batch_size", "max_gen_len", "max_seq_len", "num_iterations", "num_minibatches", "accumulation_steps",
                 "micro_batch_size", "epochs", "num_generations_eval", "eval_samples", "eval_batch_size", "log_interval",
                 "save_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    for name in ("beta", "epsilon_low", "max_steps", "warmup_steps", "weight_decay", "eval_interval", "num_workers",
                 "reward_timeout", "reward_model_clip", "entropy_coef", "ref_model_sync_steps"):
        if getattr(args, name) < 0:
            parser.error(f"--{name} is {getattr(args, name)}; it must not be negative")
    for name in ("learning_rate", "temperature", "grad_clip", "reward_model_scale"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")
    if args.num_generations < 2:
        parser.error(f"--num_generations is {args.num_generations}; a group needs at least 2 completions to compare")
    if not 0 <= args.reward_model_answer_share <= 1:
        parser.error(f"--reward_model_answer_share is {args.reward_model_answer_share}; it must be between 0 and 1")
    check_objective(args, parser)
    args.data_path = args.data_path or str(HERE / "dataset/train.jsonl")
    args.eval_data_path = args.eval_data_path or str(HERE / "dataset/heldout.jsonl")
    args.reward_funcs = args.reward_funcs or ["format", "tag"] * args.reasoning + ["rm", "accuracy"]
    args.reward_weights = args.reward_weights or [1.0] * len(args.reward_funcs)
    if len(args.reward_weights) != len(args.reward_funcs):
        parser.error(f"--reward_weights has {len(args.reward_weights)} numbers for {len(args.reward_funcs)} reward "
                     f"functions ({' '.join(args.reward_funcs)}); give one for each")
    if args.use_wandb:
        args.swanlab = "online"
    suffix = f"{args.hidden_size}{'_moe' if args.use_moe else ''}"
    weights = f"{'reason' if args.reasoning else 'full_sft'}_{suffix}"
    args.model_path = args.model_path or str(find_weights(weights, args.out_dir, HERE / "model/weights"))
    args.reward_model_path = args.reward_model_path or str(
        find_weights(f"reward_{suffix}", args.out_dir, HERE / "reward/weights"))
    args.run_name = args.run_name or f"grpo_{Path(args.model_path).name.removesuffix('.pth')}"


def check_objective(args, parser):
    """Refuses choices that do not go together, and fills in the defaults that depend on others."""
    cispo, group = args.loss_type == "cispo", args.batch_size * args.accumulation_steps * args.num_generations
    if args.epsilon_high is None:
        args.epsilon_high = 5.0 if cispo else 0.2
    one_ratio = "r1" if args.loss_type == "r1" else "sequence" if args.importance_sampling_level == "sequence" else None
    for wrong, message in (
        (args.epsilon_high < 0, f"--epsilon_high is {args.epsilon_high}; it must not be negative"),
        (cispo and args.epsilon_high <= 1, f"--epsilon_high {args.epsilon_high} with --loss_type cispo would scale down "
         "every token: there it is the cap on the ratio itself; give one above 1, or leave it out for 5"),
        (cispo and args.delta is not None, "--delta caps the ratio of PPO's clip, and --loss_type cispo has none; "
         "leave it out: there --epsilon_high is the cap"),
        (not cispo and args.delta is not None and args.delta <= 1 + args.epsilon_high,
         f"--delta {args.delta} would undo the clip at 1 + epsilon_high = {1 + args.epsilon_high}; give a larger one"),
        (args.loss_type == "r1" and args.importance_sampling_level == "sequence", "--loss_type r1 has a ratio of its own, "
         "the product over the completion; leave --importance_sampling_level out"),
        (args.supervision == "process" and one_ratio, "--supervision process gives each token its own advantage, but "
         f"{one_ratio} has one ratio for the whole completion; change one of the two"),
        (args.supervision == "process" and args.scale_rewards != "group", f"--scale_rewards {args.scale_rewards} does not "
         "go with --supervision process, which normalises the steps of a group together; leave it out"),
        (args.kl_in_reward and args.beta == 0, "--kl_in_reward subtracts beta * KL, and --beta is 0; give a --beta above 0"),
        (args.kl_in_reward and args.kl_type not in (None, "k1"), f"--kl_type {args.kl_type} is for the KL in the loss; "
         "in the reward it is k1: leave it out, or leave out --kl_in_reward"),
        (args.ref_model_sync_steps and args.beta == 0, "--ref_model_sync_steps moves a reference, and with --beta 0 there "
         "is none; give a --beta above 0"),
        (not 0 < args.ref_model_mixup_alpha <= 1, f"--ref_model_mixup_alpha is {args.ref_model_mixup_alpha}; it must be "
         "above 0 and at most 1"),
        (args.num_minibatches > group, f"--num_minibatches {args.num_minibatches} is more than the {group} completions of a "
         "rank's step; choose fewer"),
    ):
        if wrong:
            parser.error(message)
    args.kl_type = args.kl_type or "k3"


# --- main -------------------------------------------------------------------------------------------------------------


def load_models(args, device):
    """Tokenizer, policy, reference and reward functions. Policies are float32, so that small updates add up."""
    policy = load_pretrained(args.model_path, dtype=torch.float32, device=device)
    if args.num_hidden_layers not in (None, policy.config.num_hidden_layers):
        raise ValueError(f"--num_hidden_layers {args.num_hidden_layers}: {args.model_path} has "
                         f"{policy.config.num_hidden_layers} layers; leave the flag out")
    policy.model.gradient_checkpointing = args.gradient_checkpointing
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.config.vocab_size)
    if not eos_token_ids(policy, tokenizer):
        raise ValueError(f"{tokenizer_path}: its tokenizer has no EOS token to end an answer with; "
                         "give another --tokenizer_path")
    # Copied before either is wrapped: a copied wrapper would go on calling the policy.
    reference = copy.deepcopy(policy) if args.beta > 0 else None
    if reference is not None:
        in_precision(reference, args.dtype, device)
    reward_funcs = load_reward_funcs(
        args.reward_funcs, reward_model_path=args.reward_model_path, device=args.reward_model_device or device,
        max_completion_length=args.max_gen_len, timeout=args.reward_timeout, reasoning=args.reasoning,
        clip=args.reward_model_clip, scale=args.reward_model_scale, answer_share=args.reward_model_answer_share)
    return tokenizer, in_precision(policy, args.dtype, device), reference, reward_funcs


def read_prompts(args, tokenizer):
    """The collator, the training prompts, and the held-out problems, none where nothing is evaluated."""
    collate, problems = PromptCollator(tokenizer, args.max_seq_len, args.system_prompt), PromptDataset(args.data_path)
    heldout = read_heldout(args.eval_data_path, args.eval_samples) if args.eval_interval or args.eval_only else []
    if args.overlong_prompts == "drop":
        problems = collate.without_overlong(problems, args.data_path)
        heldout = collate.without_overlong(heldout, args.eval_data_path)
    return collate, problems, heldout


def settings_of(args):
    """The flags that steps 1, 2 and 4 read, as their keyword arguments."""
    sampling = {"max_new_tokens": args.max_gen_len, "temperature": args.temperature}
    comparison = {"num_generations": args.num_generations, "scale_rewards": args.scale_rewards,
                  "supervision": args.supervision, "total_weight": sum(map(abs, args.reward_weights)),
                  "kl_coef": args.beta if args.kl_in_reward else 0.0}
    learning = {name: getattr(args, name) for name in (
        "num_iterations", "num_minibatches", "mask_truncated_completions", "grad_clip", "loss_type", "kl_type",
        "epsilon_low", "epsilon_high", "delta", "importance_sampling_level", "entropy_coef")}
    learning |= {"beta": 0.0 if args.kl_in_reward else args.beta, "max_completion_length": args.max_gen_len}
    return sampling, comparison, learning


def lr_at(step, last_step, *, peak, warmup_steps):
    """Learning rate of a step (from 1): a linear rise, then a cosine from the peak to a tenth of it."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def seed_of(*numbers):
    """One seed from several numbers, so that each (seed, step, rank) draws on its own: nothing to save for a resume."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**62
    return seed


@contextmanager
def user_errors():
    """A user's mistake ends the run with its one sentence and exit code 2; MINIGRPO_TRACEBACK=1 shows where it was found."""
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("MINIGRPO_TRACEBACK"):
            raise
        print(f"train_grpo.py: error: {error}", file=sys.stderr)
        sys.exit(2)


@user_errors()
def main(argv=None):
    args = parse_args(argv)
    world = World(args.device)
    device, run_dir, G = world.device, Path(args.out_dir) / args.run_name, args.num_generations
    tokenizer, policy, reference, reward_funcs = load_models(args, device)
    collate, problems, heldout = read_prompts(args, tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=args.weight_decay, fused=True)
    steps_done, num_tokens = load_checkpoint(run_dir / "checkpoint", policy, optimizer, reference) if args.resume else (0, 0)
    prompts_per_rank = args.batch_size * args.accumulation_steps
    last_step = args.epochs * steps_per_epoch(len(problems), prompts_per_rank, world.size)
    last_step = min(last_step, args.max_steps or last_step)
    batches = batches_of_steps(problems, collate, range(steps_done + 1, last_step + 1), prompts_per_rank=prompts_per_rank,
                               rank=world.rank, world_size=world.size, seed=args.seed, num_workers=args.num_workers)
    generator = torch.Generator(device)
    sampling, comparison, learning = settings_of(args)
    sampling |= {"eos_token_id": eos_token_ids(policy, tokenizer), "pad_token_id": tokenizer.pad_token_id or 0,
                 "generator": generator}
    logps_of = {"micro_batch_size": args.micro_batch_size, "temperature": args.temperature}

    def evaluate_heldout(step):
        generator.manual_seed(seed_of(args.seed, 1, step, world.rank))
        return evaluate(policy, heldout, collate, world, num_generations=args.num_generations_eval,
                        batch_size=args.eval_batch_size, **sampling)

    if args.eval_only:
        results = evaluate_heldout(steps_done)
        if world.rank == 0:
            print(json.dumps(results, indent=2))
        world.close()
        return
    if world.rank == 0 and not args.resume:
        discard_checkpoint(run_dir / "checkpoint")
    with Report(run_dir, args, total_steps=last_step, start_step=steps_done, active=world.rank == 0) as report:
        report.intro(policy, device, world.size, len(problems))
        if args.eval_interval and steps_done == 0:
            report.evaluation(0, evaluate_heldout(0))
        for step, batch in enumerate(batches, start=steps_done + 1):
            # 1. ask: G completions of every prompt
            with report.timed("rollout"):
                generator.manual_seed(seed_of(args.seed, 0, step, world.rank))
                rollout = ask(policy, batch, num_generations=G, **sampling)
            # 2. judge: rewards
            with report.timed("reward"):
                completions, rewards, per_function = judge(
                    rollout, batch, tokenizer, reward_funcs, args.reward_weights, num_generations=G)
            # 3. remember: log-probabilities under the policy that sampled, where it will have moved, and the reference
            if args.num_iterations * args.num_minibatches > 1 or args.kl_in_reward:
                with report.timed("old_logps"):
                    rollout.old_logps = remember(policy, rollout, **logps_of)
            if reference is not None:
                with report.timed("ref_logps"):
                    rollout.ref_logps = remember(reference, rollout, **logps_of)
            # 2. again: advantages within each group; here, since with --kl_in_reward the reference has a say in the reward
            rollout.advantages = compare(rollout, rewards, tokenizer, world, **comparison)
            rows = world.gather(describe(rollout, batch, completions, rewards, per_function, num_generations=G))
            metrics = rollout_metrics(rows, G)
            # 4. learn: clipped gradient steps on mini-batches
            with report.timed("update"):
                lr = lr_at(step, last_step, peak=args.learning_rate, warmup_steps=args.warmup_steps)
                optimizer.param_groups[0]["lr"] = lr
                metrics |= learn(policy, optimizer, rollout, world, **learning, **logps_of)
                if args.ref_model_sync_steps and step % args.ref_model_sync_steps == 0:
                    sync_reference(reference, policy, alpha=args.ref_model_mixup_alpha)
            # 5. report: metrics, now and then an evaluation, a checkpoint, a picture
            num_tokens += metrics["tokens"]
            metrics |= {"num_tokens": num_tokens, "learning_rate": lr}
            if args.eval_interval and (step % args.eval_interval == 0 or step == last_step):
                with report.timed("eval"):
                    results = evaluate_heldout(step)
                report.evaluation(step, results)
                metrics |= results
            report.step(step, metrics, rows)
            if step in (steps_done + 1, last_step):
                report.group(step, rows[:G])
            if world.rank == 0 and (step % args.save_interval == 0 or step == last_step):
                with report.timed("checkpoint"):
                    save_checkpoint(run_dir / "checkpoint", policy, tokenizer, optimizer, step=step, num_tokens=num_tokens,
                                    reference=reference if args.ref_model_sync_steps else None)
                report.draw()
        if world.rank == 0:
            save_pretrained(policy, tokenizer, run_dir / "final")
    world.close()


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *where: f"warning: {message}\n"
    main()
