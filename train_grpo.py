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

One step, for B prompts and G = num_generations answers to each; 1 to 4 are grpo_step:
    1. ask        generate           sample G completions of every prompt          model/
    2. remember   compute_logps      their log-probabilities under the reference, to stay near it
    3. judge      compute_rewards    format, tags, a reward model, accuracy        reward/
                  compute_advantages ... compared within each group
    4. learn      minibatches        which completions each optimizer step learns from
                  update_policy      gradient steps on the clipped objective
    5. report     Run.record         metrics, a progress bar, pictures; weights    run/

Letters: q a prompt, o a completion, r its reward; B prompts, G generations per prompt, N = B*G
completions; P prompt tokens, R completion tokens, T = P + R; V vocabulary; n rows of a micro-batch.

    python docs/grpo_on_one_page.py                 all of GRPO, none of the options
    python train_grpo.py                            two to four minutes on two cores
    python train_grpo.py --sampler plain            exactly these lines, and model/sampler.py's
    torchrun --nproc_per_node=2 train_grpo.py       on two processes

By default `sample` and `token_logps` hand over to model/fast/pair.py: the same up to rounding.

Where we differ from the papers and from other code, on purpose:
  - log-probabilities (float32, from the head on) are those of the distribution that was sampled:
    the same temperature, no top-k or top-p. The trainer computes pi_old: so ratios start at 1.
  - averages run over the whole optimizer step, all micro-batches and ranks, so that neither
    micro_batch_size nor the number of processes changes the gradient of the same completions.
