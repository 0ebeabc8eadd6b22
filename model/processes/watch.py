"""Whatever ends a run early ends it on every rank, and the run says why.

Training may be waiting in a collective for a rank that is gone. So a thread beside it watches for

    a signal   SIGINT (Ctrl-C), SIGTERM (a scheduler) or SIGHUP (a closed terminal): the run ends
               its step and saves (model/storage/write.py); a second signal ends it at once
    a failure  the first rank that fails says why, and the others leave without a word
    a death    a rank that was killed can't say anything, so another one does
    a hang     with --hang_timeout: a rank has been busy for longer without reaching the others, or
               its process is frozen, this thread too

torchrun knows only that a process has failed, and prints a page about that. So the reason is
repeated after this page, where people look first.
"""
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from contextlib import ExitStack, suppress

import torch.distributed as dist

from report import needs_no_traceback, printable

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
           if hasattr(signal, name)]        # Windows has no SIGHUP
SECONDS_BETWEEN_LOOKS = 0.25
LAUNCHER = os.getppid()                     # torchrun, if it is there
# The folders of Python's own modules and of the installed packages.
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class Stopped(KeyboardInterrupt):
    """A signal ends the run. The exit code is 128 + signal, as shells have it.

    together: all ranks have agreed to stop after the same step.
    """

    def __init__(self, number, where, *, together):
        super().__init__(f"stopped by {signal.Signals(number).name} {where}")
        self.code, self.together = 128 + number, together


