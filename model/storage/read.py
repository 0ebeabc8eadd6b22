"""Reads weights, tokenizers, adapters and checkpoints, whoever wrote them."""
import re
import reprlib
from pathlib import Path

import torch
from transformers import AutoTokenizer

from report import UserError, printable

from ..lora import adapter_state, adapters
from ..model import MiniMindForCausalLM
from ..processes.shard import load_parts, part_of, part_of_optimizer
from .config import check_field, read_config
from .files import check_template, check_tensors, explained, read_json, read_tensors
from .minimind_pth import read_pth


def load_pretrained(path, *, dtype=None, matrix_dtype=None, device=None):
    """Load a model from a folder, a hub id or a MiniMind .pth.

    dtype: None keeps the dtype that the weights were saved in. matrix_dtype: another one for the
    matrices in the layers, which are nearly all of a model. Raises UserError if the weights are
    missing, broken, or of an architecture that model/model.py does not build.
    """
    path, generation = local_path(path), {}
    if path.is_file():
        config, state = read_pth(path)
    else:
        if not (path / "config.json").is_file():
            raise UserError(f"{path}: no config.json there; give a folder with config.json and "
                            "model.safetensors, a hub id like Qwen/Qwen3-0.6B, or a MiniMind "
                            ".pth file")
        config, state = read_config(path), read_weights(path)
        if (file := path / "generation_config.json").is_file():
            generation, kind = read_json(file), int | list[int] | None
            check_field("eos_token_id", generation.get("eos_token_id"), kind, file)
    if config.tie_word_embeddings and "model.embed_tokens.weight" in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    dtype = dtype or getattr(state.get("model.norm.weight"), "dtype", None)
    model = build(MiniMindForCausalLM, config, state=state, path=path, dtype=dtype,
                  matrix_dtype=matrix_dtype, device=device)
    model.tie_weights()
    model.generation_config = generation
    return model


def local_path(path, *, weights="*.safetensors"):
    """The path itself; for a hub id like Qwen/Qwen3-0.6B, the folder it is downloaded to.

    weights: a pattern for the weight files to download; None downloads no weights.
    """
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return Path(path)
    from huggingface_hub import snapshot_download
    try:
        files = ["*.json", "*.jinja", "*.txt", "*.model"] + ([weights] if weights else [])
        return Path(snapshot_download(str(path), allow_patterns=files,
                                      ignore_patterns=["original/*"]))
    except Exception as error:      # many classes: no such name, network, permission, disk space
        raise UserError(f"{path}: no such folder on this machine, and downloading it from the hub "
                        f"failed ({type(error).__name__}); check the spelling, the network, and "
                        "whether it needs a login (hf auth login)") from error


def load_tokenizer(path, vocab_size, advice="give another with --tokenizer_path"):
    """Load the tokenizer from a folder or a hub id. Code that comes with it never runs.

    advice: what to do if there is none, if its chat template is missing or fails, or if it has more
    tokens than the weights, whose embedding has vocab_size rows: the end of the UserError.
    """
    path = local_path(path, weights=None)
    if path.is_file():
        raise UserError(f"{path}: a .pth file comes without a tokenizer; give the tokenizer's "
                        "folder with --tokenizer_path (MiniMind's is model/ in its repository)")
    if not path.is_dir():
        raise UserError(f"{path}: no such folder, so no tokenizer; {advice}")
    with explained(path, "no tokenizer could be read there", advice):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        count = max(tokenizer.get_vocab().values()) + 1     # an id may be larger than all others
    if tokenizer.chat_template is None:
        raise UserError(f"{path}: its tokenizer has no chat template to write prompts with; "
                        f"{advice}")
    # Fewer tokens than rows are common: embeddings are often padded to a round number.
    if count > vocab_size:
        raise UserError(f"{path}: its tokenizer has {count} tokens, but the weights know "
                        f"{vocab_size}; {advice}")
    check_template(tokenizer, path, advice)
    return tokenizer


