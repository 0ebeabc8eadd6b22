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
  - with one update per rollout, the default, the clip never acts, and the printed loss is just beta * KL, about 0: the
    advantages of a group cancel in its value, though not in its gradient. Watch the reward.
"""
import argparse
import copy
import json
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from dataset import PromptCollator, PromptDataset, rows_of_step, steps_per_epoch
from model import discard_checkpoint, load_checkpoint, load_pretrained, sample, save_checkpoint, save_pretrained
from report import Report, rollout_metrics
from reward import accuracy_reward, combine_rewards, load_reward_funcs

HERE = Path(__file__).parent

# --- the objective ----------------------------------------------------------------------------------------------------


def group_advantages(rewards, num_generations, *, eps=1e-4):
    """How much better each completion is than its siblings, in standard deviations of its group.

        A = (r - mean(group)) / (std(group) + eps)           std with n-1; DeepSeekMath, section 4.1.2

    rewards (N,) with the G completions of one prompt adjacent -> (N,). NaN marks a completion that no reward judged: it
    is left out of mean and std and gets advantage 0. Four answers to `7 + 3*7`: a wrong one, one that is right and well
    formatted, one that is right, another wrong one:

    >>> group_advantages(torch.tensor([0.1, 1.1, 1.0, 0.1]), 4)
    tensor([-0.8635,  0.9544,  0.7726, -0.8635])
    """
    groups = rewards.view(-1, num_generations)                                          # (B, G)
    mean = groups.nanmean(1, keepdim=True)                                              # (B, 1)
    deviation = (groups - mean).nan_to_num(0.0)                                         # (B, G)
    judged = (~groups.isnan()).sum(1, keepdim=True)                                     # (B, 1)
    std = (deviation.pow(2).sum(1, keepdim=True) / (judged - 1).clamp(min=1)).sqrt()
    return (deviation / (std + eps)).view(-1)


def completion_mask(completion_ids, eos_token_id):
    """(N, R): 1 up to and including the first EOS, all 1 where there is none. The EOS is trained: stopping is a skill."""
    eos = torch.tensor([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id, device=completion_ids.device)
    is_eos = torch.isin(completion_ids, eos).int()                                      # (N, R)
    return (is_eos.cumsum(1) - is_eos == 0).int()           # no EOS before this token


def kl_penalty(logps, ref_logps):
    """The k3 estimate of KL(pi || pi_ref) per token: e^x - x - 1 with x = log pi_ref - log pi; never negative (N, R).

    x is clamped at 20 only because e^x would overflow. There is no clamp below and none on the result: a clamp removes
    the gradient, the pull back, exactly where the policy has drifted furthest.
    """
    x = (ref_logps - logps).clamp(max=20)
    return x.exp() - x - 1                                                              # (N, R)


def clipped_policy_loss(logps, old_logps, advantages, *, epsilon_low, epsilon_high):
    """PPO's surrogate per token, -min(ratio A, clip(ratio) A), and where the clip holds the policy back; both (N, R).

    Once a token's ratio has moved past epsilon in the direction that its advantage favours, the clip removes its gradient.
    """
    ratio = (logps - old_logps).exp()                                                   # (N, R)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    is_clipped = ((ratio < 1 - epsilon_low) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    return -surrogate, is_clipped


def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps=None, beta=0.0, epsilon_low=0.2, epsilon_high=0.2,
              num_sequences=None, num_tokens=None):
    """GRPO's loss, the mean over sequences of the mean over their tokens, and metrics as detached scalars.

    logps, old_logps (N, R); ref_logps (N, R), or None if beta is 0; advantages (N,) or (N, R); mask (N, R). num_sequences
    and num_tokens are totals of the whole optimizer step, over all micro-batches and ranks (None: this call is the whole
    step): losses and metrics of the parts then add up to those of the step. Masked-out rows count in num_sequences.
    """
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]           # (N, 1) or (N, R)
    num_sequences = len(mask) if num_sequences is None else num_sequences
    num_tokens = mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    per_token, is_clipped = clipped_policy_loss(logps, old_logps, advantages,
                                                epsilon_low=epsilon_low, epsilon_high=epsilon_high)     # (N, R) both
    metrics = {"clip_ratio/region_mean": (is_clipped * mask).sum() / num_tokens}
    if beta:
        kl = kl_penalty(logps, ref_logps)                                               # (N, R)
        per_token = per_token + beta * kl
        metrics["kl"] = (kl.detach() * mask).sum() / num_tokens
    per_sequence = (per_token * mask).sum(1) / mask.sum(1).clamp(min=1)                 # (N,)
    return per_sequence.sum() / num_sequences, metrics


# --- log-probabilities ------------------------------------------------------------------------------------------------


def token_logps(model, input_ids, attention_mask, num_completion_tokens, *, temperature=1.0, with_entropy=False):
    """log pi(token | all before) of the last R = num_completion_tokens of input_ids (N, T): (N, R) in float32.

    With `with_entropy` also the entropy of each of these distributions, (N, R), in nats and without gradient.
    """
    R = num_completion_tokens
    # Logits at position t predict token t+1: start one position early, drop the last.
    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1].float() / temperature   # (N, R, V)
    log_normalizer = logits.logsumexp(-1)                                               # (N, R)
    logps = logits.gather(-1, input_ids[:, -R:, None])[..., 0] - log_normalizer         # (N, R)
    if not with_entropy:
        return logps
    with torch.no_grad():
        expected_logit = ((logits - log_normalizer[..., None]).exp() * logits).sum(-1)
    return logps, log_normalizer.detach() - expected_logit                              # H = log Z - E[logit]


@dataclass
class Rollout:
    """What one rank sampled in one step; a micro-batch is some of its rows."""
    prompt_ids: torch.Tensor                    # (N, P) padded on the left, each prompt G times
    prompt_mask: torch.Tensor                   # (N, P)
    completion_ids: torch.Tensor                # (N, R) padded on the right
    mask: torch.Tensor                          # (N, R)
    advantages: torch.Tensor = None             # (N,)
    old_logps: torch.Tensor = None              # (N, R); None: the policy has not moved since it sampled
    ref_logps: torch.Tensor = None              # (N, R); None: no reference model

    def rows(self, start, end):
        """Some of the completions, without the columns that hold nothing but padding."""
        P, R = (int(mask[start:end].sum(1).max()) for mask in (self.prompt_mask, self.mask))

        def cut(x):
            return None if x is None else x[start:end, :R]

        return Rollout(self.prompt_ids[start:end, -P:], self.prompt_mask[start:end, -P:], cut(self.completion_ids),
                       cut(self.mask), self.advantages[start:end], cut(self.old_logps), cut(self.ref_logps))

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
    completion_ids, _ = sample(model, prompt_ids, prompt_mask, num_generations=num_generations, **sampling)
    return Rollout(prompt_ids.repeat_interleave(num_generations, 0), prompt_mask.repeat_interleave(num_generations, 0),
                   completion_ids, completion_mask(completion_ids, sampling["eos_token_id"]))


def judge(rollout, batch, tokenizer, reward_funcs, reward_weights, *, num_generations):
    """Step 2: the completions as texts, their rewards (N,), and each function's own {name: (N,)}."""
    def for_each_completion(items):
        return [item for item in items for _ in range(num_generations)]                     # a a a b b b

    ids, completions = rollout.decode(tokenizer)
    replies = [opened + rest for opened, rest in zip(for_each_completion(batch["opened"]), completions)]
    columns = {name: for_each_completion(values) for name, values in batch["columns"].items()}
    rewards, per_function = combine_rewards(for_each_completion(batch["prompts"]), replies, reward_funcs,
                                            reward_weights, completion_ids=ids, **columns)
    return completions, rewards, per_function


