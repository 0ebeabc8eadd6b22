"""What stands around the loop of train_grpo.py: its data, evaluations, reports, checkpoints."""
from pathlib import Path

from dataset import batches_from, read_prompts
from errors import UserError

from .checkpoint import Saver
from .evaluate import evaluate
from .metrics import describe, rollout_metrics
from .report.terminal import Report
from .signals import Stopped, stop, stop_on_signals

MOST_UNJUDGED = 10      # steps in a row without a reward


class Run:
    """A run, as a context manager, so that its files are complete even after an error.

    From its beginning on its folder is locked.
    """

    def __init__(self, args, world):
        self.args, self.world = args, world
        self.saver = Saver(Path(args.out_dir) / args.run_name, world, args)
        self.state, self.report = None, None
        self.signal, self.unjudged = 0, 0       # what asks the run to stop

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.report is not None:
            self.report.__exit__(*error)
        if error[0] is Stopped:
            self.world.gather([])       # torchrun ends all ranks once one has left
            self.world.close()
        self.world.cleanup.close()

    def steps(self, state):
        """Resumes, says what is about to be trained, evaluates; the steps that are left.

        (step, batch) each; none with --eval_only. state is a TrainState.
        """
        self.state, args, world = state, self.args, self.world
        self.steps_done, num_tokens = self.saver.resume(
            state.policy.model, state.optimizer, state.saved)
        self.collate, problems, self.heldout = read_prompts(args, state.tokenizer)
        batches, self.last_step = batches_from(
            self.steps_done + 1, problems, self.collate, state.num_prompts, world, args)
        if args.eval_only:
            world.print_json(evaluate(state, self.heldout, self.collate, self.steps_done)[0])
            return ()
        self.report = Report(
            self.saver.run_dir, args, total_steps=self.last_step, start_step=self.steps_done,
            num_tokens=num_tokens, active=world.rank == 0).__enter__()
        self.report.intro(state, len(problems), len(self.heldout))
        self.evaluate_if_due(0)
        stop_on_signals(world)                  # from here on a signal lets the step end
        return enumerate(batches, start=self.steps_done + 1)

    def evaluate_if_due(self, step):
        """The metrics of an evaluation, which are written and printed; none if none is due."""
        interval = self.args.eval_interval
        if step == 0:
            due = interval > 0 and self.steps_done == 0     # before the first step of a new run
        else:
            due = interval > 0 and (step % interval == 0 or step == self.last_step)
        if not due:
            return {}
        if step:                    # the one before the first step counts towards none
            self.world.phase("eval")
        metrics, replies = evaluate(self.state, self.heldout, self.collate, step)
        self.world.phase(None)
        return self.report.evaluation(step, metrics, replies)

    def record(self, step, rollout, metrics):
        """Step 5: evaluates, writes and prints a step; draws and saves when that is due.

        Ends the run, on all ranks, after a signal or ten steps without a reward; it is saved.
        """
        state, args, world, report = self.state, self.args, self.world, self.report
        metrics = metrics | self.evaluate_if_due(step)
        rows = world.gather(describe(rollout, state.tokenizer, args.num_generations))
        failures = world.gather([(judge.__name__, judge.failed.total(), judge.reason)
                                 for judge in state.reward_funcs if judge.failed])
        learned = "loss" in metrics         # else no rank had a reward
        of_rollout = rollout_metrics(rows, args.num_generations, failures,
                                     warn=world.rank == 0 and not learned)
        report.step(step, metrics | of_rollout, rows, world.timings)
        world.timings.clear()
        self.unjudged = 0 if learned else self.unjudged + 1
        is_due, self.signal = self.saver.is_due(step, self.last_step)
        if is_due or self.unjudged == MOST_UNJUDGED:
            world.phase("checkpoint")           # it counts towards the next step
            self.saver.save(step, report.num_tokens, state.policy.model, state.tokenizer,
                            state.optimizer, state.saved)
            report.draw()
        if self.signal:
            stop(self.signal, step, world.rank)
        if self.unjudged == MOST_UNJUDGED:
            raise UserError(f"no completion of the last {MOST_UNJUDGED} steps has a reward; check "
                            "that --reward_funcs fit the data")

    def finish(self, defaults):
        """Writes the final weights; their card names the flags that are not the defaults."""
        if not self.args.eval_only:
            self.saver.save_final(self.state.policy.model, self.state.tokenizer, defaults)
