"""What a run reads, by its contents: a resume goes on only with the same.

A file that has moved is the same. {what: a hash or a number}, where `what` names the flag.
"""
import hashlib
import json
from pathlib import Path

import torch

from dataset.jsonl import read_lines
from errors import UserError
from model.load import local_path, read_tensors, read_weights

SMALL_FILES = ".json", ".jinja", ".txt", ".model"      # of a tokenizer, and configurations


def what_is_read(args, num_problems, prompts_per_step):
    """{what: value} of the weights, tokenizers and data that the flags name, and of their order."""
    found = {"--seed": args.seed, "the prompts of a step, over all ranks": prompts_per_step,
             "the number of prompts in --data_path": num_problems}
    for flag, path in vars(args).items():
        if flag.endswith("_path") and path:
            for part, value in contents(path).items():
                found[f"{part} of --{flag}"] = value
    return found


def contents(path):
    """{part: hash} of a file of rows, a .pth, or a folder with weights or a tokenizer."""
    path, suffix = local_path(path), Path(path).suffix
    if path.is_file() and suffix != ".pth":
        rows = (json.dumps(row, sort_keys=True).encode() for _, row in read_lines(path))
        return {"the rows": hashed(rows)}
    if path.is_file():
        return {"the weights": hashed(bytes_of(read_tensors(path)))}
    if not path.is_dir():           # a pipe, which can be read only once
        return {}
    found = {file.name: hashed([file.read_bytes()]) for file in sorted(path.iterdir())
             if file.suffix in SMALL_FILES and file.name[0] != "." and "index" not in file.name}
    if any(file.suffix in (".safetensors", ".bin") for file in path.iterdir()):
        found["the weights"] = hashed(bytes_of(read_weights(path)))
    return found


def bytes_of(tensors):
    """Names, dtypes and numbers of tensors, in whatever files and order they are."""
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        yield f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
        yield memoryview(tensor.flatten().view(torch.uint8).numpy())


def hashed(parts):
    """A hash of bytes; of those in Python this one is the fastest, 1 s for 1.5 GB."""
    found = hashlib.sha1(usedforsecurity=False)
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]


def refuse_another(saved, now):
    """UserError if a run that has read `saved` would now read something else."""
    for what, was in saved.items():
        if now.get(what) != was:
            raise UserError(f"--resume: {what} was {was} when this run was started, and is "
                            f"{now.get(what, 'missing')} now; bring back what it was, or start "
                            "another run with another --run_name")
