"""Which way does REINFORCE go, and what does the baseline change? By hand, two minutes on one core:

    python tests/gradients.py

The shipped policy answers two disjoint lots of training prompts, 4,096 completions each. A gradient
is that of -A log pi, with each completion's sum over its tokens divided by its length (as loss_type
grpo does) or by a constant (dr_grpo). The cosine of two gradients, one from each lot, tells how
much of their direction is no accident: 1 if both are the same vector and noise is small, 0 if they
have nothing in common or are noise. docs/ladder.md has the result.
"""
import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_grpo
from model import World, fast
from train_grpo import compute_rewards, generate, group_advantages, grpo_loss


def gradient(policy, rollouts, advantages, loss_type, args):
    """Of the policy's loss for these advantages, one tensor per rollout, as one vector."""
    total = sum(map(len, advantages))
    for rollout, of_rollout in zip(rollouts, advantages):
        for rows in torch.arange(len(of_rollout)).split(args.micro_batch_size):
            part = rollout.select(rows)
            logps = fast.token_logps(policy, *part.sequences())
            grpo_loss(logps, logps.detach(), of_rollout[rows], part.mask, loss_type=loss_type,
                      num_sequences=total, max_completion_length=args.max_gen_len)[0].backward()
    grads = [parameter.grad.flatten() for parameter in policy.parameters()]
    policy.zero_grad()
    return torch.cat(grads)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=4096, help="in each of the two lots")
    parser.add_argument("--seed", default="42")
    options = parser.parse_args()
    args = train_grpo.parse_args(["--batch_size", "64", "--max_steps", "0", "--device", "cpu",
                                  "--seed", options.seed])
    world = World("cpu", "float32", args.seed)
    tokenizer, policy, _, reward_funcs, _ = train_grpo.load_models(args, world)
    collate, problems, _ = train_grpo.read_prompts(args, tokenizer)
    batches, _ = train_grpo.batches_from(1, problems, collate, world, args)
    G, lots, found = args.num_generations, ([], []), {}
    for number, batch in zip(range(2 * options.completions // (64 * G)), batches):
        rollout = generate(policy, batch, tokenizer, fast.sample, world.rng(number + 1), args)
        rollout.rewards, per_func = compute_rewards(rollout, reward_funcs, args.reward_weights)
        rollout.columns["right"] = per_func["accuracy_reward"].tolist()
        lots[number % 2].append(rollout)

    def without_scale(rewards):
        return group_advantages(rewards, G, scale_rewards="none")

    kinds = {
        "constant": lambda rollout: torch.ones_like(rollout.rewards),
        "reward": lambda rollout: rollout.rewards,
        "minus mean": lambda rollout: without_scale(rollout.rewards),
        "accuracy": lambda rollout: without_scale(torch.tensor(rollout.columns["right"]))}
    for loss_type in ("grpo", "dr_grpo"):
        for kind, advantages_of in kinds.items():
            for lot, rollouts in enumerate(lots):
                found[loss_type, kind, lot] = gradient(
                    policy, rollouts, [advantages_of(rollout) for rollout in rollouts], loss_type,
                    args)

    def cosine(first, second):      # of either lot with the other
        return sum(torch.cosine_similarity(found[(*first, lot)], found[(*second, 1 - lot)], dim=0)
                   for lot in (0, 1)).item() / 2

    def norm(key):
        return sum(found[(*key, lot)].norm() for lot in (0, 1)).item() / 2

    rollouts = [rollout for lot in lots for rollout in lot]
    right = torch.tensor([rollout.columns["right"] for rollout in rollouts])
    rewards = torch.cat([rollout.rewards for rollout in rollouts])
    lengths = torch.cat([rollout.lengths for rollout in rollouts])
    right = right.flatten().bool()
    print(f"rewards: mean {rewards.mean():.2f}, right {right.float().mean():.0%}, wrong ones' mean "
          f"{rewards[~right].mean():.2f}")
    for name, rows in (("of less than 14 tokens", lengths < 14),
                       ("right, of 14 or more", right & (lengths >= 14))):
        print(f"reward per token, answers {name}: {(rewards / lengths)[rows].mean():.3f} "
              f"({rows.float().mean():.0%} of all)")
    print(f"{'cosine of':42}{'/ length':>10}{'/ constant':>12}")
    for first, second in (("constant", "constant"), ("reward", "reward"),
                          ("minus mean", "minus mean"), ("reward", "constant"),
                          ("reward", "minus mean"), ("reward", "accuracy"),
                          ("minus mean", "accuracy")):
        print(f"{first + ', ' + second:42}", *(
            f"{cosine((name, first), ('dr_grpo' if second == 'accuracy' else name, second)):10.2f}"
            for name in ("grpo", "dr_grpo")))
    for kind in kinds:
        print(f"norm, {kind:36}", *(f"{norm((name, kind)):10.3f}" for name in ("grpo", "dr_grpo")))


if __name__ == "__main__":
    main()
