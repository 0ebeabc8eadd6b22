"""Group Relative Policy Optimization (GRPO), from scratch.

GRPO (DeepSeekMath, arXiv 2402.03300) trains a language model with rewards: numbers that say how
good a completion is. The model completes each prompt several times, which gives a group of
completions. Training then makes the completions that score above their group's average more likely,
and the others less likely.

In the formulas, q is a prompt, o is a completion of q, o_t is token t of o, and r is the reward of
o. pi is the policy, the model being trained, and pi(o_t) is the probability that it assigns to o_t
after q and the tokens before o_t. pi_old is the policy as it was when it sampled o. pi_ref, the
reference, is a frozen copy of the initial weights. clip(x, a, b) limits x to the range a to b.

    A_i     = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)       advantage of completion i
    ratio_t = pi(o_t) / pi_old(o_t)
    loss    = - mean over completions of mean over tokens of [
                  min(ratio_t A_i, clip(ratio_t, 1-epsilon_low, 1+epsilon_high) A_i)
                  - beta KL_t(pi || pi_ref) ]

The ratio corrects for the fact that pi_old sampled the tokens, not pi. The clip removes a token's
gradient once its ratio has left the clip range in the direction that A favors. The KL term keeps
the policy close to the reference. By default, a step makes one update, when pi still equals pi_old.
So every ratio is 1, nothing is clipped, and the first term has the gradient of -A log pi: the loss
is then a cross-entropy on the policy's own completions, weighted by A.

A step has five phases. It uses B prompts with G completions each; B, G, beta, epsilons are flags.
    1. generate               generate             the policy samples the completions
    2. reference log-probs    compute_logps        how likely each token is under the reference
    3. rewards                compute_rewards      a number for each completion
       and advantages         compute_advantages   each reward relative to its group
    4. update                 update_policy        gradient steps on the loss
    5. log                    loop.record          metrics, evaluations, pictures, checkpoints

A rollout is all completions of a step. A minibatch is the part of the rollout that one optimizer
step uses, by default all of it. A micro-batch is the part of a minibatch that the model processes
at once; smaller ones need less memory. A rank is a process of torchrun. logps are
log-probabilities. A mask is 1 for tokens that count, else 0. In shapes, N = B*G counts completions,
n those in a micro-batch, P prompt and R completion tokens, V vocabulary entries; T is P + R.

    python docs/grpo_on_one_page.py                 read this first: the same without options
    python train_grpo.py                            some minutes on one CPU core
    torchrun --nproc_per_node=2 train_grpo.py       on two processes

The algorithm is in this file, up to the end of `main`; `GRPO.step` shows the phases together. The
sampler, two of the four rewards, and bookkeeping are in other files. By default, the sampler and
`token_logps` are replaced by faster versions in model/fast, whose results agree up to rounding
(each run checks `token_logps`); `--sampler plain` runs the readable versions. Options override
methods of the class GRPO. A run first prints the name of each such method, and the file.

The log-probabilities under pi_old come from the trainer, not from the sampler, so every ratio
starts at exactly 1. All log-probabilities are those of the sampling distribution, in float32: they
depend on the temperature, and top-k and top-p are not used.
"""
import math
import os
import re
from dataclasses import dataclass
from functools import partial

# Set before torch is imported: idle OpenMP threads then soon sleep, and leave their cores free.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch

# Imported first, because it raises an error if another module hides one of our folders.
import errors
import reward.load
from dataset import prompts
from errors import COUNT, COUNT_OR_0, POSITIVE, POSITIVE_OR_0, Parser, UserError, number
from model import eos_token_ids, in_memory, load_tokenizer, vllm
from run import checkpoint, distributed, evaluate, extensions, minimind_flags
from run import policy as policies
from run.distributed import World
from run.loop import Loop
from run.metrics import Clock, Metrics
from run.report import terminal
from run.rollout import Rollout
from run.signals import recorded, stop_if_cut_short

# --- the objective --------------------------------------------------------------------------------


