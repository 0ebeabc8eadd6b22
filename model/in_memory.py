"""What `train` in train_grpo.py gets in place of files: objects as flags, a model as a policy.

Flags are stored in args.json and compared between processes, so they can't contain models or
functions. During the call, errors.GIVEN maps each name to its object.
"""
import copy
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

import torch
from torch import nn

from dataset.prompts import PROMPT_FIELDS
from errors import GIVEN, UserError

from . import transformers_model
from .load import as_ours, unbuilt
from .model import Head, MiniMindForCausalLM

NEEDED = {"model_path": "model", "data_path": "prompts", "reward_funcs": "reward_funcs"}
KNOWN_CODE = ("torch.nn.modules.", "transformers.models.", "transformers.activations",
              "model.model")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ONE_AT_A_TIME = RLock()     # threads would share GIVEN and reward/child.py's process


@contextmanager
def as_flags(flags, own):
    """Yields a dict {flag: value} without None values, with objects replaced by names.

    own: the named parameters of `train`, as {flag: value}; `flags` must not contain them.
    """
    for flag, name in NEEDED.items():
        if own[flag] is None or flag == "reward_funcs" and own[flag] in ([], ()):
            raise UserError(f"{name} is {own[flag]}; pass what you want to train with")
    own = {flag: value for flag, value in own.items() if value is not None}
    for flag in own.keys() & flags.keys():
        raise UserError(f"{flag} is given twice, since it has a parameter of its own; pass it once")
    flags = flags | own
    for flag in "data_path", "eval_data_path":
        if not isinstance(flags.get(flag), (str, Path, type(None))):
            flags[flag] = rows_of(flags[flag], NEEDED.get(flag, flag))
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


def rows_of(data, name="prompts"):
    """Returns the rows of a data set as a list: of a table, or of anything with a length.

    data: a list, a Dataset of torch or datasets, a generator, a dict of columns, or a table of
    pandas, polars or pyarrow. Raises a UserError for other objects; name: of the parameter.
    """
    who = f"{name}: <{type(data).__name__}>"
    advice = 'pass a list of prompts, or of rows like {"prompt": ..., "answer": ...}'
    for name in "to_dicts", "to_pylist":                                # polars, pyarrow
        if hasattr(data, name):
            return getattr(data, name)()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):           # pandas
        return data.to_dict("records")
    if isinstance(data, Mapping):
        columns = {name: list(values) for name, values in data.items()
                   if hasattr(values, "__iter__") and not isinstance(values, str)}
        if len(columns) < len(data) or not {*PROMPT_FIELDS, "nums"} & columns.keys() or len(
                {len(values) for values in columns.values()}) > 1:
            raise UserError(f"{who} has no columns of prompts of the same length; {advice}, or one "
                            'of several splits, such as prompts["train"]')
        return [dict(zip(columns, values)) for values in zip(*columns.values())]
    if hasattr(data, "__next__"):
        return list(data)
    if isinstance(data, (str, bytes)) or not hasattr(data, "__len__"):
        raise UserError(f"{who} has no rows, or no length; {advice}")
    return list(data) if hasattr(data, "__iter__") else [data[i] for i in range(len(data))]


class WithoutPeft:
    """The reference of a policy with PEFT adapters: the same model with adapters switched off."""

    def __init__(self, policy):
        self.policy = policy

    def run(self, function, *args, **options):
        with self.policy.peft.disable_adapter():
            return function(self.policy, *args, **options)


def prepare(model, device, matrix_dtype):
    """Moves a model to the device; casts frozen matrices to matrix_dtype, the rest to float32.

    The model is changed in place. It is also put in evaluation mode, since dropout would make
    log-probabilities random. Raises a UserError if the weights can't be trained.
    """
    who = f"<{type(model).__name__}>"
    if not isinstance(model, nn.Module) or not (
            hasattr(model, "get_output_embeddings") or hasattr(model, "new_cache")):
        raise UserError(f"{who} is not a causal model of transformers; pass one, or a path")
    if not hasattr(model, "new_cache") and model.get_output_embeddings() is None:
        raise UserError(f"{who} has no head that predicts tokens; load it with "
                        "AutoModelForCausalLM")
    if any(weight.is_meta for weight in model.parameters()):
        raise UserError(f"{who} is on the meta device, so it has no values; load its weights")
    # Weights of a byte or less have scales elsewhere, so they can't just be cast.
    if getattr(model, "is_quantized", False) or not all(
            weight.is_floating_point() and weight.element_size() > 1
            for weight in model.parameters()):
        raise UserError(f"{who} is quantized, so it cannot be trained; pass one that is not")
    model.to(device).eval().zero_grad()
    for name, weight in model.named_parameters():
        is_matrix = ".layers." in name and weight.dim() == 2 and not weight.requires_grad
        weight.data = weight.data.to(matrix_dtype if is_matrix else torch.float32)


def as_policy(theirs, *, device, matrix_dtype):
    """Returns a policy that shares the weights of `theirs`, without copying them.

    theirs: a causal model of transformers, with or without PEFT adapters, or a model from
    load_pretrained.
    """
    prepare(theirs, device, matrix_dtype)
    if hasattr(theirs, "new_cache"):        # from load_pretrained
        return theirs
    peft = theirs if hasattr(theirs, "get_base_model") else None
    base = theirs.get_base_model() if peft else theirs
    lacking = "PEFT's adapters" if peft else unbuilt(base.config) or own_code(base)
    if base.config.model_type == "qwen3_moe":       # its experts are one tensor in memory
        lacking = lacking or "its experts"
    if lacking:
        model = transformers_model.wrapped(base, lacking)
        model.peft = peft
    else:
        config, head = as_ours(base.config), base.get_output_embeddings()
        config.tie_word_embeddings = head.weight is base.get_input_embeddings().weight
        with torch.device("meta"):
            model = MiniMindForCausalLM(config)
        learns = [weight.requires_grad for weight in base.parameters()]
        model.load_state_dict(base.state_dict(keep_vars=True), assign=True)
        model.tie_weights()
        for weight, kept in zip(base.parameters(), learns):     # load_state_dict reset it
            weight.requires_grad_(kept)
    eos = getattr(base.generation_config, "eos_token_id", None)
    model.generation_config = {} if eos is None else {"eos_token_id": eos}
    return model


def own_code(model):
    """Returns what in a model's modules would not run in model/model.py, or ""."""
    for module in model.modules():
        is_theirs = type(module).__module__.startswith(KNOWN_CODE)
        if not is_theirs or "forward" in vars(module):
            return f"its {type(module).__name__}, which has code of its own"
        if any(vars(module)[name] for name in HOOKS):
            return "its hooks"
    if type(model.get_output_embeddings()) not in (nn.Linear, Head):
        return "its head"
    return ""


def frozen_copy(theirs, *, device, matrix_dtype):
    """Returns a frozen copy of the model, for use as the reference."""
    copied = copy.deepcopy(theirs).requires_grad_(False)
    return as_policy(copied, device=device, matrix_dtype=matrix_dtype)
