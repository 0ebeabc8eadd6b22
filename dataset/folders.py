"""Whose a folder is: a run, or a command that makes weights, writes only into one of its own."""
import json
import os
import uuid
from pathlib import Path

from errors import UserError

MARK = ".minigrpo.json"     # in each of ours: {"by": what made it, "id": of this run of it, ...}
VERSIONED = {".git", ".hg", ".svn"}
# Before there were marks: what args.json has, and what a run has saved.
OF_A_RUN = {"num_generations", "reward_funcs", "run_name"}
SAVED = ["model.safetensors", "config.json", "generation_config.json", "optimizer.pt",
         "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         "adapter_model.safetensors", "adapter_config.json"]


def mark_of(folder):
    """What a claim has left in the folder; None in a folder that is not ours."""
    for name, fields in ((MARK, {"by", "id"}), ("args.json", OF_A_RUN)):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and fields <= found.keys():
            of_old = dict.fromkeys(("checkpoint", "final", "adapter"), SAVED)
            return found if name == MARK else {"by": "train_grpo.py", "id": None, **of_old}
    return None


def claim(folder, by, args):
    """Makes the folder and marks it as made by this program, which may replace what it wrote there.

    It must be new, empty, or have this program's mark; and no marked folder may be around it or in
    it, nor a file that a flag in args names. UserError says what is there instead. Returns the
    folder without links.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a new folder")
    for flag, value in vars(args).items():
        for path in value if isinstance(value, list) else [value]:
            is_input = isinstance(path, Path) and flag != "save" or flag.endswith("_path")
            if is_input and path and Path(path).resolve().is_relative_to(folder):
                raise UserError(f"--{flag} {path} is in {folder}, where {by} would replace it; "
                                "choose another folder")
    for outer in folder.parents:
        if mark_of(outer):
            raise UserError(f"{folder} is in {outer}, which is {mark_of(outer)['by']}'s; choose a "
                            "folder elsewhere")
    there = {*os.listdir(folder)} - {".lock"} if folder.exists() else set()     # of a failed start
    mark = mark_of(folder)
    if there and (mark is None or mark["by"] != by or there & VERSIONED):
        raise UserError(f"{folder} holds {', '.join(sorted(there)[:3])}, which {by} has not "
                        "written; choose a new folder")
    for name in there:
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a link to something else; remove the link, or "
                            "choose a new folder")
    for inner in {file.parent for name in (MARK, "args.json") for file in folder.rglob(name)}:
        if inner != folder and mark_of(inner):
            raise UserError(f"{folder} holds {inner}, which is {mark_of(inner)['by']}'s; move it "
                            "away, or choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if mark is None:
        write_mark(folder, new_mark(by))
    return folder


def new_mark(by):
    return {"by": by, "id": uuid.uuid4().hex[:12]}


def write_mark(folder, mark):
    """Marks the folder; returns the mark's id."""
    write_whole(folder / MARK, json.dumps(mark))
    return mark["id"]


def write_whole(path, text):
    """Write a file so that it is never half there: aside, then renamed."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(f"{text}\n", encoding="utf-8")
    aside.replace(path)
