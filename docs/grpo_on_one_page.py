"""GRPO on one page: all of the algorithm, and none of its options.

    python docs/grpo_on_one_page.py             three to five minutes on two cores, no GPU

A small model does sums such as `What is 34 + 27*6?` in several styles: some work on paper, some
guess. Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) lets it find out which
style pays. Nobody shows it a solution: three rules and a small network score what it wrote. A step:

    1. ask        the policy answers B prompts, each G times
    2. remember   how likely each token is under the reference, the first weights, to stay near them
    3. judge      a reward for each answer; its advantage: how much better is it than its group?
    4. learn      make the tokens of better answers likelier, those of worse answers less likely
    5. report     the share of held-out problems that the policy gets right

Imported are the network, the sampler, the data and the rewards; everything of GRPO is here. The
same steps, from the shipped weights, with the script that has all options:

    python train_grpo.py --sampler plain --micro_batch_size 128 --max_steps 100 --device cpu

Letters: pi the policy, the model that learns; B prompts, G answers to each, N = B*G answers; P and
R tokens of a prompt and an answer; V vocabulary.
"""
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dataset import PromptCollator, PromptDataset, rows_of_step
from model import eos_token_ids, load_pretrained, load_tokenizer, rng_of, sample
from reward import accuracy_reward, combine_rewards, load_reward_funcs

WEIGHTS, SEED = ROOT / "model/weights/reason_128", 42
B, G, MAX_TOKENS = 16, 8, 96            # prompts a step, answers to each, tokens of an answer
EPSILON, BETA = 0.2, 0.02               # no gain from ratios beyond 1 ± 0.2; weight of the KL
PEAK, WARMUP, MAX_NORM = 3e-4, 3, 1.0   # learning rate, steps up to it, largest gradient norm
# What is paid: 0.5 for the format, 0.25 for each of four tags, -1 to 1 by a network that has learnt
# what good answers look like, and 1 for the right result.
REWARDS = ["format", "tag", "rm", "accuracy"]


def ask(policy, tokenizer, batch, count, rng):
    """1. ask: `count` answers to each prompt, adjacent, drawn from the policy's probabilities."""
    eos_ids = eos_token_ids(policy, tokenizer)
    answer_ids, _ = sample(             # _: their log-probs, without a gradient
        policy, batch["prompt_ids"], batch["prompt_mask"], num_generations=count,
        max_new_tokens=MAX_TOKENS, eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id,
        generator=rng)                                                                  # (N, R)
    is_eos = torch.isin(answer_ids, torch.tensor(eos_ids)).int()
    mask = (is_eos.cumsum(1) - is_eos == 0).int()       # (N, R) 1 where no EOS stands before
    # Prompts are padded on the left, so that an answer follows its prompt at once.
    prompt_ids = batch["prompt_ids"].repeat_interleave(count, 0)                        # (N, P)
    prompt_mask = batch["prompt_mask"].repeat_interleave(count, 0)
    return SimpleNamespace(
        input_ids=torch.cat((prompt_ids, answer_ids), 1), answer_ids=answer_ids, mask=mask,
        attention_mask=torch.cat((prompt_mask, mask), 1),                               # (N, P+R)
        prompts=[prompt for prompt in batch["prompts"] for _ in range(count)],
        texts=tokenizer.batch_decode(answer_ids, skip_special_tokens=True),
        columns={name: [value for value in values for _ in range(count)]    # right result, chat
                 for name, values in batch["columns"].items()})


def token_logps(model, answers):
    """log pi(token | all before) of each token of the answers, (N, R)."""
    R = answers.answer_ids.shape[1]
    # The logits at a position predict the next token: so start one before the answer.
    logits = model(answers.input_ids, answers.attention_mask)[:, -R - 1:-1]             # (N, R, V)
    return logits.log_softmax(-1).gather(-1, answers.answer_ids[..., None]).squeeze(-1)


def group_advantages(rewards):
    """How much better is each answer than its siblings, in standard deviations? (N,) -> (N,)

    If all answers to a prompt earn the same, their advantages are 0: then only the KL moves them.
    """
    groups = rewards.view(-1, G)                                                        # (B, G)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).view(-1)


def grpo_loss(logps, old_logps, advantages, mask, ref_logps):
    """-(gain - beta KL): its mean over an answer's tokens, then the mean of these over answers."""
    A = advantages[:, None]                     # the same for all tokens of an answer
    ratio = (logps - old_logps).exp()           # pi / pi_old: pi_old is the policy that answered
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    # A ratio past the bound on the side that A favours has no gradient; on the other side it has.
    gain = torch.min(ratio * A, clipped * A)
    x = ref_logps - logps
    kl = x.exp() - x - 1            # never negative; on average over pi's tokens KL(pi || pi_ref)
    per_answer = ((gain - BETA * kl) * mask).sum(1) / mask.sum(1)                       # (N,)
    return -per_answer.mean()


def learning_rate(step, steps):
    """A linear rise, then a cosine from the peak down to a tenth of it."""
    if step <= WARMUP:
        return PEAK * step / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def report(when, policy, tokenizer, batch):
    """5. report: the share of these problems that it gets right, answering each once at random."""
    answers = ask(policy, tokenizer, batch, 1, rng_of(SEED, 1))
    right = accuracy_reward(answers.prompts, answers.texts, **answers.columns)
    print(f"{when}: {sum(right) / len(right):.1%} right, for example")
    print(f"    {answers.columns['messages'][0][-1]['content']} {answers.texts[0]!r}", flush=True)


def train(steps=100, heldout=200):
    """GRPO, from the weights that we ship; returns the policy."""
    policy, reference = (load_pretrained(WEIGHTS, dtype=torch.float32) for _ in range(2))
    tokenizer = load_tokenizer(WEIGHTS, policy.config.vocab_size)
    collate = PromptCollator(tokenizer, max_seq_len=66)         # no prompt is longer
    problems = PromptDataset(ROOT / "dataset/train.jsonl")
    unseen = collate(PromptDataset(ROOT / "dataset/heldout.jsonl")[:heldout])
    reward_funcs = load_reward_funcs(
        REWARDS, reward_model_path=ROOT / "reward/weights/reward_128", clip=1.0)
    optimizer = torch.optim.AdamW(policy.parameters(), PEAK, betas=(0.9, 0.99), weight_decay=0.0)
    report("before", policy, tokenizer, unseen)
    for step in range(1, steps + 1):
        rows = rows_of_step(step, len(problems), B, seed=SEED)  # shuffled anew in each epoch
        batch = collate([problems[row] for row in rows])
        answers = ask(policy, tokenizer, batch, G, rng_of(SEED, 0, step, 0))        # 1. ask
        with torch.no_grad():
            ref_logps = token_logps(reference, answers)                             # 2. remember
        rewards, _ = combine_rewards(                                               # 3. judge
            answers.prompts, answers.texts, reward_funcs, [1.0] * 4, **answers.columns)
        advantages = group_advantages(rewards)
        # 4. learn. The policy has not moved since it answered: each ratio is 1, but its gradient is
        # that of log pi. Only a second update, with the same old_logps, would meet the clip.
        logps = token_logps(policy, answers)
        old_logps = logps.detach()
        loss = grpo_loss(logps, old_logps, advantages, answers.mask, ref_logps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps:
            report(f"step {step}, reward {rewards.mean():.2f}", policy, tokenizer, unseen)
    return policy


if __name__ == "__main__":
    train()
