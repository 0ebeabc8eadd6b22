"""`sample` and `token_logps` again: same signatures, same weights, same numbers, in less time.

--fast 0 runs the plain pair instead. How many times as long the sampling or the learning pass takes
on a CPU without each trick (python tests/bench.py --tricks; differences below 0.1 may be noise):

    without ...                                          default   trained   1.7M   26M
    sampling: completions that agree so far are one row    1.27      2.44    1.03   0.90
    sampling: weights packed for oneDNN                    0.93      1.02    1.13   1.96
    learning: each distinct prefix is read once            1.91      1.32    1.21   1.16
    learning: sequences of like size attend together       1.27      1.02    1.05   0.99
    all of it: sampling, learning                     1.8, 3.9  3.9, 7.3  2.4, 1.2  2.8, 1.2

No row was measured again since matrices with the same input are no longer joined, which gained at
most 5% of the sampling.

On a GPU nobody has measured any of it. It runs there as on a CPU, one small operation after the
other; what samples fast on a GPU is an inference engine.
"""
from .learning import token_logps
from .sampling import Decoding, sample

__all__ = ["Decoding", "sample", "token_logps"]
