"""Extensions: options that the step of train_grpo.py does not know. Each module holds all of one.

    NAME        its flag, as sentences and a run's first lines call it
    EXCLUDES    the modules that can't be on beside it
    add_flags   adds its flags, in the group of its step
    defaults    {flag: value}, of other flags that were not given, while it is on
    is_on       whether a run's flags ask for it
    refuse      UserError for flags that contradict it, if it is on
    install     wraps or replaces functions of the TrainState, and adds what these need

A wrapper has the wrapped function as its first parameter, `inner`. An extension never imports the
script, which runs as __main__ and would be loaded a second time: it gets the script's functions
from the TrainState. Without these modules the default run is the same.

EXTENSIONS, below, lists them. Each wraps what those before it have made, so a later one is called
first; by the same order a later one sets the defaults of those before it.
"""
from errors import UserError


def add_flags(parser):
    for extension in EXTENSIONS:
        extension.add_flags(parser)


def fill_in(args):
    """Gives flags that were not given the defaults of the extensions that are on."""
    for extension in reversed(EXTENSIONS):
        if extension.is_on(args):
            for name, value in extension.defaults(args).items():
                if getattr(args, name) is None:
                    setattr(args, name, value)


def refuse(args):
    """UserError for flags that an extension can't have beside it."""
    on = {one.__name__.rpartition(".")[2]: one for one in EXTENSIONS if one.is_on(args)}
    for extension in on.values():
        for other in extension.EXCLUDES:
            if other in on:
                raise UserError(f"{extension.NAME} and {on[other].NAME} exclude each other; leave "
                                "one of the two out")
    for extension in on.values():
        extension.refuse(args)


def install(t):
    """Wraps and replaces functions of a TrainState, as its flags ask."""
    for extension in EXTENSIONS:
        if extension.is_on(t.args):
            extension.install(t)


def no_defaults(args):
    return {}


def nothing_to_refuse(args):
    pass


def refuse_other_advantages(name, args):
    """UserError for flags of advantages that `name` would not read."""
    if (args.scale_rewards, args.advantage_estimator) != ("group", "grpo"):
        raise UserError(f"{name} has its own way to advantages; leave --scale_rewards and "
                        "--advantage_estimator out")


# Below, since they import what stands above.
from . import (
    advantages,
    correction,
    entropy,
    gdpo,
    kl_in_reward,
    losses,
    moving_reference,
    oversample,
    process,
    teacher,
    tool,
    truncated,
)

EXTENSIONS = [losses, advantages, process, gdpo, teacher, kl_in_reward, entropy, correction,
              truncated, oversample, moving_reference, tool]