def group_advantages(rewards, num_generations, eps=1e-4):
    """Returns how far each reward is above its group's mean, in standard deviations of the group.

        A = (r - mean(group)) / (std(group) + eps)         DeepSeekMath 4.1.2; std divides by n-1

    rewards and the result are (N,); the G completions of a prompt are adjacent. A reward of NaN
    means that no function scored the completion. It is left out of mean and std, and its advantage
    is 0. An example with rewards of 1 for the right answer and 0.5 for the right format:

    >>> group_advantages(torch.tensor([0.5, 1.5, 1.0, 0.5]), 4)
    tensor([-0.7832,  1.3053,  0.2611, -0.7832])
    """
    groups = rewards.double().view(-1, num_generations)     # (B, G) float64: equal rewards get 0
    difference = (groups - groups.nanmean(1, keepdim=True)).nan_to_num(0.0)
    scored = (~groups.isnan()).sum(1, keepdim=True)                                     # (B, 1)
    std = (difference.square().sum(1, keepdim=True) / (scored - 1).clamp(min=1)).sqrt()
    return (difference / (std + eps)).float().view(-1)


def completion_mask(completion_ids, eos_token_id):
    """Returns a mask, (N, R): 1 for all tokens up to and including the first EOS, 0 after it.

    The EOS is included, because the policy has to learn when to stop. eos_token_id is an int or a
    list of ints.
    """
    is_eos = torch.isin(completion_ids, completion_ids.new_tensor(eos_token_id)).int()
    return (is_eos.cumsum(1) - is_eos == 0).int()   # no EOS before this token; the first EOS stays


def k3(x):
    """Estimates KL(pi || pi_ref) from a token that pi sampled. x is log pi_ref - log pi.

    Under pi, -x has the mean KL(pi || pi_ref), and e^x = pi_ref / pi has the mean 1. So the
    estimate, e^x - 1 - x, also has the KL as its mean; unlike -x, it is never negative. For x > 20,
    the function continues as a straight line, so that e^x can't overflow.
    """
    near = x.clamp(max=20)
    return near.expm1() * (1 + (x - near)) - near     # for x <= 20: e^x - 1 - x


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps, beta, epsilon_low, epsilon_high,
              num_sequences, num_tokens):
    """Returns (loss, metrics): the GRPO loss, and a dict of detached scalars.

    logps, old_logps, mask and ref_logps are (n, R). ref_logps is None without a reference.
    advantages are (n,), or (n, R) if each token has its own. num_sequences and num_tokens are the
    numbers of completions and tokens in the whole optimizer step. So the loss of the step is the
    sum of the losses of its micro-batches, and the same is true of the metrics.
    """
    A = advantages.view(len(mask), -1)                                  # (n, 1 or R)
    padding = mask == 0                                                 # (n, R) from here on
    log_ratio = (logps - old_logps).masked_fill(padding, 0)
    ratio = log_ratio.clamp(max=80).exp()               # pi / pi_old; e^89 would overflow
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    # Beyond 1 ± epsilon the clipped term is constant. The min selects it only if the ratio has
    # moved in the direction that A asks for; otherwise the token keeps its gradient.
    loss = -torch.min(ratio * A, clipped * A)
    metrics = {}
    if ref_logps is not None:
        kl = k3((ref_logps - logps).masked_fill(padding, 0))
        loss = loss + beta * kl
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens
    # Average over each completion's tokens, then over all completions.
    lengths = mask.sum(1, keepdim=True).clamp(min=1)                    # (n, 1)
    loss = (loss * mask / (num_sequences * lengths)).sum()
    # The share of tokens whose gradient the clip removes, at its lower and at its upper bound.
    low = (ratio < 1 - epsilon_low) & (A < 0)
    high = (ratio > 1 + epsilon_high) & (A > 0)
    for name, acts in {"low": low, "high": high, "region": low | high}.items():
        metrics[f"clip_ratio/{name}_mean"] = (acts * (mask / num_tokens)).sum()
    return loss, metrics


