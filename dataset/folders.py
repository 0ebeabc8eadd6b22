"""Marks output folders, so that each program writes only into its own folders."""
import json
from contextlib import suppress
from pathlib import Path

from errors import UserError

MARK = ".minigrpo.json"     # in each such folder: {"by": what made it, "id": of a run, ...}
VERSIONED = {".git", ".hg", ".svn"}
# For runs of older versions, without marks: fields of args.json, and files that a run saved.
OF_A_RUN = {"num_generations", "reward_funcs", "run_name"}
SAVED = [f"{folder}/{name}" for folder in ("checkpoint", "final", "adapter") for name in (
    "model.safetensors", "config.json", "generation_config.json", "optimizer.pt", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja", "adapter_model.safetensors",
    "adapter_config.json")]


def mark_of(folder):
    """Returns the mark that `claim` has written into the folder, a dict, or {} without a mark."""
    for name, fields in ((MARK, {"by"}), ("args.json", OF_A_RUN)):
        with suppress(OSError, ValueError, AttributeError):     # missing, or not a JSON object
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            if fields <= found.keys():
                return found if name == MARK else {"by": "train_grpo.py", "saved": SAVED}
    return {}


def claim(folder, by, args):
    """Creates a folder for the program `by`, and marks it so that no other program writes there.

    The folder must be new, empty, or already marked by the same program. It must not contain a
    marked folder, be inside a marked folder, or contain an input file that is named in `args`.
    Otherwise, a UserError is raised. Returns the folder's resolved absolute path.
    """
    folder = Path(folder).resolve()
    for what in obstacles(folder, by, args):
        raise UserError(f"{folder} {what}; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if not mark_of(folder):
        write_whole(folder / MARK, json.dumps({"by": by}))
    return folder


def obstacles(folder, by, args):
    """Yields each reason why the program `by` can't use the folder, for an error message."""
    if folder.exists() and not folder.is_dir():
        yield "is a file"
    for flag, value in vars(args).items():
        for path in value if isinstance(value, list) else [value]:
            is_input = isinstance(path, Path) and flag != "save" or flag.endswith("_path")
            if is_input and path and Path(path).resolve().is_relative_to(folder):
                yield f"holds --{flag} {path}, which {by} would replace"
    mark = mark_of(folder)
    others = [path.name for path in sorted(folder.glob("*")) if path.name != ".lock" and (
        mark.get("by") != by or path.name in VERSIONED or path.is_symlink())]
    if others:
        yield f"holds {', '.join(others[:3])}, which {by} did not write"
    inner = {file.parent for name in (MARK, "args.json") for file in folder.rglob(name)} - {folder}
    for how, places in (("is in", folder.parents), ("holds", inner)):
        for place in filter(mark_of, places):
            yield f"{how} {place}, a folder of {mark_of(place)['by']}"


def write_whole(path, text):
    """Writes a temporary file and then renames it, so that `path` is never half written."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(f"{text}\n", encoding="utf-8")
    aside.replace(path)
