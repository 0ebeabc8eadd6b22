"""Group Relative Policy Optimization, from scratch.

GRPO (DeepSeekMath, arXiv 2402.03300) teaches a language model from rewards alone, without a critic:
it answers each prompt several times, and each answer is judged against its siblings. Answers better
than their group's average become more likely, worse ones less.

    A_i     = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)       answer i's advantage in its group
    ratio_t = pi(o_t | q, o_<t) / pi_old(o_t | q, o_<t)            how far pi moved since sampling
    loss    = - mean over answers of mean over tokens of [
                  min(ratio_t A_i, clip(ratio_t, 1-epsilon_low, 1+epsilon_high) A_i)
                  - beta KL_t(pi || pi_ref) ]                      KL_t: an estimate, see KL_TYPES

With one update per rollout, the default, every ratio is 1 and nothing clips: the policy's part of
the loss then has the gradient of -A log pi.

One step, for B prompts and G = num_generations answers to each:
    1. ask        generate           sample G completions of every prompt          model/
    2. remember   compute_logps      their log-probabilities under the reference
    3. judge      compute_rewards    one reward per completion                     reward/
                  compute_advantages ... compared within each group
    4. learn      minibatches        which completions each optimizer step learns from
                  compute_old_logps  log-probabilities under the policy, if it moves more than once
                  update_policy      clipped gradient steps
    5. report                        metrics, a progress bar, pictures; weights    report/, model/

Letters: B prompts, G generations per prompt, N = B*G completions; P prompt tokens, R completion
tokens, T = P + R; V vocabulary; n rows of a micro-batch.

    python train_grpo.py                                       two to four minutes on two cores
    torchrun --nproc_per_node=2 train_grpo.py --reasoning 1    on two processes
    python train_grpo.py --help                                every flag

Where we differ from the papers and from other code, on purpose:
  - log-probabilities are float32 and those of the distribution that was sampled: the same
    temperature, no top-k or top-p. pi_old is computed by the trainer: so ratios start at 1.
  - averages run over the whole optimizer step, all micro-batches and ranks, so that neither
    micro_batch_size nor the number of processes changes the gradient of the same completions.
"""
import math
import os
from collections import defaultdict
from functools import partial
from pathlib import Path

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch

from dataset import batches_from, read_prompts
from model import MiniMindForCausalLM, Saver, World, eos_token_ids, sampler
from model.fast import pair, vllm_engine
from model.lora import AdaptersOff, with_adapters
from model.processes.watch import all_or_none, stop_on_signals
from model.processes.world import for_learning, for_sampling
from model.rollout import Minibatch, Rollout
from model.storage.read import find_weights, load_pretrained, load_tokenizer
from report import Report, UserError, describe
from report.command_line import Parser, folder_name, number, user_errors
from report.metrics import drift, mean_metrics, no_part, rollout_metrics, sum_metrics
from reward import combine_rewards, failures, load_reward_funcs, process, relatives

# --- the objective --------------------------------------------------------------------------------
# First the advantages, and the mask of a completion's own tokens. Then the loss: three independent
# choices, which ratio (importance_ratio), how it is bounded (ppo_clip), how tokens are averaged
# (LOSS_TYPES, pairs of a bound and an average); and a KL penalty. grpo_loss composes them. A
# relative of GRPO differs in one of them: reward/relatives.py has most, as rows of the tables here.


def group_advantages(rewards, num_generations, *, scale_rewards="group", batch_std=None, eps=1e-4,
                     advantage_estimator="grpo"):
    """How much better each completion is than its siblings, in standard deviations of its group.

        A = (r - mean(group)) / (std(group) + eps)         DeepSeekMath 4.1.2; n-1 and eps are TRL's

    scale_rewards "batch" divides by the std of all rewards instead, `batch_std` if it is given.
    "none" does not divide: an easy or hopeless group, whose rewards hardly differ, then has small
    advantages, and each prompt the same weight (Dr. GRPO, arXiv 2503.20783). advantage_estimator
    "rloo" takes the mean of the *others* (arXiv 2402.14740); scale_rewards still divides.

    rewards (N,), the G completions of one prompt adjacent -> (N,). NaN marks a completion that no
    reward judged: it is left out of mean and std and gets advantage 0. Four answers to `7 + 3*7`,
    paid 1 for being right and 0.1 for the format:

    >>> group_advantages(torch.tensor([0.1, 1.1, 1.0, 0.1]), 4)
    tensor([-0.8635,  0.9544,  0.7726, -0.8635])
    """
    if advantage_estimator not in ("grpo", *BASELINES):
        raise ValueError(f"advantage_estimator is {advantage_estimator!r}; choose grpo, "
                         f"{', '.join(BASELINES)}")
    if scale_rewards not in ("group", *SCALES):
        raise ValueError(f"scale_rewards is {scale_rewards!r}; choose group, {', '.join(SCALES)}")
    groups = rewards.view(-1, num_generations)                                          # (B, G)
    # The same constant off all changes nothing, but equal rewards or a lone one now give exactly 0.
    groups = groups - groups.nan_to_num(float("-inf")).amax(1, keepdim=True)
    baseline, scale = groups.nanmean(1, keepdim=True), nanstd(groups) + eps             # (B, 1)
    if advantage_estimator != "grpo":
        baseline = BASELINES[advantage_estimator](groups)                       # (B, 1 or G)
    if scale_rewards != "group":
        scale = SCALES[scale_rewards](rewards.view_as(groups), batch_std, eps)    # (B, 1) or ()
    return ((groups - baseline).nan_to_num(0.0) / scale).view(-1)


def nanstd(x):
    """Sample std (n-1) over the last dim (kept), ignoring NaNs; 0 for a single value."""
    deviation = (x - x.nanmean(-1, keepdim=True)).nan_to_num(0.0)
    count = (~x.isnan()).sum(-1, keepdim=True)
    return (deviation.pow(2).sum(-1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()


# Instead of the group's mean and std: from the rewards of groups, (B, G) with NaNs.
BASELINES = {
    "rloo": lambda groups: (groups.nansum(1, keepdim=True) - groups) / (        # mean of the others
        (~groups.isnan()).sum(1, keepdim=True) - 1).clamp(min=1),
}
SCALES = {
    "batch": lambda groups, std, eps: (nanstd(groups.flatten()) if std is None else std) + eps,
    "none":  lambda groups, std, eps: 1.0,
}


def completion_mask(completion_ids, eos_token_id):
    """(N, R): 1 through the first EOS, the token that ends an answer; all 1 without one.

    The EOS is trained: stopping is a skill. eos_token_id is an int or a list of ints.
    """
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_token_id)).int()
    return (is_eos.cumsum(1) - is_eos == 0).int()   # no EOS before this token; the first one stays


