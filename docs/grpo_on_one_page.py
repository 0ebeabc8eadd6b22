"""GRPO on one page: the whole algorithm, without options.

    python docs/grpo_on_one_page.py             three to five minutes on two cores, no GPU

A small model solves problems such as `What is 34 + 27*6?`. It can think first, but often it guesses
right away. Group Relative Policy Optimization (arXiv 2402.03300) trains it without any worked
solutions: three rules score what it writes. The model is called the policy, pi. One step:

    1. generate             generate            the policy samples G completions per prompt
    2. reference log-probs  compute_logps       how likely they are under the initial weights
    3. rewards              compute_rewards     a reward for each completion
       and advantages       group_advantages    ... compared with the others of the same prompt
    4. update               update_policy       makes tokens of better completions more likely
    5. log                  report              held-out accuracy; one group of the step

All functions but `report` have the names and order of train_grpo.py, which takes these steps with
`python train_grpo.py --sampler plain --micro_batch_size 128 --max_steps 100 --device cpu
--reward_funcs format tag accuracy`; its default rewards also include a reward model.
N = B*G completions; R tokens per completion, T including its prompt; V tokens in the vocabulary.
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
from model.load import decode
from reward import accuracy_reward
from train_grpo import format_reward, tag_reward

WEIGHTS, SEED = ROOT / "model/weights/reason_128", 42
B, G, MAX_LEN = 16, 8, 96           # prompts per step, completions per prompt, maximum tokens
# 0.5 for the format; 0.25 for each of four tags; 1 for the right result.
REWARD_FUNCS, REWARD_WEIGHTS = [format_reward, tag_reward, accuracy_reward], [1.0, 1.0, 1.0]
EPSILON, BETA = 0.2, 0.02               # the ratio is clipped at 1 ± EPSILON; weight of the KL
PEAK, WARMUP, MAX_NORM = 3e-4, 3, 1.0   # learning rate, steps to reach it, largest gradient norm
UPDATES = 1     # per rollout (num_iterations). With 1, every ratio is 1 and nothing is clipped.
                # With 2, 0 to 2.3% of the tokens of the second update are clipped.

def group_advantages(rewards, num_generations):
    """Returns how many standard deviations each completion is above its group's mean, (N,)."""
    groups = rewards.double().view(-1, num_generations)     # (B, G) float64: equal ones differ by 0
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)               # (B, 1)
    return ((groups - mean) / (std + 1e-4)).float().view(-1)

def completion_mask(completion_ids, eos_token_id):
    """Returns a mask (N, R): 1 through the first EOS, which ends a completion; 0 after it."""
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_id)).int()
    return (is_eos.cumsum(1) - is_eos == 0).int()   # no EOS before this token

def grpo_loss(logps, old_logps, advantages, mask, *, ref_logps, beta):
    """Returns the loss, a mean over each completion's tokens, then over completions; and the KL.

    The tokens were drawn by pi_old, the policy as it was then; the ratio is pi / pi_old. Before the
    first update, pi is pi_old: each ratio is 1, and its gradient is that of log pi, so the loss has
    the gradient of -A log pi (plus the KL's). A is the advantage. Once an update has changed pi,
    the ratio corrects for the change; the clip removes a token's gradient when pi has moved far
    enough in the direction of A's sign. The KL penalizes drift from the initial weights. Example:
    two tokens were sampled with p = 0.5 and have A = 1 and -1. The ratio is p / 0.5 and each token
    weighs 1/2, so d loss / dp = -A. Because weights are shared, an update may raise both p to 0.7.
    Both ratios are then 1.4, above 1.2, so the token with A = 1 gets no gradient, but the token
    with A = -1 still gets its gradient.

    >>> A, old, mask = torch.tensor([1.0, -1.0]), torch.full((2, 1), 0.5).log(), torch.ones(2, 1)
    >>> for p in torch.full((2, 1), 0.5), torch.full((2, 1), 0.7):
    ...     loss, _ = grpo_loss(p.requires_grad_().log(), old, A, mask, ref_logps=old, beta=0.0)
    ...     torch.autograd.grad(loss, p)[0].flatten()
    tensor([-1.,  1.])
    tensor([0., 1.])
    """
    A = advantages[:, None]                     # (N, 1) the same for all tokens of a completion
    ratio = (logps - old_logps).exp()           # (N, R) pi / pi_old
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    x = ref_logps - logps       # over pi's tokens, -x has mean KL(pi || pi_ref), e^x - 1 has mean 0
    kl = x.expm1() - x          # never < 0, and its mean is the KL as well (docs/derivation.md)
    loss = beta * kl - torch.min(ratio * A, clipped * A)                                # (N, R)
    loss = ((loss * mask).sum(1) / mask.sum(1)).mean()
    return loss, {"kl": (kl.detach() * mask).sum() / mask.sum()}

def token_logps(model, input_ids, attention_mask, num_completion_tokens):
    """Returns log pi(token | all before) of each row's last R = num_completion_tokens, (N, R)."""
    R = num_completion_tokens       # logits predict the next token, so start one token earlier
    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1]             # (N, R, V)
    return logits.log_softmax(-1).gather(-1, input_ids[:, -R:, None]).squeeze(-1)

