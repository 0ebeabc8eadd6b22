"""Output folders: a program writes into a new folder of its own, so it can't overwrite anything."""
from itertools import chain, count
from pathlib import Path

from errors import UserError


def new_folder(path, flag):
    """Creates the folder that a flag names, which must be new or empty. Returns its full path."""
    path = Path(path).absolute()
    if not is_free(path):
        raise UserError(f"{flag} {path.name}: {path} exists and is not empty; choose another name, "
                        "or delete it")
    path.mkdir(parents=True, exist_ok=True)
    return path


def is_free(path, written=("*",)):
    """Returns True if the path doesn't exist, or is a folder without a file of these patterns."""
    if path.is_dir():
        return not any(chain.from_iterable(path.glob(pattern) for pattern in written))
    return not path.exists() and not path.is_symlink()


def numbered(path, written=("*",)):
    """Yields those of path, path_2, path_3, ... that are free."""
    for place in count(1):
        one = path if place == 1 else path.with_name(f"{path.name}_{place}")
        if is_free(one, written):
            yield one


def write_whole(path, text):
    """Writes a temporary file and then renames it, so that `path` is never half written."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(f"{text}\n", encoding="utf-8")
    aside.replace(path)
