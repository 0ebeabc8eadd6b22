"""Extensions: options that the training step in train_grpo.py doesn't know about, one module each.

    NAME        its flag, as named in error messages and in a run's first lines
    add_flags   adds its flags to the group of their phase
    install     wraps or replaces functions of the TrainState, and adds data that these need

and, if it needs them,

    is_on       whether a run's flags turn it on (by default, whether the flag NAME is set)
    defaults    {flag: value} for other flags that weren't passed, if the extension is on
    check       raises a UserError for flags that contradict it

A wrapper has the wrapped function as its first parameter, `inner`. An extension never imports the
script, which runs as __main__ and would be loaded a second time; it finds the script's functions in
the TrainState.
"""
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

# Extensions are installed in this order. Those that replace a function come first, because
# replacing would undo a wrapper (TrainState.replace refuses that). If two wrap the same function,
# the later wrapper is called first. entropy, correction and teacher wrap compute_loss; none changes
# what others read or return. Of the wrappers of update_policy, moving_reference's acts last.
EXTENSIONS = [losses, advantages, process, teacher, tool, kl_in_reward, entropy, correction,
              truncated, oversample, moving_reference]


def is_on(extension, args):
    if hasattr(extension, "is_on"):
        return extension.is_on(args)
    return bool(getattr(args, extension.NAME.removeprefix("--")))


def add_flags(parser):
    for extension in EXTENSIONS:
        extension.add_flags(parser)


def set_defaults(args):
    """Sets flags that were not passed to the defaults of the extensions that are on."""
    for extension in reversed(EXTENSIONS):
        if hasattr(extension, "defaults") and is_on(extension, args):
            for name, value in extension.defaults(args).items():
                if getattr(args, name) is None:
                    setattr(args, name, value)


def check(args):
    """Raises a UserError if two flags contradict each other."""
    for extension in EXTENSIONS:
        if hasattr(extension, "check") and is_on(extension, args):
            extension.check(args)


def install(state):
    """Wraps and replaces functions of a TrainState, as the flags ask."""
    for extension in EXTENSIONS:
        if is_on(extension, state.args):
            extension.install(state)
