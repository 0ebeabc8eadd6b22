"""Converts the arguments of `train` in train_grpo.py to flags, with objects replaced by names.

Flags are stored in args.json and compared between processes, so they can't contain models or
functions. During the call, errors.GIVEN maps each name to its object.
"""
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from errors import GIVEN, UserError

ONE_AT_A_TIME = RLock()     # threads would share GIVEN and reward/child.py's process


@contextmanager
def as_flags(flags, own):
    """Yields a dict {flag: value} without None values, with objects replaced by names.

    own: the named parameters of `train`, as {flag: value}; `flags` must not contain them.
    """
    own = {flag: value for flag, value in own.items() if value is not None}
    for flag in own.keys() & flags.keys():
        raise UserError(f"{flag} is given twice, since it has a parameter of its own; pass it once")
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
                                    "pass the tokenizer, too")
            if "out_dir" not in named and named.get("resume"):
                raise UserError("resume: pass the out_dir of the run to resume")
            yield named
        finally:
            GIVEN.clear()
            GIVEN.update(before)


def by_name(value, is_source):
    """Returns a flag's value or, for an object, its name. is_source: True for models and data."""
    if isinstance(value, (list, tuple)) and not is_source:
        return [by_name(one, is_source) for one in value]
    if isinstance(value, (str, Path)) or not (is_source or callable(value)):
        return value
    kind, name = type(value).__name__, getattr(value, "__name__", "")
    form = f"<{kind}%s>" if is_source else f"given:{name if name.isidentifier() else kind}%s"
    name = form % ""
    while GIVEN.setdefault(name, value) is not value:       # another value has that name
        name = form % f"_{len(GIVEN)}"
    return name
