"""Group Relative Policy Optimization, from scratch.

GRPO (DeepSeekMath, arXiv 2402.03300) teaches a language model from rewards alone: numbers that say
how good an answer was. The model answers each prompt several times, and each answer is judged
against its siblings. Answers better than their group's average become more likely, worse ones less.

In the formulas q is a prompt, o an answer to it, o_t its token number t, r its reward. pi is the
policy, the model that learns, and pi(o_t) the probability that it gives to o_t after q and the
tokens before. pi_old is the policy as it was when it sampled o; pi_ref, the reference, a frozen
copy of the first weights. clip(x, a, b) is x, but at least a and at most b. eps, beta and the
epsilons are small numbers; but for eps they are flags.

    A_i     = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)       answer i's advantage in its group
    ratio_t = pi(o_t) / pi_old(o_t)                                how far pi moved since sampling
    loss    = - mean over answers of mean over tokens of [
                  min(ratio_t A_i, clip(ratio_t, 1-epsilon_low, 1+epsilon_high) A_i)
                  - beta KL_t(pi || pi_ref) ]                      KL_t: the distance to pi_ref at t

With one update per sampling, the default, pi is still pi_old: every ratio is 1, nothing clips, and
the first part of the loss has the gradient of -A log pi.

One step, for B prompts and G answers to each:
    1. ask        generate             the policy samples G completions of every prompt
    2. remember   compute_logps        how likely the reference finds each of their tokens
    3. judge      compute_rewards      a reward for each completion: format, tags, a model, accuracy
                  compute_advantages   ... compared within its group
    4. learn      update_policy        gradient steps on the loss
    5. report     run.record           metrics, evaluations, pictures, weights

A completion is an answer as tokens; a rollout, all completions of a step; a minibatch, what one
optimizer step learns from, by default all of the rollout; a micro-batch, what fits into memory at
a time. logps are log-probabilities. A mask is 1 where a token counts, 0 at padding. Shapes, in
comments: N = B*G completions, n of a micro-batch; P prompt tokens, R completion tokens, T = P + R;
V words of the vocabulary. A rank is a process, of which each has a GPU; by default there is one.

    python docs/grpo_on_one_page.py                 all of GRPO, none of the options
    python train_grpo.py                            two to four minutes on two cores
    torchrun --nproc_per_node=2 train_grpo.py       on two processes

All that a default run does stands here, down to the end of `main`. An option wraps or replaces one
of the functions in `TrainState`, where the run is loaded; a run's first lines name them.

Where we differ from the papers and from other code, on purpose:
  - log-probabilities (float32, from the head on) are those of the distribution that was sampled:
    the same temperature, no top-k or top-p. The trainer computes pi_old: so ratios start at 1.
  - averages run over the whole optimizer step, all micro-batches and ranks, so that neither
    micro_batch_size nor the number of processes changes the gradient of the same completions.
"""
import itertools
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

# Before torch is imported: waiting threads go to sleep soon, so that a busy machine stays usable.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch

from dataset import prompts
from errors import (
    COUNT,
    COUNT_OR_0,
    POSITIVE,
    POSITIVE_OR_0,
    Parser,
    UserError,
    number,
    user_errors,
)
from model import Policy, Rollout, eos_token_ids, load_tokenizer
from model.fast.vllm_engine import Engine
from reward import combine, unjudged
from reward.baselines import from_best, nanstd
from run import backends, evaluation, extensions, minimind, report
from run.loop import Run
from run.metrics import Metrics
from run.processes.watch import all_or_none
from run.processes.world import World
from run.saver import Saver

# --- the objective --------------------------------------------------------------------------------


