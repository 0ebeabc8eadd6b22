"""Foreign mathematics, in a child process that ends itself.

math-verify and the judges of reasoning-gym compute what a reply says, such as 9^{9^{9}}. Python
then keeps its lock for ever, and neither a thread nor an alarm ends that. So they run in a child:
this file, started as a program, where faulthandler has a timer in C that needs no lock. The child
reads a question a line, as JSON, and writes an answer a line:

    [seconds, package, *what it is about]  ->  a number, true or false, or "missing"
"""
import faulthandler
import functools
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress

SECONDS = 2             # that an answer may take; imports are not counted
MOST_LATE = 8           # late answers in a step; its other questions are not asked
AT_ONCE = 16            # questions in the pipe, since to wait for each costs milliseconds
LONGEST = 2000          # characters of a question that is asked at all
MEMORY = 4 * 2**30      # bytes of addresses
RELATION = re.compile(r"[<>≤≥]|\\[lg](?:e|t|eq)q?\b")


class Child:
    """Asks a child process, and starts another when it has ended. Each step sets late to 0."""

    def __init__(self):
        self.process, self.late, self.unanswered = None, 0, 0     # numbers of questions
        self.given_up = self.cut_short = False      # after a signal; whether it left questions

    def ask(self, questions):
        """An answer to each question: 0 if it is late, None after MOST_LATE late ones in a step."""
        answers = []
        while len(answers) < len(questions) and self.late < MOST_LATE and not self.given_up:
            answers += self.answers_to(questions[len(answers):len(answers) + AT_ONCE])
        left = len(questions) - len(answers)
        if left:
            self.unanswered, self.cut_short = self.unanswered + left, self.given_up
        return answers + [None] * left

    def answers_to(self, questions):
        """The answers until the child ends; the question at which it does so is late."""
        process = self.process
        if process is None or process.poll() is not None:       # or it has ended since
            process = self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
                start_new_session=True)         # Ctrl-C in a terminal is for the run, not for it
        with suppress(OSError):                 # it has ended, as the answers will show
            process.stdin.write("".join(json.dumps([SECONDS, *one]) + "\n" for one in questions))
            process.stdin.flush()
        lines = [process.stdout.readline() for _ in questions]
        answers = [json.loads(line) for line in lines if line.endswith("\n")]
        if "missing" in answers:
            name = questions[answers.index("missing")][0].replace("_", "-")
            raise ModuleNotFoundError(f"{name} could not be imported; pip install {name}")
        if len(answers) < len(questions):
            self.process = None
            with suppress(OSError), process:    # which closes the pipes, and waits
                process.kill()
            if not self.given_up:
                self.late += 1
                answers.append(0)
        return answers

    def give_up(self):
        """A signal wants the run to stop: what is being asked, and all after it, stays open."""
        self.given_up = True
        self.end()

    def end(self):
        """Ends the process; the next question starts another."""
        if self.process is not None:
            self.process.kill()
            self.process = None


CHILD = Child()         # of this process: its late answers are those of all functions


def math_verify(gold, given):
    """Whether two expressions in LaTeX are equal, or the second is the interval of the first."""
    from math_verify import parse, verify
    one, other = (parse(f"${text}$", parsing_timeout=None) for text in (gold, given))
    if not verify(one, other, timeout_seconds=None):
        return False
    with suppress(Exception):           # unless both are numbers
        x, y = one[0].evalf(), other[0].evalf()
        if abs(x - y) > 1e-4 * abs(y):      # 1/2004! and 1/2006! both count as 0 there
            return False
    return bool(RELATION.search(gold) or verify(other, one, timeout_seconds=None))


@functools.cache
def judge_of(dataset):
    from reasoning_gym import get_score_answer_fn
    return get_score_answer_fn(dataset)


def reasoning_gym(answer, gold, task):
    return float(judge_of(task["source_dataset"])(answer, {"answer": gold, "metadata": task}))


def main():
    judges = {"math_verify": math_verify, "reasoning_gym": reasoning_gym}
    sys.path.pop(0)             # this folder, whose modules would hide others of their names
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)               # what a package prints must not stand between them
    logging.disable()           # math-verify warns of having no limit of its own
    with suppress(ImportError, ValueError, OSError):        # Windows has no such limit
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:      # its end is the end of this process
        seconds, package, *about = json.loads(line)
        try:
            importlib.import_module(package)        # before the clock runs
            faulthandler.dump_traceback_later(seconds, exit=True)
            answer = judges[package](*about)
        except ImportError:
            answer = "missing"
        except Exception:       # MemoryError and RecursionError, too
            answer = 0
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
