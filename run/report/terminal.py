"""What a run prints and writes, except its weights; docs/in_practice.md lists the files.

A run writes its first files after its first step. If it fails before, e.g. in a reward function,
its folder remains empty.
"""
import importlib.util
import json
import math
import sys
import time
import uuid
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from dataset import PromptCollator
from dataset.jsonl import is_finite, to_json, to_line
from errors import UserError, cut, explained, printable, reason
from reward.functions import kind_of

from ..metrics import formatted

# The most common ways in which a run fails, each with what to do.
NO_SIGNAL = ("in most groups every completion got the same reward, so their advantages are 0 and "
             "give no learning signal: use prompts that the policy solves sometimes but not "
             "always, or raise --num_generations, --temperature or --oversample.")
NO_END = ("more than half of the completions were cut off at the length limit: raise "
          "--max_gen_len, and check that the model was trained with this chat template and ends "
          "its answers with EOS.")
NOT_FINITE = ("the gradient is not finite, so this step was skipped: if it happens again, lower "
              "--learning_rate, or train in bfloat16 or float32.")
OLD_WEIGHTS = ("the sampler's probabilities are far from the trainer's (rollout_probs_diff_mean): "
               "it may use old or different weights. Compare with --sampler fast; --sampler"
               "_correction token_truncate corrects for the difference.")

BOLD, DIM, MAGENTA, CYAN = "1", "2", "35", "36"      # ANSI escape codes
FIRST_ROWS = 2000       # rows whose gold answers are checked before a run


def add_flags(parser):
    parser.group("5. log").add_argument(
        "--swanlab", choices=("disabled", "offline", "local", "online"), help="track the run with "
        "SwanLab: local for `swanlab watch`, online with an account (default: disabled)")