"""
import math
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
import torch.distributed as dist

import errors
from dataset import batches_from, prompts, read_prompts
from errors import COUNT, COUNT_OR_0, POSITIVE, POSITIVE_OR_0, UserError, number, user_errors
from model import eos_token_ids, load_pretrained, load_tokenizer, objective, sample
from model.fast.vllm_engine import Engine
from model.lora import AdaptersOff, with_adapters
from model.rollout import Minibatch, Rollout
from reward import combine, combine_rewards, load_reward_funcs, load_tool, tools
from reward.baselines import BASELINES, SCALES, from_best, nanstd
from run import backends, edges, minimind, report
from run.loop import Run
from run.metrics import Mean, drift, no_clips, over_ranks, over_updates, shares
from run.processes.watch import all_or_none, stop_on_signals
from run.processes.world import World
from run.saver import Saver

# --- the objective --------------------------------------------------------------------------------
# First the advantages, and the mask of a completion's own tokens. Then the loss, three choices:
# which ratio (importance_ratio), how it is bounded (BOUNDS), how tokens are averaged (AVERAGES).
# LOSS_TYPES names the last two for each relative of GRPO. grpo_loss adds a KL, one of KL_TYPES.


def group_advantages(rewards, num_generations, *, scale_rewards="group", batch_std=None, eps=1e-4,
                     advantage_estimator="grpo"):
    """How much better each completion is than its siblings, in standard deviations of its group.

        A = (r - mean(group)) / (std(group) + eps)         DeepSeekMath 4.1.2; n-1 and eps are TRL's

    advantage_estimator may name a row of BASELINES instead of the mean, scale_rewards one of SCALES
    instead of the std; batch_std is the std of all rewards, for "batch". rewards (N,), the G
    completions of a prompt adjacent -> (N,). NaN: no reward judged it; it is left out of mean and
    std and gets advantage 0. Four answers, paid 1 for being right and 0.5 for their form, say:

    >>> group_advantages(torch.tensor([0.5, 1.5, 1.0, 0.5]), 4)
    tensor([-0.7832,  1.3053,  0.2611, -0.7832])
    """
    groups = rewards.view(-1, num_generations)                                          # (B, G)
    below = from_best(groups)           # the differences of equal rewards are exactly 0
    mean, std = below.nanmean(1, keepdim=True), nanstd(below)                           # (B, 1)
    difference, scale = below - mean, std + eps
    if advantage_estimator != "grpo":
        difference = objective.choice(BASELINES, advantage_estimator, "advantage_estimator")(groups)
    if scale_rewards != "group":
        scale = objective.choice(SCALES, scale_rewards, "scale_rewards")(groups, batch_std, eps)
    return (difference.nan_to_num(0.0) / scale).view(-1)


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
    """Choice 2, the bound: PPO's -min(ratio A, clip(ratio) A); and where it acts, by its sides.

    Once a ratio has moved past 1 ± epsilon in the direction that its advantage favours, the clip
    removes its gradient; the min keeps it on the other side. There `delta`, above 1 + epsilon_high,
    also ends that of a bad token, A < 0, whose ratio is large (INTELLECT-2; dual clip, Ye et al.
    2020). Returns the loss, and masks of where the bound acts, "low" and "high" at least.
    """
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    where = {"low": (ratio < 1 - epsilon_low) & (advantages < 0),
             "high": (ratio > 1 + epsilon_high) & (advantages > 0)}
    if delta is not None:
        where["delta"] = (ratio > delta) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.min(loss, -delta * advantages), loss)
    return loss, where


BOUNDS = {"ppo": ppo_clip} | objective.BOUNDS


# Choice 3, the average: each token's term is divided by one of these, then all are added up.
# `length` is that of the token's completion, L the maximum; completions and tokens are those of the
# whole optimizer step, over all micro-batches and ranks. So grpo is a mean over each completion's
# tokens, then over completions; bnpo a mean over all tokens; in dr_grpo no sampled length counts.
AVERAGES = {
    "completion": lambda length, completions, tokens, L: completions * length,
    "tokens":     lambda length, completions, tokens, L: tokens,
    "limit":      lambda length, completions, tokens, L: completions * L,
    "sum":        lambda length, completions, tokens, L: completions,
}
LOSS_TYPES = {      # the flags of each: docs/losses.md
    # name      bound    average       numbers of the bound's own
    "grpo":    ("ppo",   "completion", {}),
    "bnpo":    ("ppo",   "tokens",     {}),
    "dr_grpo": ("ppo",   "limit",      {}),
    "dapo":    ("ppo",   "tokens",     {}),
    "cispo":   ("cispo", "tokens",     {}),
    "dppo":    ("dppo",  "tokens",     {"largest_weight": 20.0}),
    "sapo":    ("sapo",  "completion", {"tau_good": 1.0, "tau_bad": 1.05}),
    "gmpo":    ("gmpo",  "completion", {}),
    "luspo":   ("ppo",   "sum",        {}),     # for GSPO's ratio, arXiv 2602.05261
}                   # and r1, a whole loss: see one_action_loss, below main


# KL(pi || pi_ref), estimated at a token that pi sampled, from x = log pi_ref - log pi. An unbiased
# value is the KL's on average. Its gradient is another matter: autograd does not see that another
# pi would sample other tokens. Beyond x = 20, lest e^x overflow, k3 goes on as a straight line: a
# clamp would have no gradient where pi has left the reference furthest. k3+ is verl's.
def k2(x):
    return x.pow(2) / 2


def k3(x):
    near = x.clamp(max=20)
    return near.expm1() * (1 + (x - near)) - near     # expm1(x) - x keeps its digits near 0


KL_TYPES = {
    # name                                                value      mean gradient of
    "k1":  lambda x: -x,                                # unbiased   0: it pulls nowhere
    "k2":  k2,                                          # biased     KL(pi || pi_ref)
    "k3":  k3,                                          # unbiased   KL(pi_ref || pi)
    "k3+": lambda x: (k3(x) - k2(x)).detach() + k2(x),  # k3's       k2's
    "abs": lambda x: x.abs(),                           # biased     the sum of |pi - pi_ref|
}


def kl_penalty(logps, ref_logps, *, kl_type="k3"):
    """KL to the reference, estimated at each token, (N, R). GRPO's estimate is k3."""
    return objective.choice(KL_TYPES, kl_type, "kl_type")(ref_logps - logps)


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps=None, beta=0.0, kl_type="k3",
              epsilon_low=0.2, epsilon_high=0.2, delta=None, loss_type="grpo",
              importance_sampling_level="token", max_completion_length=None,
              use_bias_correction_kl=False, num_sequences=None, num_tokens=None):
    """The loss of GRPO and its family, and metrics as detached scalars.

    logps, old_logps, mask, ref_logps (N, R); advantages (N,) or (N, R). num_sequences and
    num_tokens are totals of the whole optimizer step, over all micro-batches and ranks (None: this
    call is the step): then losses and metrics of the parts add up to those of the step. Rows that
    are masked out count as sequences. use_bias_correction_kl multiplies the KL by the ratio.
    """
    chosen = objective.choice(LOSS_TYPES, loss_type, "loss_type")
    if callable(chosen):                # a whole loss: r1, or one of your own
        return chosen(
            logps, old_logps, advantages, mask, ref_logps=ref_logps, beta=beta, kl_type=kl_type,
            epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta,
            importance_sampling_level=importance_sampling_level,
            max_completion_length=max_completion_length, num_sequences=num_sequences,
            use_bias_correction_kl=use_bias_correction_kl, num_tokens=num_tokens)
    bound, average, numbers = chosen
    if average == "limit" and max_completion_length is None:
        raise ValueError(f"loss_type {loss_type} divides by max_completion_length; give it")
    if beta and ref_logps is None:
        raise ValueError("beta weights the KL to the reference; give ref_logps")
    if use_bias_correction_kl and kl_type not in objective.CORRECTED:
        raise ValueError(objective.not_corrected(kl_type))
    if delta is not None and bound != "ppo":
        raise ValueError(f"delta belongs to PPO's clip, and {loss_type} has none; leave it out")
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]         # (N, 1 or R)
    num_sequences, num_tokens = num_sequences or len(mask), num_tokens or mask.sum().clamp(min=1)
    ratio = importance_ratio(logps, old_logps, mask, level=importance_sampling_level)
    loss, where = BOUNDS[bound](
        ratio, advantages, logps, mask, epsilon_low=epsilon_low, epsilon_high=epsilon_high,
        delta=delta, **numbers)                                                       # (N, 1 or R)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                                    # (N, 1)
    metrics = objective.clip_ratios(
        where, mask, num_sequences, num_tokens, level=importance_sampling_level)
    if ref_logps is not None:
        kl = kl_penalty(logps, ref_logps, kl_type=kl_type)                              # (N, R)
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens     # whatever the loss averages
        loss = loss + beta * (ratio * kl if use_bias_correction_kl else kl)
    divided_by = AVERAGES[average](lengths, num_sequences, num_tokens, max_completion_length)
    return (loss * mask / divided_by).sum(), metrics


