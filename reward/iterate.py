"""Iterative GRPO (DeepSeekMath, Algorithm 1): train a policy and its reward model in turns.

    python -m reward.iterate --iterations 2 --run_name turns -- --reward_funcs format tag rm \\
        --beta 0.3 --reward_model_answer_share 0 --max_steps 60

Flags after `--` go to train_grpo.py. Each iteration is an ordinary run. It starts from the policy
of the iteration before, which is also its reference. Then the reward model is retrained on what the
new policy wrote; a tenth of each batch comes from its earlier data.

The first reward model may be a classifier. The retrained ones are language models, the first from
the policy of the first run. They see slips that a classifier misses: LikelihoodModel says why.

All results are in out/: <run_name>_1, reward_<run_name>_1, <run_name>_2, ... If the command is
interrupted, start it again: it skips what is finished and resumes a run that was cut off.
"""
import argparse
import random
import signal
import subprocess
import sys
from pathlib import Path

from report import user_errors

from .reward_model import is_likelihood, load_reward_model
from .train_reward_model import accuracy_by_kind, pairs_of_run

ROOT = Path(__file__).resolve().parent.parent


def call(*command):
    """Runs a Python program from the project's folder. If it fails, exits with its code.

    The terminal sends Ctrl-C to both: the run saves before it stops, and this waits for it.
    """
    signal.signal(signal.SIGINT, lambda *unused: None)
    code = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT).returncode
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if code:
        sys.exit(code if code > 0 else 128 - code)


def train_policy(run, reward_model, flags):
    # Without accuracy among the rewards, there is nothing that the classifier's score might outbid.
    bounds = ["--reward_model_clip", 3]
    if is_likelihood(reward_model):         # a clip would make log-likelihoods all the same
        bounds = ["--reward_model_clip", 0, "--reward_model_answer_share", 0]
    if (run / "checkpoint").is_dir():
        flags = [*flags, "--resume"]
    call("train_grpo.py", *bounds, *flags, "--reward_model_path", reward_model,
         "--out_dir", run.parent, "--run_name", run.name)


def retrain_reward_model(folder, run, reward_model, args):
    init = reward_model if is_likelihood(reward_model) else run / "final"
    call("-m", "reward.train_reward_model", "--completions", run / "completions.jsonl",
         "--likelihood", "--init", init, "--data", reward_model / "pairs.jsonl",
         "--replay", args.replay, "--save", folder, "--steps", args.reward_steps,
         "--learning_rate", args.reward_learning_rate)


@user_errors("reward.iterate")
def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--iterations", type=int, default=2)
    flag("--run_name", default="turns")
    flag("--out_dir", type=Path, default=ROOT / "out")
    flag("--reward_model_path", type=Path, default=ROOT / "reward/weights/reward_128",
         help="the first reward model, a folder that also holds pairs.jsonl")
    flag("--replay", type=float, default=0.1, help="the share of earlier pairs in each batch")
    flag("--reward_steps", type=int, default=100, help="of each retraining")
    flag("--reward_learning_rate", type=float, default=3e-4)
    flag("flags", nargs="*", help="flags of train_grpo.py, after --")
    args = parser.parse_args()
    reward_models, runs, flags = [args.reward_model_path.resolve()], [], args.flags
    for i in range(1, args.iterations + 1):
        run = args.out_dir.resolve() / f"{args.run_name}_{i}"
        folder = run.with_name(f"reward_{run.name}")
        if not (run / "final/config.json").is_file():
            train_policy(run, reward_models[-1], flags)
        if not (folder / "pairs.jsonl").is_file():      # written last: the folder is complete
            retrain_reward_model(folder, run, reward_models[-1], args)
        runs.append(run)
        reward_models.append(folder)
        flags = [*args.flags, "--model_path", run / "final"]
    print("\nshare of pairs ordered right, on prompts that no retraining saw:")
    for run in runs:
        pairs = pairs_of_run(run / "completions.jsonl", random.Random(0))[1]
        for folder in reward_models:
            share = accuracy_by_kind(load_reward_model(folder), pairs)["all"]
            print(f"  {run.name}, {len(pairs)} pairs, by {folder.name}: {share:.1%}")


if __name__ == "__main__":
    main()