# --- log-probabilities ----------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0,
                with_entropy=False):
    """Returns log pi(token | prefix) of each row's last R = num_completion_tokens tokens, (N, R).

    input_ids and attention_mask are (N, T). If with_entropy is True, also returns the entropy of pi
    at each token in nats, (N, R). Both results are float32, and 0 at padding.
    """
    R = num_completion_tokens
    # The logits at position t predict token t+1, so use the logits at positions P-1 ... T-2.
    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1]             # (N, R, V)
    all_logps = (logits.float() / temperature).log_softmax(-1)
    mask = attention_mask[:, -R:]                                                       # (N, R)
    logps = all_logps.gather(-1, input_ids[:, -R:, None]).squeeze(-1) * mask
    if not with_entropy:
        return logps
    return logps, -(all_logps.exp() * all_logps).sum(-1) * mask


# --- rewards --------------------------------------------------------------------------------------
# A reward function scores N completions at once: it returns a number for each, or None for one that
# it can't score; reward/load.py turns None and failures into NaN. `own_words` are the completions
# without a tool's answers; `columns` has the data's other fields, such as `answer`, N values each.
# In FORMAT, (?>...) never backtracks, so matching takes time linear in a completion's length.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
FORMAT = re.compile(r"(?><think>\n.*?\n</think>\n\n?<answer>\n).*\n</answer>", re.DOTALL)


def format_reward(prompts, completions, own_words=None, **columns):
    """0.5 if the text is just `<think>\\n...\\n</think>\\n<answer>\\n...\\n</answer>`, else 0."""
    return [0.5 if FORMAT.fullmatch(text) else 0.0 for text in own_words or completions]


def tag_reward(prompts, completions, own_words=None, **columns):
    """Gives 0.25 for each of the four tags that occurs exactly once, as partial credit."""
    return [sum(0.25 for tag in TAGS if text.count(tag) == 1) for text in own_words or completions]


# The default reward is format + tag + rm + accuracy. rm is the score of a small reward model, from
# -1 to 1; accuracy is 1 for the right answer and 0 otherwise. Both are in reward/.
REWARD_WEIGHTS = {"format": 1.0, "tag": 1.0, "rm": 1.0, "accuracy": 1.0}


# --- a step ---------------------------------------------------------------------------------------
# A Rollout (run/rollout.py) has a row for each completion. This file uses these of its members:
#     loss_mask                  (N, R) the tokens to train on, by default all through the EOS
#     sampling_logps, ref_logps  (N, R) log-probs from the sampler, and under the reference
#     rewards, advantages        (N,); rewards_per_func {name: (N,)}
#     select(rows)               a MicroBatch of these rows, cut to their longest completion
#     minibatches(...)           lists of MicroBatches; these also have old_logps (at first None),
#                                num_sequences and num_tokens of their minibatch, over all ranks
#     sequences()                the inputs of token_logps: input_ids, attention_mask (N, T), and R


