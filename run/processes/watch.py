"""How a run ends before its last step.

    a signal   SIGINT (Ctrl-C), SIGTERM (a scheduler) or SIGHUP (a closed terminal): all ranks end
               the step, save and stop (saver.py). A second signal ends a process at once
    an error   of one rank: it tells torchrun, which ends the others and prints a page that names it
    a hang     of a rank: the others end after half an hour in a collective (world.py)
"""
import functools
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from errors import UserError, reason, sentence

from .world import World

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]        # Windows has no SIGHUP


class Stopped(KeyboardInterrupt):
    """A signal ends the run, and all ranks after the same step."""

    def __init__(self, number, where):
        super().__init__(f"stopped by {signal.Signals(number).name} {where}")
        self.code = 128 + number            # as shells have it


def stop_on_signals(world):
    """From now on a signal sets world.signal, and a second one ends this process at once.

    Python calls a handler only between two of its own instructions, so not while a rank waits in a
    collective. But it writes the number to a socket at once, and a thread reads it there.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=listen, args=(reader, world), daemon=True).start()
    world.ends.callback(writer.close)       # ends the thread
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    world.ends.callback(signal.set_wakeup_fd, -1)
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # nohup, and a shell that starts a job in the background, have some of them ignored.
        if handler != signal.SIG_IGN:
            signal.signal(number, do_nothing)
            world.ends.callback(signal.signal, number, handler)


def do_nothing(number, frame):
    """The handler while the thread listens: the default one would end the process."""


def listen(reader, world):
    signalled_at = 0.0
    while True:
        received = reader.recv(1)
        if not received:                    # the run has closed its end
            return reader.close()
        number = received[0]
        if number not in SIGNALS:           # the alarm of a time limit
            continue
        name = signal.Signals(number).name
        if not world.signal:
            world.signal, signalled_at = number, time.monotonic()
            # With SIGTERM torchrun also ends the ranks that are well, if another has failed.
            if number != signal.SIGTERM or not under_torchrun():
                say(f"{name}: the step that is running ends, then the run saves and stops; a "
                    "second signal stops it at once", world.rank)
        # A scheduler may signal torchrun and its ranks: within a second that is one wish.
        elif time.monotonic() - signalled_at > 1:
            say(f"stopped at once by a second signal, {name}{world.advice}", world.rank)
            os._exit(128 + number)


def leave_child():
    """In a process that a reward function forks: a Pool ends its workers with SIGTERM.

    Ctrl-C reaches them, too, but the step that is running still needs them.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is do_nothing:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


if hasattr(os, "register_at_fork"):         # Windows has no fork
    os.register_at_fork(after_in_child=leave_child)


def under_torchrun():
    return "TORCHELASTIC_RUN_ID" in os.environ


def say(text, rank):
    """Print on rank 0 what all ranks have to say."""
    # A closed terminal takes no text, nor does the `tee` of `| tee log` after a Ctrl-C.
    with suppress(OSError):
        if rank == 0:
            print(f"\n{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr, flush=True)


def all_or_none(main):
    """Decorate a main function that makes a World: what ends it on one rank ends it on all."""
    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except Stopped as error:
            world = World.current
            say(str(error), world.rank)
            world.gather([])                # torchrun ends all ranks once the first has left:
            if under_torchrun():            # so they leave together, and at once
                os._exit(error.code)
            world.close()
            sys.exit(error.code)
        except KeyboardInterrupt:
            if signal.getsignal(signal.SIGINT) is do_nothing:       # then it was not Ctrl-C
                raise
            say("stopped by Ctrl-C before the first step", int(os.environ.get("RANK") or 0))
            sys.exit(128 + signal.SIGINT)
        except Exception as error:
            tell_torchrun(error)
            raise
        finally:
            if World.current is not None:
                World.current.ends.close()
                World.current = None
    return wrapper


def tell_torchrun(error):
    """Write what its page says of this rank. Not if the rank has only lost contact with another."""
    world = World.current
    lost = isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    if lost or isinstance(error, dist.DistError):
        world.ends.close()                  # from here on torchrun's SIGTERM ends this process
        time.sleep(3)                       # torchrun is to see first which rank has failed
        raise ConnectionError(f"lost contact with the other ranks ({reason(error)})") from error
    advice = world.advice if world is not None else ""
    if advice:
        error.add_note(advice)
    line, page = sentence(error), get_error_handler()
    if line is None:
        return page.record_exception(error)
    try:
        raise UserError(line + advice) from None
    except UserError as told:               # the page needs no traceback either
        page.record_exception(told.with_traceback(None))
