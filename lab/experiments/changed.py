"""A run of train_grpo.py with one function changed, for arms that no flag can make.

    python -m lab.experiments.changed --change noise:2 --max_steps 40

It takes the flags of train_grpo.py, and --change: a name of CHANGES and, for some, a number. The
changes recipe, echo and behind_without_ratio run the code of docs/recipes.md.
"""
import argparse
import re
import sys
import types
from functools import partial
from pathlib import Path

import torch

import train_grpo
from errors import user_errors
from model import sampler
from model.sampler import next_token
from run.extensions import teacher
from train_grpo import GRPO


def noisy_token(logits, temperature, generator, greedy, *, scale):
    """next_token of a sampler that computes its logits badly: Gaussian noise on each, of this std.

    It reports the log-probabilities of what it sampled from, as an engine that rounds does.
    """
    noise = torch.randn(logits.shape, generator=generator, device=logits.device)
    return next_token(logits + scale * noise, temperature, generator, greedy)


def noise(scale):
    """The sampler of rollouts is noisy. That of evaluations is not: they are of the policy."""
    class Noisy(GRPO):
        def step(self, *args):
            sampler.next_token = partial(noisy_token, scale=float(scale))
            rollout_and_metrics = super().step(*args)
            sampler.next_token = next_token
            return rollout_and_metrics

    return Noisy


def above_0(_):
    """Answers worse than their group's mean teach nothing."""
    class Above0(GRPO):
        def compute_advantages(self, rollout):
            return super().compute_advantages(rollout).clamp(min=0)

    return Above0


def whole_answers(_):
    """A teacher's gradient of the KL of whole answers: a token answers for all that follows."""
    right = teacher.towards_teacher

    def towards_teacher(rollout, policy_logps):
        advantages = right(rollout, policy_logps)                                       # (N, R)
        return advantages.flip(1).cumsum(1).flip(1) * rollout.loss_mask

    teacher.towards_teacher = towards_teacher


def moved(_):
    """Nothing changes, but each step records how far its updates moved the policy, from d = log pi
    - log pi_old of a token: the mean of e^d - 1 - d, an estimate of KL(pi_old || pi), and the root
    mean square of d. Both are over all tokens of the rollout, after the last update.
    """
    class Moved(GRPO):
        def step(self, *args):
            rollout, metrics = super().step(*args)
            logps = self.compute_logps(self.policy, rollout)                            # (N, R)
            d = (logps - rollout.sampling_logps)[rollout.loss_mask.bool()]
            return rollout, metrics | {"moved/kl": (d.expm1() - d).mean().item(),
                                       "moved/rms": d.square().mean().sqrt().item()}

    return Moved


def top_p(p):
    """The sampler draws from top-p's tokens, and the trainer's log-probs are of the same tokens.

    Only for one update per rollout: after it, top-p may no longer keep a token that was sampled,
    and the log-prob of that token would be about -1e9.
    """
    right = sampler.next_token

    def next_token(logits, temperature, *options):
        return right(of_top_p(logits, temperature, float(p)), temperature, *options)

    def token_logps(model, *sequences, temperature=1.0, **options):
        def truncated(*inputs, **more):
            return of_top_p(model(*inputs, **more), temperature, float(p))
        return GRPO.token_logps(truncated, *sequences, temperature=temperature, **options)

    class TopP(GRPO):
        token_logps = staticmethod(token_logps)

    sampler.next_token = next_token
    return TopP


def of_top_p(logits, temperature, p):
    """Logits (..., V), -1e9 for all but the most likely tokens that together have probability p."""
    probs, order = (logits.float() / temperature).softmax(-1).sort(descending=True)
    kept = torch.zeros_like(probs).scatter(-1, order, (probs.cumsum(-1) - probs < p).float())
    return logits.masked_fill(kept == 0, -1e9)        # -inf would make an entropy NaN


def recipe(name):
    """The class of a recipe, or None if its file only has a function, for --loss_type NAME:..."""
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
    code = re.search(rf"^```python\n(# {name}\.py\n.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    return next((one for one in vars(module).values() if isinstance(one, type)
                 and issubclass(one, GRPO) and one is not GRPO), None)


def echo(weight):
    kind = recipe("echo")
    kind.weight = float(weight)
    return kind


def behind_without_ratio(_):
    kind = recipe("behind")
    del kind.compute_loss
    return kind


CHANGES = {"noise": noise, "above_0": above_0, "whole_answers": whole_answers, "moved": moved,
           "top_p": top_p, "recipe": recipe, "echo": echo,
           "behind_without_ratio": behind_without_ratio}


@user_errors("lab.experiments.changed")
def main():
    (change, flags), trainer = parse_args(), GRPO
    if change:
        name, _, number = change.partition(":")
        trainer = CHANGES[name](number) or GRPO
    train_grpo.main(flags, trainer)


def parse_args(argv=None):
    """Our own flag, and the others as they are."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--change", default="")
    own, flags = parser.parse_known_args(argv)
    if own.change and own.change.partition(":")[0] not in CHANGES:
        parser.error(f"--change is {own.change!r}; give one of {', '.join(CHANGES)}")
    return own.change, flags


if __name__ == "__main__":
    main()
