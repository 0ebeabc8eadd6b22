"""The spine: what one reads in train_grpo.py is what runs, and options take its places alone."""
import ast
import trace  # tests/trace.py
from dataclasses import replace

import pytest
from test_run import assert_same_weights, measured

import train_grpo
from conftest import ROOT
from run import extensions
from train_grpo import BOUND, Rollout, World

SMALL = ["--batch_size", "2", "--num_generations", "4", "--max_gen_len", "24", "--eval_samples",
         "8", "--device", "cpu", "--dtype", "float32"]
ROOMS = ["errors", "dataset", "model", "reward", "run", "train_grpo"]     # the ground first
NAMES = {one.__name__.rpartition(".")[2] for one in extensions.EXTENSIONS}

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
            above = ROOMS[ROOMS.index(room) + 1:]
            found[path] = {name for name in imported(path) if name.partition(".")[0] in above}
    assert len(found) > 40 and not any(found.values()), found


def test_what_is_read_is_what_runs():
    found = trace.measure()
    assert len(found["above"]) <= 8 and found["token_logps"] == []
    assert len(found["names"]) <= 10, found["names"]
    for name, most in (("lines to the end of main", 360), ("lines of the script", 560),
                       ("parameters of grpo_loss", 10), ("lines before a tensor", 2)):
        assert found[name] <= most, name


# --- options --------------------------------------------------------------------------------------


def loaded(*flags):
    return train_grpo.load(train_grpo.parse_args([*SMALL, *flags]), World("cpu"))


def test_without_options_all_functions_are_the_scripts_and_two_runs_do_not_meet():
    first, second = loaded("--loss_type", "dapo", "--oversample", "2"), loaded()
    assert second.changed == {} and second.grpo_loss is train_grpo.grpo_loss
    for name in BOUND:
        bound = getattr(second, name)
        assert bound.func is getattr(train_grpo, name) and bound.args == (second,)
    assert first.changed.keys() == {"grpo_loss", "update_policy"}
    assert first.grpo_loss is not second.grpo_loss and first.num_prompts == 2 * second.num_prompts


def test_options_that_wrap_one_function_do_so_in_the_declared_order():
    flags = """--ref_model_sync_steps 1 --oversample 2 --mask_truncated_completions
        --off_policy_mask_threshold 0.5 --sampler_correction token_mask --entropy_coef 0.1
        --kl_in_reward --scale_rewards none --loss_type bnpo"""
    assert loaded(*flags.split()).changed == {name: [
        f"{how} (run/extensions/{module}.py)" for how, module in by] for name, by in {
            "grpo_loss": [("replaced by --loss_type, --kl_type", "losses"),
                          ("wrapped by --kl_in_reward", "kl_in_reward")],
            "compute_advantages": [
                ("replaced by --scale_rewards, --advantage_estimator", "advantages"),
                ("wrapped by --kl_in_reward", "kl_in_reward")],
            "compute_loss": [("wrapped by --entropy_coef", "entropy"),
                             ("wrapped by --sampler_correction", "correction"),
                             ("wrapped by --off_policy_mask_threshold", "correction")],
            "update_policy": [("wrapped by --mask_truncated_completions", "truncated"),
                              ("wrapped by --oversample", "oversample"),
                              ("wrapped by --ref_model_sync_steps", "moving_reference")],
        }.items()}
    assert {name for one in extensions.EXTENSIONS for name in getattr(one, "EXCLUDES", ())} <= NAMES


def test_mistyped_hooks_and_fields_fail_and_no_wrapper_is_undone():
    state = loaded()
    for attach in (state.wrap, state.replace):
        with pytest.raises(AttributeError, match="compute_los"):
            attach("--mine", compute_los=print)
        with pytest.raises(AttributeError):
            attach("--mine", token_logps=print)         # a field, but no function of a step
    with pytest.raises(AttributeError):
        state.every_row_has_gradients = True
    for one in (Rollout, train_grpo.Policy):
        with pytest.raises(AttributeError):
            object.__new__(one).completions_mask = None
    state.wrap("--first", compute_loss=lambda inner, state, part: inner(part) + [state.step])
    with pytest.raises(RuntimeError, match="--second would undo .* wrapped by --first"):
        state.replace("--second", compute_loss=print)
    other = replace(state, compute_loss=lambda state, part: [part])     # a state of its own
    other.wrap("--last", compute_loss=lambda inner, state, part: [state.step, *inner(part)])
    other.step = 3
    assert other.compute_loss(7) == [3, 7]


def test_a_run_is_the_same_without_the_options_that_it_does_not_use(tmp_path, monkeypatch):
    for name in ("whole", "bare"):
        train_grpo.main([*SMALL, "--max_steps", "2", "--eval_interval", "0", "--out_dir",
                         str(tmp_path), "--run_name", name])
        # The script itself fills in the defaults of these two.
        monkeypatch.setattr(extensions, "EXTENSIONS", [extensions.losses, extensions.advantages])
    assert measured(tmp_path / "whole") == measured(tmp_path / "bare")
    assert_same_weights(tmp_path / "whole/final", tmp_path / "bare/final")