# --- log-probabilities ----------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """log pi(token | all before) of the last R = num_completion_tokens of input_ids (N, T): (N, R).

    With `with_entropy` also the entropy of each of these distributions, (N, R), in nats. Both are
    float32, and 0 at padding.
    """
    R = num_completion_tokens
    own_token_logps = getattr(model, "own_token_logps", None)
    if own_token_logps is not None:     # model/fast/pair.py's, by default
        return own_token_logps(model, input_ids, attention_mask, R, temperature=temperature,
                               with_entropy=with_entropy)
    # The logits at position t predict token t+1, so read those at positions P-1 ... T-2.
    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1]             # (N, R, V)
    all_logps = (logits.float() / temperature).log_softmax(-1)
    mask = attention_mask[:, -R:]                                                       # (N, R)
    logps = all_logps.gather(-1, input_ids[:, -R:, None]).squeeze(-1) * mask
    if not with_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1) * mask


# --- the functions of a step ----------------------------------------------------------------------
# model/rollout.py lists the fields of a rollout, and of the micro-batches that are cut from it.
# world: the processes, one by default. world.working() surrounds the forward passes of policy and
# reference: matrix products there have the precision of --dtype. world.phase names what is timed.
# An edge is an option in a module of its own, which these functions do not know: see EDGES.


def generate(policy, batch, tokenizer, rng, world, args, num_generations=None, greedy=False,
             tool=None):
    """Step 1: G completions of each prompt, as a Rollout. rng is on the policy's device."""
    G, eos_ids = num_generations or args.num_generations, eos_token_ids(policy, tokenizer)
    turns = tool and tool.turns(batch, G, rng)      # reward/turns.py; None by default
    with world.working():
        completion_ids, logps, *drawn = sample(     # drawn: with a tool, which tokens are pi's
            policy, batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
            num_generations=G, max_new_tokens=args.max_gen_len, temperature=args.temperature,
            eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id or 0, generator=rng,
            greedy=greedy, tool=turns)                                                  # (N, R)
    mask = completion_mask(completion_ids, eos_ids)                                     # (N, R)
    return Rollout.of(batch, completion_ids, mask, logps, eos_ids, tokenizer, turns, *drawn)


@torch.no_grad()
def compute_logps(model, rollout, world, args):
    """Step 2: log-probs of all completions, (N, R), some at a time, without common padding."""
    logps = torch.zeros_like(rollout.sampling_logps)
    for rows in torch.arange(len(logps), device=logps.device).split(args.micro_batch_size):
        part = rollout.select(rows)
        with world.working():
            logps[rows, :part.mask.shape[1]] = token_logps(
                model, *part.sequences(), temperature=args.temperature)
    return logps


def compute_rewards(rollout, reward_funcs, reward_weights):
    """Step 3: the weighted sum of the rewards, (N,), and each function's own, {name: (N,)}."""
    return combine_rewards(rollout.prompts, rollout.replies, reward_funcs, reward_weights,
                           completion_ids=rollout.token_ids(), own_words=rollout.own_words,
                           **rollout.columns)


def compute_advantages(rollout, world, args):
    """Step 3: the advantage of each completion, (N,), from its return, by default its reward."""
    batch_std = None
    if args.scale_rewards == "batch":
        batch_std = nanstd(torch.tensor(world.gather(rollout.returns.tolist())))
    advantages = group_advantages(rollout.returns, args.num_generations, batch_std=batch_std,
                                  scale_rewards=args.scale_rewards,
                                  advantage_estimator=args.advantage_estimator)
    return advantages.to(rollout.mask.device)


