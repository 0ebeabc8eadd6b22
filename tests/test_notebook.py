"""The notebook: its functions are the script's, its cells run, its saved outputs show it learn."""
import ast
import json
import re

import pytest
import torch

from conftest import ROOT

SCRIPT = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
NOTEBOOK = (ROOT / "grpo_in_ten_cells.ipynb").read_text(encoding="utf-8")
CELLS = [cell for cell in json.loads(NOTEBOOK)["cells"] if cell["cell_type"] == "code"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
PASTED = {"nanstd", "group_advantages", "completion_mask", "token_logps", "kl_penalty",
          "importance_ratio", "ppo_clip", "as_one_action", "grpo_loss"}


def functions(source):
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)}


def test_the_pasted_functions_are_the_scripts():
    ours, theirs = functions("\n".join(SOURCES)), functions(SCRIPT)
    assert ours.keys() & theirs.keys() == PASTED
    for name in PASTED:
        assert ours[name] == theirs[name], f"paste {name} into the notebook again"
    rows = re.findall(r'^    "\w+": +\(?.*lambda.*', SOURCES[4] + SOURCES[6], re.M)
    assert len(rows) == 10 and all(row in SCRIPT for row in rows)


@pytest.mark.usefixtures("one_thread")
def test_every_cell_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MPLBACKEND", "agg")
    sizes, names = "STEPS, PROMPTS, HELDOUT = ", {}
    few = [re.sub(f"^{sizes}.*", f"{sizes}2, 4, 40", source, flags=re.M) for source in SOURCES]
    for number, source in enumerate(few[:8], start=1):
        exec(compile(source, f"cell {number}", "exec"), names)
    G, advantages, best, worst = (names[name] for name in ("G", "advantages", "best", "worst"))
    assert names["by_hand"] == pytest.approx(advantages.tolist(), abs=1e-4)
    torch.testing.assert_close(names["logps"], names["group"].sampling_logps, atol=1e-3, rtol=0)
    torch.testing.assert_close(names["gradient"].sum(1), -advantages / G)
    moved = (names["after"] - names["logps"]).sum(1)
    assert moved[best] > 0 > moved[worst]
    for number, source in enumerate(few[8:], start=9):
        exec(compile(source, f"cell {number}", "exec"), names)
    steps, shares = zip(*names["curve"])
    assert steps == (0, 2) and 0.05 < shares[0] < 0.6
    assert len(names["axes"].lines[0].get_xdata()) == 2
    names["plt"].close("all")


def test_the_saved_outputs_show_accuracy_climb():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, 11))
    assert all(cell["outputs"] for cell in CELLS)
    assert {output["output_type"] for cell in CELLS for output in cell["outputs"]} <= {
        "stream", "display_data"}
    printed = "".join("".join(output.get("text", "")) for output in CELLS[8]["outputs"])
    curve = [int(share) for share in re.findall(r"accuracy (\d+)%", printed)]
    assert len(curve) == 9 and curve[0] < 40 and min(curve[-3:]) > 80
    assert any("image/png" in output.get("data", ()) for output in CELLS[9]["outputs"])


def test_the_file_tells_nothing_of_the_machine_that_ran_it():
    assert not re.search(r"/(tmp|home|root|Users|opt)\b|site-packages|\d{4}-\d\d-\d\dT", NOTEBOOK)
    assert not any(cell["metadata"] for cell in CELLS)
