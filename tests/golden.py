"""Do two versions of the code compute the same, to the last bit?

    python tests/golden.py HEAD~3               that commit, and the working tree
    python tests/golden.py HEAD~3 --only lora   only the runs with "lora" in their names
    python tests/golden.py HEAD~3 --gone x y    these two metrics are gone on purpose

Makes a few steps of each run below with both versions, on this machine, with a thread each, and
compares metrics (clocks removed), evaluations, completions and weights. A metric that is gone is a
difference; a new one, and a field of a completion that only one of the two has, are named. Both
versions must know the flags below. Exit code 1 where anything differs or a run fails. Takes about
27 minutes on two cores.
"""
import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--device cpu --dtype float32 --batch_size 4 --num_generations 4 --micro_batch_size 8 "
         "--eval_interval 2 --eval_samples 16")
CLOCKS = ("timing_s/", "step_time", "perf/")
OBJECTIVES = {
    "default": "",
    "passes": "--num_iterations 2 --num_minibatches 2",
    "lora": "--lora_rank 4 --learning_rate 3e-3",
    "process": "--supervision process",
}
TWICE = "--num_iterations 2"         # then ratios move
SMALLER = " --batch_size 4 --num_generations 4 --eval_interval 2 --max_steps 2"
OPTIONS = {
    "oversample": "--oversample 2",
    "truncated": "--mask_truncated_completions --max_gen_len 40",
    "kl_in_reward": "--kl_in_reward",
    "gdpo": "--advantage_estimator gdpo",
    "reference": "--ref_model_sync_steps 1",
    "beta_0": "--beta 0",
    "sequence": f"--importance_sampling_level sequence --epsilon_low 3e-4 {TWICE}",
    "luspo": f"--loss_type luspo --importance_sampling_level sequence {TWICE}",
    "off_policy_mask": f"--off_policy_mask_threshold 0.01 {TWICE}",
    "kl_in_process": "--kl_in_reward --supervision process",
    "delta": f"--delta 1.5 --learning_rate 3e-3 {TWICE}",
    "entropy": "--entropy_coef 0.01",
    "bias_correction": f"--use_bias_correction_kl --beta 0.5 {TWICE}",
    "teacher": "--teacher_path model/weights/full_sft_128",
    "tool": "@dataset/guess.txt --epochs 1 --num_generations_eval 2" + SMALLER,
    "weights": "--reward_weights 1 0 0.5 2 --scale_rewards none",
    "unjudged": "--data_path dataset/guess.jsonl --reward_funcs accuracy tag --eval_interval 0",
    "countdown": "@dataset/countdown.txt --max_gen_len 96" + SMALLER,
    "slices": "--rollout_batch_size 4 --gradient_checkpointing --temperature 0.7",
    "bfloat16": "--dtype bfloat16",
}
for loss in ("bnpo", "dr_grpo", "dapo", "cispo", "dppo", "sapo", "gmpo", "r1"):
    OPTIONS[loss] = f"--loss_type {loss} {TWICE} --num_minibatches 2"
for kl in ("k1", "k2", "k3+", "abs"):
    OPTIONS[kl] = f"--kl_type {kl} --beta 0.5 {TWICE}"
for correction in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    OPTIONS[correction] = (f"--sampler_correction {correction} --sampler_ratio 0.999 1.001 "
                           f"--dtype bfloat16 {TWICE}")
for scale in ("batch", "mean"):     # mean: of rewards from 0 to 1
    OPTIONS[f"scale_{scale}"] = f"--scale_rewards {scale} --reward_funcs accuracy"
for estimator in ("rloo", "grpo_passk"):
    OPTIONS[estimator] = f"--advantage_estimator {estimator}"
RESUMED = {"resume": "", "resume_lora": "--lora_rank 4 --learning_rate 3e-3",
           "resume_reference": "--ref_model_sync_steps 1"}