def group_advantages(rewards, num_generations, eps=1e-4):
    """How much better each completion is than its siblings, in standard deviations of its group.

        A = (r - mean(group)) / (std(group) + eps)         DeepSeekMath 4.1.2; the std has n-1

    rewards (N,), the G completions of a prompt adjacent -> (N,). NaN: no function judged it; it is
    left out of mean and std and gets advantage 0. Four answers, paid 1 for being right and 0.5 for
    their form, say:

    >>> group_advantages(torch.tensor([0.5, 1.5, 1.0, 0.5]), 4)
    tensor([-0.7832,  1.3053,  0.2611, -0.7832])
    """
    groups = from_best(rewards.view(-1, num_generations))     # (B, G) equal rewards are exactly 0
    difference = groups - groups.nanmean(1, keepdim=True)
    return (difference.nan_to_num(0.0) / (nanstd(groups) + eps)).view(-1)


def completion_mask(completion_ids, eos_token_id):
    """(N, R): 1 through the first EOS, the token that ends an answer; all 1 without one.

    The EOS is trained: stopping is a skill. eos_token_id is an int or a list of ints.
    """
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_token_id)).int()
    return (is_eos.cumsum(1) - is_eos == 0).int()   # no EOS before this token; the first one stays


def k3(x):
    """GRPO's estimate of KL(pi || pi_ref) at a token that pi sampled; x = log pi_ref - log pi.

    The KL is the mean of -x over what pi draws. e^x - 1 = pi_ref / pi - 1 has mean 0: with it the
    mean is the same, and no value is below 0. Beyond x = 20, lest e^x overflow, a straight line.
    """
    near = x.clamp(max=20)
    return near.expm1() * (1 + (x - near)) - near     # for x <= 20: e^x - 1 - x


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps, beta, epsilon_low, epsilon_high,
              num_sequences, num_tokens):
    """GRPO's loss, and metrics as detached scalars.

    logps, old_logps, mask, ref_logps (N, R), the last None without a reference; advantages (N,), or
    (N, R). num_sequences and num_tokens are totals of the optimizer step, of which this may be one
    micro-batch: losses and metrics of all of them add up.
    """
    A, padding = advantages.view(len(mask), -1), mask == 0              # (N, 1 or R), (N, R)
    log_ratio = (logps - old_logps).masked_fill(padding, 0)             # (N, R) from here on
    ratio = log_ratio.clamp(max=80).exp()               # pi / pi_old; e^89 would be infinite
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    # Once a ratio has moved past 1 ± epsilon in the direction that A favours, the clip removes its
    # gradient; the min keeps it on the other side.
    loss, metrics = -torch.min(ratio * A, clipped * A), {}
    if ref_logps is not None:
        kl = k3((ref_logps - logps).masked_fill(padding, 0))
        loss = loss + beta * kl
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens
    # The mean over each completion's tokens, then over all completions.
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                    # (N, 1)
    loss = (loss * mask / (num_sequences * lengths)).sum()
    # The share of tokens at which the clip acts, below 1 and above it.
    low, high = (ratio < 1 - epsilon_low) & (A < 0), (ratio > 1 + epsilon_high) & (A > 0)
    for name, acts in {"low": low, "high": high, "region": low | high}.items():
        metrics[f"clip_ratio/{name}_mean"] = (acts * (mask / num_tokens)).sum()
    return loss, metrics


# --- log-probabilities ----------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """log pi(token | all before) of the last R = num_completion_tokens of input_ids (N, T): (N, R).

    With `with_entropy` also the entropy of each of these distributions, (N, R), in nats. Both are
    float32, and 0 at padding. model/fast/pair.py computes the same in less time, and is what runs
    by default: the first call of a run compares the two. --sampler plain runs these lines.
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


# --- rewards --------------------------------------------------------------------------------------
# A reward function judges N completions at a time: a number for each, or None: it does not apply.
# columns are the data's other fields, N values each: answer, say. (?>...) in a pattern tries one
# beginning alone: linear time, whatever a policy writes.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = re.compile(r"(?><think>\n.*?\n</think>\n\n?<answer>\n).*\n</answer>", re.DOTALL)


