"""Faster versions of `sample` and `token_logps`, with the same signatures, weights and results.

Each run checks once that both versions of `token_logps` agree (run/policy.py). The flag --sampler
plain selects the plain versions. The table shows, for each trick, the time on a CPU without it
divided by the time with it (python tests/bench.py --tricks). Differences below 0.1 may be noise.

    without ...                                          default   trained   1.7M   26M
    sampling: completions share a row until they diverge   1.27      2.44    1.03   0.90
    sampling: weights are packed for oneDNN                0.93      1.02    1.13   1.96
    learning: each distinct prefix is read once            1.91      1.32    1.21   1.16
    learning: sequences of similar size attend together    1.27      1.02    1.05   0.99
    all tricks: sampling, learning                    1.8, 3.9  3.9, 7.3  2.4, 1.2  2.8, 1.2

Reward models with the architecture of model.py also process each distinct prefix only once. So the
rewards of a step with default flags take 0.056 s instead of 0.089 s.

On a CUDA GPU, starting the kernels takes longer than computing, so other tricks count. The times
are those of a prototype on an H200; the present files never ran on a GPU (docs/in_practice.md):

    without ...                                          default   Qwen3-0.6B's shape
    sampling: a step is one CUDA graph                    13         6.6
    learning: no tree, all tokens packed into one row      2.4       1.5

What is used where:

                           sampling                            log-probabilities
    CPU, Mac               shared_rows.py                      reading.py: read_tree
    CUDA, float32          graphs.py                           reading.py: read_tree
    CUDA, bfloat16         graphs.py                           reading.py: read_packed, or read_tree
                                                               where prompts are long
    experts on CUDA        shared_rows.py                      the same

Only models with the architecture of model.py can use the faster versions; other models use the
plain versions.
"""
from .reading import token_logps
from .shared_rows import sample

__all__ = ["sample", "token_logps"]
