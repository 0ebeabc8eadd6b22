"""The script: by default nearly all of what one reads runs, and it needs none of its options."""
import ast
import trace  # tests/trace.py

import pytest
from test_run import assert_same_weights, measured

import train_grpo
from run import extensions
from support import ROOT

SMALL = ["--batch_size", "2", "--num_generations", "4", "--max_gen_len", "24", "--eval_samples",
         "8", "--device", "cpu", "--dtype", "float32"]
ROOMS = ["errors", "dataset", "model", "reward", "run", "train_grpo"]     # the ground first

pytestmark = pytest.mark.usefixtures("one_thread")


def imported(path):
    """The full names of the modules, and of what is imported from them, in a file."""
    package, names = path.relative_to(ROOT).with_suffix("").parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def test_imports_run_one_way():
    """So no extension imports the script, which runs as __main__ and would be loaded twice."""
    found, paths = {}, [*ROOT.glob("*.py"), *(
        path for room in ROOMS[1:-1] for path in ROOT.glob(f"{room}/**/*.py"))]
    for path in paths:
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in ROOMS:
            above = [*ROOMS[ROOMS.index(room) + 1:], "lab"]     # the trainer imports none of it
            found[path] = {name for name in imported(path) if name.partition(".")[0] in above}
    assert len(found) > 40 and not any(found.values()), found


def test_what_is_read_is_what_runs():
    found = trace.measure()
    assert len(found["above"]) <= 8 and found["token_logps"] == []
    assert len(found["names"]) <= 10, found["names"]
    for name, most in (("lines to the end of main", 360), ("lines of the script", 560),
                       ("parameters of grpo_loss", 10), ("lines before a tensor", 2)):
        assert found[name] <= most, name


def test_a_run_is_the_same_without_the_options_that_it_does_not_use(tmp_path, monkeypatch):
    for name in ("whole", "bare"):
        train_grpo.main([*SMALL, "--max_steps", "2", "--eval_interval", "0", "--out_dir",
                         str(tmp_path), "--run_name", name])
        # The script itself fills in the defaults of these two.
        monkeypatch.setattr(extensions, "EXTENSIONS", [extensions.losses, extensions.advantages])
    assert measured(tmp_path / "whole") == measured(tmp_path / "bare")
    assert_same_weights(tmp_path / "whole/final", tmp_path / "bare/final")
