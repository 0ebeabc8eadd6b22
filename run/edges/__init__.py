"""Edges: options that the step of train_grpo.py does not know. Each module holds all of one.

    NAME        its flag, as sentences call it
    DEFAULTS    {flag: default} of other flags, while it is on
    EXCLUDES    the modules that can't be on beside it
    add_flags   adds its flags, in the group of its step
    is_on       whether a run's flags ask for it
    refuse      UserError for flags that contradict it, if it is on
    install     adds its changes to the lists that the step walks, and what these need to the bundle

A change is a function of data: of the rollout before or after its advantages are computed; of a
micro-batch and its logps before its loss, and then it returns metrics; of a step's number after it.
No edge imports the script or another edge, no function of the script is replaced, and without this
folder's modules the default run is the same. train_grpo.EDGES lists them, in the order of their
changes.
"""
from errors import UserError


def fill_in(edges, args):
    """Gives flags that were not given the defaults of the edges that are on."""
    for edge in edges:
        if edge.is_on(args):
            for name, value in edge.DEFAULTS.items():
                if getattr(args, name) is None:
                    setattr(args, name, value)


def refuse(edges, args):
    """UserError for flags that an edge can't have beside it."""
    on = {edge.__name__.rpartition(".")[2]: edge for edge in edges if edge.is_on(args)}
    for edge in on.values():
        for other in edge.EXCLUDES:
            if other in on:
                raise UserError(f"{edge.NAME} and {on[other].NAME} exclude each other; leave one "
                                "of the two out")
    for edge in on.values():
        edge.refuse(args)


def refuse_other_advantages(name, args):
    """UserError for flags of advantages that `name` would not read."""
    if (args.scale_rewards, args.advantage_estimator) != ("group", "grpo"):
        raise UserError(f"{name} has its own way to advantages; leave --scale_rewards and "
                        "--advantage_estimator out")