def importance_ratio(logps, old_logps, mask, *, level="token"):
    """Choice 1, the ratio pi / pi_old; with d = log pi - log pi_old at each token:

        token      exp(d)                                     (N, R)    PPO, GRPO
        sequence   exp(mean of d over the completion)         (N, 1)    GSPO, arXiv 2507.18071
    """
    log_ratio = (logps - old_logps) * mask                                              # (N, R)
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        return (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    raise ValueError(f"importance_sampling_level is {level!r}; choose token or sequence")


def ppo_clip(ratio, advantages, logps, mask, *, epsilon_low, epsilon_high, delta=None):
    """Choice 2, the bound: PPO's -min(ratio A, clip(ratio) A); and where it clips, low and high.

    Once a ratio has moved past 1 ± epsilon in the direction that its advantage favours, the clip
    removes its gradient. It does nothing against a bad token (A < 0) whose ratio is large: `delta`,
    above 1 + epsilon_high, caps it, and ends its gradient (INTELLECT-2; dual clip, Ye et al. 2020).
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    capped = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.min(capped * advantages, clipped * advantages)
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return loss, low, high


# Choice 3, the average: each token's term is divided by `divisor`, then all are added up. o is the
# length of the token's completion, L the maximum length; completions and tokens are those of the
# whole optimizer step, over all micro-batches and ranks.
LOSS_TYPES = {
    # name      bound     divisor
    "grpo":    (ppo_clip, lambda o, completions, tokens, L: completions * o),  # mean of means
    "bnpo":    (ppo_clip, lambda o, completions, tokens, L: tokens),           # mean of all tokens
    "dr_grpo": (ppo_clip, lambda o, completions, tokens, L: completions * L),  # no bias by length
    "dapo":    (ppo_clip, lambda o, completions, tokens, L: tokens),           # the same as bnpo
    "r1":      (ppo_clip, lambda o, completions, tokens, L: completions),      # see as_one_action
}   # the flags of each relative: docs/losses.md


# KL(pi || pi_ref), estimated at a token that pi sampled, from x = log pi_ref - log pi. Estimate and
# gradient (prefix and weight given, before pi moves) part ways because autograd takes the tokens as
# given: it does not see that another pi would sample others. k3 clamps x, lest e^x overflow.
KL_TYPES = {
    # name                                                            estimate   mean gradient of
    "k1":  lambda x: -x,                                            # unbiased   0: it pulls nowhere
    "k2":  lambda x: x.pow(2) / 2,                                  # biased     KL(pi || pi_ref)
    "k3":  lambda x: x.clamp(max=20).exp() - x.clamp(max=20) - 1,   # unbiased   KL(pi_ref || pi)
    "abs": lambda x: x.abs(),                                       # biased     |pi - pi_ref|
}


def kl_penalty(logps, ref_logps, *, kl_type="k3"):
    """KL to the reference, estimated at each token, (N, R). GRPO's estimate is k3."""
    if kl_type not in KL_TYPES:
        raise ValueError(f"kl_type is {kl_type!r}; choose {', '.join(KL_TYPES)}")
    return KL_TYPES[kl_type](ref_logps - logps)


def as_one_action(mask, *logps):
    """DeepSeek-R1: a completion is one action, with the sum of its tokens' log-probs; (N, 1)."""
    sums = [None if x is None else (x * mask).sum(1, keepdim=True) for x in logps]
    return mask.any(1, keepdim=True).int(), *sums


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps=None, beta=0.0, kl_type="k3",
              epsilon_low=0.2, epsilon_high=0.2, delta=None, loss_type="grpo",
              importance_sampling_level="token", max_completion_length=None, entropy=None,
              entropy_coef=0.0, use_bias_correction_kl=False, num_sequences=None, num_tokens=None,
              num_kept=None):
    """The loss of GRPO and its family, and metrics as detached scalars.

    logps, old_logps, mask, ref_logps, entropy (N, R); advantages (N,) or (N, R). num_sequences,
    num_tokens and num_kept are totals of the whole optimizer step, over all micro-batches and ranks
    (None: this call is the step): the parts' losses and metrics then add up to the step's. num_kept
    lacks masked-out rows, for metrics. entropy_coef times the mean entropy of tokens is a bonus.
    use_bias_correction_kl multiplies the KL's term by the ratio (DeepSeek-V3.2, arXiv 2512.02556).
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type is {loss_type!r}; choose {', '.join(LOSS_TYPES)}")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("loss_type dr_grpo divides by max_completion_length; give it")
    bound, divisor = LOSS_TYPES[loss_type]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]         # (N, 1 or R)
    num_sequences, num_tokens = num_sequences or len(mask), num_tokens or mask.sum().clamp(min=1)
    num_kept = num_kept or mask.any(1).sum().clamp(min=1)
    bonus = entropy_coef * (entropy * mask).sum() / num_tokens if entropy_coef else 0.0
    if loss_type == "r1":               # from here on a completion is its only token: R = 1
        if advantages.shape[1] > 1:
            raise ValueError("loss_type r1 has one ratio per completion; give advantages (N,)")
        mask, logps, old_logps, ref_logps = as_one_action(mask, logps, old_logps, ref_logps)
        num_tokens = num_kept           # its "tokens" are completions
    ratio = importance_ratio(logps, old_logps, mask, level=importance_sampling_level)
    loss, low, high = bound(ratio, advantages, logps, mask, epsilon_low=epsilon_low,
                            epsilon_high=epsilon_high, delta=delta)                   # (N, 1 or R)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                    # (N, 1)
    # Ratios of tokens are counted by token, those of completions by completion.
    by_token = importance_sampling_level == "token"
    weight = mask / num_tokens if by_token else mask / lengths / num_kept               # (N, R)
    metrics = {f"clip_ratio/{name}_mean": (where * weight).sum() for name, where in
               {"low": low, "high": high, "region": low | high}.items()}
    if delta is not None:
        capped = (ratio > delta) & (advantages < 0)
        metrics["clip_ratio/delta_mean"] = (capped * weight).sum()
    if beta or ref_logps is not None:
        kl = kl_penalty(logps, ref_logps, kl_type=kl_type)                              # (N, R)
        loss = loss + beta * (ratio * kl if use_bias_correction_kl else kl)
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens     # whatever the loss averages
    divided_by = divisor(lengths, num_sequences, num_tokens, max_completion_length)
    return (loss * mask / divided_by).sum() - bonus, metrics


# --- log-probabilities ----------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """log pi(token | all before) of the last R = num_completion_tokens of input_ids (N, T): (N, R).

    With `with_entropy` also the entropy of each of these distributions, (N, R), in nats. Both are
    float32, and 0 at padding.
    """
    R = num_completion_tokens
    # The logits at position t predict token t+1, so read those at positions P-1 ... T-2.
    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1]             # (N, R, V)
    all_logps = (logits.float() / temperature).log_softmax(-1)
    mask = attention_mask[:, -R:]                                                       # (N, R)
    logps = all_logps.gather(-1, input_ids[:, -R:, None]).squeeze(-1) * mask
    if not with_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1) * mask


# --- the functions of a step ----------------------------------------------------------------------
# With --sampler plain, `sample` is that of model/sampler.py, and `logps_of` is token_logps above.


def generate(model, batch, tokenizer, sample, rng, args, num_generations=None, greedy=False):
    """Step 1: G completions of each prompt of the batch, as a Rollout."""
    G, eos_ids = num_generations or args.num_generations, eos_token_ids(model, tokenizer)
    completion_ids, logps = sample(
        model, batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
        num_generations=G, max_new_tokens=args.max_gen_len, temperature=args.temperature,
        eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id or 0, generator=rng,
        greedy=greedy)                                                                  # (N, R)
    mask = completion_mask(completion_ids, eos_ids)                                     # (N, R)
    return Rollout.of(batch, completion_ids, mask, logps, eos_ids, tokenizer)


@torch.no_grad()
def compute_logps(model, rollout, logps_of, args):
    """Step 2: log-probs of all completions, (N, R). None without a model: beta 0, no reference."""
    if model is None:
        return None
    logps = torch.zeros_like(rollout.sampling_logps)
    for rows in torch.arange(len(logps), device=logps.device).split(args.micro_batch_size):
        part = rollout.select(rows)
        logps[rows, :part.mask.shape[1]] = logps_of(
            model, *part.sequences(), temperature=args.temperature)
    return logps


def compute_rewards(rollout, reward_funcs, reward_weights):
    """Step 3: the weighted sum of the rewards, (N,), and each function's own, {name: (N,)}."""
    return combine_rewards(rollout.prompts, rollout.replies, reward_funcs, reward_weights,
                           completion_ids=rollout.token_ids(), **rollout.columns)