@torch.no_grad()
def remember(model, rollout, *, micro_batch_size, temperature):
    """Step 3: log-probabilities of the rollout's tokens under a frozen policy, the old one or the reference, (N, R)."""
    logps = torch.zeros_like(rollout.mask, dtype=torch.float32)
    for start in range(0, len(logps), micro_batch_size):
        part = rollout.rows(start, start + micro_batch_size)
        logps[start:start + micro_batch_size, :part.mask.shape[1]] = part.logps(model, temperature=temperature)
    return logps


def learn(model, optimizer, rollout, world, *, num_iterations, micro_batch_size, temperature, grad_clip, **objective):
    """Step 4: `num_iterations` optimizer steps. Loss and metrics are summed over the ranks and averaged over the steps."""
    N = len(rollout.mask)
    num_sequences, num_tokens = world.sum(torch.tensor([N, rollout.mask.sum()])).tolist()
    metrics = {}
    for _ in range(num_iterations):
        optimizer.zero_grad()
        for start in range(0, N, micro_batch_size):
            part = rollout.rows(start, start + micro_batch_size)
            logps, entropy = part.logps(model, temperature=temperature, with_entropy=True)
            # Before it has moved, the policy is the one that sampled: the ratio is 1, but its gradient is not 0.
            old_logps = logps.detach() if part.old_logps is None else part.old_logps
            loss, part_metrics = grpo_loss(logps, old_logps, part.advantages, part.mask, ref_logps=part.ref_logps,
                                           num_sequences=num_sequences, num_tokens=num_tokens, **objective)
            loss.backward()
            part_metrics |= {"loss": loss.detach(), "entropy": (entropy * part.mask).sum() / num_tokens}
            metrics = {name: metrics.get(name, 0.0) + value / num_iterations for name, value in part_metrics.items()}
        world.sum_gradients(model)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        if grad_norm.isfinite():        # the same number on every rank: all of them take the step, or none
            optimizer.step()
    summed = world.sum(torch.stack(list(metrics.values())).cpu()).tolist()
    return dict(zip(metrics, summed)) | {"grad_norm": grad_norm.item()}


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
            opened = [opened for opened in batch["opened"] for _ in range(k)]
            replies = [start + rest for start, rest in zip(opened, rollout.decode(collate.tokenizer)[1])]
            scores = accuracy_reward(None, replies, answers)
            correct[greedy] = torch.tensor(scores).view(-1, k)                              # (B, k)
            if not greedy:
                length = rollout.mask.sum().item() / k
        sums += torch.tensor([len(correct[True]), correct[False].mean(1).sum(), correct[True].sum(),
                              correct[False].amax(1).sum(), length])
    count, *sums = world.sum(sums).tolist()
    names = ("eval/accuracy", "eval/greedy_accuracy", f"eval/pass@{num_generations}", "eval/mean_length")
    return {name: value / count for name, value in zip(names, sums)}