def minibatches(rollout, world, args):
    """Step 4: a Minibatch for each optimizer step of a pass; none if no rank has a reward.

    Rows are cut evenly, in order, so a group may fall into two. By default all are read, for their
    KL; without a KL or an entropy bonus, those whose advantage is not 0. With --shard all are, some
    of them masked: a rank with fewer passes would leave others waiting for its part of the weights.
    """
    if not world.sum((~rollout.returns.isnan()).sum()):
        return []
    kept = rollout.ended if args.mask_truncated_completions else torch.ones_like(rollout.ended)
    is_read = kept                                                                      # (N,)
    if "ref_logps" not in rollout.per_token and not args.entropy_coef:
        is_read = kept & rollout.advantages.view(len(kept), -1).any(1)
    if args.shard:
        is_read = torch.ones_like(kept)
    updates = []                # chosen: all rows, unless an edge chooses some
    for rows in rollout.chosen.tensor_split(min(args.num_minibatches, len(rollout.chosen))):
        # The loss is divided by the numbers of all rows and all kept tokens, read or not.
        totals = torch.tensor([len(rows), (rollout.lengths * kept)[rows].sum()])
        totals = dict(zip(("num_sequences", "num_tokens"), world.sum(totals).tolist()))
        parts = rows[is_read[rows]].split(args.micro_batch_size)
        parts = [rollout.select(part, kept) for part in parts if len(part)]
        updates.append(Minibatch(totals, parts))
    return updates


@torch.no_grad()
def compute_old_logps(policy, updates, world, args):
    """Step 4: log pi_old, (n, R), of each micro-batch as it will be read: so ratios start at 1."""
    for minibatch in updates:
        for part in minibatch.micro_batches:
            with world.working():
                part.old_logps = token_logps(policy, *part.sequences(),
                                             temperature=args.temperature)


def update_policy(policy, optimizer, updates, before_loss, loss_options, world, args):
    """Step 4: an optimizer step on each Minibatch, `num_iterations` times; metrics as numbers."""
    if len(updates) * args.num_iterations > 1:      # else the policy is still pi_old: see below
        world.phase("old_logps")
        compute_old_logps(policy, updates, world, args)
        world.phase("update")
    metrics = []
    for _ in range(args.num_iterations):
        for minibatch in updates:
            metrics.append(optimizer_step(policy, optimizer, minibatch, before_loss, loss_options,
                                          world, args))
    return over_updates(metrics)


def optimizer_step(policy, optimizer, minibatch, before_loss, loss_options, world, args):
    """Step 4: one gradient step, its norm bounded. Returns metrics by their kind.

    Micro-batches join by it: the parts of a Share add up, as do sum and count of a Mean. One of
    your own: metrics.append({"ratio/mean": Mean(ratios.sum(), ratios.numel())}).
    """
    metrics = [no_clips(args.delta)]        # zeros, for a rank that reads no micro-batch
    for part in minibatch.micro_batches:
        with world.working():
            logps, entropy = token_logps(
                policy, *part.sequences(), temperature=args.temperature, with_entropy=True)
        if not args.entropy_coef:           # then it is nothing but a metric
            entropy = entropy.detach()                                                  # (n, R)
        # Before it has moved, the policy is the old one: the ratio is 1, its gradient is not 0.
        old_logps = logps.detach() if part.old_logps is None else part.old_logps
        advantages = part.advantages.view(len(logps), -1)                       # (n, 1 or R)
        part = replace(part, old_logps=old_logps, advantages=advantages)    # a copy, for this pass
        for change in before_loss:          # of edges: none by default
            metrics.append(change(part, logps))
        loss, of_loss = grpo_loss(
            logps, part.old_logps, part.advantages, part.mask,
            ref_logps=part.per_token.get("ref_logps"), **minibatch.totals, **loss_options)
        if args.entropy_coef:           # a bonus: the mean entropy of a token
            total = (entropy * part.mask).sum()
            loss = loss - args.entropy_coef * total / max(1, minibatch.totals["num_tokens"])
        loss.backward()
        metrics.append(shares({"loss": loss.detach()} | of_loss) | drift(part, logps, entropy))
    world.sum_gradients(policy)
    grad_norm = world.clip_gradients(policy, args.grad_clip)
    # The same on all ranks: all step, or none. At a gradient of 0 momentum would move the policy.
    if grad_norm.isfinite() and grad_norm > 0:
        optimizer.step()
    optimizer.zero_grad()           # frees the gradients: the sampler will need the room
    return over_ranks(metrics, world) | {"grad_norm": Mean(grad_norm.item(), 1)}


