"""In place of the plain sampler and token_logps, with the same signatures:

    pair.py           both again, the same numbers in less time: chosen when the policy is loaded
    vllm_engine.py    vLLM as the sampler (--sampler vllm)
"""
from .pair import sample, token_logps
from .vllm_engine import Engine

__all__ = ["Engine", "sample", "token_logps"]
