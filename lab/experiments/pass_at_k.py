"""pass@k of a policy, the chance that one of k samples is right: a run of the experiment passk.

It takes the flags of train_grpo.py, and three of its own. First it makes the policy: the weights of
--model_path; or, with --train, what GRPO makes of them; or, with --imitate too, what fine-tuning
makes of them on the right answers of that GRPO. Then it samples --num_generations_eval answers to
each of --eval_samples problems. What it leaves in out_dir/run_name reads like a run of one step, of
which completions.jsonl has these answers, and eval.jsonl a line for each k.
"""
import argparse
import time
from functools import partial
from math import comb
from pathlib import Path
from shlex import join
from statistics import fmean

import torch

import train_grpo
from dataset import read_prompts
from dataset.jsonl import read_jsonl, write_jsonl
from dataset.prompts import countdown_prompt
from errors import UserError, user_errors
from lab.tasks.arithmetic import chat
from model import sampler
from model.model import KVCache
from run.checkpoint import default_name
from run.distributed import World
from run.metrics import describe

from .__main__ import python, quoted

AT_ONCE = 128       # answers sampled together: with more of them the plain sampler takes longer
# There are about a thousand right answers, so this is four passes. The rate is GRPO's; of the right
# answers of 30 steps some were kept aside, and their loss was higher with 3e-4 and after 8 passes.
FINE_TUNING = "--batch_size 32 --steps 130 --warmup_steps 10 --learning_rate 1e-4 --heldout 0"


@user_errors("lab.experiments.pass_at_k")
def main(argv=None):
    own, flags, args = parse_args(argv)
    folder, n = Path(args.out_dir, args.run_name or default_name(args)), args.num_generations_eval
    args.model_path = str(make_policy(own, flags, args.model_path, folder))
    start = time.time()
    rows, counts = answer_all(args, own.never_give_up)
    write_jsonl(folder / "completions.jsonl", [{"step": 1} | row for row in rows])
    write_jsonl(folder / "metrics.jsonl", [{"step": 1, "step_time": time.time() - start}])
    write_jsonl(folder / "eval.jsonl", [
        {"step": k, "eval/pass@k": fmean(pass_at_k(n, c, k) for c in counts)}
        for k in (2**i for i in range(n.bit_length()))])


def parse_args(argv=None):
    """Our own flags, the others as they are, and what train_grpo.py reads in those."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    for name in "--train", "--imitate", "--never_give_up":
        parser.add_argument(name, action="store_true")
    own, flags = parser.parse_known_args(argv)
    return own, flags, train_grpo.parse_args(flags)


def pass_at_k(n, c, k):
    """The chance that k of n answers, drawn without putting back, hold one of the c right ones.

    Without bias it estimates that of k new answers: Chen et al., arXiv 2107.03374.
    """
    return 1 - comb(n - c, k) / comb(n, k)


def make_policy(own, flags, weights, folder):
    """Train as our own flags say, in the folder; the path of the weights to sample from."""
    if own.train:
        python(f"train_grpo.py {join(flags)} --eval_interval 0 --out_dir {quoted(folder)} "
               "--run_name grpo", folder / "grpo.log")
    if not own.imitate:
        return folder / "grpo/final" if own.train else weights
    right = [row for row in read_jsonl(folder / "grpo/completions.jsonl") if row["reward"] == 1]
    chats = [chat(countdown_prompt(row["columns"]["nums"], row["columns"]["target"]),
                  row["completion"]) for row in right]
    if not chats:
        raise UserError(f"{folder}: no right answer to imitate; train it, or longer")
    print(f"{write_jsonl(folder / 'right.jsonl', chats)} right answers to imitate", flush=True)
    python(f"-m model.train_sft --init {quoted(Path(weights))} {FINE_TUNING} --data "
           f"{quoted(folder / 'right.jsonl')} --save {quoted(folder / 'imitates')}",
           folder / "imitates.log")
    return folder / "imitates"


def answer_all(args, never_give_up):
    """Rows of completions.jsonl, and of each problem how many of its answers are right."""
    world = World(args.device, args.dtype, args.seed)
    state = train_grpo.load(args, world)
    if never_give_up:
        state.policy.sampler = partial(persistent_sample, tokenizer=state.tokenizer)
    collate, _, problems = read_prompts(args, state.tokenizer)
    rows, counts, n = [], [], args.num_generations_eval
    for i, problem in enumerate(problems):
        rewards, rng = [], world.rng(i, evaluating=True)
        for done in range(0, n, AT_ONCE):
            rollout = state.generate(collate([problem]), rng, min(AT_ONCE, n - done))
            rollout.rewards, rollout.rewards_per_func = state.compute_rewards(
                rollout, state.eval_funcs, [1.0] * len(state.eval_funcs))
            rollout.advantages = rollout.rewards        # nothing is compared
            rows += describe(rollout, state.tokenizer, state.eos_ids, num_generations=0)
            rewards += rollout.rewards.tolist()
        counts.append(sum(reward >= 1 for reward in rewards))
        print(f"problem {i + 1} of {len(problems)}: {counts[-1]} right", flush=True)
    return rows, counts


# --- giving up forbidden --------------------------------------------------------------------------

class NeverGivesUp:
    """A policy that goes on after a miss, for the plain sampler, which calls it as a model.

    From a verdict `no` to a `yes` it can write nothing that ends its thought, and each line begins
    with a number. All other tokens keep their proportions: the sampler's softmax makes them add up
    to 1. Everywhere else nothing changes.
    """

    def __init__(self, policy, tokenizer):
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.no, self.yes, self.line_break = map(texts.index, (" no", " yes", "\n"))
        ends = "</think>", "<answer>", "</answer>", tokenizer.eos_token
        self.ends = torch.tensor([text in ends for text in texts])                      # (V,)
        self.is_number = torch.tensor([text.isdecimal() for text in texts])             # (V,)
        self.policy, self.new_cache = policy, Verdicts

    def __call__(self, input_ids, attention_mask, *, logits_to_keep, cache):
        logits = self.policy(input_ids, attention_mask, logits_to_keep=logits_to_keep, cache=cache)
        last = input_ids[:, -1]                                                         # (n,)
        cache.missed = (last == self.no) | (cache.missed & (last != self.yes))
        begins = cache.missed & (last == self.line_break)
        forbidden = cache.missed[:, None] & self.ends | begins[:, None] & ~self.is_number
        return logits.masked_fill(forbidden[:, None], float("-inf"))                    # (n, 1, V)


class Verdicts(KVCache):
    """A cache that also knows of each row whether its last verdict was `no`."""
    missed = False                                                                      # (n,)

    def select(self, rows):
        super().select(rows)
        self.missed = self.missed[rows]


def persistent_sample(model, *prompts, tokenizer, **options):
    return sampler.sample(NeverGivesUp(model, tokenizer), *prompts, **options)


if __name__ == "__main__":
    main()