def grpo_step(t, batch, step, lr):
    """A step of GRPO on a batch of prompts: (rollout, metrics). t is what `prepare` returns."""
    args, world = t.args, t.world
    world.phase("rollout")          # 1. ask: G completions of every prompt
    rollout = generate(t.policy, batch, t.tokenizer, world.rng(step), world, args, tool=t.tool)
    world.phase("ref_logps")        # 2. remember: by default {"ref_logps": the reference}
    for name, model in t.remembered.items():
        rollout.per_token[name] = compute_logps(model, rollout, world, args)
    world.phase("reward")           # 3. judge: rewards, then advantages within each group
    rollout.rewards, rollout.rewards_per_func = compute_rewards(
        rollout, t.reward_funcs, args.reward_weights)
    rollout.returns = rollout.rewards       # compared within each group; NaN: not judged
    for change in t.before_advantages:      # these lists are empty, unless an edge is on: see EDGES
        change(rollout)
    rollout.advantages = compute_advantages(rollout, world, args)
    for change in t.after_advantages:
        change(rollout)
    world.phase("update")           # 4. learn: minibatches, then clipped gradient steps
    updates = minibatches(rollout, world, args)
    t.optimizer.param_groups[0]["lr"] = lr
    metrics = update_policy(t.policy, t.optimizer, updates, t.before_loss, t.loss_options, world,
                            args)
    for change in t.after_step:
        change(step)
    world.phase(None)
    return rollout, metrics | {"learning_rate": lr}


@user_errors("train_grpo.py")       # a user's mistake is one line, without a traceback
@all_or_none                        # what ends one rank ends all of them
def main(argv=None):
    args = parse_args(argv)
    world = join_processes(args)
    saver = Saver(Path(args.out_dir) / args.run_name, world, args)
    t = prepare(args, world)        # models, optimizer, rewards, and the edges that are on
    steps_done, num_tokens = saver.resume(t.policy, t.optimizer, t.saved)   # 0, 0 in a new run
    collate, problems, heldout = read_prompts(args, t.tokenizer)
    batches, last_step = batches_from(steps_done + 1, problems, collate, t.num_prompts, world, args)
    if args.eval_only:
        world.print_json(evaluate(t, heldout, collate, steps_done)[0])
        return world.close()
    with Run(t, saver, steps_done, last_step, num_tokens) as run:
        run.begin(len(problems), len(heldout))
        evaluate_if_due(t, run, heldout, collate, 0)
        stop_on_signals(world)                  # from here on a signal lets the step end
        for step, batch in enumerate(batches, start=steps_done + 1):
            lr = lr_at(step, last_step, peak=args.learning_rate, warmup_steps=args.warmup_steps)
            rollout, metrics = grpo_step(t, batch, step, lr)
            metrics |= evaluate_if_due(t, run, heldout, collate, step)
            run.record(step, rollout, metrics)  # 5. report: metrics, pictures, weights
            run.stop_if_asked(step)
        run.finish(parse_args([]))      # final/, and a card of the flags that differ from these
    world.close()


# --- what one looks up: loading, evaluation -------------------------------------------------------


# Edges: options that the step does not know, each whole in a module. One that is on adds functions
# to the lists that the step walks, in the order of EDGES.
from run.edges import (
    correction,
    gdpo,
    kl_in_reward,
    moving_reference,
    oversample,
    process,
    teacher,
)

EDGES = [kl_in_reward, process, gdpo, teacher, oversample, correction, moving_reference]


def join_processes(args):
    """The processes that torchrun started, or this one alone, each with a device of its own."""
    world = World(args.device, args.dtype, args.seed, args.hang_timeout)
    if world.size > 1:
        on_cuda = world.device.type == "cuda"
        dist.init_process_group("nccl" if on_cuda else "gloo", timeout=world.time_limit,
                                device_id=world.device if on_cuda else None)
    return world


def prepare(args, world):
    """What a step takes: models, optimizer, rewards, and the changes of the edges that are on."""
    world.agree_on_flags(args)      # else some rank waits for the others, unnoticed
    engine = Engine(world, args) if args.sampler == "vllm" else None
    policy, reference = load_models(args, world, engine)
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.config.vocab_size)
    if not eos_token_ids(policy, tokenizer):
        raise UserError(f"{tokenizer_path}: no EOS token to end an answer with; give another "
                        "--tokenizer_path")
    funcs = load_reward_funcs(
        args.reward_funcs + args.eval_reward_funcs, reward_model_path=args.reward_model_path,
        device=args.reward_model_device or world.device, max_completion_length=args.max_gen_len,
        timeout=args.reward_timeout, reasoning=args.reasoning, clip=args.reward_model_clip,
        answer_share=args.reward_model_answer_share)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), fused=True,
                                  weight_decay=args.weight_decay)   # 0.99: runs are short
    if engine is not None:
        optimizer.register_step_post_hook(engine.outdate)
    count = len(args.reward_funcs)
    t = SimpleNamespace(
        args=args, world=world, tokenizer=tokenizer, policy=policy, reference=reference,
        optimizer=optimizer, reward_funcs=funcs[:count], eval_funcs=funcs[count:],
        tool=load_tool(args.tool, tokenizer, args.max_tool_calls),
        num_prompts=args.batch_size * args.accumulation_steps,      # of a step, for each rank
        loss_options=loss_options(args),
        remembered={} if reference is None else {"ref_logps": reference},
        before_advantages=[], after_advantages=[], before_loss=[], after_step=[],
        saved={},           # models that a checkpoint has beside the policy
        edges=[edge.NAME for edge in EDGES if edge.is_on(args)])
    for edge in EDGES:
        if edge.is_on(args):
            edge.install(t)
    world.alive()       # loading took its time
    return t