def compute_advantages(rollout, policy, tokenizer, logps_of, world, args):
    """Step 3: advantages, (N,), or (N, R) with process supervision, which needs the tokenizer."""
    rewards = rollout.rewards
    if args.kl_in_reward:       # k1 fits here: what counts is its value, and not its gradient
        logps = compute_logps(policy, rollout, logps_of, args)                          # (N, R)
        kl = kl_penalty(logps, rollout.ref_logps, kl_type="k1")                         # (N, R)
        rewards = rewards - args.beta * (kl * rollout.mask).sum(1).cpu()
    if args.supervision == "process":
        return process.advantages_of(rollout, rewards, tokenizer, args)
    if args.multi_objective_aggregation == "normalize_then_sum":
        return relatives.normalize_then_sum(rollout, group_advantages, world, args)
    batch_std = nanstd(torch.tensor(world.gather(rewards.tolist())))    # for scale_rewards batch
    advantages = group_advantages(rewards, args.num_generations, batch_std=batch_std,
                                  scale_rewards=args.scale_rewards,
                                  advantage_estimator=args.advantage_estimator)
    return advantages.to(rollout.mask.device)


def minibatches(rollout, world, args):
    """Step 4: a Minibatch for each optimizer step of a pass; none if no rank has a reward."""
    if not world.sum((~rollout.rewards.isnan()).sum()):
        return []
    # With --mask_truncated_completions a cut-off one adds no tokens, but is one of num_sequences.
    kept = rollout.ended if args.mask_truncated_completions else torch.ones_like(rollout.ended)
    learned = kept                                                                      # (N,)
    # Without a KL or a bonus a row of advantage 0 has no gradient: it counts, but is not read.
    if rollout.ref_logps is None and not args.entropy_coef:
        learned = kept & rollout.advantages.view(len(kept), -1).any(1)
    best, updates = relatives.best_rows(rollout, nanstd, args), []   # all, or --oversample
    for rows in best.tensor_split(min(args.num_minibatches, len(best))):
        counts = torch.stack([kept, rollout.lengths * kept])[:, rows].sum(1).tolist()
        totals = world.sum(torch.tensor([len(rows), *counts])).tolist()
        parts = [part for part in rows[learned[rows]].split(args.micro_batch_size) if len(part)]
        parts = world.keep_pace([rollout.select(part) for part in parts], rollout, args.shard)
        updates.append(Minibatch(*totals, parts))
    return updates


@torch.no_grad()
def compute_old_logps(policy, updates, logps_of, args):
    """Step 4: log pi_old of each micro-batch, (n, R); none if the policy moves only once.

    Per micro-batch: another split would round differently in bfloat16, and first ratios not be 1.
    """
    if len(updates) * args.num_iterations > 1:
        for part in [part for minibatch in updates for part in minibatch.micro_batches]:
            part.old_logps = logps_of(policy, *part.sequences(), temperature=args.temperature)


