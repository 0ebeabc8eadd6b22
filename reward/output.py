"""What a reward function prints: the beginning is shown, a flood is not."""
import sys
import threading
from contextlib import contextmanager

from report import printable

LIMIT = 4000        # characters of stdout, and as many of stderr, in each call
late = set()        # threads of calls that ran out of time: what they go on to print is dropped


class Gate:
    """Stands in for sys.stdout or sys.stderr during a call, and lets LIMIT characters through."""

    def __init__(self, stream):
        self._wrapped = stream      # tqdm's name for it, by which it knows the stream of its bar
        self.left, self.dropped, self.over = LIMIT, 0, False

    def write(self, text):
        if threading.current_thread() in late:
            return len(text)
        if self.over:               # the run's own text, or that of a logger made in the call
            return self._wrapped.write(text)
        self._wrapped.write(printable(text[:self.left]))
        self.dropped += max(0, len(text) - self.left)
        self.left -= min(self.left, len(text))
        return len(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def close(self):
        """Nothing: the stream is the run's."""

    def __getattr__(self, name):    # encoding, flush, isatty, ...
        return getattr(self._wrapped, name)


@contextmanager
def limited_output():
    """Limits what is printed inside; yields the gates of stdout and stderr.

    The gates go when the block ends, or stay while a late call still runs, to keep its text out.
    """
    streams = [stream._wrapped if isinstance(stream, Gate) else stream
               for stream in (sys.stdout, sys.stderr)]
    gates = sys.stdout, sys.stderr = [Gate(stream) for stream in streams]
    try:
        yield gates
    finally:
        late.intersection_update(threading.enumerate())     # forget those that have ended
        for gate in gates:
            gate.over = True
        sys.stdout, sys.stderr = gates if late else streams
