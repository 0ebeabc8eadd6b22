"""The script: what of it runs (by default not all, see below), and that it knows none of its edges.

Of the statements above the end of main, raises aside, a default run left out 34 of 172 when this
was written. Three runs together leave out only those that are named below.
"""
import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from conftest import ROOT, jsonl

SMALL = ["--batch_size", "2", "--num_generations", "4", "--max_gen_len", "24", "--eval_samples",
         "8", "--device", "cpu", "--dtype", "float32"]
ROOMS = ["errors", "dataset", "model", "reward", "run", "train_grpo"]     # the ground first
EDGES = sorted(path.stem for path in ROOT.glob("run/edges/[!_]*.py"))
SCRIPT = ROOT / "train_grpo.py"

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


def sources():
    return [path for path in [*ROOT.glob("*.py"), *(
        path for room in ROOMS[1:-1] for path in ROOT.glob(f"{room}/**/*.py"))]
        if path.relative_to(ROOT).parts[0].removesuffix(".py") in ROOMS]


def test_imports_run_one_way():
    found = {}
    for path in sources():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        above = ROOMS[ROOMS.index(room) + 1:]
        found[path] = {name for name in imported(path) if name.partition(".")[0] in above}
    assert len(found) > 40 and not any(found.values()), found


def test_nothing_but_the_script_imports_an_edge_and_no_edge_another():
    for path in sources():
        names = {name for name in imported(path)
                 for edge in EDGES if re.match(rf"run\.edges\.{edge}\b", name)}
        assert bool(names) == (path == SCRIPT), (path, names)
    assert {edge.__name__ for edge in train_grpo.EDGES} == {f"run.edges.{edge}" for edge in EDGES}
    assert {name for edge in train_grpo.EDGES for name in edge.EXCLUDES} <= {*EDGES}


def test_no_flag_of_an_edge_is_named_in_the_script():
    parser, text = train_grpo.errors.Parser(), SCRIPT.read_text(encoding="utf-8")
    for edge in train_grpo.EDGES:
        edge.add_flags(parser)
    flags = [action.dest for action in parser._actions if action.dest != "help"]
    assert len(flags) >= 11
    # `kl_in_reward` is also the name of its module, which stands in the list and its import.
    assert [flag for flag in flags if re.search(rf"--{flag}\b|\.{flag}\b", text)] == []
    assert [flag for flag in flags if flag not in EDGES and flag in text] == []


# --- without edges --------------------------------------------------------------------------------


def trained(folder, script=SCRIPT, steps=2):
    """The metrics without clocks, and the weights, of a short run by a script."""
    subprocess.run([sys.executable, script, *SMALL, "--max_steps", str(steps), "--eval_interval",
                    "0", "--out_dir", folder, "--run_name", "short"], check=True,
                   stdout=subprocess.DEVNULL)
    rows = [{name: value for name, value in row.items()
             if not re.match("timing|step_time|perf", name)}
            for row in jsonl(Path(folder, "short/metrics.jsonl"))]
    return rows, load_file(Path(folder, "short/final/model.safetensors"))


def test_the_default_run_is_the_same_where_all_edges_are_deleted(tmp_path):
    copy = tmp_path / "copy"
    for name in ROOMS[1:-1]:
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "errors.py", copy)
    for edge in EDGES:
        (copy / f"run/edges/{edge}.py").unlink()
    text = SCRIPT.read_text(encoding="utf-8")
    text, imports = re.subn(r"from run\.edges import \([^)]*\)\n", "", text)
    text, lists = re.subn(r"\nEDGES = \[[^]]*\]\n", "\nEDGES = []\n", text)
    assert imports == lists == 1
    (copy / "train_grpo.py").write_text(text, encoding="utf-8")
    (rows, weights), (bare_rows, bare_weights) = (
        trained(tmp_path / name, script) for name, script in (
            ("whole", SCRIPT), ("bare", copy / "train_grpo.py")))
    assert rows == bare_rows and len(rows) == 2
    assert all(torch.equal(weight, bare_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("edge", EDGES)
def test_a_run_needs_no_single_edge(edge, tmp_path, monkeypatch):
    others = [other for other in train_grpo.EDGES if other.__name__ != f"run.edges.{edge}"]
    assert len(others) == len(EDGES) - 1
    monkeypatch.setattr(train_grpo, "EDGES", others)
    train_grpo.main([*SMALL, "--max_steps", "2", "--eval_interval", "0", "--out_dir",
                     str(tmp_path), "--run_name", "short"])
    assert len(jsonl(tmp_path / "short/metrics.jsonl")) == 2


# --- which statements run -------------------------------------------------------------------------

# Above the end of main these statements, and no others, run in none of the three runs below. First
# what no reader would look for there: switches of one to three lines, rows of tables, --eval_only.
EXCEPTED = {
    'where["delta"] = (ratio > delta) & (advantages < 0)',
    "loss = torch.where(advantages < 0, torch.min(loss, -delta * advantages), loss)",
    "total = (entropy * part.mask).sum()",
    'loss = loss - args.entropy_coef * total / max(1, minibatch.totals["num_tokens"])',
    "return x.pow(2) / 2",                      # k2
    'if level == "sequence":',                  # an importance_sampling_level
    "return (log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()",
    "world.print_json(evaluate(t, heldout, collate, steps_done)[0])",
    "return world.close()",
}
RARE = {            # at most 12
    'difference = objective.choice(BASELINES, advantage_estimator, "advantage_estimator")(groups)',
    'scale = objective.choice(SCALES, scale_rewards, "scale_rewards")(groups, batch_std, eps)',
    "batch_std = nanstd(torch.tensor(world.gather(rollout.returns.tolist())))",
    "return chosen(",                           # a whole loss
    "return []",                                # no rank has a reward
    "is_read = kept & rollout.advantages.view(len(kept), -1).any(1)",       # without a KL
    "is_read = torch.ones_like(kept)",          # with --shard
    "change(rollout)",                          # of an edge, before and after the advantages
    "metrics.append(change(part, logps))",      # before the loss
    "change(step)",                             # after the step
}


def statements():
    """{line: statement} of the functions of the script, to the end of main; no raises."""
    tree, found = ast.parse(SCRIPT.read_text(encoding="utf-8")), {}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        if function.lineno <= functions["main"].lineno:
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and node is not function and not isinstance(
                        node, ast.Raise) and not (isinstance(node, ast.Expr) and isinstance(
                            node.value, ast.Constant)):
                    found[node.lineno] = node
    return found


def test_every_statement_above_the_end_of_main_runs(tmp_path):
    seen = set()

    def of_script(frame, event, argument):
        if frame.f_code.co_filename != train_grpo.__file__:
            return None
        seen.add(frame.f_lineno)
        return of_script

    sys.settrace(of_script)
    try:
        for flags in ([], ["--sampler", "plain", "--num_minibatches", "2"],
                      ["--max_steps", "3", "--resume"]):
            train_grpo.main([*SMALL, "--max_steps", "2", "--out_dir", str(tmp_path), "--run_name",
                             "plain" if "plain" in flags else "fast", *flags])
    finally:
        sys.settrace(None)
    source = SCRIPT.read_text(encoding="utf-8").splitlines()
    missed = {source[line - 1].strip() for line, node in statements().items() if not any(
        line <= one <= node.end_lineno for one in seen)}
    assert sorted(missed) == sorted(EXCEPTED | RARE) and len(RARE) <= 12