def generate(state, batch, rng, num_generations=G):
    """1. Samples G completions of each prompt, a a b b; prompts are padded on the left."""
    policy, tokenizer = state.policy, state.tokenizer
    eos_ids = eos_token_ids(policy, tokenizer)
    completion_ids, _ = sample(     # (N, R); _: log-probs, which have no gradient
        policy, batch["prompt_ids"], batch["prompt_mask"], generator=rng, max_new_tokens=MAX_LEN,
        eos_token_id=eos_ids, pad_token_id=tokenizer.pad_token_id, num_generations=num_generations)
    mask = completion_mask(completion_ids, eos_ids)                                     # (N, R)
    prompt_of = torch.arange(len(batch["prompts"])).repeat_interleave(num_generations)  # (N,)
    input_ids = torch.cat((batch["prompt_ids"][prompt_of], completion_ids), 1)          # (N, T)
    attention_mask = torch.cat((batch["prompt_mask"][prompt_of], mask), 1)              # (N, T)
    return SimpleNamespace(
        sequences=(input_ids, attention_mask, mask.shape[1]), mask=mask, lengths=mask.sum(1),
        completions=[decode(ids, tokenizer, eos_ids) for ids in completion_ids.tolist()],
        prompts=[batch["prompts"][i] for i in prompt_of], columns={
            name: [values[i] for i in prompt_of] for name, values in batch["columns"].items()})

@torch.no_grad()
def compute_logps(policy, rollout):
    """2. Computes the log-probabilities of all completions, (N, R)."""
    return token_logps(policy, *rollout.sequences)

def compute_rewards(rollout, reward_funcs, reward_weights):
    """3. Returns the weighted sum of the rewards, (N,)."""
    each = [func(rollout.prompts, rollout.completions, **rollout.columns) for func in reward_funcs]
    return torch.tensor(reward_weights) @ torch.tensor(each)            # (functions, N) -> (N,)

def update_policy(state, rollout):
    """4. Takes UPDATES gradient steps; returns the metrics of the last."""
    for update in range(UPDATES):
        logps = token_logps(state.policy, *rollout.sequences)                           # (N, R)
        if update == 0:     # pi is still pi_old: each ratio is 1, but has the gradient of log pi
            old_logps = logps.detach()
        loss, metrics = grpo_loss(logps, old_logps, rollout.advantages, rollout.mask,
                                  ref_logps=rollout.ref_logps, beta=BETA)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.policy.parameters(), MAX_NORM)
        state.optimizer.step()
        state.optimizer.zero_grad()
    return metrics

def grpo_step(state, batch, step, lr):
    """Takes a step of GRPO on a batch of prompts; returns the rollout and metrics."""
    rollout = generate(state, batch, rng_of(SEED, 0, step, 0))                  # 1. generate
    rollout.ref_logps = compute_logps(state.reference, rollout)                 # 2. reference
    rollout.rewards = compute_rewards(rollout, REWARD_FUNCS, REWARD_WEIGHTS)    # 3. rewards
    rollout.advantages = group_advantages(rollout.rewards, G)                   #    and advantages
    state.optimizer.param_groups[0]["lr"] = lr
    return rollout, update_policy(state, rollout)                               # 4. update

def main(last_step=100, heldout=200):
    """Trains the included weights with GRPO; returns the policy."""
    policy, reference = (load_pretrained(WEIGHTS, dtype=torch.float32) for _ in range(2))
    tokenizer = load_tokenizer(WEIGHTS, policy.config.vocab_size)
    state = SimpleNamespace(policy=policy, reference=reference, tokenizer=tokenizer)
    state.optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    collate = PromptCollator(tokenizer, max_seq_len=66)         # no prompt is longer
    problems = PromptDataset(ROOT / "dataset/train.jsonl")
    unseen = collate(PromptDataset(ROOT / "dataset/heldout.jsonl")[:heldout])
    report(0, state, unseen)
    for step in range(1, last_step + 1):
        rows = rows_of_step(step, len(problems), B, seed=SEED)  # shuffled anew in each epoch
        progress = max(0, step - WARMUP) / max(1, last_step - WARMUP)   # a cosine, down to 0.1
        lr = PEAK * min(step / WARMUP, 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        rollout, metrics = grpo_step(state, collate([problems[row] for row in rows]), step, lr)
        if step % 20 == 0 or step == last_step:
            report(step, state, unseen, rollout, metrics)       # 5. log
    return policy

def report(step, state, unseen, rollout=None, metrics=None):
    """5. Prints held-out accuracy (one completion each), and the group with the largest std."""
    answered = generate(state, unseen, rng_of(SEED, 1), 1)
    right = compute_rewards(answered, [accuracy_reward], [1.0]).mean()
    print(f"step {step}: {right:.1%} of held-out problems right. The first of them:")
    print(f"  {unseen['columns']['messages'][0][-1]['content']} {answered.completions[0]!r}")
    if rollout:
        length, group = rollout.lengths.float().mean(), rollout.rewards.view(-1, G).std(1).argmax()
        print(f"  KL per token {metrics['kl']:.4f}, tokens per completion {length:.1f}. One group:")
        for name in "rewards", "advantages", "lengths":
            numbers = getattr(rollout, name).view(-1, G)[group].tolist()
            print(f"  {name:10}", *(f"{number:6.3g}" for number in numbers), flush=True)

if __name__ == "__main__":
    main()