@dataclass
class GRPO:
    """What a step needs, and the functions of a step. The last, `step`, calls the others in order.

    Options (run/extensions/) are classes whose methods override these, and call them with super().
    """
    args: object                        # the flags
    world: World                        # run/distributed.py: the ranks
    tokenizer: object
    eos_ids: list                       # ids of the tokens that end a completion
    policy: policies.Policy             # run/policy.py: a model, its sampler, its token_logps
    reference: policies.Policy          # None with --beta 0
    optimizer: torch.optim.Optimizer
    reward_funcs: list
    eval_funcs: list

    grpo_loss = staticmethod(grpo_loss)         # these functions of this file are here, so that
    token_logps = staticmethod(token_logps)     # options can override or call them
    k3 = staticmethod(k3)

    def __post_init__(self):
        self.num_prompts = self.args.batch_size * self.args.accumulation_steps  # per step and rank
        self.every_row_has_gradient = self.reference is not None    # by the KL, even if A is 0
        self.phase = Clock(self.world.device)   # self.phase("update") starts timing a phase
        self.current_step, self.saved = 0, {}   # saved: {name: model or dict} for checkpoints

    def generate(self, batch, rng, num_generations=None, greedy=False):
        """1. Samples G completions of each prompt in the batch, and returns them as a Rollout."""
        args = self.args
        completion_ids, logps = self.policy.sample(     # (N, R); prompt_ids are (B, P)
            batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
            num_generations=num_generations or args.num_generations, temperature=args.temperature,
            max_new_tokens=args.max_gen_len, eos_token_id=self.eos_ids, greedy=greedy,
            pad_token_id=self.tokenizer.pad_token_id or 0, generator=rng)
        mask = completion_mask(completion_ids, self.eos_ids)                            # (N, R)
        return Rollout.of(batch, completion_ids, mask, logps, self.eos_ids, self.tokenizer)

    @torch.no_grad()
    def compute_logps(self, policy, rollout):
        """2. Returns the log-probs, (N, R), that a policy assigns to the completions' tokens."""
        logps = torch.zeros_like(rollout.sampling_logps)
        for rows in torch.arange(len(logps), device=logps.device).split(self.args.micro_batch_size):
            part = rollout.select(rows)
            logps[rows, :part.loss_mask.shape[1]] = policy.token_logps(
                *part.sequences(), temperature=self.args.temperature)
        return logps

    def compute_rewards(self, rollout, reward_funcs, reward_weights):
        """3. Returns (rewards, each): the weighted sum, (N,), and {function name: (N,) rewards}.

        The sum leaves out NaNs. It is NaN if it is infinite, or if no function gave a score.
        """
        given = rollout.for_rewards()           # prompts, completions, own_words, and columns
        each = {func.__name__: torch.tensor(func(**given)) for func in reward_funcs}
        values, weights = torch.stack([*each.values()]), torch.tensor(reward_weights)[:, None]
        rewards = (values * weights).nansum(0)          # (N,), from (functions, N) * (functions, 1)
        scored = ~values.isnan()
        if weights.any():       # weight 0: only a metric; with a teacher, all weights may be 0
            scored &= weights != 0
        rewards[~scored.any(0) | ~rewards.isfinite()] = math.nan
        return rewards, each

    def compute_advantages(self, rollout):
        """3. Returns the advantage of each completion, (N,)."""
        advantages = group_advantages(rollout.rewards, self.args.num_generations)
        return advantages.to(rollout.loss_mask.device)

    def compute_loss(self, part, logps, entropy):
        """4. Returns (loss, metrics) of a micro-batch, to be summed over the optimizer step.

        logps are (n, R), and so is entropy, in nats, which only options use.
        """
        args = self.args
        return self.grpo_loss(
            logps, part.old_logps, part.advantages, part.loss_mask, ref_logps=part.ref_logps,
            beta=args.beta, epsilon_low=args.epsilon_low, epsilon_high=args.epsilon_high,
            num_sequences=part.num_sequences, num_tokens=part.num_tokens)

    def update_policy(self, rollout):
        """4. Makes num_iterations passes over the rollout, with one optimizer step per minibatch.

        Returns metrics, or {}, without an update, if no completion on any rank has a reward.
        """
        args, world, policy = self.args, self.world, self.policy
        metrics = Metrics(world, args)
        if not world.sum((~rollout.rewards.isnan()).sum()):
            return {}
        # Rows without a gradient are left out, but num_sequences and num_tokens count them.
        minibatches = rollout.minibatches(args, world, self.every_row_has_gradient)

        if args.num_iterations * len(minibatches) > 1:  # pi will move away from pi_old, so compute
            self.phase("old_logps")                     # pi_old's log-probabilities beforehand
            with torch.no_grad():       # in the same micro-batches as below, so that rounding
                for part in sum(minibatches, []):       # can't make a ratio differ from 1
                    part.old_logps = policy.token_logps(
                        *part.sequences(), temperature=args.temperature)
            self.phase("update")

        for _ in range(args.num_iterations):
            for minibatch in minibatches:
                for part in minibatch:          # the gradients of micro-batches add up
                    logps, entropy = policy.token_logps(                                # (n, R)
                        *part.sequences(), temperature=args.temperature, with_entropy=True)
                    if part.old_logps is None:  # pi equals pi_old: the ratio is 1, with a gradient
                        part.old_logps = logps.detach()
                    loss, of_loss = self.compute_loss(part, logps, entropy)
                    loss.backward()
                    metrics.add(part, logps, entropy, loss, of_loss)
                world.sum_gradients(policy.model)       # over the ranks
                grad_norm = world.clip_gradients(policy.model, args.grad_clip)
                # With a gradient of 0, the optimizer's momentum would still change the policy.
                if grad_norm.isfinite() and grad_norm > 0:
                    self.optimizer.step()
                self.optimizer.zero_grad()      # frees the gradients; sampling needs the memory
                metrics.end_update(grad_norm)
        return metrics.means()      # of the updates; a loss's metrics are sums over micro-batches

    def step(self, batch, step, lr):
        """Takes one GRPO step on a batch of prompts. Returns (rollout, metrics)."""
        self.current_step = step
        self.phase("rollout")           # 1. generate
        rollout = self.generate(batch, self.world.rng(step))

        self.phase("ref_logps")         # 2. reference log-probs; no reference with --beta 0
        if self.reference is not None:
            rollout.ref_logps = self.compute_logps(self.reference, rollout)

        self.phase("reward")            # 3. rewards and advantages
        rollout.rewards, rollout.rewards_per_func = self.compute_rewards(
            rollout, self.reward_funcs, self.args.reward_weights)
        stop_if_cut_short(self.world)   # if a signal has ended them early, on any rank
        rollout.advantages = self.compute_advantages(rollout)

        self.phase("update")            # 4. update
        self.optimizer.param_groups[0]["lr"] = lr
        metrics = self.update_policy(rollout)
        self.phase(None)
        return rollout, metrics | {"learning_rate": lr}


