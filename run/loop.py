"""The loop around the steps of a run: prompts, evaluations, checkpoints, and how a run ends."""
import json

from dataset import last_step_of, read_prompts, rows_of_step
from dataset.jsonl import to_json
from dataset.prompts import asking_as_trained
from errors import UserError
from reward.child import CHILD
from reward.load import COROUTINES

from .checkpoint import Saver
from .evaluate import evaluate
from .metrics import describe, rollout_metrics
from .report.terminal import Report, again
from .signals import CutShort, Signals, Stopped, stop

NO_REWARD = ("no completion of this step was scored, so the policy was not updated: every reward "
             "function returned None or failed")
MOST_UNJUDGED = 10      # steps in a row without a reward, after which a run ends


class Loop:
    """Context manager of a run, which completes its files at the end, even after an error.

    The run's folder is locked from the start. Without out_dir, nothing is written. watches: whether
    signals are handled.
    """

    def __init__(self, args, world, watches=True):
        self.args, self.world, self.watches = args, world, watches
        self.saver = Saver(world, args)
        self.run_dir = self.saver.run_dir
        self.report = Report(args, world.rank, self.run_dir)
        self.signals, self.history = Signals(world.rank), []    # history: the metrics of each step
        self.done = None        # the last step, while the weights are still those that it left
        self.unjudged = 0       # steps in a row without a reward

    def __enter__(self):
        return self

    def steps(self, grpo):
        """Reads the prompts, resumes, and evaluates before step 1. Returns the steps to make.

        With --eval_only, evaluates, and returns no steps.
        """
        self.grpo, args, world = grpo, self.args, self.world
        self.collate, self.problems, self.heldout = read_prompts(
            args, grpo.tokenizer, grpo.policy.model.config)
        world.check_same(args.data_path, self.problems, "pass the same prompts")
        self.last_step = last_step_of(len(self.problems), grpo.num_prompts, world, args)
        self.start_step, self.num_tokens = self.saver.resume(
            grpo.policy.model, grpo.optimizer, grpo.saved, len(self.problems),
            grpo.num_prompts * world.size)
        if args.eval_only:
            found, _ = evaluate(grpo, self.heldout, self.collate, self.start_step)
            if world.rank == 0:
                print(json.dumps(to_json(found), indent=2))
            return ()
        self.report.open(self.last_step, self.start_step)
        self.report.intro(grpo, self.collate, self.problems, len(self.heldout))
        if self.start_step == 0:
            self.evaluate_if_due(0)
        if self.watches:
            self.signals.watch()                # from here on, signals let the step finish
        self.done = self.start_step
        return range(self.start_step + 1, self.last_step + 1)

    def batch(self, step, problems=None):
        """Returns this rank's prompts of a step, a dict: prompt_ids and prompt_mask, (B, P), and
        `prompts`, `prefills` and `columns`, with B values each (dataset/prompts.py).

        problems: the rows to choose from, for example only easy ones (default: all).
        """
        problems = self.problems if problems is None else problems
        rows = rows_of_step(
            step, len(problems), self.grpo.num_prompts, rank=self.world.rank,
            world_size=self.world.size, seed=self.args.seed, shuffle=self.args.shuffle)
        return self.collate([problems[row] for row in rows])

    def record(self, step, rollout, metrics):
        """5. Writes and prints a step's metrics; evaluates, plots and saves if this is due.

        After a signal or after ten steps without any reward, saves and ends the run on all ranks.
        """
        grpo, args, world = self.grpo, self.args, self.world
        self.done = None            # if a signal interrupts the evaluation, nothing is saved
        metrics = metrics | self.evaluate_if_due(step)
        rows = world.gather(describe(
            rollout, grpo.tokenizer, grpo.eos_ids, args.num_generations))
        failures = world.gather([(judge.__name__, judge.failed.total(), judge.reason)
                                 for judge in grpo.reward_funcs if judge.failed])
        self.unjudged = 0 if "loss" in metrics else self.unjudged + 1
        if self.unjudged:
            reasons = {f"{name} {text}" for name, _, text in failures if text}
            self.report.warn("; ".join([NO_REWARD, *sorted(reasons)]))
        metrics |= rollout_metrics(rows, args.num_generations, failures)
        self.num_tokens += metrics["tokens"]
        metrics |= {"num_tokens": self.num_tokens} | grpo.phase.taken(metrics["tokens"])
        if not self.history:
            self.saver.begin()
        self.history.append({"step": step} | {name: float(one) for name, one in metrics.items()})
        self.report.step(step, metrics, rows)
        self.save_or_stop(step)

    def save_or_stop(self, step):
        """Saves a checkpoint if this is due, and ends the run after a signal or without rewards."""
        is_last, hopeless = step == self.last_step, self.unjudged == MOST_UNJUDGED
        signal = 0 if is_last else self.signals.of_any_rank(self.world)
        if is_last or signal or hopeless or step % int(self.args.save_interval) == 0:
            self.grpo.phase("checkpoint")       # its time counts for the next step
            self.save(step)
            self.report.draw()
        self.done = step
        if signal:
            stop(signal, f"after step {step}, which is saved", again(self.args), self.world.rank)
        if hopeless:
            raise UserError(f"no completion was scored in the last {MOST_UNJUDGED} steps; check "
                            "that --reward_funcs fit the data")

    def evaluate_if_due(self, step):
        """Evaluates if an evaluation is due at this step. Returns its metrics, or else {}."""
        interval = self.args.eval_interval
        if interval == 0 or (step % interval and step != self.last_step):
            return {}
        if step:                    # the first evaluation's time is part of no step
            self.grpo.phase("eval")
        metrics, replies = evaluate(self.grpo, self.heldout, self.collate, step)
        self.grpo.phase(None)
        return self.report.evaluation(step, metrics, replies)

    def save(self, step):
        """Saves a checkpoint; call it on all ranks."""
        grpo = self.grpo
        self.saver.save(step, self.num_tokens, grpo.policy.model, grpo.tokenizer, grpo.optimizer,
                        grpo.saved)

    def finish(self, defaults):
        """Saves the final weights, and a model card that lists flags with non-default values."""
        if not self.args.eval_only:
            tokenizer = asking_as_trained(self.grpo.tokenizer, self.collate.switches)
            self.saver.save_final(self.grpo.policy.model, tokenizer, defaults)

    def __exit__(self, kind, error, traceback):
        try:
            if kind is CutShort:    # a signal during rewards: `step` has not changed the weights
                if self.done and self.done > self.start_step:
                    self.save(self.done)
                stop(error.signal, f"in step {self.grpo.current_step}, which is given up",
                     again(self.args), self.world.rank)
        finally:
            self.report.close(error)
            self.signals.leave()
            CHILD.end()
            COROUTINES.end()
            CHILD.given_up = CHILD.cut_short = 0    # later calls in this process ask a new child
            if kind in (CutShort, Stopped):
                self.world.gather([])       # wait, as torchrun ends all ranks when one exits
            if kind in (CutShort, Stopped, None):
                self.world.close()
            self.world.cleanup.close()
