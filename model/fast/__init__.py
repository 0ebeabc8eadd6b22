"""What stands behind the plain sampler and token_logps, with the same signatures:

    pair.py           both again, the same numbers in less time: a run uses these
    vllm_engine.py    vLLM in place of the sampler (--sampler vllm)
"""
from .pair import sample, token_logps
from .vllm_engine import Engine

__all__ = ["Engine", "sample", "token_logps"]