def load_models(args, world, engine=None):
    """The policy, and its reference, the same weights frozen; None with --beta 0.

    Weights that learn are float32, so that small updates add up. The matrices of frozen ones have
    the dtype in which products read them anyway. with_backend says what runs each of the two.
    """
    path, reference = args.model_path, None
    policy = load_pretrained(path, dtype=torch.float32,
                             matrix_dtype=world.matrix_dtype if args.lora_rank else None,
                             device="meta" if args.shard else world.device)
    minimind.refuse_layers(policy, args)
    policy.model.gradient_checkpointing = args.gradient_checkpointing
    if args.lora_rank:          # the reference is the policy without its adapters
        reference, policy = policy, with_adapters(
            policy, rank=args.lora_rank, alpha=args.lora_alpha, name=path, seed=args.seed)
    policy = backends.with_backend(policy, path, world, args, engine)
    if args.beta == 0:
        return policy, None
    if not args.lora_rank:
        return policy, backends.load_frozen(path, world, args)
    if args.shard:              # the base is let go: it would keep every layer whole on the GPU
        reference = AdaptersOff(policy)
    return policy, backends.with_backend(reference, path, world, args)


def loss_options(args):
    """The keywords of grpo_loss that are flags."""
    names = ("beta", "kl_type", "epsilon_low", "epsilon_high", "delta", "loss_type",
             "importance_sampling_level", "use_bias_correction_kl")
    return {"max_completion_length": args.max_gen_len} | {
        name: getattr(args, name) for name in names}


