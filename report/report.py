"""Everything a run prints and writes, except its weights.

It moves a progress bar, prints warnings, logs to SwanLab if asked to, and writes the files that
docs/runs.md lists: in metrics.jsonl a line per training step, from step 1; in eval.jsonl a line per
evaluation, step 0 being before training; in completions.jsonl every completion with its rewards and
its advantage, and in completions.1.jsonl the older ones (--completions_limit).

Once its first step is done, a new run deletes what an earlier run of its name has left there. A run
that fails before that, for a mistake in a reward function, say, leaves those results alone.
"""
import gc
import importlib.util
import json
import math
import os
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from .command_line import UserError
from .metrics import training_time
from .text import duration, fold, is_finite, number, printable, read_jsonl, to_json, to_line

# The most common ways a run fails, each with its remedy.
NO_SIGNAL = ("in most groups every completion got the same reward, so the advantages are 0 and "
             "nothing is learned: use prompts that the policy solves sometimes but not always, "
             "or raise --num_generations, --temperature or --oversample.")
NO_END = ("more than half of the completions were cut off at the length limit: raise "
          "--max_gen_len, and check that the model was trained with this chat template and ends "
          "its answers with EOS.")
NOT_FINITE = ("the gradient is not finite, so this step was skipped: if it happens again, lower "
              "--learning_rate, or train in bfloat16 or float32.")
OLD_WEIGHTS = ("the sampler's probabilities are ten times as far from the trainer's as in the "
               "first step (rollout_probs_diff_mean): does it sample with old weights? Compare "
               "with --sampler fast; --rollout_is_threshold 2 weights what it samples.")


