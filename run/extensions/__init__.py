"""Extensions: options that the step in train_grpo.py doesn't contain. Each is a module with

    add_flags   adds its flags to the command line
    a class     overrides methods of the class GRPO in train_grpo.py

and, optionally,

    NAME        the flag that turns it on if it is set; or, if there are several flags,
    is_on       returns those that turn it on, a list of texts to print
    defaults    {flag: value}: if the extension is on, the defaults of flags that were not passed
    check       raises a UserError for flags that contradict it

The class of a run inherits from the classes of the extensions that are on, and then from GRPO. So
in an extension, super() is the next one, or GRPO. An override that doesn't call super() replaces
the method. An extension must not import train_grpo.py: it runs as __main__, so an import would load
it a second time. GRPO offers the script's functions as self.k3, self.token_logps and so on.
"""
import sys
import warnings
from difflib import get_close_matches
from pathlib import Path

from errors import UserError

from . import (
    advantages,
    correction,
    entropy,
    kl_in_reward,
    losses,
    moving_reference,
    oversample,
    process,
    teacher,
    tool,
    truncated,
)

# The first is called first, and has the last word on what it returns. Those that replace a method
# come last, just before GRPO. moving_reference is first, so that it acts after the update.
EXTENSIONS = {
    moving_reference: moving_reference.MovingReference,
    oversample: oversample.Oversample,
    truncated: truncated.MaskTruncated,
    correction: correction.SamplerCorrection,
    entropy: entropy.EntropyBonus,
    kl_in_reward: kl_in_reward.KLInReward,
    tool: tool.ToolCalls,
    teacher: teacher.Distillation,
    process: process.ProcessRewards,
    advantages: advantages.OtherAdvantages,
    losses: losses.OtherLoss,
}


def is_on(extension, args):
    """Returns the flags that turn the extension on, a list."""
    if hasattr(extension, "is_on"):
        return extension.is_on(args)
    return [extension.NAME] if getattr(args, extension.NAME.removeprefix("--")) else []


def add_flags(parser):
    for extension in reversed(EXTENSIONS):
        extension.add_flags(parser)


def set_defaults(args):
    """Applies the defaults of the extensions that are on to all flags that were not passed."""
    for extension in EXTENSIONS:
        if hasattr(extension, "defaults") and is_on(extension, args):
            for name, value in extension.defaults(args).items():
                if getattr(args, name) is None:
                    setattr(args, name, value)


def check(args):
    """Raises a UserError if two flags contradict each other."""
    for extension in reversed(EXTENSIONS):
        if hasattr(extension, "check") and is_on(extension, args):
            extension.check(args)


def class_of_run(base, args, own):
    """Returns the class of a run, which inherits from `own`, the extensions that are on, and base.

    base: GRPO. own: base itself, or a user's subclass. The class has an attribute `changed`, a dict
    {method of base: ["wrapped by --flag (file)", ...]}, in the order from base to the override that
    is called first. Raises a UserError if an override would undo another: it has no super(). Warns
    of a method of `own` whose name is almost one of base's.
    """
    on = {option: is_on(extension, args) for extension, option in EXTENSIONS.items()}
    on = {option: flags for option, flags in on.items() if flags}
    bases = [*on, base] if own is base else [own, *on, base]
    kind = type(own.__name__, tuple(bases), {"changed": {}})
    for owner in reversed(kind.__mro__[1:kind.__mro__.index(base)]):
        by = ", ".join(on.get(owner, [owner.__name__]))
        for name, function in vars(owner).items():
            if name.startswith("__"):
                continue
            if not hasattr(base, name):
                warn_of_typo(base, owner, name)
                continue
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            calls_super = "__class__" in getattr(code, "co_freevars", ())
            before = kind.changed.setdefault(name, [])
            if before and not calls_super:
                raise UserError(f"{by} would undo that {name} is {before[-1]}; call super().{name} "
                                "in it, or leave one of the two out")
            how = "wrapped" if calls_super else "replaced"
            before.append(f"{how} by {by} ({file_of(owner)})")
    return kind


def file_of(owner):
    """Returns the file of a class, as a text: of a script, its name."""
    if owner.__module__ == "__main__":
        return Path(getattr(sys.modules["__main__"], "__file__", "this notebook")).name
    return owner.__module__.replace(".", "/") + ".py"


def warn_of_typo(base, owner, name):
    """Warns if a method that base lacks has almost the name of one of base's methods."""
    close = get_close_matches(name, dir(base), n=1, cutoff=0.8)
    if close and owner not in EXTENSIONS.values() and not name.startswith("_"):
        warnings.warn(f"{owner.__name__}.{name} overrides nothing, because {base.__name__} has no "
                      f"method of this name; is {close[0]} meant?", stacklevel=2)