def format_reward(prompts, completions, **columns):
    """0.5 for `<think>\\n...\\n</think>\\n<answer>\\n...\\n</answer>` and nothing else, else 0."""
    return [0.5 if FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def tag_reward(prompts, completions, **columns):
    """0.25 for each of the four tags that occurs exactly once: a slope up to the full format."""
    return [sum(0.25 for tag in TAGS if completion.count(tag) == 1) for completion in completions]


# By default a completion earns format + tag + rm + accuracy. rm is a small reward model's opinion,
# -1 to 1; accuracy is 1 if the answer is right, else 0 (reward/reward_model.py, reward/rules.py).
REWARD_WEIGHTS = {"format": 1.0, "tag": 1.0, "rm": 1.0, "accuracy": 1.0}


# --- the functions of a step ----------------------------------------------------------------------
# t, a TrainState (below main), has the flags, t.args; the ranks, t.world; the models; and these
# functions: t.generate is `generate`, unless an option has wrapped or replaced it. A policy has
# policy.model and what runs it: policy.sample, and policy.token_logps, which is token_logps or its
# faster twin. `part` is a micro-batch: rollout.select(rows) cuts it out, without padding that all
# its rows have, and part.sequences() are what token_logps reads: input_ids, attention_mask, R. Of a
# part's tokens loss_mask has those that are learned: by default all, through the EOS.


def generate(t, batch, rng, num_generations=None, greedy=False):
    """Step 1: G completions of each prompt, as a Rollout: model/rollout.py lists its fields."""
    completion_ids, logps = t.policy.sample(    # (N, R); model/sampler.py. prompt_ids are (B, P)
        batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
        num_generations=num_generations or t.args.num_generations,
        max_new_tokens=t.args.max_gen_len, temperature=t.args.temperature, eos_token_id=t.eos_ids,
        pad_token_id=t.tokenizer.pad_token_id or 0, generator=rng, greedy=greedy)
    mask = completion_mask(completion_ids, t.eos_ids)                                   # (N, R)
    return Rollout.of(batch, completion_ids, mask, logps, t.eos_ids, t.tokenizer)


@torch.no_grad()
def compute_logps(t, policy, rollout):
    """Step 2: log-probabilities of all completions, (N, R), a micro-batch at a time."""
    logps = torch.zeros_like(rollout.sampling_logps)
    for rows in torch.arange(len(logps), device=logps.device).split(t.args.micro_batch_size):
        part = rollout.select(rows)
        logps[rows, :part.loss_mask.shape[1]] = policy.token_logps(
            *part.sequences(), temperature=t.args.temperature)
    return logps


def compute_rewards(rollout, reward_funcs, reward_weights):
    """Step 3: the weighted sum of the rewards, (N,), and each function's own, {name: (N,)}."""
    given = rollout.for_rewards()                           # prompts, completions, and columns
    each = {func.__name__: torch.tensor(func(**given)) for func in reward_funcs}
    values, weights = torch.stack([*each.values()]), torch.tensor(reward_weights)
    rewards = (values * weights[:, None]).nansum(0)         # None, and a failure, are NaN: add 0
    rewards[unjudged(values, weights, rewards)] = math.nan  # where no function has judged
    return rewards, each


def compute_advantages(t, rollout):
    """Step 3: the advantage of each completion, (N,)."""
    return group_advantages(rollout.rewards, t.args.num_generations).to(rollout.loss_mask.device)


def cut_up(t, rollout):
    """Step 4: the minibatches of a pass, each a list of micro-batches.

    Rows are cut evenly, in order, so a group may fall into two. By default all are read. Without a
    KL, --beta 0, a row of advantage 0 has no gradient and is left out; not with --shard, where
    ranks must make the same number of forward passes.
    """
    N, found = len(rollout.loss_mask), []
    is_read = rollout.has_gradient(t.pulls_on_all) | bool(t.args.shard)                 # (N,)
    for rows in torch.arange(N, device=is_read.device).tensor_split(min(N, t.args.num_minibatches)):
        # The loss is divided by the numbers of all its rows and tokens, on all ranks, read or not.
        totals = t.world.sum(torch.tensor([len(rows), rollout.lengths[rows].sum()])).tolist()
        found.append([rollout.select(part, num_sequences=totals[0], num_tokens=totals[1])
                      for part in rows[is_read[rows]].split(t.args.micro_batch_size) if len(part)])
    return found


def compute_loss(t, part, logps, entropy):
    """Step 4: the loss of a micro-batch, its part of the optimizer step's, and metrics."""
    return t.grpo_loss(logps, part.old_logps, part.advantages, part.loss_mask,
                       ref_logps=part.ref_logps, beta=t.args.beta, epsilon_low=t.args.epsilon_low,
                       epsilon_high=t.args.epsilon_high, num_sequences=part.num_sequences,
                       num_tokens=part.num_tokens)


def update_policy(t, rollout):
    """Step 4: passes over the rollout, and in each an optimizer step per minibatch, as in PPO.

    PPO is GRPO's parent. By default there is one pass and one minibatch. Returns {metric: number}.
    """
    args, world, policy, metrics = t.args, t.world, t.policy, Metrics(t.world, t.args)
    if not world.sum((~rollout.rewards.isnan()).sum()):
        return {}                           # no rank has a reward
    minibatches = cut_up(t, rollout)
    if args.num_iterations * len(minibatches) > 1:      # pi will move: note what pi_old says, now
        world.phase("old_logps")
        with torch.no_grad():
            for part in itertools.chain(*minibatches):
                part.old_logps = policy.token_logps(
                    *part.sequences(), temperature=args.temperature)
        world.phase("update")
    for _ in range(args.num_iterations):
        for minibatch in minibatches:
            for part in minibatch:          # their gradients add up
                logps, entropy = policy.token_logps(                                    # (n, R)
                    *part.sequences(), temperature=args.temperature, with_entropy=True)
                if part.old_logps is None:  # pi is pi_old: a ratio of 1, whose gradient is not 0
                    part.old_logps = logps.detach()
                loss, of_loss = t.compute_loss(t, part, logps, entropy)
                loss.backward()
                metrics.add(part, logps, entropy, loss, of_loss)
            world.sum_gradients(policy.model)       # over the ranks
            grad_norm = world.clip_gradients(policy.model, args.grad_clip)
            # grad_norm is the same on all ranks. At a gradient of 0 momentum would move pi.
            if grad_norm.isfinite() and grad_norm > 0:
                t.optimizer.step()
            t.optimizer.zero_grad()     # frees the gradients: the sampler will need the room
            metrics.end_update(grad_norm)
    return metrics.means()


def grpo_step(t, batch, step, lr):
    """A step of GRPO on a batch of prompts: (rollout, metrics). world.phase names what is timed."""
    world, t.step = t.world, step                   # t.step: for options
    world.phase("rollout")          # 1. ask: G completions of every prompt
    rollout = t.generate(t, batch, world.rng(step))
    world.phase("ref_logps")        # 2. remember: how likely the reference finds them
    if t.reference is not None:     # None with --beta 0
        rollout.ref_logps = t.compute_logps(t, t.reference, rollout)
    world.phase("reward")           # 3. judge: rewards, then advantages within each group
    rollout.rewards, rollout.rewards_per_func = t.compute_rewards(
        rollout, t.reward_funcs, t.args.reward_weights)
    rollout.advantages = t.compute_advantages(t, rollout)
    world.phase("update")           # 4. learn: clipped gradient steps
    t.optimizer.param_groups[0]["lr"] = lr
    metrics = t.update_policy(t, rollout)
    world.phase(None)
    return rollout, metrics | {"learning_rate": lr}


@user_errors("train_grpo.py")       # a user's mistake is one line, without a traceback
@all_or_none                        # what ends one rank ends all of them
def main(argv=None):
    args = parse_args(argv)
    world = World.join(args)        # the processes that torchrun started, or this one alone
    with Run(args, world) as run:   # its folder and files, checkpoints, evaluations: run/loop.py
        t = load(args, world)
        for step, batch in run.begin(t):        # evaluates; with --resume goes on where it ended
            lr = lr_at(step, run.last_step, peak=args.learning_rate, warmup_steps=args.warmup_steps)
            rollout, metrics = grpo_step(t, batch, step, lr)
            run.record(step, rollout, metrics)  # 5. report: metrics, evaluations, pictures, weights
        run.finish(parse_args([]))      # final/, and a card of the flags that differ from these
    world.close()


# --- what one looks up: loading -------------------------------------------------------------------


@dataclass(slots=True)
class TrainState:
    """All that a step takes. A mistyped field, or hook, is an AttributeError."""
    args: Namespace
    world: World
    tokenizer: object
    eos_ids: list                       # the ids that end a reply
    policy: Policy                      # model/policy.py: a model, its sampler, its token_logps
    reference: Policy                   # None with --beta 0
    optimizer: torch.optim.Optimizer
    reward_funcs: list
    eval_funcs: list
    num_prompts: int                    # of a step, for each rank
    pulls_on_all: bool                  # a KL or an entropy: a row of advantage 0 has a gradient
    generate: Callable                  # from here on the functions of a step: those above, unless
    compute_logps: Callable             # an option wraps or replaces them
    compute_rewards: Callable
    compute_advantages: Callable
    compute_loss: Callable
    grpo_loss: Callable
    update_policy: Callable
    token_logps: Callable               # for models that an option loads
    step: int = 0                       # the one that is being made
    saved: dict = field(default_factory=dict)       # name -> a model, saved beside the policy
    changed: dict = field(default_factory=dict)     # function -> by what, for the first lines

    def wrap(self, flag, **wrappers):
        """wrapper(inner, ...) takes the place of the function of its name, which is its `inner`."""
        for name, wrapper in wrappers.items():
            self._put(name, partial(wrapper, getattr(self, name)), f"wrapped by {flag}", wrapper)

    def replace(self, flag, **functions):
        """Another function takes the place of the one of its name."""
        for name, function in functions.items():
            self._put(name, function, f"replaced by {flag}", function)

    def _put(self, name, function, how, by):
        if not callable(getattr(self, name)):
            raise AttributeError(f"{name} is no function of a step")
        module = getattr(by, "func", by).__module__.replace(".", "/")
        self.changed.setdefault(name, []).append(f"{how} ({module}.py)")
        setattr(self, name, function)


def load(args, world):
    """The TrainState of a run: models, optimizer, rewards, and what its options wrap or replace."""
    world.agree_on_flags(args)      # else some rank waits for the others, unnoticed
    engine = Engine(world, args) if args.sampler == "vllm" else None
    policy, reference = backends.load_models(args, world, token_logps, engine)
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.model.config.vocab_size)
    eos_ids = eos_token_ids(policy.model, tokenizer)
    if not eos_ids:
        raise UserError(f"{tokenizer_path}: no EOS token to end an answer with; give another "
                        "--tokenizer_path")
    funcs = combine.load_reward_funcs(
        args.reward_funcs + args.eval_reward_funcs,
        known={"format": format_reward, "tag": tag_reward},
        reward_model_path=args.reward_model_path,
        device=args.reward_model_device or world.device, max_completion_length=args.max_gen_len,
        timeout=args.reward_timeout, reasoning=args.reasoning, clip=args.reward_model_clip,
        answer_share=args.reward_model_answer_share)
    count = len(args.reward_funcs)
    for judges in (funcs[:count], funcs[count:]):
        combine.refuse_same_names(judges)
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.99), fused=True,
                                  weight_decay=args.weight_decay)   # 0.99: runs are short
    if engine is not None:
        optimizer.register_step_post_hook(engine.outdate)
    t = TrainState(
        args=args, world=world, tokenizer=tokenizer, eos_ids=eos_ids, policy=policy,
        reference=reference, optimizer=optimizer, reward_funcs=funcs[:count],
        eval_funcs=funcs[count:], num_prompts=args.batch_size * args.accumulation_steps,
        pulls_on_all=reference is not None,
        generate=generate, compute_logps=compute_logps, compute_rewards=compute_rewards,
        compute_advantages=compute_advantages, compute_loss=compute_loss, grpo_loss=grpo_loss,
        update_policy=update_policy, token_logps=token_logps)
    extensions.install(t)
    world.alive()       # loading took its time
    return t


