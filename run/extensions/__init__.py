"""Extensions: options that the step in train_grpo.py doesn't contain. Each is a module with

    NAME        its flag, for error messages and the first lines that a run prints
    add_flags   adds its flags to the command line
    install     wraps or replaces functions of the TrainState, and adds the data they need

and, optionally,

    is_on       whether a run's flags turn it on (by default, whether the flag NAME is set)
    defaults    {flag: value}: if the extension is on, the defaults of flags that were not passed
    check       raises a UserError for flags that contradict it

The first parameter of a wrapper, `inner`, is the wrapped function. An extension must not import
train_grpo.py: it runs as __main__, so an import would load it a second time. The script's
functions are in the TrainState instead.
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
    """Applies the defaults of the extensions that are on to all flags that were not passed."""
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
    """Installs the extensions that the flags turn on: they wrap or replace functions of `state`."""
    for extension in EXTENSIONS:
        if is_on(extension, state.args):
            extension.install(state)