# --- processes --------------------------------------------------------------------------------------------------------


class World:
    """The processes that torchrun started, one rank each, or just this one."""

    def __init__(self, device=None):
        self.rank, self.size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        usable = {"cuda": torch.cuda.device_count() >= on_this_machine,             # nccl wants a GPU for each process
                  "mps": torch.backends.mps.is_available() and self.size == 1,      # gloo cannot add up MPS tensors
                  "cpu": True}
        device = device or next(name for name in usable if usable[name])
        if not usable[device]:
            raise ValueError(f"--device {device}: there is none for each of the {on_this_machine} processes; choose another")
        self.device = torch.device(device)
        if device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if device == "cuda" else "gloo")

    def sum(self, tensor):
        """The sum of the ranks' tensors, on every rank."""
        if self.size > 1:
            tensor = tensor.to(self.device if self.device.type == "cuda" else "cpu")
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, model):
        """A rank's loss is its share of the step's loss, so the gradients are summed, not averaged."""
        if self.size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

    def gather(self, rows):
        """The ranks' lists, one behind the other."""
        if self.size == 1:
            return rows
        lists = [None] * self.size
        dist.all_gather_object(lists, rows)
        return [row for rows in lists for row in rows]

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()


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
    flag("--model_path", help="a folder of weights (default: reason_<hidden_size> or full_sft_<hidden_size>, looked up in "
                              "out_dir, then in model/weights)")
    flag("--tokenizer_path", help="a folder with the tokenizer, if it is not in the folder of the weights")
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
    flag("--reward_funcs", nargs="+", metavar="NAME", help="format, tag, rm, accuracy, or module:function of your own "
         "(default: format tag rm accuracy with --reasoning 1, rm accuracy with 0)")
    flag("--reward_weights", nargs="+", type=float, metavar="W", help="one for each of reward_funcs (default: all 1)")
    flag("--reward_model_path", help="a folder with a reward model (default: reward_<hidden_size>, looked up in out_dir, "
                                     "then in reward/weights), or owner/name on the hub: a ...ForSequenceClassification "
                                     "with one label, or internlm/internlm2-1_8b-reward and its like")
    flag("--reward_model_device", help="where the reward model runs, cpu or cuda:1 (default: where the policy does)")
    flag("--reward_model_scale", type=float, default=1.0, help="the reward model's score is multiplied by it, then clipped")
    flag("--reward_model_clip", type=float, default=3.0, help="bounds the score from above and below; 0: no bound")
    flag("--reward_model_answer_share", type=float, default=0.6,
         help="with --reasoning 1, the weight of the answer's own score; the whole reply's has the rest")

    flag = parser.add_argument_group("3. and 4. remember and learn: the objective, the optimizer").add_argument
    flag("--epsilon_low", type=float, default=0.2, help="the ratio is clipped at 1 - epsilon_low")
    flag("--epsilon_high", type=float, default=0.2, help="the ratio is clipped at 1 + epsilon_high")
    flag("--num_iterations", type=int, default=1, help="optimizer steps on each rollout; with 1 the ratio stays 1")
    flag("--accumulation_steps", type=int, default=1, help="multiplies the prompts of a step")
    flag("--micro_batch_size", type=int, default=64,
         help="completions that go through the model at once in steps 3 and 4: changes the memory, never the result")
    flag("--epochs", type=int, default=1, help="how often the prompts are read")
    flag("--max_steps", type=int, default=120, help="steps at most; 0: as many as the epochs have")
    flag("--warmup_steps", type=int, default=3, help="steps over which the learning rate rises; then a cosine to a tenth")
    flag("--weight_decay", type=float, default=0.0, help="AdamW's")
    flag("--grad_clip", type=float, default=1.0, help="the norm of the gradient at most")

    flag = parser.add_argument_group("5. report: evaluation, logs, weights").add_argument
    flag("--eval_data_path", help="held-out problems with answers, a jsonl file (default: dataset/heldout.jsonl)")
    flag("--eval_interval", type=int, default=30, help="steps between evaluations; one also runs before and after; 0: none")
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
    """Refuses what can't work, by the flag's name."""
    for name in ("batch_size", "max_gen_len", "max_seq_len", "num_iterations", "accumulation_steps", "micro_batch_size",
                 "epochs", "num_generations_eval", "eval_samples", "eval_batch_size", "log_interval", "save_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; it must be at least 1")
    for name in ("beta", "epsilon_low", "epsilon_high", "max_steps", "warmup_steps", "weight_decay", "eval_interval",
                 "num_workers", "reward_model_clip"):
        if getattr(args, name) < 0:
            parser.error(f"--{name} is {getattr(args, name)}; it must not be negative")
    for name in ("learning_rate", "temperature", "grad_clip", "reward_model_scale"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")
    if args.num_generations < 2:
        parser.error(f"--num_generations is {args.num_generations}; a group needs at least 2 completions to compare")
    if not 0 <= args.reward_model_answer_share <= 1:
        parser.error(f"--reward_model_answer_share is {args.reward_model_answer_share}; it must be between 0 and 1")
    if args.data_path and not args.eval_data_path and not args.eval_only:
        args.eval_interval = 0              # the arithmetic problems say nothing about another task
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
    args.run_name = args.run_name or f"grpo_{Path(args.model_path).name}"


def find_weights(name, *folders):
    """The first folder that holds weights of this name; the last one's path if none does, for the error to name."""
    paths = [Path(folder) / name for folder in folders]
    return next((path for path in paths if (path / "config.json").is_file()), paths[-1])


# --- main -------------------------------------------------------------------------------------------------------------


def load_models(args, device):
    """Tokenizer, policy, reference and reward functions. Policies are float32, so that small updates add up."""
    policy = load_pretrained(args.model_path, dtype=torch.float32, device=device)
    if args.num_hidden_layers not in (None, policy.config.num_hidden_layers):
        raise ValueError(f"--num_hidden_layers {args.num_hidden_layers}: {args.model_path} has "
                         f"{policy.config.num_hidden_layers} layers; leave the flag out")
    tokenizer_path = args.tokenizer_path or args.model_path
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{tokenizer_path}: its tokenizer has no EOS token to end an answer with; "
                         "give another --tokenizer_path")
    # Copied before either is wrapped: a copied wrapper would go on calling the policy.
    reference = copy.deepcopy(policy) if args.beta > 0 else None
    if reference is not None:
        in_precision(reference, args.dtype, device)
    reward_funcs = load_reward_funcs(
        args.reward_funcs, reward_model_path=args.reward_model_path, device=args.reward_model_device or device,
        reasoning=args.reasoning, clip=args.reward_model_clip, scale=args.reward_model_scale,
        answer_share=args.reward_model_answer_share)
    return tokenizer, in_precision(policy, args.dtype, device), reference, reward_funcs


