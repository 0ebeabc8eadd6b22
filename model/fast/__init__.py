"""The sampler and token_logps again, in less time: pair.py. vllm_engine.py: vLLM as the sampler."""
from .pair import sample, token_logps

__all__ = ["sample", "token_logps"]