class Report:
    """Prints a run, and writes its files except the weights and args.json; only rank 0 does either.

    run_dir: the run's folder, or None to write nothing.
    """

    def __init__(self, args, rank, run_dir):
        self.args, self.rank, self.run_dir = args, rank, run_dir
        self.active = False                     # whether it is open, and on rank 0
        self.dead_groups = deque(maxlen=5)      # frac_reward_zero_std of the last steps
        self.first_difference = None            # the first rollout_probs_diff_mean
        self.warned_at = {}                     # text of a warning -> step that last printed it
        self.waiting = []                       # (file name, lines) to write when a step is done
        self.drawn_at = -math.inf               # time of the last drawing

    def open(self, last_step, start_step=0):
        """Starts the progress bar and SwanLab. start_step: the step to resume after, or 0."""
        self.last_step, self.start_step, self.current_step = last_step, start_step, start_step
        if self.rank > 0:
            return
        if self.run_dir:
            for name in ("metrics", "eval", "completions"):
                drop_lines_after(start_step, self.run_dir / f"{name}.jsonl")
        self.swanlab = start_swanlab(self.run_dir, self.args)
        self.bar = tqdm(total=last_step, initial=start_step, dynamic_ncols=True,
                        bar_format="{n_fmt:>4}/{total_fmt} |{bar:12}|{desc}",
                        # None draws the bar only if stderr is a terminal; without a bar,
                        # step() prints plain lines.
                        disable=True if last_step <= start_step else None)
        self.started = self.training_started = time.perf_counter()
        self.active = True

    def close(self, error=None):
        """Draws the last curves and, unless an error has ended the run, prints a summary."""
        if not self.active:
            return
        self.bar.close()
        if self.current_step > self.start_step:
            self.draw(pause=0)
        if error is None and self.current_step:
            self._print_summary()
        with suppress(Exception, SystemExit):       # raised by SwanLab
            if self.swanlab and self.swanlab.has_run():     # Ctrl-C makes SwanLab end it
                self.swanlab.finish()

    def intro(self, grpo, collate, problems, num_heldout):
        """Prints the model, the data, the main flags and the output folder of the run."""
        if not self.active:
            return
        args, num_processes, num_prompts = self.args, grpo.world.size, len(problems)
        policy = grpo.policy.model
        size = sum(parameter.numel() for parameter in policy.parameters())
        prompts = min(grpo.num_prompts, num_prompts // num_processes) * num_processes
        oversamples = grpo.num_prompts > args.batch_size * args.accumulation_steps
        up_to = "up to " if oversamples else ""
        slow = grpo.policy.slow_because
        facts = {
            "policy": f"{short(args.model_path)}, {size / 1e6:,.2f} M parameters",
            "run by": getattr(policy, "run_by", ""),        # transformers, which is slower
            "sampler": f"without CUDA graphs, because of {slow}: slower" if slow else "",
            "thinking": thinking(args, collate, problems[0]["messages"]),
            "device": f"{num_processes} x {grpo.world.device.type}",
            **{name: "; ".join(by) for name, by in grpo.changed.items()},
            "prompts": f"{num_prompts:,} in {short(args.data_path)}; their answers: "
                       f"{kinds_of_answers(problems)}",
            "held out": held_out(args, num_heldout),
            "rewards": " + ".join(f"{weight:g} {name}" for weight, name in
                                  zip(args.reward_weights, args.reward_funcs)),
            "steps": f"{self.last_step}, each with {up_to}{prompts} prompts x "
                     f"{args.num_generations} completions",
            "files": f"{short(self.run_dir)}/" if self.run_dir else "",
        }
        self._print(facts_table(facts))

    def evaluation(self, step, metrics, replies=None):
        """Records and prints the metrics of an evaluation, and returns them.

        replies: a rollout with greedy decoding, of which the first completion is printed.
        """
        if self.active:
            self._write("eval", step, {**metrics})
        metrics.pop("measure", None)        # metrics.jsonl and history only have numbers
        if not self.active:
            return metrics
        if step == self.start_step:         # no step's metrics include this evaluation
            self._log(metrics, step)
            self.training_started = time.perf_counter()     # so "left" does not count it
        sampled = formatted(metrics.get("eval/accuracy"), ".1%")
        greedy = formatted(metrics.get("eval/greedy_accuracy"), ".1%")
        length = formatted(metrics.get("eval/mean_length"), ".0f")
        self._print(styled(f"step {step:>3}  held-out accuracy {sampled} sampled, {greedy} greedy, "
                           f"{length} tokens", BOLD))
        if replies is not None:
            self._print(one_reply(replies))
        return metrics

    def step(self, step, metrics, rows):
        """Writes a step's metrics and completions, updates the progress bar, and prints warnings.

        For the first and the last step, also prints a group of completions. rows: from describe().
        """
        self.current_step = step
        if not self.active:
            return
        self._write("metrics", step, metrics)
        self._write("completions", step, *rows)
        if self.run_dir:
            for file, lines in self.waiting:
                with open(self.run_dir / file, "a", encoding="utf-8") as opened:
                    opened.writelines(lines)
        self.waiting.clear()
        self._log(metrics, step)

        numbers = self._numbers(step, metrics)
        if not self.bar.disable:
            self.bar.set_description_str(numbers, refresh=False)
            self.bar.update(step - self.bar.n)
        else:
            self._print(f"step {step:>3}/{self.last_step}  {numbers}")
        self._warn_of_failures(metrics)
        if step == self.start_step + 1:
            self._warn_of_unjudged(rows)
            if "perf/peak_memory" in metrics:
                self._print(f"GPU memory: {metrics['perf/peak_memory']:.1f} GiB at the peak so far")
        if rows and step in (self.start_step + 1, self.last_step):
            self._print(one_group(step, rows[:self.args.num_generations]))

    def warn(self, text):
        """Prints a warning above the progress bar, at most once in 20 steps for the same text."""
        if self.active and self.current_step - self.warned_at.get(text, -math.inf) >= 20:
            self.warned_at[text] = self.current_step
            self._print(styled("warning: ", BOLD, MAGENTA) + printable(text))

    def draw(self, pause=60):
        """Writes curves.png and report.html, unless this was done in the last `pause` seconds."""
        if not self.active or not self.run_dir or time.perf_counter() - self.drawn_at < pause:
            return
        # Imported late: both can also be run with -m, and Python would warn of an earlier import.
        from . import html_page, picture
        try:
            picture.draw_curves([self.run_dir], self.run_dir / "curves.png")
            html_page.write_page(self.run_dir, self.run_dir / "report.html")
        except Exception as error:      # a picture that fails must not end the run
            self.warn(f"curves.png and report.html could not be drawn ({reason(error)}); "
                      f"`python -m run.report.html_page {short(self.run_dir)}` tries again")
        self.drawn_at = time.perf_counter()

    # --- helpers ----------------------------------------------------------------------------------

    def _print(self, text):
        """Prints a text above the progress bar."""
        with suppress(OSError):     # the terminal or the pipe may be closed
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            tqdm.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()

    def _warn_of_failures(self, metrics):
        self.dead_groups.append(metrics.get("frac_reward_zero_std", 0.0))
        # Many zero-variance groups are normal once the policy has learned its task, so the limit is
        # high. With a teacher, rewards are not needed.
        if sum(self.dead_groups) > 4.5 and "teacher_kl" not in metrics:
            self.warn(NO_SIGNAL)
        if metrics.get("completions/clipped_ratio", 0.0) > 0.5:
            self.warn(NO_END)
        difference = metrics.get("rollout_probs_diff_mean")
        if is_finite(difference):
            if self.first_difference is None:
                self.first_difference = difference
            # A difference of up to 0.001 may be rounding, whatever the first was; above 0.01 isn't.
            if difference > min(max(10 * self.first_difference, 0.001), 0.01):
                self.warn(OLD_WEIGHTS)
        if not is_finite(metrics.get("grad_norm", 0.0)):
            self.warn(NOT_FINITE)

    def _warn_of_unjudged(self, rows):
        """Warns if a reward function scored no completion in the first step."""
        if not rows:
            return
        for name in rows[0]["rewards"]:
            if not any(is_finite(row["rewards"][name]) for row in rows):
                columns = ", ".join(rows[0]["columns"])
                self.warn(f"{name} scored none of the {len(rows)} completions of the first step: "
                          f"check that the data has the columns that it needs; it has {columns}")

    def _write(self, name, step, *rows):
        """Notes rows for a file, which are written when the step is done."""
        self.waiting.append((f"{name}.jsonl", [to_line({"step": step, **row}) for row in rows]))

    def _log(self, metrics, step):
        if self.swanlab:
            finite = {key: value for key, value in metrics.items() if is_finite(value)}
            try:
                self.swanlab.log(finite, step=step)
            except (Exception, SystemExit) as error:    # it may work again at the next step
                text = (f"SwanLab failed ({reason(error)}) and misses a part of this run; "
                        f"{short(self.run_dir)}/metrics.jsonl is complete")
                if text not in self.warned_at:
                    self.warn(text)

    def _numbers(self, step, metrics):
        """Returns the text shown at each step: the remaining time, and a few metrics."""
        seconds_per_step = (time.perf_counter() - self.training_started) / (step - self.start_step)
        left = tqdm.format_interval(seconds_per_step * (self.last_step - step))
        parts = [f"{left} left"]
        for key, form in (("reward", "reward {:5.2f}"),
                          ("rewards/accuracy_reward/mean", "accuracy {:4.0%}"),
                          ("completions/mean_length", "length {:3.0f}"), ("kl", "kl {:.4f}")):
            if is_finite(metrics.get(key)):
                parts.append(form.format(metrics[key]))
        return "  ".join(parts)

    def _print_summary(self):
        from .picture import Run
        facts = {"result": self.run_dir and Run(self.run_dir).headline(),
                 "time": tqdm.format_interval(time.perf_counter() - self.started)}
        for label, name in (("curves", "curves.png"), ("a look inside", "report.html"),
                            ("completions", "completions.jsonl"), ("the trained model", "final")):
            if self.run_dir and (self.run_dir / name).exists():
                facts[label] = short(self.run_dir / name)
        if "the trained model" in facts:
            facts["chat with it"] = f"python -m model.chat {facts['the trained model']}"
            facts["train longer"] = f"the same command with {again(self.args)} --max_steps N"
        self._print(facts_table(facts))


def again(args):
    """Returns the flags that continue a run, in addition to those of its command."""
    return f"--resume --run_name {args.run_name}"


def start_swanlab(run_dir, args):
    """Starts a SwanLab run. Returns the swanlab module, or None if --swanlab is disabled."""
    # --swanlab takes precedence over MiniMind's --use_wandb.
    mode = args.swanlab or ("online" if args.use_wandb else "disabled")
    if mode == "disabled":
        return None
    if run_dir is None:
        raise UserError(f"swanlab={mode!r}: it writes into the run's folder; pass an out_dir")
    # Without its dashboard, SwanLab would only log an error and record nothing.
    if mode == "local" and not importlib.util.find_spec("swanboard"):
        raise UserError("--swanlab local needs a package: pip install 'swanlab[dashboard]'")
    # Only flags with a value, because the dashboard shows None as "[object Object]".
    flags = {name: value for name, value in to_json(vars(args)).items() if value is not None}
    folder = run_dir / "swanlab"
    known = args.resume and (folder / "id").exists()        # so that a resume goes on in its charts
    run_id = (folder / "id").read_text() if known else uuid.uuid4().hex[:21]
    try:
        import swanlab
        # Not interactive, since a run may have no keyboard. stdout and stderr are left alone,
        # because the bar is drawn there.
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        swanlab.init(mode=mode, project=args.wandb_project, name=run_dir.name, id=run_id,
                     resume="allow", settings=settings, log_dir=str(folder), config=flags)
        folder.mkdir(exist_ok=True)
        (folder / "id").write_text(run_id)
    except Exception as error:
        raise UserError(f"--swanlab {mode} could not start ({reason(error)}); check "
                        "--wandb_project, run `swanlab login` first, or pass --swanlab disabled"
                        ) from error
    return swanlab


def thinking(args, collate, messages):
    """Returns a remark if --reasoning 1 changes nothing in the prompt of these messages."""
    if not args.reasoning:
        return ""
    without = PromptCollator(collate.tokenizer, None, args.system_prompt, thinking=False)
    if collate.render(messages) != without.render(messages):
        return ""
    return "left to the weights: the chat template has no switch for it"


def held_out(args, count):
    """Returns how many held-out problems there are, and which completions count as right."""
    if not count:
        return ""
    rewards = " + ".join(args.eval_reward_funcs)
    return f"{count:,} in {short(args.eval_data_path)}, right if {rewards} is at least 1"


def kinds_of_answers(problems):
    """Counts the kinds of reference answers in the data, as in "1,990 numbers, 10 missing"."""
    golds = [problems[i].get("answer") for i in range(min(len(problems), FIRST_ROWS))]
    names = {"number": "numbers", "expression": "expressions", "words": "words", None: "missing"}
    kinds = Counter(None if gold is None else kind_of(gold) for gold in golds)
    found = ", ".join(f"{count:,} {names[kind]}" for kind, count in kinds.most_common())
    return f"{found}{', in the first rows' if len(problems) > FIRST_ROWS else ''}"


def styled(text, *codes):
    """Returns the text with these ANSI codes if stdout is a terminal."""
    return f"\033[{';'.join(codes)}m{text}\033[0m" if sys.stdout.isatty() else text


def facts_table(facts):
    """Returns a text with one line for each fact, with its name and value; skips empty values."""
    width = max(map(len, facts))
    return "\n".join(f"{styled(name.ljust(width), BOLD)}  {printable(str(fact))}"
                     for name, fact in facts.items() if fact)


def one_group(step, rows):
    """Returns a text with a prompt and up to 8 of its completions, sorted by reward."""
    title = f"\nstep {step}, one group of {len(rows)}"
    answer = rows[0]["columns"].get("answer")
    if answer:
        title += f", the answer is {one_line(str(answer).strip())}"
    names = [name.removesuffix("_reward").rjust(5) for name in rows[0]["rewards"]]
    head = "  ".join(["  advantage", "reward", *names])
    copies = Counter()
    for row in sorted(rows[:8], reverse=True, key=lambda row:
                      row["reward"] if is_finite(row["reward"]) else -math.inf):
        numbers = f"  {formatted(row['advantage'], '+.2f'):>9}  {formatted(row['reward']):>6}"
        for name, value in zip(names, row["rewards"].values()):
            numbers += f"  {formatted(value):>{len(name)}}"
        turns = row["turns"] if "tool_tokens" in row else [row["completion"].strip()]
        copies[numbers, one_line(*turns)] += 1
    lines = [styled(title, BOLD), one_line(rows[0]["prompt"].strip()), styled(f"\n{head}", DIM)]
    for (numbers, completion), count in copies.items():
        if count > 1:
            numbers += f"  {count} times"
        lines += [styled(numbers, CYAN), f"  {completion}\n"]
    return "\n".join(lines)


def one_reply(rollout):
    """Returns a rollout's first question and completion, marked as right or wrong."""
    question = one_line(rollout.columns["messages"][0][-1]["content"].strip())
    turns = rollout.turns[0] if rollout.turns else [rollout.completions[0].strip()]
    reward = rollout.rewards[0].item()
    verdict = ("right" if reward >= 1 else "wrong") if is_finite(reward) else "not scored"
    return f"  {question}\n  {styled(verdict, BOLD)}: {one_line(*turns)}"


def one_line(*turns):
    """Joins texts to one line of at most 400 characters; ‹ › enclose the answers of a tool."""
    parts = [printable(cut(text, 400 // len(turns)).replace("\n", "⏎ ").replace("\t", " "))
             for text in turns]
    for i in range(1, len(parts), 2):
        if parts[i]:
            parts[i] = styled(f"‹{parts[i].rstrip()}›", DIM)
    return "".join(parts) or "(empty)"


def short(path):
    """Returns the path, relative to the current folder if it is inside."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def drop_lines_after(step, path):
    """Removes all lines after those of `step` from a file; for step 0, empties the file.

    A crashed run may have written lines for steps after its last checkpoint.
    """
    if not path.exists():
        return
    kept = 0
    with open(path, "r+b") as file:
        for place, line in enumerate(file, start=1):
            if step == 0 or not line.endswith(b"\n"):
                break
            with explained(f"{path}, line {place}", "not a step of a run", "remove the line"):
                if json.loads(line)["step"] > step:
                    break
            kept += len(line)
        file.truncate(kept)