def read_heldout(args):
    """The held-out problems that have an answer; none where nothing is evaluated."""
    if not (args.eval_interval or args.eval_only):
        return []
    problems = [row for row in PromptDataset(args.eval_data_path) if row.get("answer") is not None][:args.eval_samples]
    if not problems:
        raise ValueError(f"--eval_data_path {args.eval_data_path}: no line has an answer to compare with; add the field, "
                         "or train with --eval_interval 0")
    return problems


def batches_of_steps(args, world, problems, collate, steps):
    """The prompts of this rank at each of these steps, `batch_size * accumulation_steps` of them."""
    rows = (rows_of_step(step, len(problems), args.batch_size * args.accumulation_steps, rank=world.rank,
                         world_size=world.size, seed=args.seed) for step in steps)
    return DataLoader(problems, batch_sampler=rows, collate_fn=collate, num_workers=args.num_workers)


def eos_token_ids(model, tokenizer):
    """Every token that ends a reply: the tokenizer's, and those that the weights' configuration names."""
    configured = model.config.eos_token_id if model.config.eos_token_id is not None else []
    return sorted({tokenizer.eos_token_id, *([configured] if isinstance(configured, int) else configured)})


def in_precision(model, dtype, device):
    """Lets every forward of the model, whoever calls it, make its matrix products in bfloat16 where --dtype asks for it."""
    made_for_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "bfloat16" or dtype == "auto" and made_for_it:
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    return model


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