class Watch:
    """Watches over this process and, if the world has several ranks, over the others.

    hang_timeout: seconds, 0 for no limit. `signal` is the number of the signal that asked the run
    to stop, or None. `advice` tells how to go on after a failure, once there is a checkpoint.
    """
    current = None                          # the Watch of the main function that is running

    def __init__(self, world, hang_timeout=0):
        self.world, self.hang_timeout = world, hang_timeout
        self.rank, self.size = world.rank, world.size
        self.signal, self.signalled_at, self.steps_began, self.advice = None, 0.0, False, ""
        self.failing = False                # this rank; perhaps because another one did
        self.failed = False                 # this rank, and it says why
        # The training and the thread take turns: neither ends the process while the other says why.
        self.turn = threading.RLock()
        # Is this rank in a collective? When did it last enter or leave one?
        self.waiting, self.since = False, time.monotonic()
        self.ends, self.own_signals = ExitStack(), ExitStack()  # what to undo at the end
        self.at_end = self.ends.callback    # at_end(f) calls f when this rank ends, well or not
        self.store, self.processes = self._meet_the_others() if self.size > 1 else (None, {})
        # Looks that each rank's thread has taken, ranks that take no more, time to compare again.
        self.beats, self.frozen, self.compare_at = [], [], 0.0
        # Python calls a handler only between two of its own instructions, so not while the training
        # waits in a collective. But it writes the number of the signal into the mailbox at once.
        self.mailbox, self.letters = socket.socketpair()
        self.letters.setblocking(False)
        self.main = threading.current_thread()
        self.closed, self.thread = False, threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        Watch.current = world.watch = self
        self._handle_signals()

    def _meet_the_others(self):
        """A store that all ranks share, and the processes of the other ranks on this machine.

        Our own connection to the store: a call of the training may block the one that it has.
        """
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host = f"{os.environ.get('GROUP_RANK')}/{socket.gethostname()}"     # node number and name
        store = dist.PrefixStore(f"watch/{attempt}", dist.TCPStore(address, port, is_master=False))
        store.set(f"process/{self.rank}", f"{host} {os.getpid()}")
        places = [store.get(f"process/{rank}").decode().split() for rank in range(self.size)]
        return store, {rank: int(process) for rank, (where, process) in enumerate(places)
                       if rank != self.rank and where == host and os.name != "nt"
                       and is_alive(int(process))}

    def _handle_signals(self):
        if self.main is not threading.main_thread():    # Python lets no other thread
            return
        old = signal.set_wakeup_fd(self.letters.fileno(), warn_on_full_buffer=False)
        self.own_signals.callback(signal.set_wakeup_fd, old)
        for number in SIGNALS:
            # nohup, and a shell that starts a job in the background, have some of them ignored.
            if (old := signal.getsignal(number)) is not signal.SIG_IGN:
                self.own_signals.callback(signal.signal, number, old)
                signal.signal(number, self._stop_unless_steps_began)

    def _stop_unless_steps_began(self, number, frame):
        # torchrun stops a rank that has failed as soon as another has left: it is to say why first.
        if not self.steps_began and not self.failing:
            raise Stopped(number, "before the first step; nothing was written", together=False)
        # asyncio, in a reward, may have reset set_wakeup_fd: then this is the only letter.
        if self.signal is None:
            self.letters.send(bytes([number]))

    def leave_child(self):
        """In a process that a reward function forks, a worker of a Pool, say.

        The Pool ends it with SIGTERM, which must neither be caught nor reach our mailbox. But the
        terminal sends Ctrl-C to it too, and the step that is running still needs it.
        """
        self.own_signals.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def steps_begin(self):
        """From now on a signal lets the step end. Before, there is nothing to save."""
        self.steps_began, self.since = True, time.monotonic()
        self._handle_signals()              # again: SwanLab has put a handler of its own there

    def close(self):
        self.ends.close()
        self.closed = True
        self._count(f"ended/{self.rank}")
        self.letters.send(b"\0")
        self.thread.join()
        self.own_signals.close()
        self.mailbox.close()
        self.letters.close()
        Watch.current = None

    def _count(self, key, number=1):
        """Add to a number that all ranks share; the sum, or None if this process has no store.

        The store ends with torchrun or rank 0.
        """
        store = self.store                  # the other thread may set it to None at any time
        with suppress(RuntimeError):
            return store and store.add(key, number)
        self.store = None

    # --- World calls these around each collective -------------------------------------------------

    def enter_collective(self):
        self.waiting, self.since = True, time.monotonic()

    def leave_collective(self):
        self.waiting, self.since = False, time.monotonic()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self):
        while True:
            has_mail = select.select([self.mailbox], [], [], SECONDS_BETWEEN_LOOKS)[0]
            if self.closed:
                return
            # The others first: when a rank fails, torchrun sends the rest a SIGTERM, which is not
            # the reason.
            with self.turn:
                if not self.failed:
                    self._look_at_the_others()
                    if self.hang_timeout:
                        self._look_at_the_clock()
            for number in self.mailbox.recv(64) if has_mail else b"":
                if number in SIGNALS:       # not the alarm of a time limit, say
                    self._stop(number, signal.Signals(number).name)
            if under_torchrun() and os.getppid() != LAUNCHER and self.signal is None:
                self._stop(SIGNALS[-1], "torchrun is gone")

    def _stop(self, number, reason):
        if self.signal is None:
            self.signal, self.signalled_at = number, time.monotonic()
            if self.steps_began and self.rank == 0 and not self.failing:
                say(f"\n{reason}: the step that is running ends, then the run saves and stops; a "
                    "second signal stops it at once")
        # torchrun may pass on what the terminal has sent already: that is not a second signal.
        elif time.monotonic() - self.signalled_at > 1:
            self._leave(f"stopped at once by a second signal, {reason}", 128 + number)

    def _look_at_the_others(self):
        if self._count("failures", 0):
            self.leave(1)                   # the rank that failed has said why
        for rank, process in self.processes.items():
            if not is_alive(process) and self._count(f"ended/{rank}", 0) == 0:
                self._leave(f"error: rank {rank} (process {process}) is gone: it was killed, "
                            "perhaps for lack of memory, or a reward function has ended it", 1)

    def _look_at_the_clock(self):
        now, limit = time.monotonic(), f"{self.hang_timeout:g} s (--hang_timeout)"
        self._count(f"beats/{self.rank}")
        if now > self.compare_at:           # a frozen process can't say so: its thread has stopped
            beats = [self._count(f"beats/{rank}", 0) for rank in range(self.size)]
            self.frozen = [rank for rank, (new, old) in enumerate(zip(beats, self.beats))
                           if new == old is not None and self._count(f"ended/{rank}", 0) == 0]
            self.beats, self.compare_at = beats, now + max(2, self.hang_timeout / 3)
        if not self.steps_began or now - self.since < self.hang_timeout:
            return
        # These first: in a sharded backward pass a rank waits for them, and looks busy itself.
        for rank in self.frozen:
            if rank in self.processes:
                os.kill(self.processes[rank], signal.SIGKILL)       # it won't leave by itself
            self._leave(f"error: rank {rank} hangs: its process is frozen, and others have waited "
                        f"for more than {limit}", 1)
        if not self.waiting:
            frames = traceback.extract_stack(sys._current_frames()[self.main.ident])
            place = [f for f in frames if not f.filename.startswith((*LIBRARIES, "<"))][-1]
            self._leave(f"error: rank {self.rank} hangs: it was busy for more than {limit} in "
                        f"{place.filename}, line {place.lineno}: {place.line}", 1)

    def _leave(self, text, code):
        with self.turn:
            if self.is_first_to_fail():
                last_words(text + self.advice)
            self.leave(code)

    def leave(self, code):
        """End this process now, whatever the training or its group of processes is waiting for."""
        self.ends.close()
        with suppress(OSError):             # as in say()
            sys.stdout.flush()
        os._exit(code)

    # --- failures ---------------------------------------------------------------------------------

    def is_first_to_fail(self):
        """Only the first rank to fail speaks: what the others run into then is its consequence."""
        return self._count("failures") in (1, None)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        """Inside of what takes its time to end, such as the report, which draws: tell at once."""
        if error is not None and not getattr(error, "together", False) and self.size > 1:
            self.fail(error)

    def fail(self, error):
        """One of several ranks has failed: say why, or end if another has failed before."""
        if self.failed:
            return
        self.failing = True
        if isinstance(error, RuntimeError):     # a backward pass of shards lost a rank, perhaps:
            time.sleep(3)                       # then the thread is about to say which one
        with self.turn:
            self.failed = True
            if not self.is_first_to_fail():
                self.leave(1)
            text = f"error: rank {self.rank}: {error}"
            if isinstance(error, Stopped):
                text = str(error)
            elif not needs_no_traceback(error):
                traceback.print_exception(error)
                text = f"error: rank {self.rank}: {type(error).__name__}: {error}"
            last_words(text + self.advice)


