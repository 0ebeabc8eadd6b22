"""Everything a run says and leaves behind, except its weights: files, a progress bar, warnings, SwanLab, curves.

    out/<run_name>/args.json           the arguments of the run
                   metrics.jsonl       one line per training step, from step 1
                   eval.jsonl          one line per evaluation; step 0 is the policy before training
                   completions.jsonl   what the policy wrote, and what it earned
                   curves.png          all of it as one picture (drawn by curves.py)
                   swanlab/            SwanLab's own files, with --swanlab offline or local or online
"""

import importlib.util
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

# The field's most common accidents, and the way out of each.
NO_SIGNAL = ("most groups got the same reward for all their completions, so their advantages are 0 and nothing is "
             "learned: use prompts the policy solves sometimes but not always, raise --num_generations or --temperature.")
NO_END = ("more than half of the completions were cut off at the length limit: raise --max_gen_len, and check that the "
          "model was trained with this chat template and ends its answers with EOS.")
NOT_FINITE = ("the gradient is not finite, so this step was skipped: if it happens again, lower --learning_rate, or "
              "train in bfloat16 or float32.")


class Report:
    """Reports a run into `run_dir`; use it as a context manager, so that an error or Ctrl-C still leaves whole files.

    `start_step` > 0 says that the run was resumed after that step: the lines of later steps are dropped.
    With `active=False` (all ranks but 0) every method does nothing.
    """

    def __init__(self, run_dir, args, *, total_steps, start_step=0, active=True):
        self.run_dir, self.args, self.active = Path(run_dir), args, active
        self.total_steps, self.start_step = total_steps, start_step
        self.current_step = start_step
        self.held_out = None                    # the last held-out accuracy, sampled
        self.dead_groups = deque(maxlen=10)     # frac_reward_zero_std of the last steps
        self.timings = {}                       # timing_s/<phase> -> seconds, since the last step
        self.warned_at = {}                     # text of a warning -> step at which it was last printed

    def __enter__(self):
        if not self.active:
            return self
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.swanlab = self._start_swanlab()    # first: if it refuses, an earlier run's files are still untouched
        arguments = json.dumps(to_json(vars(self.args)), indent=2, sort_keys=True, ensure_ascii=False, default=str)
        (self.run_dir / "args.json").write_text(arguments + "\n", encoding="utf-8")
        self.files = {}
        for name in ("metrics", "eval", "completions"):
            path = self.run_dir / f"{name}.jsonl"
            drop_lines_after(self.start_step, path)
            self.files[name] = open(path, "a", encoding="utf-8", buffering=1)   # line-buffered: a crash loses nothing
        self.bar = tqdm(total=self.total_steps, initial=self.start_step, dynamic_ncols=True,
                        bar_format="{n_fmt:>4}/{total_fmt} |{bar:12}|{desc}",
                        # None: no bar unless stderr is a terminal; step() prints plain lines instead
                        disable=True if self.total_steps <= self.start_step else None)
        self.started = self.training_started = time.perf_counter()
        return self

    def __exit__(self, error_type, error, traceback):
        if not self.active:
            return
        self.bar.close()
        for file in self.files.values():
            file.close()
        self.draw()
        if error is None:
            self._print_summary()
        if self.swanlab and self.swanlab.has_run():     # its own Ctrl-C handler may have finished the run already
            if error is None:
                self.swanlab.finish()
            else:
                state = "aborted" if isinstance(error, KeyboardInterrupt) else "crashed"
                self.swanlab.finish(state=state, error=f"{error_type.__name__}: {error}")

    # ---- what the training loop calls -------------------------------------------------------------------------------

    def intro(self, policy, device, num_processes, num_prompts):
        """Print what a user should know before the first step."""
        if not self.active:
            return
        args, note = self.args, []
        updates = args.num_iterations * args.num_minibatches
        if updates == 1 and args.loss_type in ("grpo", "r1") and args.supervision == "outcome":
            note = [
                "The loss will read about 0 all the time: in its value, though not in its gradient, the advantages of a",
                "group cancel out. Whether the policy learns shows in the reward and in the accuracy on held-out problems.",
                ""]
        rewards = [name if weight == 1 else f"{weight:g} {name}"
                   for name, weight in zip(args.reward_funcs, args.reward_weights)]
        size = sum(parameter.numel() for parameter in policy.parameters())
        prompts = args.batch_size * args.accumulation_steps * num_processes
        self._print("\n".join([
            f"policy   {short(Path(args.model_path))}, {size / 1e6:,.2f} M parameters",
            f"device   {device.type}, {num_processes} process{'es' * (num_processes > 1)}",
            f"prompts  {num_prompts:,} in {short(Path(args.data_path))}",
            f"rewards  {' + '.join(rewards)}",
            f"steps    {self.total_steps}, each with {prompts} prompts x {args.num_generations} completions",
            f"files    {short(self.run_dir)}/",
            "", *note,
        ]))

    @contextmanager
    def timed(self, phase):
        """Time a phase of a step; what comes after step() counts for the next one."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()            # a GPU works on after the call has returned
        self.timings[f"timing_s/{phase}"] = self.timings.get(f"timing_s/{phase}", 0.0) + time.perf_counter() - start

    def evaluation(self, step, metrics):
        """Write and print one held-out evaluation; step 0 is before training."""
        if not self.active:
            return
        self._write("eval", {"step": step, **metrics})
        self._log(metrics, step)
        self.held_out = metrics.get("eval/accuracy")
        if step == self.start_step:
            self.training_started = time.perf_counter()     # not a part of the steps: keep it out of the time left
        accuracies = [("sampled", metrics.get("eval/accuracy")), ("greedy", metrics.get("eval/greedy_accuracy"))]
        parts = [f"{value:.1%} {name}" for name, value in accuracies if is_finite(value)]
        parts += [f"{key.removeprefix('eval/')} {value:.1%}" for key, value in metrics.items()
                  if key.startswith("eval/pass@") and is_finite(value)]
        if is_finite(metrics.get("eval/mean_length")):
            parts.append(f"{metrics['eval/mean_length']:.0f} tokens")
        self._print(f"step {step:>3}  held-out accuracy {', '.join(parts)}")

    def step(self, step, metrics, rows):
        """Write one training step and its completions, move the bar, and warn of what usually goes wrong.

        To the metrics come the seconds of each phase, their sum, and tokens sampled per second of all but evaluation and
        checkpoint. rows: a dict for each completion, with its prompt, text, rewards and advantage.
        """
        if not self.active:
            return
        self.current_step = step
        aside = sum(self.timings.get(f"timing_s/{phase}", 0.0) for phase in ("eval", "checkpoint"))
        seconds = sum(self.timings.values())
        throughput = metrics["tokens"] / max(seconds - aside, 1e-9)
        metrics = metrics | self.timings | {"step_time": seconds, "perf/throughput": throughput}
        self.timings = {}
        self._write("metrics", {"step": step, **metrics})
        for row in rows:
            self._write("completions", {"step": step, **row})
        self._log({key: value for key, value in metrics.items() if not key.startswith("eval/")}, step)

        numbers = self._numbers(step, metrics)
        if not self.bar.disable:
            self.bar.set_description_str(numbers, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step in (self.start_step + 1, self.total_steps) or step % self.args.log_interval == 0:
            self._print(f"step {step:>3}/{self.total_steps}  {numbers}")

        self.dead_groups.append(metrics.get("frac_reward_zero_std", 0.0))
        if self.dead_groups[-1] == 1 or (len(self.dead_groups) == 10 and sum(self.dead_groups) / 10 > 0.8):
            self.warn(NO_SIGNAL)
        if metrics.get("completions/clipped_ratio", 0.0) > 0.5:
            self.warn(NO_END)
        if not is_finite(metrics.get("grad_norm", 0.0)):
            self.warn(NOT_FINITE)

    def group(self, step, rows):
        """Print one whole group: rows of completions.jsonl, the G completions of one prompt, with all their numbers."""
        if not self.active:
            return
        width = min(shutil.get_terminal_size().columns, 110)
        title = f"── step {step}, one group of {len(rows)} "
        names = list(rows[0]["rewards"])
        columns = [name.removesuffix("_reward").rjust(5) for name in ("advantage", "reward", *names)]
        lines = ["", title + "─" * (width - len(title)), *fold(rows[0]["prompt"], width, max_lines=3)]
        lines.append("  " + "  ".join(columns))
        for row in rows:
            values = [number(row["advantage"], "+.2f"), number(row["reward"])]
            values += [number(row["rewards"][name]) for name in names]
            lines.append("  " + "  ".join(value.rjust(len(name)) for name, value in zip(columns, values)))
            lines += [f"    │ {line}" for line in fold(row["completion"], width - 6, max_lines=5)]
        self._print("\n".join([*lines, "─" * width]))
        if self.swanlab:
            samples = [self.swanlab.Text(f"{row['prompt']}\n\n{row['completion']}",
                                         caption=f"reward {number(row['reward'])}") for row in rows[:4]]
            self.swanlab.log({"samples": samples}, step=step)

    def warn(self, text):
        """Print one line above the bar; the same text is not repeated within 20 steps."""
        if self.active and self.current_step - self.warned_at.get(text, -math.inf) >= 20:
            self.warned_at[text] = self.current_step
            self._print(f"warning: {text}")

    def draw(self):
        """Draw curves.png from the lines written so far. A picture is never worth a run: a failure is a warning."""
        if not self.active or (self.run_dir / "metrics.jsonl").stat().st_size == 0:
            return
        try:
            from .curves import draw_curves
            draw_curves([self.run_dir], self.run_dir / "curves.png")
        except Exception as error:
            self.warn(f"curves.png could not be drawn ({type(error).__name__}: {error}); try "
                      f"`python -m report.curves {short(self.run_dir)}` later.")

    # ---- how it is done ---------------------------------------------------------------------------------------------

    def _print(self, text):
        # Models write anything, and a terminal's encoding may lack it: print a '?' rather than stop.
        encoding = sys.stdout.encoding or "utf-8"
        tqdm.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()

    def _write(self, name, row):
        self.files[name].write(json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n")

    def _log(self, metrics, step):
        if self.swanlab:
            self.swanlab.log({key: value for key, value in metrics.items() if is_finite(value)}, step=step)

    def _numbers(self, step, metrics):
        """The few numbers that show, at every step, whether things go well."""
        seconds = (time.perf_counter() - self.training_started) / (step - self.start_step) * (self.total_steps - step)
        numbers = [f"{duration(seconds):>7} left", f"reward {number(metrics.get('reward')):>5}"]
        if "rewards/accuracy_reward/mean" in metrics:
            numbers.append(f"accuracy {number(metrics['rewards/accuracy_reward/mean'], '.0%'):>4}")
        if self.held_out is not None:
            numbers.append(f"held-out {number(self.held_out, '.0%'):>4}")
        numbers.append(f"length {number(metrics.get('completions/mean_length'), '.0f'):>3}")
        if "kl" in metrics:
            numbers.append(f"kl {number(metrics['kl'], '.4f')}")
        return "  ".join(numbers)

    def _print_summary(self):
        evaluations = read_jsonl(self.run_dir / "eval.jsonl")

        def change(key, spec):
            values = [row[key] for row in evaluations if is_finite(row.get(key))]
            return " → ".join(format(value, spec) for value in ([values[0], values[-1]] if len(values) > 1 else values))

        accuracies = [("sampled", change("eval/accuracy", ".1%")), ("greedy", change("eval/greedy_accuracy", ".1%"))]
        length = change("eval/mean_length", ".0f")
        lines = {
            "held-out accuracy": ", ".join(f"{values} {name}" for name, values in accuracies if values),
            "answer length": length and f"{length} tokens",
            "time": duration(time.perf_counter() - self.started),
            **{label: short(self.run_dir / name) for label, name in
               [("curves", "curves.png"), ("completions", "completions.jsonl"), ("the trained model", "final")]
               if (self.run_dir / name).exists()},
        }
        self._print("\n" + "\n".join(f"{label:<17}  {value}" for label, value in lines.items() if value))

    def _start_swanlab(self):
        """The swanlab module with a run of ours open, or None with --swanlab disabled."""
        mode = self.args.swanlab
        if mode == "disabled":
            return None
        if importlib.util.find_spec("swanlab") is None:
            raise ValueError(f"--swanlab {mode} needs the package swanlab: pip install swanlab.")
        if mode == "local" and importlib.util.find_spec("swanboard") is None:
            # swanlab itself would log an error and record nothing
            raise ValueError("--swanlab local needs swanlab's dashboard: pip install 'swanlab[dashboard]'.")
        import swanlab
        # Never ask questions (a run may have no keyboard), and leave stdout and stderr alone (the bar lives there).
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        try:
            swanlab.init(mode=mode, project=self.args.wandb_project, name=self.run_dir.name, settings=settings,
                         log_dir=str(self.run_dir / "swanlab"), config=to_json(vars(self.args)))
        except Exception as error:
            advice = "run `swanlab login` first, or choose --swanlab offline" if mode == "online" else \
                "check --wandb_project, or choose --swanlab disabled"
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(f"--swanlab {mode} could not start ({reason}): {advice}.") from error
        return swanlab


def is_finite(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def to_json(value):
    """Strict JSON knows neither NaN nor infinity: they become null. Tensors become numbers or lists, paths strings."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_jsonl(path):
    """The lines of a file as dicts; a missing file has none, and the half line of a run still writing does not count."""
    rows = []
    if Path(path).exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break
    return rows


def drop_lines_after(step, path):
    """Keep the lines of a jsonl file up to `step`; a run that crashed may have written past its last checkpoint."""
    kept = [row for row in read_jsonl(path) if row["step"] <= step] if step > 0 else []
    partial = path.with_suffix(".partial")      # then rename: a crash in here must not lose the good lines
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
    os.replace(partial, path)


def number(value, spec=".2f"):
    value = math.nan if value is None else float(value)
    return format(value, spec) if math.isfinite(value) else "-"


def duration(seconds):
    """Seconds for people: 8.2s, 2m 40s, 1h 03m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"


def short(path):
    """A path as seen from the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def fold(text, width, max_lines):
    """Text as at most `max_lines` lines: line breaks shown as ⏎, the middle left out if it is long (answers end it)."""
    text = "".join(c if c.isprintable() else "·" for c in text.strip().replace("\n", "⏎ "))
    room = (max_lines - 1) * width              # the last line is spare: wrapping at spaces wastes some room
    if len(text) > room:
        half = room // 2 - 15
        text = f"{text[:half]} … [{len(text) - 2 * half:,} more characters] … {text[-half:]}"
    return textwrap.wrap(text, width) or ["(empty)"]
