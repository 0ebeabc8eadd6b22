"""In place of the plain sampler and token_logps, with the same signatures:

    pair.py           both again, the same numbers in less time: a run uses these
    vllm_engine.py    vLLM as the sampler (--sampler vllm)
    proof.py          before the first step: does such an engine take all weights?
"""
from .pair import sample, token_logps
from .vllm_engine import Engine

__all__ = ["Engine", "sample", "token_logps"]
