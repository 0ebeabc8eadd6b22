"""What stands around the loop of train_grpo.py: reports, evaluations, checkpoints, and the end."""
from errors import UserError

from .metrics import describe, rollout_metrics
from .report import Report

MOST_UNJUDGED = 10      # steps in a row without a reward


class Run:
    """A run, as a context manager, so that its files are complete even after an error.

    t is the bundle that train_grpo.prepare returns.
    """

    def __init__(self, t, saver, steps_done, last_step, num_tokens):
        self.t, self.saver = t, saver
        self.steps_done, self.last_step = steps_done, last_step
        self.signal, self.unjudged = 0, 0       # what asks the run to stop
        self.report = Report(saver.run_dir, t.args, total_steps=last_step, start_step=steps_done,
                             num_tokens=num_tokens, active=t.world.rank == 0)

    def __enter__(self):
        self.report.__enter__()
        return self

    def __exit__(self, *error):
        self.report.__exit__(*error)

    def begin(self, num_prompts, num_heldout):
        """Says what is about to be trained."""
        self.report.intro(self.t, num_prompts, num_heldout)

    def evaluates_at(self, step):
        """Whether the policy is evaluated after this step; 0: before the first of a new run."""
        interval = self.t.args.eval_interval
        if step == 0:
            return interval > 0 and self.steps_done == 0
        return interval > 0 and (step % interval == 0 or step == self.last_step)

    def record(self, step, rollout, metrics):
        """Step 5: writes and prints a step; draws and saves when that is due."""
        t, args, world, report = self.t, self.t.args, self.t.world, self.report
        rows = world.gather(describe(rollout, t.tokenizer, args.num_generations))
        failures = world.gather([(judge.__name__, judge.failed.total(), judge.reason)
                                 for judge in t.reward_funcs if judge.failed])
        learned = "loss" in metrics         # else no rank had a reward
        of_rollout = rollout_metrics(rows, args.num_generations, failures,
                                     warn=world.rank == 0 and not learned)
        report.step(step, metrics | of_rollout, rows, world.timings)
        world.timings.clear()
        self.unjudged = 0 if learned else self.unjudged + 1
        is_due, self.signal = self.saver.is_due(step, self.last_step)
        if is_due or self.unjudged == MOST_UNJUDGED:
            world.phase("checkpoint")           # it counts towards the next step
            self.saver.save(step, report.num_tokens, t.policy, t.tokenizer, t.optimizer, t.saved)
            report.draw()

    def finish(self, defaults):
        """Writes the final weights; their card names the flags that are not the defaults."""
        self.saver.save_final(self.t.policy, self.t.tokenizer, defaults)

    def stop_if_asked(self, step):
        """Ends the run, on all ranks, after a signal or ten steps without a reward; it is saved."""
        if self.signal:
            raise self.saver.stopped(step, self.signal)
        if self.unjudged == MOST_UNJUDGED:
            raise UserError(f"no completion of the last {MOST_UNJUDGED} steps has a reward; check "
                            "that --reward_funcs fit the data")
