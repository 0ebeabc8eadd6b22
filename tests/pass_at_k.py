"""Does RL widen or narrow what a model can solve? pass@k before and after, by hand:

    python tests/pass_at_k.py model/weights/reason_128 out/grpo_reason_128/final
    python tests/pass_at_k.py @dataset/countdown.txt model/weights/countdown_128 out/countdown/final

Samples n = 128 completions of 200 held-out problems with each of the weights. With c of n right,
the chance that k of them, drawn without putting back, hold a right one is 1 - C(n-c, k) / C(n, k):
an unbiased estimate of pass@k (Chen et al., arXiv 2107.03374). docs/questions.md has the result.
"""
import argparse
import sys
from math import comb
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_grpo
from model import World, fast
from train_grpo import compute_rewards, generate


def pass_at_k(n, c, k):
    return 1 - comb(n - c, k) / comb(n, k)


def right_counts(weights, flags, n, problems):
    """How many of n samples are right, for each problem."""
    args = train_grpo.parse_args([*flags, "--model_path", weights, "--max_steps", "0", "--device",
                                  "cpu", "--eval_samples", str(problems), "--beta", "0"])
    world = World("cpu", "float32", args.seed)
    tokenizer, policy, _, _, eval_funcs = train_grpo.load_models(args, world)
    collate, _, heldout = train_grpo.read_prompts(args, tokenizer)
    rng, counts = world.rng(0, evaluating=True), []
    for start in range(0, len(heldout), 8):
        rollout = generate(policy, collate(heldout[start:start + 8]), tokenizer, fast.sample, rng,
                           args, n)
        rewards, _ = compute_rewards(rollout, eval_funcs, [1.0] * len(eval_funcs))
        counts += (rewards.view(-1, n) >= args.eval_threshold).sum(1).tolist()
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+", help="folders; a leading @FILE holds a task's flags")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--problems", type=int, default=200)
    options = parser.parse_args()
    flags = [word for word in options.weights if word.startswith("@")]
    ks = [2**i for i in range(7) if 2**i <= options.samples]
    print(f"{'pass@':40}", *(f"{k:6}" for k in ks), " never")
    for weights in [word for word in options.weights if word not in flags]:
        with torch.inference_mode():
            counts = right_counts(weights, flags, options.samples, options.problems)
        means = [sum(pass_at_k(options.samples, c, k) for c in counts) / len(counts) for k in ks]
        print(f"{weights:40}", *(f"{mean:6.1%}" for mean in means),
              f"{counts.count(0) / len(counts):6.1%}", flush=True)


if __name__ == "__main__":
    main()
