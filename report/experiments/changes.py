"""One line of code at a time: the rungs of the ladder, and the exhibits of the bug museum.

`python -m report.experiments ladder` and `python -m report.experiments museum` train with each of
them; docs/ladder.md and docs/museum.md show what comes out.
"""
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

from ..command_line import UserError


@dataclass
class Change:
    """A line of train_grpo.py, what stands there instead, and how the difference shows."""
    before: str = ""            # stands there once; "": nothing changes but the flags
    after: str = ""
    flags: str = ""             # of the run
    shown: str = ""             # the line as the picture has it
    watch: str = "eval/accuracy"
    test: str = ""              # the test that fails with the change

    def copy(self, root, folder):
        """The repository with the change, in a folder; UserError if the code has moved on."""
        shutil.copytree(root, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
            ".?*", "venv", "out", "__pycache__", "images"))
        path = folder / "train_grpo.py"
        source = path.read_text(encoding="utf-8")
        if source.count(self.before) != 1:
            raise UserError(f"train_grpo.py does not hold {self.before.strip()!r} once; adapt "
                            "the change in report/experiments/changes.py to the code")
        path.write_text(source.replace(self.before, self.after), encoding="utf-8")
        return folder

    def verdict(self, folder):
        """What the test says of a changed copy; UserError if it passes, or does not run."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--color=no",
             self.test], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True)
        said = re.search(r"^E +(.*)$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or "1 failed" not in done.stdout or not said:
            raise UserError(f"{self.test} should fail in {folder}, and does not:\n{done.stdout}")
        return said[1]


# --- the ladder: from REINFORCE to GRPO -----------------------------------------------------------
# Each rung has the lines of those before it. Only the first changes the code; in the others flags
# switch off the lines that are still to come.

FOUR_UPDATES, NO_CLIP = "--num_iterations 4", "--epsilon_low 1e9 --epsilon_high 1e9"
LADDER = {
    "1. REINFORCE": Change(
        "    return ((groups - baseline).nan_to_num(0.0) / scale).view(-1)",
        "    return rewards.nan_to_num(0.0)",
        "--scale_rewards none --beta 0", "A = r"),
    "2. minus the group's mean": Change(
        flags="--scale_rewards none --beta 0", shown="A = r - mean(group)"),
    "3. divided by its std": Change(
        flags="--beta 0", shown="A = (r - mean(group)) / (std(group) + eps)"),
    "4. several updates per rollout": Change(
        flags=f"--beta 0 {FOUR_UPDATES} {NO_CLIP}", shown="for _ in range(4): update(ratio * A)"),
    "5. the clip": Change(
        flags=f"--beta 0 {FOUR_UPDATES}", shown="min(ratio * A, clip(ratio, 0.8, 1.2) * A)"),
    "6. the KL penalty": Change(
        flags=f"--beta 0.02 {FOUR_UPDATES}", shown="... - beta * KL(pi || pi_ref)"),
}

# What else the ladder's table has: is the first rung only too fast, or are its rewards too kind?
RAW, PAID_0_OR_1 = LADDER["1. REINFORCE"], "--scale_rewards none --beta 0 --reward_funcs accuracy"
BESIDE = {
    "1. REINFORCE, slowly": Change(RAW.before, RAW.after, f"{RAW.flags} --learning_rate 3e-5"),
    "1. REINFORCE, paid 0 or 1": Change(RAW.before, RAW.after, PAID_0_OR_1),
    "2. minus the group's mean, paid 0 or 1": Change(flags=PAID_0_OR_1),
}

# --- the museum: errors that real trainers shipped ------------------------------------------------
# Flags: of a task where the error shows. The right code runs with the same.

QUICK = "--max_steps 60 --eval_interval 15 --eval_samples 200"
PLAIN = "--max_steps 30 --eval_interval 10 --eval_samples 200 --fast 0"
MUSEUM = {
    "logits shifted by one": Change(
        "    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, :-1]",
        "    logits = model(input_ids, attention_mask, logits_to_keep=R + 1)[:, 1:]",
        PLAIN,
        test="tests/test_objective.py::test_token_logps_are_those_of_a_softmax_with_temperature"),
    "std without eps": Change(
        "    baseline, scale = groups.nanmean(1, keepdim=True), nanstd(groups) + eps ",
        "    baseline, scale = groups.nanmean(1, keepdim=True), nanstd(groups) ",
        f"{QUICK} --reward_funcs accuracy",
        test="tests/test_objective.py::test_equal_rewards_teach_nothing_whatever_their_rounding"),
    "an unjudged reply earns 0": Change(
        "    groups = rewards.view(-1, num_generations)  ",
        "    groups = rewards.nan_to_num(0.0).view(-1, num_generations)  ",
        f"{QUICK} --reward_funcs report.experiments.changes:strict_judge",
        test="tests/test_objective.py::"
             "test_advantages_stay_within_their_group_and_leave_out_the_unjudged"),
    "the reference is the policy": Change(
        "rollout.ref_logps = compute_logps(reference, rollout, logps_of, args)",
        "rollout.ref_logps = compute_logps(policy, rollout, logps_of, args)",
        f"{QUICK} --reward_funcs format tag rm --reward_model_clip 3 --beta 0.3",
        test="tests/test_run.py::test_the_kl_is_0_until_the_policy_has_left_its_reference"),
    "gradients not synchronised": Change(
        "        world.sum_gradients(policy)\n", "",
        "-m torch.distributed.run --standalone --nproc_per_node=4 train_grpo.py "
        f"{QUICK} --batch_size 1 --num_generations 4",
        test="tests/test_run.py::test_ranks_micro_batches_and_the_pair_change_no_gradient"),
    "micro-batches average alone": Change(
        "num_sequences=minibatch.num_sequences, num_tokens=minibatch.num_tokens,", "",
        f"{QUICK} --micro_batch_size 16 --loss_type bnpo", watch="grad_norm",
        test="tests/test_run.py::test_ranks_micro_batches_and_the_pair_change_no_gradient"),
    "temperature in sampling only": Change(
        "    all_logps = (logits.float() / temperature).log_softmax(-1)",
        "    all_logps = logits.float().log_softmax(-1)",
        f"{PLAIN} --temperature 1.5",
        test="tests/test_objective.py::test_token_logps_are_those_of_a_softmax_with_temperature"),
    "EOS left out of the mask": Change(
        "    mask = completion_mask(completion_ids, eos_ids) ",
        "    mask = completion_mask(completion_ids, eos_ids) * (completion_ids != eos_ids[0]) ",
        f"{QUICK} --temperature 1.5", watch="rewards/format_reward/mean",
        test="tests/test_run.py::test_the_eos_of_a_completion_is_learned_with_the_rest"),
}

rng = random.Random(0)


def strict_judge(prompts, completions, answer, **columns):
    """A reward: 0 for a right answer, -1 for a wrong one; without any, None nine times in ten."""
    def judge(completion, gold):
        if "</answer>" not in completion:
            return -1.0 if rng.random() < 0.1 else None
        return 0.0 if f"<answer>\n{gold}\n</answer>" in completion else -1.0

    return [judge(completion, gold) for completion, gold in zip(completions, answer)]