def lr_at(step, last_step, *, peak, warmup_steps):
    """Learning rate of a step (from 1): a linear rise, then a cosine from the peak to a tenth."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


# --- what one looks up: flags ---------------------------------------------------------------------
# Those of the algorithm stand here. Others stand beside the code that reads them.

GROUPS = ("the six that matter first", "1. ask (weights, prompts, sampling)",
          "2. remember (the reference)", "3. judge (rewards, advantages)",
          "4. learn (the objective)", "4. learn (the optimizer)",
          "5. report (evaluation, logs, weights)", "the machine")


def parse_args(argv=None):
    parser = Parser(usage="%(prog)s [flags] [@file of flags]", description=(
        "Group Relative Policy Optimization. Without flags a small model learns, in minutes, that "
        "thinking before it answers pays. Policy: the model that learns. Reference: the weights it "
        "started from. Group: the completions of one prompt. Rollout: those of a step."))
    for title in GROUPS:
        parser.add_argument_group(title)
    add_flags(parser)
    for owner in (prompts, combine, evaluation, Saver, report, backends, World, minimind,
                  extensions):
        owner.add_flags(parser)
    args = parser.parse_args(argv)
    extensions.fill_in(args)
    fill_in_defaults(args)
    extensions.refuse(args)
    return args


def add_flags(parser):
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

    flag = parser.group("4. learn (the objective)").add_argument
    flag("--epsilon_low", type=POSITIVE_OR_0, default=0.2, help="clip the ratio at 1 - it")
    flag("--epsilon_high", type=POSITIVE_OR_0, help="and at 1 + it (default: 0.2; DAPO 0.28); "
         "cispo: the cap itself (default: 5); gmpo: both in log space, 0.4 say; dppo: of pi, 0.15")
    flag("--num_iterations", type=COUNT, default=1, help="passes over each rollout: more save "
         "sampling, but the policy moves away from the one that sampled")
    flag("--num_minibatches", type=COUNT, default=1,
         help="optimizer steps per pass; with a single one in all, no ratio moves and no clip acts")

    flag = parser.group("4. learn (the optimizer)").add_argument
    flag("--micro_batch_size", type=COUNT, default=64, help="completions per forward pass: lower "
         "it if memory runs out; the result stays the same")
    flag("--max_steps", type=COUNT_OR_0, help="with as many passes over the prompts as it takes; "
         "0: one pass (default: --epochs; without it one pass, at most 300 steps)")
    flag("--epochs", type=COUNT, help="passes over the prompts; with --max_steps, unlike in TRL, "
         "whichever ends first")
    flag("--warmup_steps", type=COUNT_OR_0, default=3, help="the rate rises, then falls to a tenth")
    flag("--weight_decay", type=POSITIVE_OR_0, default=0.0, help="AdamW's")
    flag("--grad_clip", "--max_grad_norm", type=POSITIVE, default=1.0, help="the gradient's norm")


def fill_in_defaults(args):
    """The defaults that depend on other flags."""
    minimind.fill_in(args)
    prompts.fill_in(args)
    backends.fill_in(args)
    combine.fill_in(args, REWARD_WEIGHTS)
    Saver.fill_in(args)
    if args.beta is None:
        args.beta = 0.02
    if args.loss_type is None:
        args.loss_type = "grpo"
    if args.scale_rewards is None:
        args.scale_rewards = "group"
    if args.epsilon_high is None:
        args.epsilon_high = 0.2
    if args.kl_type is None:
        args.kl_type = "k3"


# What notebooks import from here as well.
from model import sample  # noqa: F401
from run.extensions.losses import kl_penalty  # noqa: F401

if __name__ == "__main__":
    main()
