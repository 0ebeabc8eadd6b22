"""The script: by default nearly all of what one reads runs, and it needs none of its options."""
import ast
import trace  # tests/trace.py

import pytest
from test_extensions import FLAGS
from test_objective import DEVIATIONS, DIVISORS, FAMILY
from test_real_weights import FAMILIES
from test_run import assert_same_weights, measured

import train_grpo
from model import load
from reward import baselines, functions
from run import extensions
from run.extensions import losses
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
    for name, most in (("lines to the end of main", 370), ("lines of the script", 560),
                       ("parameters of grpo_loss", 10), ("lines before a tensor", 2)):
        assert found[name] <= most, name


def test_a_run_is_the_same_without_the_options_that_it_does_not_use(tmp_path, monkeypatch):
    for name in ("whole", "bare"):
        train_grpo.main([*SMALL, "--max_steps", "2", "--eval_interval", "0", "--out_dir",
                         str(tmp_path), "--run_name", name])
        # The script itself fills in the defaults of these two.
        monkeypatch.setattr(extensions, "EXTENSIONS", {
            extensions.advantages: extensions.advantages.OtherAdvantages,
            extensions.losses: extensions.losses.OtherLoss})
    assert measured(tmp_path / "whole") == measured(tmp_path / "bare")
    assert_same_weights(tmp_path / "whole/final", tmp_path / "bare/final")


BY_LOOP = {one.get("loss_type", "grpo") for one in FAMILY}
BOUNDS, AVERAGES = zip(*(losses.LOSS_TYPES[name] for name in BY_LOOP - {"r1"}))


@pytest.mark.parametrize("table, rows, tested, line", [
    ("POLICY_LOSSES or LOSS_AGGREGATIONS", [*losses.POLICY_LOSSES, *losses.LOSS_AGGREGATIONS],
     BOUNDS + AVERAGES, "a row of LOSS_TYPES that has ROW, and it to FAMILY in test_objective.py"),
    ("LOSS_TYPES", losses.LOSS_TYPES, BY_LOOP,
     '{"loss_type": "ROW"} to FAMILY in test_objective.py, and its formula to loop_loss'),
    ("KL_TYPES", losses.KL_TYPES, {one.get("kl_type", "k3") for one in FAMILY},
     '{"kl_type": "ROW", "beta": 1} to FAMILY in test_objective.py, its formula to loop_loss'),
    ("BASELINES", baselines.BASELINES, DEVIATIONS, '"ROW": [...] to DEVIATIONS, test_objective.py'),
    ("SCALES", baselines.SCALES, {scale for scale, *_ in DIVISORS} | {"mean"},    # test_maxrl_...
     '("ROW", None, what it divides by) to DIVISORS in test_objective.py'),
    ("RULES", functions.RULES, {"accuracy", "repetition", "reasoning_gym"},
     'a test of its function to test_rewards.py, and "ROW" to this test'),
    ("FAMILIES", [name.removesuffix("ForCausalLM") for name, _ in load.FAMILIES.values()],
     dict(FAMILIES.values()), '"any name": ("ROW", {}) to FAMILIES in test_real_weights.py'),
    ("EXTENSIONS", [one.__name__.rpartition(".")[2] for one in extensions.EXTENSIONS], FLAGS,
     '"ROW": "the flags that switch it on" to FLAGS in test_extensions.py')])
def test_a_test_touches_every_row_of_a_table(table, rows, tested, line):
    for row in rows:
        assert row in tested, f"no test touches {row} of {table}: add {line.replace('ROW', row)}"