def run(args, world, trainer=GRPO, **options):
    """Trains a policy. Returns (model, history), where history has the metrics of each step."""
    args.trainer = trainer.__name__
    with Loop(args, world, **options) as loop:      # makes the run's folder
        grpo = load(args, world, trainer)
        for step in loop.steps(grpo):       # reads the prompts, resumes, evaluates before step 1
            batch = loop.batch(step)        # {"prompt_ids": (B, P), "prompt_mask": (B, P), ...}
            lr = lr_at(step, loop.last_step, peak=args.learning_rate,
                       warmup_steps=args.warmup_steps)
            rollout, metrics = grpo.step(batch, step, lr)
            loop.record(step, rollout, metrics)     # 5. log: prints, evaluates and saves if due
        loop.finish(defaults=parse_args([]))        # writes final/ and a card with changed flags
    return grpo.policy.model, loop.history


@errors.user_errors("train_grpo.py")    # prints a user's mistake as one sentence, no traceback
@recorded                               # tells torchrun which rank has failed, and why
def main(argv=None, trainer=GRPO):
    args = parse_args(argv)
    run(args, World.join(args), trainer)    # the processes that torchrun started, or this one alone


# --- for reference: a call from Python ------------------------------------------------------------


def train(model, tokenizer=None, *, reward_funcs, prompts, reference=None, reward_model=None,
          out_dir=None, trainer=GRPO, **flags):
    """Trains a model like `main`, but from Python. Returns (trained model, metrics of each step).

        def length(completions, **columns):
            return [min(len(text), 100) / 100 for text in completions]

        model, history = train(model, tokenizer, reward_funcs=[length], prompts=["Tell me a joke."],
                               max_steps=30, num_generations=8, learning_rate=1e-6)

    model, tokenizer, reference, reward_model: each is an object, a folder or a hub id. A model
    object is trained in place, on `device` (a flag), in float32 and in evaluation mode. Frozen
    parameters stay frozen. Qwen3, Qwen2 and Llama models run in the network of model/model.py,
    which shares their weights; other causal models of transformers run in their own classes. If the
    model has PEFT adapters, only the adapters are trained, and the reference is the model without
    adapters. Otherwise, if beta is above 0, the default reference is a copy of the model. With
    lora_rank, shard, ref_model_sync_steps or sampler="vllm", `model` must be a path.
    reward_funcs: a list of functions, names of rewards, or strings "module:function".
    prompts: strings, chats, or rows like {"prompt": ..., "answer": ...}; in a list, table or file.
    out_dir: the folder for output files. If it is None, no files are written.
    trainer: a subclass of GRPO with methods of your own, which are called before those of options.
    flags: any flags that --help lists, as keyword arguments. Where --help says "module:function",
    pass a function. To resume a run, pass resume=True, the same out_dir and run_name, and the
    initial model. Tokenizer and prompts must be the same as before.

    Wrong arguments raise a ValueError. Ctrl-C stops the training at once, and the model keeps its
    updates so far. Under torchrun, call `train` in each process.
    """
    own = {"model_path": model, "tokenizer_path": tokenizer, "reference_path": reference,
           "reward_model_path": reward_model, "data_path": prompts, "reward_funcs": reward_funcs,
           "out_dir": out_dir}
    with in_memory.as_flags(flags, own) as named:
        args = parse_args(named)
        args.out_dir = out_dir and args.out_dir
        world = World.join(args)
        try:
            policy, history = run(args, world, trainer, watches=False)
        finally:
            world.close()
        return errors.GIVEN.get(args.model_path, policy), history