def all_or_none(main):
    """Decorate a main function that makes a Watch: whatever ends it on one rank ends it on all."""
    @functools.wraps(main)
    def wrapper(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except BaseException as error:
            watch = Watch.current
            if isinstance(error, Stopped) and (error.together or watch.size == 1):
                if watch.rank == 0:
                    last_words(str(error))
                watch.world.gather([])      # nobody leaves before rank 0 has told
                watch.world.close()
                sys.exit(error.code)
            elif watch is not None and watch.size > 1:
                watch.fail(error)
                watch.leave(getattr(error, "code", 2))
            elif under_torchrun() and needs_no_traceback(error):
                # A single rank, or several that don't know of each other yet: these all have the
                # same to say.
                if os.environ["LOCAL_RANK"] == "0":
                    last_words(f"error: {error}{watch.advice if watch else ''}")
                sys.exit(2)
            elif watch is not None and watch.advice:
                error.add_note(watch.advice)
            raise
        finally:
            if Watch.current is not None:
                Watch.current.close()
    return wrapper


def under_torchrun():
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_alive(process):
    try:
        os.kill(process, 0)
    except OSError:                         # no such process, or now it is somebody else's
        return False
    return True


if hasattr(os, "register_at_fork"):         # Windows has no fork
    os.register_at_fork(after_in_child=lambda: Watch.current and Watch.current.leave_child())


def say(text):
    # A closed terminal takes no text, nor does the `tee` of `| tee log` after a Ctrl-C.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


# Runs as a process of its own: waits until torchrun, process argv[1], has ended; prints argv[2].
REPEAT_AFTER = """
import os, select, sys, time
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [], 60)
except ProcessLookupError:                  # it has ended
    pass
except (AttributeError, OSError):           # not on Linux
    time.sleep(3)
print(sys.argv[2], file=sys.stderr)
"""


def last_words(text):
    """Say why the run ends; under torchrun again, after torchrun's own page."""
    text = f"{os.path.basename(sys.argv[0])}: {printable(text)}"
    say(text)
    if under_torchrun() and os.getppid() == LAUNCHER:
        # torchrun ends the session of each rank, so the new process has one of its own. A SIGTERM
        # that comes before must not end it: it inherits from this thread what to be deaf to.
        if hasattr(signal, "pthread_sigmask"):      # Windows has none
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        subprocess.Popen([sys.executable, "-c", REPEAT_AFTER, str(LAUNCHER), text],
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=sys.stderr, start_new_session=True)
