"""How a run ends before its last step.

    a signal   SIGINT (Ctrl-C), SIGTERM or SIGUSR1 (from a scheduler) or SIGHUP (a closed terminal):
               all ranks finish the step, save and stop. A second signal kills the process that
               receives it.
    an error   on one rank: torch's @record reports it to torchrun, which stops the other ranks.
"""
import os
import signal
import sys
import time
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import record

from reward.child import CHILD

LAUNCHER = os.getppid()                     # torchrun, if it started the run
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
           if hasattr(signal, name)]        # Windows has only the first two


class Stopped(SystemExit):
    """Raised on all ranks, after the same step, when a signal ends the run."""


class CutShort(Exception):
    """Raised on all ranks by stop_if_cut_short; run/loop.py then ends the run."""

    def __init__(self, signal):
        self.signal = signal


def stop_if_cut_short(world):
    """Raises CutShort on all ranks if a signal has cut the rewards short on one of them."""
    signal = max(world.gather([CHILD.cut_short]))
    if signal:
        raise CutShort(signal)


class Signals:
    """Stores the signal that asks the run to stop in `received`, which is 0 before that.

    A second signal ends this process immediately.
    """

    def __init__(self, rank):
        self.rank, self.received, self.first_at = rank, 0, 0.0
        self.owner, self.before, self.wakeup = os.getpid(), {}, None

    def watch(self):
        with suppress(ValueError):      # only the main thread can set handlers
            self.wakeup = signal.set_wakeup_fd(-1)      # so no event loop handles them as well
            for number in SIGNALS:
                # nohup, and shells that start background jobs, set some signals to be ignored.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.note)

    def leave(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.wakeup is not None:
            signal.set_wakeup_fd(self.wakeup)

    def of_any_rank(self, world):
        """Returns a signal that a rank has received, or 0; the same on all ranks."""
        received = self.received
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER:    # torchrun died
            received = SIGNALS[-1]
        return max(world.gather([received]))

    def note(self, number, frame):
        if os.getpid() != self.owner:       # a process that a reward function forked
            # Ctrl-C also reaches this forked process, which the current step still needs.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not self.received:
            self.received, self.first_at = number, time.monotonic()
            CHILD.give_up(number)           # its computations may take too long
            say(f"{signal.Signals(number).name}: the step that is running ends, then the run saves "
                "and stops; a second signal stops it at once", self.rank)
        # A scheduler may signal torchrun and its ranks, so signals within a second count as one.
        elif time.monotonic() - self.first_at > 1:
            os._exit(128 + number)


def stop(number, where, again, rank):
    """Prints a message, and raises Stopped to end the run. again: the flags that continue it."""
    say(f"stopped by {signal.Signals(number).name} {where}; continue with the same command and "
        f"{again}", rank)
    raise Stopped(128 + number)             # the exit code that shells use


def say(text, rank):
    """Prints a message to stderr, on rank 0 only."""
    with suppress(OSError):                 # the terminal may be closed
        if rank == 0:
            print(f"\n{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr, flush=True)


def recorded(main):
    """Decorates a main function, so that torchrun reports which rank failed and why."""
    return record(main) if "TORCHELASTIC_RUN_ID" in os.environ else main
