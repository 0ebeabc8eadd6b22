"""Runs the scorers of math-verify and reasoning-gym in a child process with a time limit.

The scorers compute the expressions in a completion, even one as large as 9^{9^{9}}. Python then
holds its global lock (GIL), so neither a thread nor an alarm can stop the computation. The child
process, which runs this file, is ended by the timer of faulthandler, which doesn't need the lock.
The child reads one JSON question per line, and writes one JSON answer per line:

    [seconds, package, *arguments]  ->  a number, true, false, or "missing" (package not installed)
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
from threading import Lock

SECONDS = 2             # time limit for an answer, without imports
MOST_LATE = 8           # late answers per call, after which no more questions are asked
AT_ONCE = 16            # questions in the pipe, since waiting for each one costs milliseconds
LONGEST = 2000          # maximum characters of a question; longer ones are not asked
MEMORY = 4 * 2**30      # limit on the child's address space, in bytes
SYMBOLS = {"π": "pi", "∞": "infty", "<=": "le", ">=": "ge", "≤": "le", "≥": "ge", "≠": "ne",
           "θ": "theta", "∪": "cup", "∩": "cap", "∈": "in", "±": "pm", "×": "times",
           "·": "cdot", "⋅": "cdot", "÷": "div", "∅": "emptyset"}
# Text is no product of its letters: H2O, (OH)2, words of three letters but for these, 1 2.
PROSE = re.compile(r"[A-Za-z)\]]\d|[^\W\d_]{3,}|(?<!_)\d\s+\d")
FUNCTION = re.compile(r"\\(?:begin|end)\s*\{\w*\}|\\[a-zA-Z]+|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?"
                      r"|log|exp|lim|max|min|gcd|lcm|mod|abc|xyz|sqrt|\binf(?:inity)?\b|\band\b")


class Child:
    """Sends questions to a child process, and restarts the process if it has ended."""

    def __init__(self):
        self.process, self.lock = None, Lock()
        self.late = self.unanswered = 0         # numbers of questions: in the last call, in all
        self.given_up = self.cut_short = 0      # the signal; the same if questions were then left

    def ask(self, questions):
        """Returns a list of answers: 0 for a late one, and None after MOST_LATE late answers."""
        with self.lock:     # so that each thread gets its own answers
            answers, self.late = [], 0
            while len(answers) < len(questions) and self.late < MOST_LATE and not self.given_up:
                answers += self.answers_to(questions[len(answers):len(answers) + AT_ONCE])
            left = len(questions) - len(answers)
            if left:
                self.unanswered, self.cut_short = self.unanswered + left, self.given_up
            return answers + [None] * left

    def answers_to(self, questions):
        """Returns the child's answers up to and including the first late answer, which is 0."""
        process = self.process
        if process is None or process.poll() is not None:
            process = self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True,
                start_new_session=True)         # so Ctrl-C in a terminal does not reach the child
        with suppress(OSError):                 # if the child has ended, answers will be missing
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

    def give_up(self, signal=1):
        """Ends the child and asks no more questions, because this signal has stopped the run."""
        self.given_up = signal
        if self.process is not None:    # its pipes stay, as `ask` may be reading just now
            self.process.kill()
            self.process.wait()

    def end(self):
        """Ends the child process. The next question starts a new process."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(OSError), process:    # which closes the pipes, and waits
                process.kill()


CHILD = Child()         # one per process: all reward functions share it and its late answers


def math_verify(gold, given):
    """Returns whether two LaTeX expressions are equal according to math-verify.

    If math-verify's own parser fails, it reads the last number instead, so we parse without it.
    """
    from latex2sympy2_extended.sets import FiniteSet
    from math_verify import verify
    from math_verify.grader import should_treat_as_complex
    from sympy import Eq, Tuple, simplify
    if not comparable(gold, given):
        return False
    is_real = not any(map(should_treat_as_complex, (gold, given)))
    one, other = parsed(gold, is_real), parsed(given, is_real)
    if "(" in (gold[0], given[0]):      # a list beside a pair is ordered, too
        one, other = (Tuple(*side._unsorted_args) if isinstance(side, FiniteSet) else side
                      for side in (one, other))
    if not all(verify(*pair, timeout_seconds=None, allow_set_relation_comp=True)
               for pair in ((one, other), (other, one))):
        return False
    if isinstance(one, Eq) and isinstance(other, Eq):   # two without a solution count as equal
        factor = simplify((one.lhs - one.rhs) / (other.lhs - other.rhs))
        return bool(factor.is_number and factor.is_finite and factor.is_nonzero)
    with suppress(Exception):           # raised unless both are numbers
        x, y = one.evalf(), other.evalf()
        if abs(x - y) > 1e-4 * abs(y):      # math-verify takes both 1/2004! and 1/2006! for 0
            return False
    return True


def comparable(gold, given):
    """Returns False where math-verify would equate too much: it reads what follows the last `=`."""
    for one, other, label in ((gold, given, r"[^\d=+*/^-]*="), (given, gold, r"(?!-)[^\d=]*=")):
        if "=" in one and "=" not in other:
            items = [item for item in re.split(",|;|and|or", one) if "=" in item]
            if not all(re.match(label, item) for item in items):
                return False
    pair, other = sorted((gold, given))     # "(" sorts first
    return not (pair[:1] == "(" and other[:2] == "\\{")     # the pair (1, 2) is no set {1, 2}


def parsed(text, is_real):
    """Returns a SymPy expression with exact decimals, or raises an exception."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    if PROSE.search(FUNCTION.sub(",", text)):
        raise ValueError("this would be read as a product of its letters")
    for symbol, command in SYMBOLS.items():
        text = text.replace(symbol, rf"\{command} ")
    text = re.sub(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-z]))",
                  r"\\sqrt{\1\2\3}", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(\d*)\.(\d+)", lambda found: r"(\frac{%d}{1%s})" % (
        int(found[1] + found[2]), "0" * len(found[2])), text)
    return latex2sympy(text, is_real=is_real, convert_degrees=False,
                       conversion_config=ConversionConfig(lowercase_symbols=False),
                       normalization_config=NormalizationConfig(
                           malformed_operators=True, boxed="none"))


@functools.cache
def judge_of(dataset):
    from reasoning_gym import get_score_answer_fn
    return get_score_answer_fn(dataset)


def reasoning_gym(answer, gold, task):
    return float(judge_of(task["source_dataset"])(answer, {"answer": gold, "metadata": task}))


def main():
    judges = {"math_verify": math_verify, "reasoning_gym": reasoning_gym}
    sys.path.pop(0)             # this folder's modules would hide others of the same name
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)               # what a package prints must not get between the answers
    logging.disable()           # math-verify warns that it has no time limit of its own
    with suppress(ImportError, ValueError, OSError):        # Windows has no such limit
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:      # when stdin ends, this process ends
        seconds, package, *about = json.loads(line)
        try:
            importlib.import_module(package)        # before the timer starts
            faulthandler.dump_traceback_later(seconds, exit=True)
            answer = judges[package](*about)
        except ImportError:
            answer = "missing"
        except Exception:       # including MemoryError and RecursionError
            answer = 0
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
