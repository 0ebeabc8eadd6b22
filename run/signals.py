"""How a run ends before its last step.

    a signal   SIGINT (Ctrl-C), SIGTERM (a scheduler) or SIGHUP (a closed terminal): all ranks
               finish the step, save (checkpoint.py) and stop. A second one ends a process at once
    an error   of one rank: torch's @record writes it down for torchrun, which ends the others
"""
import os
import signal
import sys
import time
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import record

from reward.child import CHILD

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]        # Windows has no SIGHUP


class Stopped(SystemExit):
    """A signal ends the run, on all ranks after the same step."""


class Signals:
    """Notes in `received` the signal that asks the run to stop (0: none).

    A second one ends this process at once.
    """

    def __init__(self, rank):
        self.rank, self.received, self.first_at = rank, 0, 0.0
        self.owner, self.before, self.wakeup = os.getpid(), {}, None

    def watch(self):
        with suppress(ValueError):      # outside of the main thread they are the caller's
            self.wakeup = signal.set_wakeup_fd(-1)      # an event loop would hear of them, too
            for number in SIGNALS:
                # nohup, and a shell that starts a job in the background, have some ignored.
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.note)

    def leave(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.wakeup is not None:
            signal.set_wakeup_fd(self.wakeup)

    def note(self, number, frame):
        if os.getpid() != self.owner:       # a process that a reward function forked
            # Ctrl-C reaches it, too, but the step that is running still needs it.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not self.received:
            self.received, self.first_at = number, time.monotonic()
            CHILD.give_up()                 # what it computes may take longer than anybody waits
            say(f"{signal.Signals(number).name}: the step that is running ends, then the run saves "
                "and stops; a second signal stops it at once", self.rank)
        # A scheduler may signal torchrun and its ranks: within a second that is one wish.
        elif time.monotonic() - self.first_at > 1:
            os._exit(128 + number)


def stop(number, where, rank):
    """Ends the run that this signal has asked to stop."""
    say(f"stopped by {signal.Signals(number).name} {where}; continue with the same command and "
        "--resume", rank)
    raise Stopped(128 + number)             # as shells have it


def say(text, rank):
    """Prints on rank 0 what all ranks have to say."""
    with suppress(OSError):                 # a closed terminal takes no text
        if rank == 0:
            print(f"\n{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr, flush=True)


def recorded(main):
    """Decorates a main function: under torchrun, its page names the rank that failed, and why."""
    return record(main) if "TORCHELASTIC_RUN_ID" in os.environ else main