def build(model_class, config, *more, state, path, dtype=torch.float32, matrix_dtype=None,
          device=None):
    """model_class(config, *more) with copies of the tensors in `state`. UserError: they don't fit.

    On the meta device a model takes no memory, and no time: at 4B parameters, drawing random
    weights only to overwrite them takes a minute. So a config.json that asks for more than the
    weights have is refused before anything is allocated.
    """
    if config.num_hidden_layers * max(1, config.num_experts) > 10 * len(state):
        raise UserError(f"{path}: num_hidden_layers {config.num_hidden_layers} and num_experts "
                        f"{config.num_experts} do not belong to weights of {len(state)} tensors; "
                        "check that both are of the same model")
    with explained(path, "no model has this configuration", "download its config.json again"):
        with torch.device("meta"):
            model = model_class(config, *more)
    expected, found = shapes(model.state_dict()), shapes(state)
    if wrong := sorted({name for name, _ in expected.items() ^ found.items()}):
        name = wrong[0]
        raise UserError(f"{path}: {printable(name)} should have shape {expected.get(name)} "
                        f"according to the configuration, but has {found.get(name)} in the weights "
                        f"({len(wrong)} such tensors); check that both are of the same model")

    def copy(name, tensor):         # one by one: there is never a second model, in another dtype
        is_matrix = ".layers." in name and tensor.dim() == 2
        return tensor.to(device, is_matrix and matrix_dtype or dtype, copy=True)

    model.load_state_dict({name: copy(name, tensor) for name, tensor in state.items()},
                          assign=True)
    return model


def shapes(state):
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def read_weights(path):
    """All tensors in a folder, by name, from one file or from the shards that its index lists.

    Reads safetensors, or PyTorch's pytorch_model*.bin if there are only those.
    """
    pickled = list(path.glob("pytorch_model*.bin")) and not list(path.glob("*.safetensors"))
    name = "pytorch_model.bin" if pickled else "model.safetensors"
    index, files = path / f"{name}.index.json", [name]
    if index.is_file():
        with explained(index, "its weight_map does not say where the tensors are",
                       "download it again"):
            files = sorted({str(name) for name in read_json(index)["weight_map"].values()})
    state = {}
    for name in files:
        file = path / name
        if file.name != name:       # ../elsewhere/model.safetensors
            raise UserError(f"{index}: it names {reprlib.repr(name)}, which is not in this "
                            "folder; download the index again")
        if not file.is_file():
            raise UserError(f"{path}: {name} is missing; copy it next to config.json")
        # Llama 2's files also hold the RoPE frequencies, which the model computes from its config.
        tensors = {name: tensor for name, tensor in read_tensors(file).items()
                   if not name.endswith("rotary_emb.inv_freq")}
        check_tensors(tensors, file)
        state |= tensors
    return state


@torch.no_grad()
def load_adapter(model, path):
    """Copy an adapter of the same rank, scale and targets into the model, in place.

    Raises UserError if the adapter is another one.
    """
    path = Path(path)
    config = read_json(path / "adapter_config.json")
    for name in ("r", "lora_alpha", "target_modules"):
        if config.get(name) != model.lora[name]:
            raise UserError(f"{path}: its {name} is {config.get(name)!r}, and this run's "
                            f"{model.lora[name]!r}; give the flags of the run")
    file, ours = path / "adapter_model.safetensors", adapter_state(model)
    state = read_tensors(file)
    check_tensors(state, file)
    if shapes(state) != shapes(ours):
        raise UserError(f"{file}: not the adapter of this model, it has other names or shapes; "
                        "give the run's own --model_path")
    for name, tensor in ours.items():
        tensor.copy_(part_of(state[name], tensor))


def load_checkpoint(folder, model, optimizer, reference=None):
    """Restore weights, optimizer and reference in place; returns (steps done, tokens sampled).

    What is saved is whole, and of sharded models each rank takes its part.
    """
    # A crash between the two renames in written_whole leaves only the previous checkpoint.
    found = next((path for path in (folder, folder.with_suffix(".old"))
                  if (path / "optimizer.pt").is_file()), None)
    if found is None:
        raise UserError(f"--resume: no checkpoint in {folder}; start without --resume, "
                        "or name the run to resume with --run_name")
    saved_with = (found / "adapter_config.json").is_file()
    if saved_with != bool(adapters(model)):
        raise UserError(f"--resume: {found} was saved {'with' if saved_with else 'without'} "
                        "--lora_rank; resume it the same way")
    with explained(found, "its checkpoint is broken, or of another model",
                   "start without --resume"):
        if adapters(model):
            load_adapter(model, found)
        else:
            load_parts(model, load_pretrained(found).state_dict())
        saved = read_tensors(found / "optimizer.pt")
        optimizer.load_state_dict(part_of_optimizer(saved["optimizer"], optimizer))
        if "reference" in saved and reference is not None:
            load_parts(reference, saved["reference"])
        return int(saved["step"]), int(saved["num_tokens"])


def find_weights(name, *folders):
    """The path of the first weights with this name, a folder or a .pth, in any of the folders.

    If there are none, the path they would have in the last folder, for the error message.
    """
    for folder in folders:
        for path in (Path(folder) / name, Path(folder) / f"{name}.pth"):
            if path.is_file() or (path / "config.json").is_file():
                return path
    return Path(folders[-1]) / name
