"""The page about changes and a task of one's own: each applies and runs as printed."""
import importlib.util
import runpy
import shlex
import shutil
import sys
from collections import defaultdict

from test_docs import ENGLISH, blocks

import train_grpo
from conftest import ROOT

BLOCKS = defaultdict(list)      # of the page, by language
for language, text in blocks(ENGLISH["docs/own_task.md"]):
    BLOCKS[language].append(text)


def apply(name, lines, folder):
    before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
    after = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
    file = folder / name
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text.count(before) == 1 or not text, f"{name} does not hold these lines once:\n{before}"
    file.write_text(text.replace(before, after) if text else after, encoding="utf-8")


def test_the_changes_apply_and_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = shutil.copy(ROOT / "train_grpo.py", tmp_path)
    assert len(BLOCKS["diff"]) == 4
    for diff in BLOCKS["diff"]:
        for hunk in diff.split("--- ")[1:]:
            name, *lines = hunk.splitlines()
            apply(name, lines, tmp_path)
    spec = importlib.util.spec_from_file_location("changed_grpo", script)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    changed.main(f"--model_path {ROOT}/model/weights/reason_128 --max_steps 2 --batch_size 4 "
                 f"--data_path {ROOT}/dataset/train.jsonl --num_generations 4 --max_gen_len 64 "
                 "--loss_type sqrt --advantage_estimator median "
                 "--reward_funcs accuracy brevity:brevity".split())
    assert "brevity" in capsys.readouterr().out


def test_the_task_of_ones_own_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (module,), (flags,), (_, script) = (BLOCKS[name] for name in ("python", "text", "bash"))
    # The same commands, of fewer numbers and steps.
    for count, fewer in (("8000", "400"), ("11_500", "500"), ("12_000", "520")):
        module = module.replace(count, fewer)
    (tmp_path / "sorting.py").write_text(module)
    (tmp_path / "sorting.txt").write_text(flags)
    script = script.replace("--steps 400", "--steps 2").replace("\\\n", "")
    for command in script.splitlines():
        program, *arguments = shlex.split(command)[1:]
        if program == "train_grpo.py":
            train_grpo.main([*arguments, "--max_steps", "2", "--eval_samples", "8"])
        elif program == "-m":
            monkeypatch.setattr(sys, "argv", arguments)
            runpy.run_module(arguments[0], run_name="__main__")
        else:
            runpy.run_path(program, run_name="__main__")
    assert "held-out accuracy" in capsys.readouterr().out
    assert (tmp_path / "out/sorting/final").is_dir()