def describe(rollout, batch, completions, rewards, per_function, eos_token_id):
    """A row of completions.jsonl for each completion: prompt, text, every reward, and the advantage that came of them."""
    G, lengths = len(completions) // len(batch["prompts"]), rollout.mask.sum(1)             # (N,)
    last_ids = rollout.completion_ids.gather(1, lengths[:, None] - 1)[:, 0].tolist()
    return [{
        "prompt": batch["prompts"][i // G],
        "messages": batch["columns"]["messages"][i // G],
        "completion": completions[i],
        "length": int(lengths[i]),
        "ended": last_ids[i] in eos_token_id,
        "rewards": {name: values[i].item() for name, values in per_function.items()},
        "reward": rewards[i].item(),
        "advantage": rollout.advantages[i].item(),
    } for i in range(len(completions))]


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
    problems, heldout = PromptDataset(args.data_path), read_heldout(args)
    collate = PromptCollator(tokenizer, args.max_seq_len, args.system_prompt)
    if args.overlong_prompts == "drop":
        problems = collate.without_overlong(problems, args.data_path)
        heldout = collate.without_overlong(heldout, args.eval_data_path)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=args.weight_decay)
    steps_done, num_tokens = load_checkpoint(run_dir / "checkpoint", policy, optimizer) if args.resume else (0, 0)
    last_step = args.epochs * steps_per_epoch(len(problems), args.batch_size * args.accumulation_steps, world.size)
    last_step = min(last_step, args.max_steps or last_step)
    batches = batches_of_steps(args, world, problems, collate, range(steps_done + 1, last_step + 1))
    eos, generator = eos_token_ids(policy, tokenizer), torch.Generator(device)
    sampling = {"max_new_tokens": args.max_gen_len, "temperature": args.temperature, "eos_token_id": eos,
                "pad_token_id": tokenizer.pad_token_id or 0, "generator": generator}
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
            # 2. judge: rewards, then advantages within each group
            with report.timed("reward"):
                completions, rewards, per_function = judge(
                    rollout, batch, tokenizer, reward_funcs, args.reward_weights, num_generations=G)
                rollout.advantages = group_advantages(rewards, G).to(device)
                rows = world.gather(describe(rollout, batch, completions, rewards, per_function, eos))
                metrics = rollout_metrics(rows, G)
            # 3. remember: log-probabilities under the policy that sampled, if it moves more than once, and the reference
            if args.num_iterations > 1:
                with report.timed("old_logps"):
                    rollout.old_logps = remember(policy, rollout, **logps_of)
            if reference is not None:
                with report.timed("ref_logps"):
                    rollout.ref_logps = remember(reference, rollout, **logps_of)
            # 4. learn: clipped gradient steps on micro-batches
            with report.timed("update"):
                lr = lr_at(step, last_step, peak=args.learning_rate, warmup_steps=args.warmup_steps)
                optimizer.param_groups[0]["lr"] = lr
                metrics |= learn(policy, optimizer, rollout, world, num_iterations=args.num_iterations, beta=args.beta,
                                 epsilon_low=args.epsilon_low, epsilon_high=args.epsilon_high,
                                 grad_clip=args.grad_clip, **logps_of)
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
                    save_checkpoint(run_dir / "checkpoint", policy, tokenizer, optimizer, step=step, num_tokens=num_tokens)
                report.draw()
        if world.rank == 0:
            save_pretrained(policy, tokenizer, run_dir / "final")
    world.close()


if __name__ == "__main__":
    main()
