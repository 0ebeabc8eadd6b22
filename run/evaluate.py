"""Evaluates the policy on held-out problems."""
import hashlib
import json
import math
import warnings
from collections import defaultdict

from tqdm import tqdm

from dataset.jsonl import to_json
from errors import COUNT, COUNT_OR_0

from .signals import stop_if_cut_short


def add_flags(parser):
    flag = parser.group("5. log").add_argument
    flag("--eval_interval", type=COUNT_OR_0, help="steps between evaluations, also before and "
         "after training; 0: none (default: 30; 0 with --data_path but no --eval_data_path)")
    flag("--eval_reward_funcs", nargs="+", metavar="NAME", default=["accuracy"], help="names as in "
         "--reward_funcs: a held-out completion is right if these rewards add up to 1 or more")
    flag("--num_generations_eval", type=COUNT, default=2, help="k, samples per held-out problem")
    flag("--eval_only", action="store_true", help="evaluate the weights without training")


def measure(args, problems):
    """Returns a description of the evaluation. Results are comparable if descriptions are equal."""
    asked = args.temperature, args.max_gen_len, args.reasoning, args.system_prompt, args.tool
    content = json.dumps(to_json([asked, problems]), sort_keys=True).encode()
    rewards = " + ".join(sorted(args.eval_reward_funcs))
    return f"{rewards} on {len(problems)} problems, {hashlib.sha256(content).hexdigest()[:12]}"


def evaluate(state, problems, collate, step):
    """Evaluates the policy on held-out problems, on all ranks. Returns (metrics, rollout).

    A completion is right if its evaluation rewards add up to at least 1. Problems with an unscored
    completion are left out; the metric eval/judged is the share of problems that remain. rollout:
    the first batch of greedy completions, from which an example is printed.
    """
    args, world = state.args, state.world
    rng = world.rng(step, evaluating=True)
    weights = [1.0] * len(state.eval_funcs)
    k = args.num_generations_eval
    found = defaultdict(list)                   # metric -> a number per problem
    # Ranks wait for each other in every batch (stop_if_cut_short, and --shard when sampling), so a
    # rank with one problem fewer than others answers an extra problem, which isn't counted.
    mine = problems[world.rank::world.size]
    share = math.ceil(len(problems) / world.size)
    answered = mine + problems[:share - len(mine)]
    # A rollout's number of completions fits in memory; for a small model, more fit.
    at_once = max(1, args.batch_size * args.num_generations // k)
    if sum(weight.numel() for weight in state.policy.model.parameters()) < 10**7:
        at_once = 256
    # None shows the bar only in a terminal; in a log file, it would precede the next line.
    for start in tqdm(range(0, share, at_once), desc="evaluation", leave=False, dynamic_ncols=True,
                      disable=True if world.rank > 0 else None):
        batch = collate(answered[start:start + at_once])
        greedy = state.generate(batch, rng, 1, greedy=True)
        sampled = state.generate(batch, rng, k)
        greedy.rewards, _ = state.compute_rewards(greedy, state.eval_funcs, weights)    # (B,)
        rewards, _ = state.compute_rewards(sampled, state.eval_funcs, weights)
        rewards = rewards.view(-1, k)                                                   # (B, k)
        stop_if_cut_short(world)
        if start == 0:
            first = greedy
        judged = ~(greedy.rewards.isnan() | rewards.isnan().any(1))                     # (B,)
        judged = judged[:len(mine) - start]     # the extra problem is the last one
        found["judged"] += judged.tolist()
        right = (rewards >= 1).float()                                                  # (B, k)
        numbers_of_problems = {
            "accuracy": right.mean(1),
            "reward": rewards.mean(1),
            f"pass@{k}": right.amax(1),
            "greedy_accuracy": (greedy.rewards >= 1).float(),
            "mean_length": sampled.lengths.cpu().float().view(-1, k).mean(1),
        }
        for name, numbers in numbers_of_problems.items():
            found[name] += numbers[:len(judged)][judged].tolist()
    if k == 1:
        del found["pass@1"]         # it equals the accuracy
    found = {f"eval/{name}": world.gather(numbers) for name, numbers in found.items()}
    judged = found["eval/judged"]
    if world.rank == 0 and not all(judged):
        warnings.warn(f"only {sum(judged)} of {len(judged)} held-out problems were scored; check "
                      "that --eval_data_path has the columns that --eval_reward_funcs need",
                      stacklevel=2)
    return {"measure": measure(args, problems)} | {
        name: sum(all_of) / len(all_of) if all_of else math.nan
        for name, all_of in found.items()}, first