# --- for reference: loading -----------------------------------------------------------------------


def load(args, world, trainer=GRPO):
    """Returns the trainer of a run, with its models, its rewards, and the options that are on."""
    world.check_same_flags(args)      # if they differed, a rank could wait forever for the others
    engine = vllm.Engine(world, args) if args.sampler == "vllm" else None
    policy, reference = policies.load_models(args, world, trainer.token_logps, engine)
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = load_tokenizer(tokenizer_path, policy.model.config.vocab_size)
    eos_ids = eos_token_ids(policy.model, tokenizer)
    if not eos_ids:
        raise UserError(f"{tokenizer_path}: neither the tokenizer nor the model config defines an "
                        "EOS token, so no completion could end; pass another --tokenizer_path")
    reward_funcs, eval_funcs = reward.load.load_for_run(
        args, world.device, known={"format": format_reward, "tag": tag_reward})
    optimizer = torch.optim.AdamW(policy.model.parameters(), betas=(0.9, 0.99), fused=True,
                                  weight_decay=args.weight_decay)   # 0.99, as runs are short
    grpo = extensions.class_of_run(GRPO, args, trainer)(
        args=args, world=world, tokenizer=tokenizer, eos_ids=eos_ids, policy=policy,
        reference=reference, optimizer=optimizer, reward_funcs=reward_funcs, eval_funcs=eval_funcs)
    if engine is not None:          # vLLM reloads changed weights, and frees memory for updates
        optimizer.register_step_post_hook(engine.outdate)
        grpo.phase.listeners.append(engine.sleep)
    return grpo


