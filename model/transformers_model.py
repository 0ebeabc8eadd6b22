"""Runs causal models of transformers whose architecture model/model.py does not implement.

Each model runs in its class in the transformers library. Code that comes with the weights never
runs. Some of these classes give wrong results for batches: they ignore padding, or have a cache
whose rows can't be selected. So each model is tested when it is loaded, and rejected if it fails.
"""
import inspect
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from errors import explained

from .model import Head


class Cache:
    """Wraps a cache of transformers, and adds the method `select`, which the samplers need."""

    def __init__(self):
        self.past, self.length = None, 0

    def select(self, rows):
        """Keeps only the given rows of the cache. `rows` is a tensor of indices or booleans."""
        # batch_select_indices would fail for layers with a recurrent state.
        self.past.reorder_cache(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows)


class AnyModel(nn.Module):
    """A policy that runs in a transformers class, because model/model.py does not support it."""
    new_cache = Cache

    def __init__(self, model, lacking):
        super().__init__()
        self.model, self.lm_head = model, model.get_output_embeddings()
        self.config, self.generation_config = model.config.get_text_config(), {}
        self.peft = None        # the PEFT model around it, if it has adapters
        self.run_by = (f"transformers' {type(model).__name__}, because of {lacking}: "
                       "without model/fast")
        self.known = set(inspect.signature(model.forward).parameters)
        for name in ("state_dict", "load_state_dict", "named_modules", "set_submodule"):
            setattr(self, name, getattr(model, name))   # so all names are transformers'
        model.gradient_checkpointing = False        # a run's flag

    def forward(self, input_ids, attention_mask=None, *, logits_to_keep=0, cache=None):
        """Returns logits, (N, T, V), with the same arguments as MiniMindForCausalLM."""
        T, past, theirs = input_ids.shape[1], 0, None
        if cache is not None:
            past, theirs = cache.length, cache.past
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), past + T)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
        options = {"position_ids": positions, "logits_to_keep": logits_to_keep}
        with recomputing(self.model, self.model.gradient_checkpointing and torch.is_grad_enabled()):
            out = self.model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=cache is not None,
                past_key_values=theirs,
                **{name: options[name] for name in options.keys() & self.known})
        if cache is not None:
            cache.past, cache.length = out.past_key_values, past + T
        return out.logits[:, -logits_to_keep:]          # -0: all of them


@contextmanager
def recomputing(model, recompute):
    """Context manager in which the layers recompute their activations in the backward pass, or not.

    A layer only does so in training mode. The modules in it stay in evaluation mode, because
    dropout would change the log-probs from pass to pass.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    before = [vars(layer).copy() for layer in layers]
    for layer in layers:
        layer.training = layer.gradient_checkpointing = recompute
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, was in zip(layers, before):
            vars(layer).update(was)


def load(path, config, lacking, *, dtype=None, matrix_dtype=None, device=None):
    """Loads the model from a folder. Raises a UserError if the model is not supported.

    config and lacking are the results of load.read_hub_config(path) and load.unbuilt(config).
    """
    # Imported here, because it takes longer than all other imports of a run.
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging
    logging.disable_progress_bar()
    with explained(path, "transformers cannot run it as a policy", "choose other weights"):
        theirs, info = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype or "auto", trust_remote_code=False,
            local_files_only=True, output_loading_info=True)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(f"{missing[0]} is missing, one of {len(missing)} such tensors")
        theirs.generation_config = GenerationConfig()   # because some load but can't be saved
        head = theirs.get_output_embeddings()
        if head.weight is not theirs.get_input_embeddings().weight:     # its config may be wrong
            theirs.config.tie_word_embeddings = False
        model = wrapped(theirs.to(device), lacking)
    if matrix_dtype:
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not isinstance(layer, Head):
                layer.to(matrix_dtype)
    return model


def wrapped(theirs, lacking):
    """Returns the model as an AnyModel. Raises a ValueError if it fails check_rows."""
    head = theirs.get_output_embeddings()
    if type(head) is nn.Linear:
        head.__class__ = Head                       # computes in float32 under autocast
    model = AnyModel(theirs, lacking)
    check_rows(model)
    return model


@torch.no_grad()
def check_rows(model):
    """Raises a ValueError if a sequence gets different logits in a padded batch than on its own.

    The test runs the batch both in one pass, as in training, and with a cache, as in sampling.
    """
    vocab_size, device = model.config.vocab_size, model.lm_head.weight.device
    ids = torch.randint(min(vocab_size, 1000), (3, 13),     # the last ids may be image tokens
                        generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, [0, 1, 2, 3, 12]] = 0
    mask[2, :7] = 0
    real = mask.bool()
    alone = torch.cat([model.model(input_ids=row[None, is_real]).logits[0]
                       for row, is_real in zip(ids, real)])
    at_once, cache = model(ids, mask), model.new_cache()                            # (3, 13, V)
    in_parts = torch.zeros_like(at_once)
    in_parts[:, :9] = model(ids[:, :9], mask[:, :9], cache=cache)
    rows = torch.tensor([2, 0, 0, 1], device=device)
    cache.select(rows)
    for t in range(9, 13):
        if t == 11:             # a row leaves the batch
            stays = torch.tensor([True, True, False, True], device=device)
            cache.select(stays)
            rows = rows[stays]
        in_parts[rows, t] = model(ids[rows, t, None], mask[rows, :t + 1], cache=cache)[:, 0]
    error = torch.maximum((at_once[real] - alone).abs().max(), (in_parts[real] - alone).abs().max())
    # Rounding may change the lower half of the mantissa's bits, of which TF32 has 10.
    digits, scale = torch.finfo(error.dtype).eps, alone.abs().max()
    if torch.get_float32_matmul_precision() != "highest":
        digits = max(digits, 2**-10)
    if not error <= digits**0.5 * scale:
        raise ValueError(f"rows of a padded batch get logits that differ by {error:.2g} from those "
                         f"that each row gets alone, which are up to {scale:.2g}")
