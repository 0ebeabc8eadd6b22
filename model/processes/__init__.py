"""The processes that train one model together. world.py first: it is all that a single one needs.

machine.py is what the flags of the machine make of sampler and log-probs; shard.py divides weights
over the processes; watch.py ends all of them if one fails, hangs or is stopped.
"""
from .machine import for_learning, for_sampling, sampler_weights
from .shard import keep_pace, shard
from .watch import Watch, all_or_none
from .world import World

__all__ = ["Watch", "World", "all_or_none", "for_learning", "for_sampling", "keep_pace",
           "sampler_weights", "shard"]