def lr_at(step, last_step, *, peak, warmup_steps):
    """Learning rate of a step (from 1): a linear rise, then a cosine from the peak to a tenth."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, last_step - warmup_steps)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


# --- for reference: flags -------------------------------------------------------------------------
# The flags of the algorithm are defined here, all others next to the code that reads them.

GROUPS = ("the six that matter first", "1. generate (weights, prompts, sampling)",
          "2. reference log-probs", "3. rewards and advantages", "4. update (the objective)",
          "4. update (the optimizer)", "5. log (evaluation, files, weights)", "the machine")


def parse_args(argv=None):
    """Parses flags. argv: a list of words, {flag: value}, or None for the command line."""
    parser = Parser(usage="%(prog)s [flags] [@file of flags]", description=(
        "Trains a language model with GRPO (Group Relative Policy Optimization). Without flags, a "
        "small model learns arithmetic within minutes. Policy: the model being trained. Reference: "
        "a frozen copy of its initial weights. Group: all completions of one prompt."))
    for title in GROUPS:
        parser.add_argument_group(title)
    add_flags(parser)
    for owner in (prompts, reward.load, evaluate, checkpoint, terminal, policies, distributed,
                  minimind_flags, extensions):
        owner.add_flags(parser)
    words = parser.words(argv)
    args = filled_in(parser.parse_args(words))
    if args.resume:         # flags that are not passed keep the run's values
        was = checkpoint.flags_of_run(args)
        parser.set_defaults(**{name: was[name] for name in vars(args) if name in was})
        args = filled_in(parser.parse_args(words))
    extensions.check(args)
    return args


def add_flags(parser):
    flag = parser.group("the six").add_argument
    flag("--reasoning", type=int, choices=(0, 1), default=1,
         help="1: start from weights that think between tags, reward the tags, and switch thinking "
         "on in chat templates that have a switch for it; 0: none of these, and thinking off")
    flag("--num_generations", type=number(int, 2), default=8, help="G, completions per prompt; "
         "more make a group's mean less noisy, but sampling and training take longer")
    flag("--batch_size", type=COUNT, default=16, help="prompts per step on each process")
    flag("--learning_rate", type=POSITIVE, default=3e-4, help="peak learning rate, which then "
         "decays to a tenth; for models of 0.5B parameters or more, start at 1e-6")
    flag("--max_gen_len", "--max_completion_length", type=COUNT, default=96,
         help="maximum tokens per completion; longer completions are truncated")
    flag("--beta", type=POSITIVE_OR_0, help="weight of the KL penalty, which keeps the policy near "
         "the reference; 0: no penalty, and no reference in memory (default: 0.02)")

    flag = parser.group("1. generate").add_argument
    flag("--model_path", help="initial weights: a folder or hub id of a Qwen3, Qwen2.5, Llama or "
         "Qwen3-MoE model, or of any other causal model of transformers (slower); or a MiniMind "
         ".pth file (default: reason_128 or full_sft_128, in out_dir or else in model/weights)")
    flag("--tokenizer_path", help="folder or hub id of the tokenizer, if not that of the weights")
    flag("--temperature", type=number(float, 0.001), default=1.0,
         help="sampling temperature, in training and evaluation")

    flag = parser.group("4. update (the objective)").add_argument
    flag("--epsilon_low", type=POSITIVE_OR_0, default=0.2,
         help="lower clip bound: the ratio is clipped at 1 - epsilon_low")
    flag("--epsilon_high", type=POSITIVE_OR_0, help="upper clip bound: the ratio is clipped at "
         "1 + epsilon_high (default: 0.2; DAPO uses 0.28). For cispo, the cap itself (default: 5); "
         "for gmpo, both bounds limit the log-ratio, e.g. 0.4; for dppo, pi - pi_old, e.g. 0.15")
    flag("--num_iterations", type=COUNT, default=1, help="passes over a step's completions: more "
         "of them save sampling time, but the policy moves away from the one that sampled")
    flag("--num_minibatches", type=COUNT, default=1, help="optimizer steps per pass; with one pass "
         "of one step, every ratio is 1 and nothing is clipped")

    add_optimizer_flags(parser.group("4. update (the optimizer)").add_argument)


def add_optimizer_flags(flag):
    flag("--micro_batch_size", type=COUNT, default=64, help="completions per forward pass; lower "
         "it if you run out of memory, the result stays the same")
    flag("--max_steps", type=COUNT_OR_0, help="number of steps, in as many passes over the prompts "
         "as needed; 0: one pass (default: as --epochs says, else one pass, at most 300 steps)")
    flag("--epochs", type=COUNT, help="passes over the prompts; with --max_steps too, training "
         "ends at the earlier of the two (in TRL, max_steps overrides epochs)")
    flag("--warmup_steps", type=COUNT_OR_0, default=3, help="steps to reach the peak learning rate")
    flag("--weight_decay", type=POSITIVE_OR_0, default=0.0, help="weight decay of AdamW")
    flag("--grad_clip", "--max_grad_norm", type=POSITIVE, default=1.0,
         help="clip the gradient norm to this value")


def filled_in(args):
    """Checks the flags, and sets defaults that depend on other flags. Returns the flags."""
    extensions.set_defaults(args)
    for owner in (prompts, policies, checkpoint):
        owner.check(args)
    reward.load.check(args, REWARD_WEIGHTS)
    for name, value in {"beta": 0.02, "loss_type": "grpo", "kl_type": "k3", "epsilon_high": 0.2,
                        "scale_rewards": "group"}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


# Notebooks also import these names from here.
from model import sample  # noqa: F401
from run.extensions import losses

family_loss, kl_penalty = (partial(f, k3=k3) for f in (losses.family_loss, losses.kl_penalty))

if __name__ == "__main__":
    main()