def all_runs():
    """{name: [the flags of each call]}; a second call resumes the first."""
    runs = {}
    for ranks in (1, 2):
        for sampler in ("plain", "fast"):
            for name, flags in OBJECTIVES.items():
                runs[f"{name}, {sampler}, {ranks}"] = [f"--sampler {sampler} --max_steps 3 {flags}"]
    for name, flags in OPTIONS.items():
        runs[f"{name}, fast, 1"] = [f"--max_steps 2 {flags}"]
    runs["shard, fast, 2"] = ["--shard 1 --max_steps 3"]
    for name in ("teacher", "tool", "r1", "delta", "bias_correction"):
        runs[f"{name}, plain, 1"] = [f"--sampler plain --max_steps 2 {OPTIONS[name]}"]
    for name in ("teacher", "gdpo", "oversample", "scale_batch", "tool", "unjudged"):
        runs[f"{name}, fast, 2"] = [f"--max_steps 2 {OPTIONS[name]}"]
    for name, flags in RESUMED.items():
        runs[f"{name}, fast, 1"] = [f"--max_steps 2 {flags}", f"--max_steps 4 --resume {flags}"]
    return runs


def train(version, name, calls, out):
    """The folder of the run, made by the code in `version`; RuntimeError if a call fails."""
    ranks = name.rpartition(" ")[2]
    start = [sys.executable, "train_grpo.py"]
    if ranks != "1":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc_per_node={ranks}", "train_grpo.py"]
    folder = name.replace(", ", "_")
    for flags in calls:
        done = subprocess.run(
            [*start, *shlex.split(f"{SMALL} {flags}"), "--out_dir", out,
             "--run_name", folder], cwd=version, env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{version} fails with {flags}:\n{done.stdout[-2000:]}")
    return Path(out) / folder


def rows_of(path):
    """The lines of a file, without clocks; a run that never evaluates has no eval.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if not key.startswith(CLOCKS)}
            for line in lines]


def differences(base, head, may_go=()):
    """(what differs between two runs, the names that only the first has, only the second)."""
    found, gone, new = [], set(), set()
    for name in ("metrics.jsonl", "eval.jsonl", "completions.jsonl"):
        ours, theirs = rows_of(head / name), rows_of(base / name)
        if len(ours) != len(theirs):
            found.append(f"{name}: {len(theirs)} and {len(ours)} lines")
        for row, other in zip(theirs, ours):
            gone |= row.keys() - other.keys()
            new |= other.keys() - row.keys()
            for key, value in row.items():
                if key not in other and name != "completions.jsonl" and key not in may_go:
                    found.append(f"{name}, step {row['step']}: no {key}")
                elif key in other and other[key] != value:
                    found.append(f"{name}, step {row['step']}, {key}: {value!r} and {other[key]!r}")
    for path in sorted(base.rglob("*.safetensors")):
        name = path.relative_to(base)
        ours, theirs = load_file(head / name), load_file(path)
        moved = [key for key, tensor in theirs.items()
                 if key not in ours or not ours[key].equal(tensor)]
        if moved or ours.keys() != theirs.keys():
            found.append(f"{name}: {len(moved)} of {len(theirs)} tensors, {moved[:1]}")
    return found, gone, new


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("--only", default="", help="a part of the names of the runs")
    parser.add_argument("--gone", nargs="+", default=[], help="metrics gone on purpose")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    args = parser.parse_args()
    runs = {name: calls for name, calls in all_runs().items() if args.only in name}
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "code")
        base.mkdir()
        archive = subprocess.run(["git", "archive", args.base], cwd=ROOT, check=True,
                                 stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", base], input=archive, check=True)

        def both(name):
            try:
                return [train(version, name, runs[name], str(Path(folder, side)))
                        for side, version in (("base", base), ("head", ROOT))]
            except RuntimeError as error:
                return error

        with ThreadPoolExecutor(args.jobs) as pool:
            for name, pair in zip(runs, pool.map(both, runs)):
                if isinstance(pair, RuntimeError):
                    different += 1
                    print(f"{name}: FAILED, {pair}", flush=True)
                    continue
                found, gone, new = differences(*pair, args.gone)
                different += bool(found)
                print(f"{name}: {'DIFFERENT' if found else 'the same'}", flush=True)
                for where, names in (("there", gone), ("here", new)):
                    if names:
                        print(f"    only {where}: {', '.join(sorted(names))}")
                for line in found[:5]:
                    print(f"    {line[:300]}")
    print(f"{different} of {len(runs)} runs differ or fail")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
