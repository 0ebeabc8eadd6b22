"""GRPO on one page: all of the algorithm, and none of its options.

    python docs/grpo_on_one_page.py             two to three minutes on two cores, no GPU

A small model does sums such as `What is 34 + 27*6?` in several styles: some work on paper, some
guess. Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) lets it find out which
style pays. Nobody shows it a solution. One step:

    1. ask        the policy answers B prompts, each G times
    2. remember   how likely is each token under the reference, the weights that we start from?
    3. judge      a reward for each answer; its advantage: how much better is it than its group?
    4. learn      make the tokens of better answers likelier, and those of worse answers less likely
    5. report     the share of held-out problems that the policy gets right

Imported are the network, the sampler, the data and the rewards; everything of GRPO is here. With
`--sampler plain --micro_batch_size 128`, train_grpo.py takes the same steps to the same numbers.

Letters: B prompts, G answers to each, N = B*G answers; R tokens of the longest answer.
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
EPSILON, BETA = 0.2, 0.02               # of the clip, and of the KL penalty
PEAK, WARMUP, MAX_NORM = 3e-4, 3, 1.0   # learning rate, steps until it is reached, gradient norm


def ask(policy, tokenizer, batch, G, rng):
    """1. ask: G answers to each prompt, adjacent, as ids and masks (N, ...) and as texts."""
    eos_ids = eos_token_ids(policy, tokenizer)
    answer_ids, _ = sample(
        policy, batch["prompt_ids"], batch["prompt_mask"], num_generations=G,
        max_new_tokens=MAX_TOKENS, eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id,
        generator=rng)                                                                  # (N, R)
    is_eos = torch.isin(answer_ids, torch.tensor(eos_ids)).int()
    mask = (is_eos.cumsum(1) - is_eos == 0).int()       # (N, R) 1 through the EOS that ends it
    prompt_ids = batch["prompt_ids"].repeat_interleave(G, 0)
    prompt_mask = batch["prompt_mask"].repeat_interleave(G, 0)
    return SimpleNamespace(
        input_ids=torch.cat((prompt_ids, answer_ids), 1), ids=answer_ids, mask=mask,
        attention_mask=torch.cat((prompt_mask, mask), 1),
        prompts=[prompt for prompt in batch["prompts"] for _ in range(G)],
        texts=tokenizer.batch_decode(answer_ids, skip_special_tokens=True),
        columns={name: [value for value in values for _ in range(G)]
                 for name, values in batch["columns"].items()})


def token_logps(model, answers):
    """log pi(token | all before) of each token of the answers, (N, R)."""
    R = answers.ids.shape[1]
    # The logits at a position predict the next token: so start one before the answer.
    logits = model(answers.input_ids, answers.attention_mask)[:, -R - 1:-1]             # (N, R, V)
    return logits.log_softmax(-1).gather(-1, answers.ids[..., None]).squeeze(-1)


def group_advantages(rewards):
    """How much better is each answer than its siblings, in standard deviations? (N,) -> (N,)"""
    groups = rewards.view(-1, G)                                                        # (B, G)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).view(-1)


def grpo_loss(logps, old_logps, ref_logps, advantages, mask):
    """PPO's clipped objective, less beta times the KL to the reference; (N, R) -> a number.

    Averaged over the tokens of each answer, then over answers.
    """
    A = advantages[:, None]                     # the same for all tokens of an answer
    ratio = (logps - old_logps).exp()           # pi / pi_old: how far the policy has moved
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    gain = torch.min(ratio * A, clipped * A)    # moving further than that gains nothing
    x = ref_logps - logps
    kl = x.exp() - x - 1                        # k3: on average over samples KL(pi || pi_ref)
    per_answer = ((gain - BETA * kl) * mask).sum(1) / mask.sum(1)                       # (N,)
    return -per_answer.mean()


def learning_rate(step, steps):
    """A linear rise, then a cosine from the peak down to a tenth of it."""
    if step <= WARMUP:
        return PEAK * step / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def share_right(policy, tokenizer, collate, problems):
    """The share of problems that the policy gets right, answering each once, at random."""
    answers = ask(policy, tokenizer, collate(problems), 1, rng_of(SEED, 1))
    right = accuracy_reward(answers.prompts, answers.texts, **answers.columns)
    return sum(right) / len(right)


def train(steps=100, heldout=200):
    """Trains, and prints how it goes; returns the policy, and (texts, loss) of each step."""
    policy, reference = (load_pretrained(WEIGHTS, dtype=torch.float32) for _ in range(2))
    tokenizer = load_tokenizer(WEIGHTS, policy.config.vocab_size)
    collate = PromptCollator(tokenizer, max_seq_len=66)
    problems = PromptDataset(ROOT / "dataset/train.jsonl")
    unseen = PromptDataset(ROOT / "dataset/heldout.jsonl")[:heldout]
    rewards_of = load_reward_funcs(["format", "tag", "rm", "accuracy"], clip=1.0,
                                   reward_model_path=ROOT / "reward/weights/reward_128")
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    history = []
    print(f"before training   {share_right(policy, tokenizer, collate, unseen):.1%} right")
    for step in range(1, steps + 1):
        rows = rows_of_step(step, len(problems), B, seed=SEED)
        batch = collate([problems[row] for row in rows])
        # 1. ask
        answers = ask(policy, tokenizer, batch, G, rng_of(SEED, 0, step, 0))
        # 2. remember
        with torch.no_grad():
            ref_logps = token_logps(reference, answers)                                 # (N, R)
        # 3. judge
        rewards, _ = combine_rewards(answers.prompts, answers.texts, rewards_of, [1.0] * 4,
                                     completion_ids=answers.ids, **answers.columns)     # (N,)
        advantages = group_advantages(rewards)                                          # (N,)
        # 4. learn. The policy has not moved since it answered: each ratio is 1, but its gradient
        # is that of log pi. Only a second update on the same answers would see the clip.
        logps = token_logps(policy, answers)                                            # (N, R)
        loss = grpo_loss(logps, logps.detach(), ref_logps, advantages, answers.mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        # 5. report
        history.append((answers.texts, loss.item()))
        if step % 20 == 0 or step == steps:
            right = share_right(policy, tokenizer, collate, unseen)
            print(f"step {step:3}/{steps}   reward {rewards.mean():.2f}   {right:.1%} right")
    print("\n".join(answers.texts[:2]))
    return policy, history


if __name__ == "__main__":
    train()