def lr_at(step, last_step, *, peak, warmup_steps):
    """Learning rate of a step (from 1): a linear rise, then a cosine from the peak to a tenth."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def evaluate_if_due(t, run, problems, collate, step):
    """The metrics of an evaluation, which the run writes and prints; none if none is due."""
    if not run.evaluates_at(step):
        return {}
    if step:                    # the one before the first step counts towards none
        t.world.phase("eval")
    metrics, replies = evaluate(t, problems, collate, step)
    t.world.phase(None)
    return run.report.evaluation(step, metrics, replies)


def evaluate(t, problems, collate, step):
    """Held-out accuracy over all ranks: of k samples the mean, any of them (pass@k), and greedy.

    A reply is right if its evaluation rewards add up to at least 1; unjudged problems don't count.
    Returns metrics, and the rollout of greedy replies with the first problem, for a look at one.
    """
    args, world, policy = t.args, t.world, t.policy
    rng = world.rng(step, evaluating=True)
    k, found = args.num_generations_eval, defaultdict(list)     # metric -> a number per problem
    # Sharded ranks must sample equally often: one with a problem less than others answers another
    # one, which isn't counted.
    mine, share = problems[world.rank::world.size], -(-len(problems) // world.size)
    answered = mine + problems[:share - len(mine)]
    # What fits into memory in a rollout fits in an evaluation, and a small model fits anyway.
    at_once = max(1, args.batch_size * args.num_generations // k)
    if sum(weight.numel() for weight in policy.parameters()) < 10**7:
        at_once = 256
    for start in report.visibly(range(0, share, at_once), "evaluation", world):
        batch = collate(answered[start:start + at_once])
        rollouts = [
            generate(policy, batch, collate.tokenizer, rng, world, args, n, greedy, t.tool)
            for n, greedy in ((1, True), (k, False))]
        of_greedy, sampled = (
            compute_rewards(rollout, t.eval_funcs, [1.0] * len(t.eval_funcs))[0].view(-1, n)
            for rollout, n in zip(rollouts, (1, k)))                            # (B, 1), (B, k)
        if start == 0:
            first = rollouts[0]
            first.rewards = of_greedy[:, 0]
        judged = ~torch.cat((of_greedy, sampled), 1).isnan().any(1)                     # (B,)
        judged[len(mine) - start:] = False      # the one that isn't counted is the last
        right = (sampled >= 1).float()                                                  # (B, k)
        for name, numbers in {
            "accuracy": right.mean(1), "reward": sampled.mean(1), f"pass@{k}": right.amax(1),
            "greedy_accuracy": (of_greedy[:, 0] >= 1).float(),
            "mean_length": rollouts[1].lengths.cpu().float().view(-1, k).mean(1),
        }.items():
            found[name] += numbers[judged].tolist()
    if k == 1:
        del found["pass@1"]         # it would be the accuracy again
    found = {f"eval/{name}": world.gather(numbers) for name, numbers in found.items()}
    return {name: sum(all_of) / len(all_of) if all_of else math.nan
            for name, all_of in found.items()}, first


# --- what one looks up: whole losses --------------------------------------------------------------


def one_action_loss(logps, old_logps, advantages, mask, *, ref_logps=None, num_sequences=None,
                    num_tokens=None, **options):
    """r1, DeepSeek-R1's loss: a completion is one action, with its tokens' summed log-probs."""
    if advantages.dim() == 2 and advantages.shape[1] > 1:
        raise ValueError("loss_type r1 has one ratio per completion; give advantages (N,)")
    logps, old_logps, ref_logps = (
        None if x is None else (x * mask).sum(1, keepdim=True)
        for x in (logps, old_logps, ref_logps))                                         # (N, 1)
    num_sequences = num_sequences or len(mask)
    return grpo_loss(
        logps, old_logps, advantages, mask.any(1, keepdim=True).int(), ref_logps=ref_logps,
        loss_type="luspo", num_sequences=num_sequences, num_tokens=num_sequences, **options)


LOSS_TYPES["r1"] = one_action_loss


def add_own_loss(name):
    """A row of LOSS_TYPES for `module:function`: a bound, if its first parameter is `ratio`.

    Then it is averaged as GRPO is. Else it is a whole loss, called as grpo_loss is.
    """
    function = combine.import_function("--loss_type", name, ", ".join(LOSS_TYPES))
    LOSS_TYPES[name] = function
    if objective.is_bound(function):
        BOUNDS[name], LOSS_TYPES[name] = function, (name, "completion", {})


# --- what one looks up: flags ---------------------------------------------------------------------
# Those of the algorithm stand here. Others stand beside the code that reads them.


GROUPS = ("the six that matter first", "1. ask (weights, prompts, sampling)",
          "2. remember (the reference)", "3. judge (rewards, advantages)",
          "4. learn (the objective)", "4. learn (the optimizer)",
          "5. report (evaluation, logs, weights)", "the machine")


def parse_args(argv=None):
    parser = errors.Parser(usage="%(prog)s [flags] [@file of flags]", description=(
        "Group Relative Policy Optimization. Without flags a small model learns, in minutes, that "
        "thinking before it answers pays. Policy: the model that learns. Reference: the weights it "
        "started from. Group: the completions of one prompt. Rollout: those of a step."))
    for title in GROUPS:
        parser.add_argument_group(title)
    for add_flags in (add_first_flags, add_loss_flags, add_optimizer_flags, add_evaluation_flags):
        add_flags(parser)
    for module in (prompts, tools, combine, Saver, report, backends, World, minimind, *EDGES):
        module.add_flags(parser)
    args = parser.parse_args(argv)
    edges.fill_in(EDGES, args)
    fill_in_defaults(args)
    row = LOSS_TYPES[args.loss_type]
    objective.refuse_contradictions(args, bound=None if callable(row) else row[0])
    edges.refuse(EDGES, args)
    return args


def add_first_flags(parser):
    flag = parser.group("the six").add_argument
    flag("--reasoning", type=int, choices=(0, 1), default=1,
         help="1: weights that think between tags, rewards for the tags, and thinking switched on "
         "in chat templates that have the switch; 0: weights without tags")
    flag("--num_generations", type=number(int, 2), default=8, help="G, completions per prompt: "
         "with more of them a group's mean is less noisy, at a cost in proportion")
    flag("--batch_size", type=COUNT, default=16, help="prompts per step, for each process")
    flag("--learning_rate", type=POSITIVE, default=3e-4,
         help="its peak; 1e-6 to 3e-5 for real models")
    flag("--max_gen_len", "--max_completion_length", type=COUNT, default=96,
         help="tokens after which a completion is cut off")
    flag("--beta", type=POSITIVE_OR_0, help="weight of the KL penalty, which keeps the policy near "
         "the reference; 0: none, and no reference in memory (default: 0.02)")

    flag = parser.group("1. ask").add_argument
    flag("--model_path", help="the policy: a folder or hub id of Qwen3, Qwen2.5, Llama or "
         "Qwen3-MoE weights, or (slower) of any other causal model of transformers; or MiniMind's "
         ".pth (default: reason_128 or full_sft_128, from out_dir or else from model/weights)")
    flag("--tokenizer_path", help="a folder or hub id, if the tokenizer is not with the weights")
    flag("--temperature", type=number(float, 0.001), default=1.0,
         help="of sampling, in evaluation too")

    flag = parser.group("3. judge").add_argument
    flag("--scale_rewards", choices=("group", *SCALES), help="divide advantages by the std of the "
         "group, of the step, by nothing, by the group's mean (default: group; none with another "
         "--advantage_estimator)")
    flag("--advantage_estimator", choices=("grpo", *BASELINES), default="grpo",
         help="compare a reward with its group's mean, or with the mean of the others (rloo); "
         "grpo_passk: only the best of a group, with the second best")


def add_loss_flags(parser):
    flag = parser.group("4. learn (the objective)").add_argument
    flag("--loss_type", metavar="NAME", help="mean over tokens: of each completion, then of all "
         "(grpo); of all tokens (bnpo, dapo); sum / max_gen_len (dr_grpo); sum (luspo); cispo, "
         "dppo, sapo, gmpo and r1 also change the bound or the ratio; or a bound or a loss of your "
         "own as module:function (docs/losses.md; default: grpo)")
    flag("--importance_sampling_level", choices=("token", "sequence"), default="token",
         help="a ratio pi / pi_old per token, or per completion (GSPO: epsilons of about 3e-4)")
    flag("--epsilon_low", type=POSITIVE_OR_0, default=0.2, help="clip the ratio at 1 - it")
    flag("--epsilon_high", type=POSITIVE_OR_0, help="and at 1 + it (default: 0.2; DAPO 0.28); "
         "cispo: the cap itself (default: 5); gmpo: both in log space, 0.4 say; dppo: of pi, 0.15")
    flag("--delta", type=POSITIVE, help="dual clip: cap on the ratio of bad tokens (default: none)")
    flag("--kl_type", choices=tuple(KL_TYPES), help="estimate of the KL: k2 has its gradient, k3 "
         "is GRPO's, k3+ its value with k2's gradient (default: k3)")
    flag("--use_bias_correction_kl", action="store_true", help="multiply the KL, k1 or k3, by the "
         "ratio: with one per token it has the KL's gradient, after any number of updates")
    flag("--entropy_coef", type=POSITIVE_OR_0, default=0.0, help="weight of an entropy bonus")
    flag("--mask_truncated_completions", action="store_true",
         help="learn nothing from completions that were cut off")
    flag("--num_iterations", type=COUNT, default=1, help="passes over each rollout: more save "
         "sampling, but the policy moves away from the one that sampled")
    flag("--num_minibatches", type=COUNT, default=1,
         help="optimizer steps per pass; with a single one in all, no ratio moves and no clip acts")


def add_optimizer_flags(parser):
    flag = parser.group("4. learn (the optimizer)").add_argument
    flag("--micro_batch_size", type=COUNT, default=64, help="completions per forward pass: lower "
         "it if memory runs out; the result stays the same")
    flag("--lora_rank", type=COUNT_OR_0, default=0,
         help="train adapters of this rank (LoRA) instead of the weights; 0: the weights")
    flag("--lora_alpha", type=POSITIVE, default=32, help="alpha / rank scales the adapters")
    flag("--gradient_checkpointing", action="store_true", help="less memory, more time")
    flag("--max_steps", type=COUNT_OR_0, help="with as many passes over the prompts as it takes; "
         "0: one pass (default: --epochs; without it one pass, at most 300 steps)")
    flag("--epochs", type=COUNT, help="passes over the prompts; with --max_steps, unlike in TRL, "
         "whichever ends first")
    flag("--warmup_steps", type=COUNT_OR_0, default=3, help="the rate rises, then falls to a tenth")
    flag("--weight_decay", type=POSITIVE_OR_0, default=0.0, help="AdamW's")
    flag("--grad_clip", "--max_grad_norm", type=POSITIVE, default=1.0, help="the gradient's norm")


def add_evaluation_flags(parser):
    flag = parser.group("5. report").add_argument
    flag("--eval_interval", type=COUNT_OR_0, help="steps between evaluations; also before and "
         "after training; 0: none (default: 30; 0 if only data_path is your own)")
    flag("--eval_reward_funcs", nargs="+", metavar="NAME", default=["accuracy"], help="by the "
         "names of --reward_funcs: a held-out reply is right if these add up to 1 or more")
    flag("--num_generations_eval", type=COUNT, default=2, help="k, samples per problem (pass@k)")
    flag("--eval_only", action="store_true", help="evaluate the weights and stop")


def fill_in_defaults(args):
    """The defaults that depend on other flags."""
    minimind.fill_in(args)
    prompts.fill_in(args)
    backends.fill_in(args)
    combine.fill_in(args)
    Saver.fill_in(args)
    if args.beta is None:
        args.beta = 0.02
    if args.loss_type is None:
        args.loss_type = "grpo"
    if args.loss_type not in LOSS_TYPES:
        add_own_loss(args.loss_type)
    if args.scale_rewards is None:
        args.scale_rewards = "group" if args.advantage_estimator == "grpo" else "none"
    if args.epsilon_high is None:
        args.epsilon_high = 5.0 if args.loss_type == "cispo" else 0.2
    if args.kl_type is None:
        args.kl_type = "k3"


if __name__ == "__main__":
    main()