def update_policy(policy, optimizer, lr, updates, world, logps_of, args):
    """Step 4: an optimizer step on each Minibatch, `num_iterations` times; their mean metrics."""
    metrics, options = [], loss_options(args)
    optimizer.param_groups[0]["lr"] = lr
    for minibatch in updates * args.num_iterations:
        shares = [no_part(args.delta)]      # a rank may have none
        for part in minibatch.micro_batches:
            logps, entropy = logps_of(policy, *part.sequences(), temperature=args.temperature,
                                      with_entropy=True)                                # (n, R)
            if not args.entropy_coef:
                entropy = entropy.detach()      # frees what its gradient would need
            # Before it has moved, the policy is the old one: the ratio is 1, its gradient is not 0.
            old_logps = logps.detach() if part.old_logps is None else part.old_logps
            # By default 1, and the advantages as they are: two flags correct for the sampler.
            weights = relatives.sampler_weights(part, old_logps, args)              # (n, 1 or R)
            advantages = relatives.near_sampler(part, logps, args)                  # (n, 1 or R)
            loss, of_loss = grpo_loss(
                logps, old_logps, weights * advantages, part.mask,
                num_sequences=minibatch.num_sequences, num_tokens=minibatch.num_tokens,
                num_kept=minibatch.num_kept, ref_logps=part.ref_logps, entropy=entropy, **options)
            loss.backward()
            of_policy = drift(part, logps, old_logps, entropy, weights)     # sums over tokens
            shares.append({"loss": loss.detach()} | of_loss | of_policy)
        world.sum_gradients(policy)
        grad_norm = world.clip_gradients(policy, args.grad_clip)
        if grad_norm.isfinite():    # the same on every rank: all take the step, or all skip it
            optimizer.step()
        optimizer.zero_grad()       # frees the gradients: the sampler will need the room
        metrics.append(sum_metrics(shares, world) | {"grad_norm": grad_norm.item()})
    return mean_metrics(metrics)


# --- main -----------------------------------------------------------------------------------------


@user_errors("train_grpo.py")       # a user's mistake is one line, without a traceback
@all_or_none                        # what ends one rank ends all of them
def main(argv=None):
    args = parse_args(argv)
    world = World(args.device, args.dtype, args.seed, args.hang_timeout)
    saver = Saver(Path(args.out_dir) / args.run_name, world, args)
    tokenizer, policy, reference, reward_funcs, eval_funcs = load_models(args, world)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), fused=True,
                                  weight_decay=args.weight_decay)   # 0.99: runs are short
    sample, logps_of = choose_pair(policy, optimizer, world, args)      # or a pair of your own
    sample, logps_of = for_sampling(sample, world, args), for_learning(logps_of, world, args)
    steps_done, num_tokens = saver.resume(policy, optimizer, reference)
    collate, problems, heldout = read_prompts(args, tokenizer)
    batches, last_step = batches_from(steps_done + 1, problems, collate, world, args)
    evaluate_at = partial(evaluate, policy, heldout, eval_funcs, collate, world, sample, args)
    if args.eval_only:
        world.print_json(evaluate_at(steps_done))
        return world.close()
    with Report(saver.run_dir, args, total_steps=last_step, start_step=steps_done,
                num_tokens=num_tokens, active=world.rank == 0) as report:
        report.intro(policy, world.device, world.size, len(problems), len(heldout))
        if args.eval_interval and steps_done == 0:
            report.evaluation(0, evaluate_at(0))
        stop_on_signals(world)              # from here on a signal lets the step end
        unjudged = 0                        # steps in a row without a reward
        for step, batch in enumerate(batches, start=steps_done + 1):
            report.phase("rollout")         # 1. ask: G completions of every prompt
            rollout = generate(policy, batch, tokenizer, sample, world.rng(step), args)
            report.phase("ref_logps")       # 2. remember: log-probs under the reference
            rollout.ref_logps = compute_logps(reference, rollout, logps_of, args)
            report.phase("reward")          # 3. judge: rewards, then advantages within each group
            rollout.rewards, rollout.rewards_per_func = compute_rewards(
                rollout, reward_funcs, args.reward_weights)
            rollout.advantages = compute_advantages(
                rollout, policy, tokenizer, logps_of, world, args)
            report.phase("old_logps")       # 4. learn: minibatches, then clipped gradient steps
            updates = minibatches(rollout, world, args)
            unjudged = 0 if updates else unjudged + 1
            compute_old_logps(policy, updates, logps_of, args)
            report.phase("update")
            lr = lr_at(step, last_step, peak=args.learning_rate, warmup_steps=args.warmup_steps)
            metrics = update_policy(policy, optimizer, lr, updates, world, logps_of, args)
            sync_reference(reference, policy, step, args)
            report.phase(None)              # 5. report: metrics, pictures, weights
            records, of_rollout = gather_records(rollout, reward_funcs, tokenizer, world, args)
            if args.eval_interval and (step % args.eval_interval == 0 or step == last_step):
                report.phase("eval")
                metrics |= report.evaluation(step, evaluate_at(step))
            report.step(step, metrics | of_rollout | {"learning_rate": lr}, records)
            is_due, signal = saver.is_due(step, last_step)
            if is_due or unjudged == 10:
                report.phase("checkpoint")
                saver.save(step, report.num_tokens, policy, tokenizer, optimizer, reference)
                report.draw()
            stop_if_asked(step, signal, unjudged, saver)        # the same on all ranks
        saver.save_final(policy, tokenizer)
    world.close()


# --- what one looks up: evaluation, loading -------------------------------------------------------


def gather_records(rollout, reward_funcs, tokenizer, world, args):
    """A row for each completion of all ranks, and the metrics that follow from these rows."""
    rows = world.gather(describe(rollout, tokenizer if args.log_token_logps else None))
    failed = world.gather(failures(reward_funcs))
    return rows, rollout_metrics(rows, args.num_generations, failed, warn=world.rank == 0)


def stop_if_asked(step, signal, unjudged, saver):
    """Ends the run after a step that is saved: for a signal, or if no step had a reward of late."""
    if signal:
        raise saver.stopped(step, signal)
    if unjudged == 10:
        raise UserError("no completion of the last 10 steps has a reward; check that "
                        "--reward_funcs fit the data")


def loss_options(args):
    """The keywords of grpo_loss that are flags."""
    names = ("kl_type", "epsilon_low", "epsilon_high", "delta", "loss_type", "entropy_coef",
             "importance_sampling_level", "use_bias_correction_kl")
    beta = 0.0 if args.kl_in_reward else args.beta
    return {"beta": beta, "max_completion_length": args.max_gen_len} | {
        name: getattr(args, name) for name in names}