class Report:
    """Reports a run into the folder `run_dir`.

    Use it as a context manager, so that its files are complete even after an error or Ctrl-C.
    start_step: the step after which a run was resumed; lines of later steps are dropped from the
    files. num_tokens: sampled until then. active: False on every rank but 0, where all methods do
    nothing.
    """

    def __init__(self, run_dir, args, *, total_steps, start_step=0, num_tokens=0, active=True):
        self.run_dir, self.args, self.active = Path(run_dir), args, active
        self.total_steps, self.start_step, self.num_tokens = total_steps, start_step, num_tokens
        self.current_step = start_step
        self.dead_groups = []                   # frac_reward_zero_std of the last 10 steps
        self.first_difference = None            # rollout_probs_diff_mean of the first step
        self.timings = Counter()                # timing_s/<phase> -> seconds since the last step
        self.running = None, 0.0                # the phase that is being timed, and since when
        self.numbers = ""                       # what the bar shows of the last step
        self.is_slow = True                     # whether that took more than a second
        self.warned_at = {}                     # text of a warning -> step that last printed it
        self.held_back = []                     # rows until the first step is done, then None
        self.drawn_step, self.next_drawing = None, -math.inf    # the step, and the time

    def __enter__(self):
        if not self.active:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.swanlab = self._start_swanlab()
        self.bar = tqdm(total=self.total_steps, initial=self.start_step, dynamic_ncols=True,
                        desc="eval",            # a run that evaluates begins with that
                        bar_format="{n_fmt:>4}/{total_fmt} |{bar:12}|{desc}",
                        # None draws the bar only if stderr is a terminal; without a bar,
                        # step() prints plain lines.
                        disable=True if self.total_steps <= self.start_step else None)
        self.started = self.training_started = time.perf_counter()
        return self

    def __exit__(self, error_type, error, traceback):
        if not self.active:
            return
        self.bar.close()
        self.next_drawing = -math.inf
        self.draw()
        if error is None:
            self._print_summary()
        # SwanLab's own Ctrl-C handler may already have finished its run.
        if self.swanlab and self.swanlab.has_run():
            state = "aborted" if isinstance(error, KeyboardInterrupt) else "crashed"
            end = {"state": state, "error": f"{error_type.__name__}: {error}"} if error_type else {}
            self.swanlab.finish(**end)

    # --- called by the training loop --------------------------------------------------------------

    def intro(self, policy, device, num_processes, num_prompts, num_heldout):
        """Print what is about to be trained, on what, and where the files go."""
        if not self.active:
            return
        args, note = self.args, ""
        updates = args.num_iterations * args.num_minibatches
        if updates == 1 and args.loss_type in ("grpo", "r1") and args.supervision == "outcome":
            held_out = " and the accuracy on held-out problems" if num_heldout else ""
            note = ("\nThe loss will read about 0 throughout: the advantages of a group cancel\n"
                    "out in its value, though not in its gradient. To see whether the policy\n"
                    f"learns, watch the reward{held_out}.\n")
        rewards = " + ".join(name if weight == 1 else f"{weight:g} {name}"
                             for name, weight in zip(args.reward_funcs, args.reward_weights))
        size = sum(parameter.numel() for parameter in policy.parameters())
        judges = " + ".join(args.eval_reward_funcs)
        if args.eval_threshold != 1:
            judges += f" of at least {args.eval_threshold:g}"
        prompts = args.batch_size * args.accumulation_steps * num_processes
        ends = f" (the end of --epochs {args.epochs})" * (self.total_steps < (args.max_steps or 0))
        # In float32: weights, AdamW's two moments, and a reference if it moves.
        checkpoint = 4 * size * (4 if args.ref_model_sync_steps else 3) / 1e6
        earlier = self.start_step == 0 and (self.run_dir / "metrics.jsonl").exists()
        self._print_table({
            "policy": f"{short(Path(args.model_path))}, {size / 1e6:,.2f} M parameters",
            "run by": getattr(policy, "run_by", ""),        # transformers, if it isn't our own
            "device": f"{device.type}, {num_processes} process{'es' * (num_processes > 1)}",
            "prompts": f"{num_prompts:,} in {short(Path(args.data_path))}",
            "held out": num_heldout and f"{num_heldout:,} in {short(Path(args.eval_data_path))}, "
                                        f"right by {judges}",
            "rewards": rewards,
            "steps": f"{self.total_steps}{ends}, each with {prompts} prompts x "
                     f"{args.num_generations} completions",
            "files": f"{short(self.run_dir)}/, a checkpoint takes {checkpoint:,.0f} MB",
            "": "the first step replaces the earlier run there" * earlier,
        })
        self._print(note)
        free = shutil.disk_usage(self.run_dir).free / 1e6
        if free < 3 * checkpoint:       # the last one, the next one, and final/
            self.warn(f"{short(self.run_dir)} has {free:,.0f} MB free, and a run needs three times "
                      "the size of a checkpoint: make room, or choose another --out_dir.")

    def phase(self, name):
        """From here to the next phase, or to step() or draw(), time goes to timing_s/<name>.

        What runs after step() counts towards the next step. If steps are slow, the bar names it.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()    # a GPU is still working when a call returns
        now, (before, since) = time.perf_counter(), self.running
        if before:
            self.timings[f"timing_s/{before}"] += now - since
        self.running = name, now
        if self.active and self.is_slow and not self.bar.disable:
            self.bar.set_description_str(f"{self.numbers}  {name or ''}".rstrip())

    def evaluation(self, step, metrics):
        """Record, print and return one held-out evaluation; step 0 is before training."""
        if not self.active:
            return metrics
        self._write("eval", step, metrics)
        self._log(metrics, step)
        if step == self.start_step:
            # The first evaluation is not part of a step: keep it out of the time left.
            self.training_started = time.perf_counter()
        names = {"eval/accuracy": "{:.1%} sampled", "eval/greedy_accuracy": "{:.1%} greedy",
                 **{key: f"{key.removeprefix('eval/')} {{:.1%}}" for key in metrics
                    if key.startswith("eval/pass@")},
                 "eval/reward": "reward {:.2f}", "eval/mean_length": "{:.0f} tokens"}
        known = {key: metrics[key] for key in names if is_finite(metrics.get(key))}
        if abs(known.get("eval/reward", 0.0) - known.get("eval/accuracy", 0.0)) < 1e-9:
            known.pop("eval/reward", None)
        parts = ", ".join(names[key].format(value) for key, value in known.items())
        self._print(f"step {step:>3}  held-out accuracy "
                    f"{parts or 'not known: the evaluation rewards judged nothing'}")
        return metrics

    def step(self, step, metrics, rows):
        """Record one training step and its completions, move the bar, warn of common failures.

        The first and the last step also print one whole group.

        Adds timing_s/<phase> (seconds) to the metrics, their sum step_time, and perf/throughput,
        the sampled tokens per second, not counting the phases eval and checkpoint.
        rows: a dict for each completion, as describe() returns them.
        """
        if not self.active:
            return
        self.phase(None)
        self.current_step = step
        if self.held_back is not None:
            self._begin()
        self.num_tokens += metrics["tokens"]
        took = training_time(self.timings)
        metrics = {**metrics, **self.timings, "num_tokens": self.num_tokens,
                   "step_time": sum(self.timings.values()),
                   "perf/throughput": metrics["tokens"] / max(took, 1e-9)}
        self.timings.clear()
        self._write("metrics", step, metrics)
        path, limit = self.run_dir / "completions.jsonl", self.args.completions_limit * 1e6
        if limit and path.exists() and path.stat().st_size > limit:
            os.replace(path, self.run_dir / "completions.1.jsonl")
        self._write("completions", step, *rows)
        # evaluation() has already logged the eval/ metrics.
        self._log({key: value for key, value in metrics.items() if key[:5] != "eval/"}, step)

        self.numbers, self.is_slow = self._numbers(step, metrics), took > 1
        if not self.bar.disable:
            self.bar.set_description_str(self.numbers, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step in (self.start_step + 1, self.total_steps) or step % self.args.log_interval == 0:
            self._print(f"step {step:>3}/{self.total_steps}  {self.numbers}")
        # A policy that has learned its task has many such groups; that is no accident yet.
        last = self.dead_groups = self.dead_groups[-9:] + [metrics.get("frac_reward_zero_std", 0.0)]
        if last[-3:] == [1] * 3 or len(last) == 10 and sum(last) / 10 > 0.9:
            self.warn(NO_SIGNAL)
        if metrics.get("completions/clipped_ratio", 0.0) > 0.5:
            self.warn(NO_END)
        difference = metrics.get("rollout_probs_diff_mean", 0.0)
        self.first_difference = self.first_difference or difference
        if difference > max(10 * self.first_difference, 1e-3):      # less may be rounding
            self.warn(OLD_WEIGHTS)
        if not is_finite(metrics.get("grad_norm", 0.0)):
            self.warn(NOT_FINITE)
        if rows and step in (self.start_step + 1, self.total_steps):
            self.group(step, rows[:self.args.num_generations])

    def group(self, step, rows):
        """Print one group: a prompt and at most 8 completions, best to worst, with their numbers.

        rows: the group's rows, as describe() returns them. Copies are printed once, and counted.
        """
        if not self.active:
            return
        width = min(shutil.get_terminal_size().columns, 110)
        answer = f", the answer is {rows[0]['answer']}" if rows[0].get("answer") else ""
        title = f"── step {step}, one group of {len(rows)}{printable(answer)} "
        columns = [name.removesuffix("_reward").rjust(5)
                   for name in ("advantage", "reward", *rows[0]["rewards"])]
        lines = ["", title.ljust(width, "─"), *fold(rows[0]["prompt"], width, max_lines=6),
                 "  " + "  ".join(columns)]
        copies = Counter()
        for row in sorted(rows[:8], key=lambda row: -row["reward"] if is_finite(row["reward"]) else
                          math.inf):
            values = [row["advantage"], row["reward"], *row["rewards"].values()]
            cells = [number(value, "+.2f" if column == columns[0] else ".2f").rjust(len(column))
                     for column, value in zip(columns, values)]
            copies["  " + "  ".join(cells), row["completion"]] += 1
        for (cells, completion), count in copies.items():
            lines.append(cells + f"   {count} times" * (count > 1))
            lines += [f"    │ {line}" for line in fold(completion, width - 6, max_lines=5)]
        self._print("\n".join([*lines, "─" * width]))
        if self.swanlab:
            samples = [self.swanlab.Text(printable(f"{row['prompt']}\n\n{row['completion']}"),
                                         caption=f"reward {number(row['reward'])}")
                       for row in rows[:8]]
            self.swanlab.log({"samples": samples}, step=step)

    def warn(self, text):
        """Print a warning above the bar, the same text at most once in 20 steps."""
        if self.active and self.current_step - self.warned_at.get(text, -math.inf) >= 20:
            self.warned_at[text] = self.current_step
            self._print(f"warning: {text}")

    def draw(self):
        """Draw curves.png and report.html from the lines written so far; a failure only warns.

        Skipped if the last ones show them all, or are so young that drawing would take 5% of the
        run's time.
        """
        self.phase(None)
        start = time.perf_counter()
        # A run that was killed after its last step may not have drawn it: its resume does.
        is_ours = self.held_back is None or self.start_step >= self.total_steps
        has_news = is_ours and self.current_step != self.drawn_step
        if not self.active or not has_news or start < self.next_drawing:
            return
        # Imported here: `python -m report.page` would warn of a module that it runs a second time.
        from . import curves, page
        for name, module, write, source in (
                ("curves.png", "curves", curves.draw_curves, [self.run_dir]),
                ("report.html", "page", page.write_page, self.run_dir)):
            path = self.run_dir / name
            new = path.with_stem(f"{path.stem}.new")
            try:
                write(source, new)
                os.replace(new, path)
            except Exception as error:      # no picture is worth losing a run for
                self.warn(f"{name} could not be drawn ({type(error).__name__}: {error}); try "
                          f"`python -m report.{module} {short(self.run_dir)}` later.")
        gc.collect()    # a picture is megabytes of objects that refer to each other
        now = time.perf_counter()
        self.drawn_step, self.next_drawing = self.current_step, now + 20 * (now - start)

    # --- helpers ----------------------------------------------------------------------------------

    def _print(self, text):
        # A model can write any character: print '?' for one that the terminal cannot encode,
        # rather than stop the run.
        encoding = sys.stdout.encoding or "utf-8"
        with suppress(OSError):     # nobody reads it: a closed terminal, the end of `| tee log`
            tqdm.write(text.encode(encoding, errors="replace").decode(encoding))
            sys.stdout.flush()

    def _begin(self):
        """A first step is done: from here on the folder is this run's."""
        if self.start_step == 0:        # these belong to an earlier run
            for name in ("checkpoint", "checkpoint.old", "final", "adapter"):
                shutil.rmtree(self.run_dir / name, ignore_errors=True)
        arguments = json.dumps(to_json(vars(self.args)), indent=2, sort_keys=True,
                               ensure_ascii=False)
        (self.run_dir / "args.json").write_text(arguments + "\n", encoding="utf-8")
        older = self.run_dir / "completions.1.jsonl"
        drop_lines_after(self.start_step, older)
        if older.exists() and older.stat().st_size == 0:
            older.unlink()
        held_back, self.held_back = self.held_back, None
        for name in ("metrics", "eval", "completions"):
            drop_lines_after(self.start_step, self.run_dir / f"{name}.jsonl")
            self._write(name, 0)        # no row, but the file
        for row in held_back:
            self._write(*row)

    def _write(self, name, step, *rows):
        """Append rows of a step to a file; before the first step is done, hold them back."""
        if self.held_back is not None:
            self.held_back.append((name, step, *rows))
            return
        path = self.run_dir / f"{name}.jsonl"
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(to_line({"step": step, **row}) for row in rows)
        except OSError as error:
            raise UserError(f"{path} could not be written ({error.strerror}); make room, "
                            "then go on with --resume") from error

    def _log(self, metrics, step):
        if self.swanlab:
            finite = {key: value for key, value in metrics.items() if is_finite(value)}
            self.swanlab.log(finite, step=step)

    def _numbers(self, step, metrics):
        """The line shown at every step: time left, and the few numbers that show progress."""
        seconds_per_step = (time.perf_counter() - self.training_started) / (step - self.start_step)
        parts = [f"{duration(seconds_per_step * (self.total_steps - step)):>7} left"]
        for key, name, spec, width in (("reward", "reward", ".2f", 5),
                                       ("rewards/accuracy_reward/mean", "accuracy", ".0%", 4),
                                       ("completions/mean_length", "length", ".0f", 3),
                                       ("kl", "kl", ".4f", 1)):
            if key in metrics:
                parts.append(f"{name} {number(metrics[key], spec):>{width}}")
        return "  ".join(parts)

    def _print_table(self, values):
        """Print a line for each value that there is, after its name."""
        width = max(map(len, values))
        self._print("\n".join(f"{name:<{width}}  {value}" for name, value in values.items()
                              if value))

    def _print_summary(self):
        evaluations = read_jsonl(self.run_dir / "eval.jsonl")

        def change(key, spec, name):
            """The first and the last value, "25.1% → 71.3% greedy"; one value alone; or ""."""
            values = [row[key] for row in evaluations if is_finite(row.get(key))]
            ends = " → ".join(format(value, spec) for value in values[:1] + values[1:][-1:])
            return ends and f"{ends} {name}"

        accuracies = [change("eval/accuracy", ".1%", "sampled"),
                      change("eval/greedy_accuracy", ".1%", "greedy")]
        files = [("curves", "curves.png"), ("a look inside", "report.html"),
                 ("completions", "completions.jsonl"), ("the trained model", "final")]
        self._print("")
        self._print_table({
            "held-out accuracy": ", ".join(filter(None, accuracies)),
            "answer length": change("eval/mean_length", ".0f", "tokens"),
            "time": duration(time.perf_counter() - self.started),
            **{label: short(self.run_dir / name)
               for label, name in files if (self.run_dir / name).exists()}})

    def _start_swanlab(self):
        """Open a SwanLab run; returns the swanlab module, or None with --swanlab disabled."""
        mode = self.args.swanlab
        if mode == "disabled":
            return None
        # Without its dashboard, SwanLab itself would only log an error and record nothing.
        needed = ["swanlab"] + ["swanboard"] * (mode == "local")
        if not all(map(importlib.util.find_spec, needed)):
            raise UserError(f"--swanlab {mode} needs a package: pip install 'swanlab[dashboard]'.")
        import swanlab
        # Ask no questions, since a run may have no keyboard, and leave stdout and stderr alone,
        # since the bar is drawn there.
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        # Only flags that have a value: the dashboard shows a None as "[object Object]".
        flags = {name: x for name, x in to_json(vars(self.args)).items() if x is not None}
        try:
            swanlab.init(mode=mode, project=self.args.wandb_project, name=self.run_dir.name,
                         settings=settings, log_dir=str(self.run_dir / "swanlab"), config=flags)
        except Exception as error:
            advice = ("run `swanlab login` first, or choose --swanlab offline" if mode == "online"
                      else "check --wandb_project, or choose --swanlab disabled")
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(f"--swanlab {mode} could not start ({reason}): {advice}.") from error
        return swanlab


def short(path):
    """The path relative to the current folder, if it lies inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def drop_lines_after(step, path):
    """Cut off a file after the lines of `step`; with step 0, a new run, keep none.

    A run that crashed may have written lines for steps after its last checkpoint, and half a line.
    """
    if not path.exists():
        return
    with open(path, "r+b") as file:
        kept = 0
        with suppress(ValueError, LookupError, TypeError):
            for line in file if step else ():
                if json.loads(line)["step"] > step or not line.endswith(b"\n"):
                    break
                kept += len(line)
        file.truncate(kept)
