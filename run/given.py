"""What `train` of train_grpo.py is given, as flags: a name for each object and function.

The objects themselves are in errors.GIVEN until the call ends. In args they would differ from
process to process, and no args.json could hold them.
"""
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from errors import GIVEN, UserError

ONE_AT_A_TIME = RLock()     # of the threads: GIVEN, and the child that judges, are the process's


@contextmanager
def as_flags(flags, own):
    """{flag: value} without what is None, and with names for what a command line can't hold.

    own: the parameters of `train`, by the names of their flags, which flags may hold as well.
    """
    own = {flag: value for flag, value in own.items() if value is not None}
    for flag in own.keys() & flags.keys():
        raise UserError(f"{flag} is given twice, as it has a parameter of its own; give it once")
    flags = flags | own
    with ONE_AT_A_TIME:
        before = GIVEN.copy()
        try:
            named = {flag: by_name(value, flag.endswith("_path"))
                     for flag, value in flags.items() if value is not None}
            model = GIVEN.get(named.get("model_path"))
            if model is not None and "tokenizer_path" not in named:
                named["tokenizer_path"] = getattr(model, "name_or_path", None)
                if not named["tokenizer_path"]:
                    raise UserError(f"{named['model_path']} does not say where its tokenizer is; "
                                    "give the tokenizer, too")
            if "out_dir" not in named and named.get("resume"):
                raise UserError("resume: give the out_dir of the run that is to go on")
            yield named
        finally:
            GIVEN.clear()
            GIVEN.update(before)


def by_name(value, is_source):
    """The value itself, or a name that stands for it. is_source: of weights, prompts, ..."""
    if isinstance(value, (list, tuple)) and not is_source:
        return [by_name(one, is_source) for one in value]
    if isinstance(value, (str, Path)) or not (is_source or callable(value)):
        return value
    kind, name = type(value).__name__, getattr(value, "__name__", "")
    form = f"<{kind}%s>" if is_source else f"given:{name if name.isidentifier() else kind}%s"
    name = form % ""
    while GIVEN.setdefault(name, value) is not value:       # another has that name
        name = form % f"_{len(GIVEN)}"
    return name