def lr_at(step, last_step, *, peak, warmup_steps):
    """Learning rate of a step (from 1): a linear rise, then a cosine from the peak to a tenth."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def sync_reference(reference, policy, step, args):
    """Now and then reference <- alpha policy + (1 - alpha) reference (TR-DPO, arXiv 2404.09656)."""
    if args.ref_model_sync_steps and step % args.ref_model_sync_steps == 0:
        for theirs, ours in zip(reference.parameters(), policy.parameters()):
            theirs.lerp_(ours, args.ref_model_mixup_alpha)


def evaluate(policy, problems, eval_funcs, collate, world, sample, args, step):
    """Held-out accuracy over all ranks: of k samples the mean, any of them (pass@k), and greedy.

    A reply is right if its evaluation rewards add up to --eval_threshold or more. A problem that
    they do not judge is left out.
    """
    rng = world.rng(step, evaluating=True)
    k, found = args.num_generations_eval, defaultdict(list)     # metric -> a number per problem
    # Sharded ranks must sample equally often: one with a problem less than others answers another
    # one, which isn't counted.
    mine, share = problems[world.rank::world.size], -(-len(problems) // world.size)
    answered = mine + problems[:share - len(mine)]
    for start in range(0, share, args.eval_batch_size):
        batch = collate(answered[start:start + args.eval_batch_size])
        rollouts = [generate(policy, batch, collate.tokenizer, sample, rng, args, n, greedy)
                    for n, greedy in ((1, True), (k, False))]
        greedy, sampled = (
            compute_rewards(rollout, eval_funcs, [1.0] * len(eval_funcs))[0].view(-1, n)
            for rollout, n in zip(rollouts, (1, k)))                            # (B, 1), (B, k)
        judged = ~torch.cat((greedy, sampled), 1).isnan().any(1)                        # (B,)
        judged[len(mine) - start:] = False
        right = (sampled >= args.eval_threshold).float()                                # (B, k)
        for name, numbers in {
            "accuracy": right.mean(1), "reward": sampled.mean(1), f"pass@{k}": right.amax(1),
            "greedy_accuracy": (greedy[:, 0] >= args.eval_threshold).float(),
            "mean_length": rollouts[1].lengths.cpu().float().view(-1, k).mean(1),
        }.items():
            found[name] += numbers[judged].tolist()
    if k == 1:
        del found["pass@1"]         # it would be the accuracy again
    found = {f"eval/{name}": world.gather(numbers) for name, numbers in found.items()}
    return {name: sum(all_of) / len(all_of) if all_of else math.nan
            for name, all_of in found.items()}


def load_models(args, world):
    """Tokenizer, policy, reference, and reward functions.

    Weights that learn are float32, so that small updates add up. The matrices of frozen ones have
    the dtype in which products read them anyway.
    """
    products, reference = world.matrix_dtype, None
    load = partial(load_pretrained, args.model_path, dtype=torch.float32,
                   device="meta" if args.shard else world.device)
    policy = load(matrix_dtype=products if args.lora_rank else None)
    layers = policy.config.num_hidden_layers
    if args.num_hidden_layers not in (None, layers):
        raise UserError(f"--num_hidden_layers {args.num_hidden_layers}: {args.model_path} has "
                        f"{layers} layers; leave the flag out")
    policy.model.gradient_checkpointing = args.gradient_checkpointing
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.config.vocab_size)
    if not eos_token_ids(policy, tokenizer):
        raise UserError(f"{tokenizer_path}: no EOS token to end an answer with; give another "
                        "--tokenizer_path")
    if args.lora_rank:
        reference, policy = policy, with_adapters(
            policy, rank=args.lora_rank, alpha=args.lora_alpha, name=args.model_path,
            seed=args.seed)
        if args.shard:      # the base is let go: it would keep every layer whole on the GPU
            reference = AdaptersOff(policy)
    elif args.beta > 0:
        reference = load(matrix_dtype=None if args.ref_model_sync_steps else products)
        reference.requires_grad_(False)
    if args.shard:
        for model in (policy, reference):
            world.shard(model, products, args.model_path)
    reward_funcs = load_reward_funcs(
        args.reward_funcs + args.eval_reward_funcs, reward_model_path=args.reward_model_path,
        device=args.reward_model_device or world.device, max_completion_length=args.max_gen_len,
        timeout=args.reward_timeout, reasoning=args.reasoning, clip=args.reward_model_clip,
        scale=args.reward_model_scale, answer_share=args.reward_model_answer_share)
    reference, count = reference if args.beta > 0 else None, len(args.reward_funcs)
    return tokenizer, policy, reference, reward_funcs[:count], reward_funcs[count:]


def choose_pair(policy, optimizer, world, args):
    """The two functions that run the policy: `sample`, and what computes log-probabilities."""
    sample, logps_of = sampler.sample, token_logps
    if args.sampler != "plain" and isinstance(policy, MiniMindForCausalLM):
        sample, logps_of = pair.sample, pair.token_logps    # they know our own network alone
    if args.sampler == "vllm":
        sample = vllm_engine.Engine(world, args)
        optimizer.register_step_post_hook(sample.outdate)
        logps_of = sample.while_asleep(logps_of)
    return sample, logps_of


# --- what one looks up: flags ---------------------------------------------------------------------


HERE = Path(__file__).parent
BASELINES |= relatives.BASELINES        # the tables of the objective get the rows of the relatives
SCALES |= relatives.SCALES
LOSS_TYPES |= relatives.loss_types(ppo_clip)
KL_TYPES |= relatives.kl_types(KL_TYPES["k3"])

COUNT, COUNT_OR_0 = number(int, 1), number(int, 0)
POSITIVE, POSITIVE_OR_0 = number(float, 0, above=True), number(float, 0)
FINITE = number(float, -10**6, 10**6)


def parse_args(argv=None):
    parser = Parser(description=(
        "Group Relative Policy Optimization. Without flags a small model learns, in minutes, that "
        "thinking before it answers pays. Policy: the model that learns. Reference: the weights it "
        "started from. Group: the completions of one prompt. Rollout: those of a step."))
    for add_flags in (add_ask_flags, add_judge_flags, add_objective_flags, add_optimizer_flags,
                      add_report_flags, add_machine_flags):
        add_flags(parser)
    args = parser.parse_args(argv)
    fill_in_defaults(args)
    for wrong, message in impossible_objectives(args) + impossible_combinations(args):
        if wrong:
            parser.error(message)
    return args


def add_ask_flags(parser):
    flag = parser.add_argument_group("the six that matter first").add_argument
    flag("--reasoning", type=int, choices=(0, 1), default=1,
         help="1: start from weights that think between tags (reason_*), reward the tags, let a "
         "chat template think that has the switch; 0: weights without tags (full_sft_*)")
    flag("--num_generations", type=number(int, 2), default=8, help="G, completions per prompt: "
         "with more of them a group's mean is less noisy, at a cost in proportion")
    flag("--batch_size", type=COUNT, default=16, help="prompts per step, for each process")
    flag("--learning_rate", type=POSITIVE, default=3e-4,
         help="its peak; 1e-6 to 3e-5 for real models")
    flag("--max_gen_len", type=COUNT, default=96, help="tokens after which a completion is cut off")
    flag("--beta", type=POSITIVE_OR_0, default=0.02, help="weight of the KL penalty, which keeps "
         "the policy near the reference; 0: no penalty, and no reference in memory")

    flag = parser.add_argument_group("1. ask (weights, prompts, sampling)").add_argument
    flag("--model_path", help="the policy: Qwen3, Qwen2.5, Llama or Qwen3-MoE weights, or (slower) "
         "of any other causal model of transformers, a folder or hub id; or MiniMind's .pth "
         "(default: reason_ or full_sft_<hidden_size>, from out_dir or else from model/weights)")
    flag("--tokenizer_path", help="a folder or hub id, if the tokenizer is not with the weights")
    flag("--hidden_size", type=COUNT, default=128, help="picks the default weights by their name")
    flag("--num_hidden_layers", type=COUNT, help="refuse weights with another number of layers")
    flag("--use_moe", type=int, choices=(0, 1), default=0, help="1: default weights named ..._moe")
    flag("--data_path", help="training prompts, a jsonl file (default: dataset/train.jsonl)")
    flag("--max_seq_len", type=COUNT, default=66, help="tokens that a prompt may have")
    flag("--overlong_prompts", choices=("refuse", "cut", "drop"), default="refuse",
         help="refuse longer prompts, keep their last tokens, or leave them out")
    flag("--system_prompt", help="for chats without one; r1: a text that asks for the tags")
    flag("--num_workers", type=number(int, 0, 256), default=0, help="MiniMind's, ignored")
    flag("--temperature", type=POSITIVE, default=1.0, help="of sampling, in evaluation too")
    flag("--rollout_batch_size", type=COUNT_OR_0, default=0, help="completions sampled at once, in "
         "training and evaluation: fewer need less memory and more time; 0: all of them")
    flag("--oversample", type=COUNT, default=1, help="sample this many times the prompts, learn "
         "from the groups with the largest spread of rewards (DAPO's dynamic sampling)")

    flag = parser.add_argument_group("2. remember (the reference)").add_argument
    flag("--ref_model_sync_steps", type=COUNT_OR_0, default=0, help="steps between moves of the "
         "reference towards the policy, in long runs; 0: it stays")
    flag("--ref_model_mixup_alpha", type=number(float, 0, 1, above=True), default=0.6,
         help="such a move is reference <- alpha policy + (1 - alpha) reference")


def add_judge_flags(parser):
    flag = parser.add_argument_group("3. judge (rewards, advantages)").add_argument
    flag("--reward_funcs", nargs="+", metavar="NAME", help="format, tag, rm, accuracy, overlong, "
         "repetition, countdown, sentence, reasoning_gym, or your own as module:function (default: "
         "format tag rm accuracy; no tags with --reasoning 0, rm only for our data or your model)")
    flag("--reward_weights", nargs="+", type=FINITE, metavar="W", help="a factor for each of them; "
         "with 0 it is recorded, but teaches nothing (default: 1)")
    flag("--reward_model_path", help="what rm is, a folder or hub id: a "
         "...ForSequenceClassification with one label, InternLM2's, one of "
         "reward.train_reward_model, or likelihood:PATH, the mean log-prob under a language model "
         "(default: reward_<hidden_size>, from out_dir or else from reward/weights)")
    flag("--reward_model_device", help="cpu or cuda:1, say (default: the policy's)")
    flag("--reward_model_scale", type=POSITIVE, default=1.0, help="multiplies the score of rm")
    flag("--reward_model_clip", type=POSITIVE_OR_0, default=1.0,
         help="bounds the scaled score: 1 is worth as much as a right answer; 0: no bound")
    flag("--reward_model_answer_share", type=number(float, 0, 1), default=0.6,
         help="with --reasoning 1, weight of the answer's own score; the whole reply has the rest")
    flag("--reward_timeout", type=POSITIVE_OR_0, default=0,
         help="seconds per step after which a reward function has failed; 0: no limit")
    flag("--scale_rewards", choices=("group", *SCALES), help="divide advantages by the std of the "
         "group, of the step, or by nothing: then groups that hardly differ count less; mean: by "
         "its mean (MaxRL) (default: group; none with another --advantage_estimator than grpo)")
    flag("--advantage_estimator", choices=("grpo", *BASELINES), default="grpo",
         help="compare a reward with the mean of its group, or of the other completions in it; "
         "grpo_passk: only the best of a group, with the second best")
    flag("--multi_objective_aggregation", choices=("sum_then_normalize", "normalize_then_sum"),
         default="sum_then_normalize", help="normalize_then_sum: divide each reward function by "
         "its own std in the group, then the sum by that of the step (GDPO)")
    flag("--supervision", choices=("outcome", "process"), default="outcome",
         help="process: also reward each right line of arithmetic with 1")
    flag("--kl_in_reward", action="store_true", help="take beta * KL (k1) off the reward instead")


def add_objective_flags(parser):
    flag = parser.add_argument_group("4. learn (the objective)").add_argument
    flag("--loss_type", choices=tuple(LOSS_TYPES), default="grpo", help="mean over tokens: of each "
         "completion, then of all (grpo); of all tokens (bnpo, dapo); sum / max_gen_len (dr_grpo); "
         "sum (luspo); cispo, sapo, gmpo and r1 also change the bound or the ratio")
    flag("--importance_sampling_level", choices=("token", "sequence"), default="token",
         help="a ratio pi / pi_old per token, or per completion (GSPO: epsilons of about 3e-4)")
    flag("--epsilon_low", type=POSITIVE_OR_0, default=0.2, help="clip the ratio at 1 - it")
    flag("--epsilon_high", type=POSITIVE_OR_0, help="and at 1 + it (default: 0.2; DAPO 0.28); "
         "with cispo the cap itself (default: 5); gmpo has both in log space: 0.4, say")
    flag("--delta", type=FINITE, help="dual clip: cap on the ratio of bad tokens (default: none)")
    flag("--kl_type", choices=tuple(KL_TYPES), help="estimate of the KL: k2 has its gradient, k3 "
         "is GRPO's, k3+ its value with k2's gradient (default: k3; k1 with --kl_in_reward)")
    flag("--use_bias_correction_kl", action="store_true",
         help="multiply the KL by the ratio: with one per token k3 has the KL's gradient, too")
    flag("--rollout_is_threshold", type=POSITIVE_OR_0, default=0.0, help="where the sampler is not "
         "the policy: weight advantages by pi_old / pi_sampler, at most this: 2, say; 0: don't")
    flag("--off_policy_mask_threshold", type=POSITIVE_OR_0, default=0.0, help="learn nothing from "
         "bad completions whose mean of log pi_sampler - log pi is above this: 0.5, say; 0: all")
    flag("--entropy_coef", type=POSITIVE_OR_0, default=0.0, help="weight of an entropy bonus")
    flag("--mask_truncated_completions", action="store_true",
         help="learn nothing from completions that were cut off")
    flag("--num_iterations", type=COUNT, default=1, help="passes over each rollout: more save "
         "sampling, but the policy moves away from the one that sampled")
    flag("--num_minibatches", type=COUNT, default=1,
         help="optimizer steps per pass; with a single one in all, no ratio moves and no clip acts")


def add_optimizer_flags(parser):
    flag = parser.add_argument_group("4. learn (the optimizer)").add_argument
    flag("--lora_rank", type=COUNT_OR_0, default=0,
         help="train adapters of this rank (LoRA) instead of the weights; 0: the weights")
    flag("--lora_alpha", type=POSITIVE, default=32, help="alpha / rank scales the adapters")
    flag("--accumulation_steps", type=COUNT, default=1, help="multiplies batch_size")
    flag("--micro_batch_size", type=COUNT, default=64, help="completions per forward pass: lower "
         "it if memory runs out; the result stays the same")
    flag("--gradient_checkpointing", action="store_true", help="less memory, more time")
    flag("--epochs", type=COUNT, default=1, help="passes over the prompts, within max_steps")
    flag("--max_steps", type=COUNT_OR_0, default=300, help="at most; 0: until the epochs are done")
    flag("--warmup_steps", type=COUNT_OR_0, default=3, help="the rate rises, then falls to a tenth")
    flag("--weight_decay", type=POSITIVE_OR_0, default=0.0, help="AdamW's")
    flag("--grad_clip", type=POSITIVE, default=1.0, help="maximum norm of the gradient")


def add_report_flags(parser):
    flag = parser.add_argument_group("5. report (evaluation, logs, weights)").add_argument
    flag("--eval_data_path", help="jsonl with held-out problems (default: dataset/heldout.jsonl)")
    flag("--eval_interval", type=COUNT_OR_0, help="steps between evaluations; also before and "
         "after training; 0: none (default: 30; 0 if only data_path is your own)")
    flag("--eval_samples", type=COUNT, default=1000, help="held-out problems per evaluation")
    flag("--eval_reward_funcs", nargs="+", metavar="NAME", help="what tells whether a held-out "
         "reply is right, by the names of --reward_funcs (default: accuracy)")
    flag("--eval_threshold", type=FINITE, default=1.0,
         help="a reply is right if these rewards add up to at least this")
    flag("--eval_batch_size", type=COUNT, help="problems answered at once (default: 256; with data "
         "of your own as many replies as a rollout has)")
    flag("--num_generations_eval", type=COUNT, default=2, help="k, samples per problem (pass@k)")
    flag("--eval_only", action="store_true", help="evaluate the weights and stop")
    flag("--out_dir", default="out", help="a run writes to out_dir/run_name")
    flag("--run_name", type=folder_name, help="(default: grpo_<name of the weights>)")
    flag("--log_interval", type=COUNT, default=1, help="steps per line, where no bar can be drawn")
    flag("--save_interval", type=COUNT, default=30, help="steps between checkpoints")
    flag("--log_token_logps", action="store_true", help="completions.jsonl also gets each token "
         "and its log-probability, by which report.html shades it")
    flag("--resume", action="store_true", help="continue exactly from the run's checkpoint")
    flag("--swanlab", choices=("disabled", "offline", "local", "online"), default="disabled",
         help="track the run: local for `swanlab watch`, online with an account")
    flag("--use_wandb", action="store_true", help="MiniMind's name of --swanlab online")
    flag("--wandb_project", default="MiniGRPO", help="the project in SwanLab")


def add_machine_flags(parser):
    flag = parser.add_argument_group("the machine").add_argument
    flag("--sampler", choices=("fast", "plain", "vllm"), help="fast: the sampler and log-probs of "
         "model/fast, measured on CPUs only; plain: the ones to read, same numbers; vllm: an "
         "inference engine samples (requirements-vllm.txt), log-probs are fast's (default: fast)")
    flag("--vllm_gpu_memory_utilization", type=number(float, 0, 1, above=True), default=0.3,
         help="the engine's share of a GPU's memory; it is free while the policy learns")
    flag("--fast", type=int, choices=(0, 1), help="0: --sampler plain")
    flag("--device", choices=("cuda", "mps", "cpu"), help="(default: the first one available)")
    flag("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of matrix "
         "products; auto: bfloat16 on a GPU that has it, with TF32 for the rest; else float32")
    flag("--shard", type=int, choices=(0, 1), default=0, help="1: divide weights, gradients and "
         "moments over the processes (FSDP); to sample, the whole model must fit one GPU")
    flag("--hang_timeout", type=POSITIVE_OR_0, help="seconds that one batch, or a wait for other "
         "processes, may take; 0: no limit (default: 1800 with several processes, else 0)")
    flag("--seed", type=COUNT_OR_0, default=42, help="of the order of prompts and of sampling")
    flag("--ddp", action="store_true", help="MiniMind's, ignored: use torchrun")


def fill_in_defaults(args):
    """The defaults that depend on other flags."""
    ours = HERE / "dataset/train.jsonl"
    own_data = Path(args.data_path or ours).resolve() != ours.resolve()
    if args.eval_interval is None:      # the arithmetic problems say nothing about another task
        args.eval_interval = 0 if own_data and not args.eval_data_path else 30
    if args.eval_batch_size is None:    # what fits into memory in a rollout fits in an evaluation
        replies = args.batch_size * args.num_generations
        args.eval_batch_size = max(1, replies // args.num_generations_eval) if own_data else 256
    args.data_path = args.data_path or str(ours)
    args.eval_data_path = args.eval_data_path or str(HERE / "dataset/heldout.jsonl")
    by_mean, cispo = args.advantage_estimator == "grpo", args.loss_type == "cispo"
    args.scale_rewards = args.scale_rewards or ("group" if by_mean else "none")
    if args.epsilon_high is None:
        args.epsilon_high = 5.0 if cispo else 0.2
    args.kl_type = args.kl_type or ("k1" if args.kl_in_reward else "k3")
    args.sampler = args.sampler or ("plain" if args.fast == 0 else "fast")
    args.swanlab = "online" if args.use_wandb else args.swanlab
    args.shard = int(args.shard and int(os.environ.get("WORLD_SIZE") or 1) > 1)
    suffix = f"{args.hidden_size}{'_moe' if args.use_moe else ''}"
    name = f"reason_{suffix}" if args.reasoning else f"full_sft_{suffix}"
    policy = find_weights(name, args.out_dir, HERE / "model/weights")
    args.model_path = args.model_path or str(policy)
    judge = find_weights(f"reward_{suffix}", args.out_dir, HERE / "reward/weights")
    args.reward_model_path = args.reward_model_path or str(judge)
    funcs = ["format", "tag"] if args.reasoning else []
    # Our reward model knows nothing but arithmetic.
    if not own_data or Path(args.reward_model_path).parent != HERE / "reward/weights":
        funcs.append("rm")
    args.reward_funcs = args.reward_funcs or [*funcs, "accuracy"]
    args.eval_reward_funcs = args.eval_reward_funcs or ["accuracy"]
    args.reward_weights = args.reward_weights or [1.0] * len(args.reward_funcs)
    args.run_name = args.run_name or f"grpo_{Path(args.model_path).name.removesuffix('.pth')}"


def impossible_objectives(args):
    """[(is it there?, what to say)] of the rewards, the advantages and the loss."""
    loss_type, high, delta = args.loss_type, args.epsilon_high, args.delta
    cispo, one_ratio = loss_type == "cispo", loss_type in ("r1", "gmpo")
    sequence, by_steps = args.importance_sampling_level == "sequence", args.supervision == "process"
    by_function = args.multi_objective_aggregation == "normalize_then_sum"
    other_advantages = (args.scale_rewards, args.advantage_estimator) != ("group", "grpo")
    return [
        (cispo and high <= 1, f"--epsilon_high {high} is the cap itself with --loss_type cispo and "
         "would scale down every token; give one above 1, or none for 5"),
        (delta is not None and LOSS_TYPES[loss_type][0] is not ppo_clip, "--delta belongs to PPO's "
         f"clip, and --loss_type {loss_type} has none; leave it out"),
        (delta is not None and delta <= 1 + high,
         f"--delta {delta} undoes the clip at 1 + epsilon_high = {1 + high}; give a larger one"),
        (one_ratio and sequence, f"--loss_type {loss_type} makes one ratio of a completion's "
         "tokens itself; leave --importance_sampling_level out"),
        (loss_type == "luspo" and not sequence, "--loss_type luspo is for one ratio per "
         "completion; add --importance_sampling_level sequence"),
        (by_steps and (one_ratio or sequence), "--supervision process gives each token an "
         f"advantage, but {'sequence' if sequence else loss_type} has one ratio per completion; "
         "change one of the two"),
        (by_steps and (other_advantages or by_function), "--supervision process normalises all "
         "steps of a group together; leave --scale_rewards, --advantage_estimator and "
         "--multi_objective_aggregation out"),
        (by_function and (other_advantages or args.kl_in_reward), "--multi_objective_aggregation "
         "normalize_then_sum has its own way to advantages; leave --scale_rewards, "
         "--advantage_estimator and --kl_in_reward out"),
        (by_steps and not any(args.reward_weights), "--supervision process divides the outcome by "
         "the sum of --reward_weights, which is 0; give one above 0"),
        (args.use_bias_correction_kl and (args.kl_in_reward or not args.beta),
         "--use_bias_correction_kl weights the KL in the loss, and there is none; give a --beta "
         "above 0 and leave --kl_in_reward out"),
        (args.kl_in_reward and not args.beta,
         "--kl_in_reward subtracts beta * KL, and --beta is 0; give a --beta above 0"),
    ]


def impossible_combinations(args):
    """[(is it there?, what to say)] of everything else."""
    functions, weights = " ".join(args.reward_funcs), len(args.reward_weights)
    return [
        (weights != len(args.reward_funcs),
         f"--reward_weights has {weights} numbers for {functions}; give one for each"),
        (0 < args.rollout_is_threshold < 1, f"--rollout_is_threshold {args.rollout_is_threshold} "
         "would scale down every token; give 1 or more, or 0 for none"),
        (args.fast == 0 and args.sampler != "plain", f"--fast 0 is --sampler plain, and --sampler "
         f"{args.sampler} something else; leave one of the two out"),
        (args.kl_in_reward and args.kl_type != "k1", f"--kl_type {args.kl_type} is for the KL in "
         "the loss, and --kl_in_reward takes k1; leave one of the two out"),
        (args.ref_model_sync_steps and not args.beta, "--ref_model_sync_steps moves a reference, "
         "and with --beta 0 there is none; give a --beta above 0"),
        (args.eval_only and args.data_path != str(HERE / "dataset/train.jsonl")
         and args.eval_data_path == str(HERE / "dataset/heldout.jsonl"), "--eval_only would ask "
         "our arithmetic problems, not those of your task; give yours with --eval_data_path"),
        (args.ref_model_sync_steps and args.lora_rank, "--ref_model_sync_steps moves the "
         "reference, and with --lora_rank that is the frozen base; leave one of the two out"),
    ]


if __name__ == "__main__":
    main()
