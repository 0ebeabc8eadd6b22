"""What runs a model: the model, and the two functions that sample from it and read it."""
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Policy:
    """A model with its pair of functions, each called with the model as its first argument.

    By default these are model/fast's; with --sampler plain those that one reads, model/sampler.py's
    `sample` and the script's `token_logps`. run/backends.py chooses. model: ours, or any causal
    model of transformers, wrapped by storage/any_model.py.
    """
    model: torch.nn.Module
    sampler: Callable                   # as model/sampler.sample
    reader: Callable                    # as train_grpo.token_logps
    world: object                       # whose `working` gives matrix products their dtype
    entropy_learns: bool = False        # else the entropy is a metric, and has no gradient

    def sample(self, *prompts, **options):
        with self.world.working():
            return self.sampler(self.model, *prompts, **options)

    def token_logps(self, *sequences, with_entropy=False, **options):
        with self.world.working():
            found = self.reader(self.model, *sequences, with_entropy=with_entropy, **options)
        if with_entropy and not self.entropy_learns:
            return found[0], found[1].detach()
        return found
