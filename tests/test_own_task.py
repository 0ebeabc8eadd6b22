"""The page about changes and a task of one's own: each applies and runs as printed."""
import re
import shutil
import subprocess
import sys
from collections import defaultdict

import pytest
from test_docs import ENGLISH, blocks

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


@pytest.fixture
def python(tmp_path):
    """Runs Python with these arguments in a copy of the code, at tmp_path; returns its output."""
    for name in ("dataset", "model", "report", "reward"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train_grpo.py", tmp_path)

    def run(arguments):
        process = subprocess.run([sys.executable, *arguments.split()], cwd=tmp_path,
                                 capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run


def test_the_changes_are_short_apply_and_train(python, tmp_path):
    assert len(BLOCKS["diff"]) == 4
    for diff in BLOCKS["diff"]:
        hunks = re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]
        assert len(hunks) <= 2 and len(re.findall(r"^[-+](?!--)", diff, re.MULTILINE)) <= 10, diff
        for hunk in hunks:
            name, *lines = hunk.splitlines()
            apply(name, lines, tmp_path)
    printed = python("train_grpo.py --max_steps 2 --batch_size 4 --num_generations 4 "
                     "--max_gen_len 64 --eval_interval 0 --loss_type sqrt "
                     "--advantage_estimator median --reward_funcs accuracy brevity:brevity")
    assert "brevity" in printed and (tmp_path / "out/grpo_reason_128/final").is_dir()


def test_the_task_of_ones_own_runs(python, tmp_path):
    (module,), (flags,), (_, script) = (BLOCKS[name] for name in ("python", "text", "bash"))
    (tmp_path / "sorting.py").write_text(module)
    (tmp_path / "sorting.txt").write_text(flags)
    # The same commands, of fewer steps.
    script = script.replace("--steps 400", "--steps 2")
    script = script.replace("@sorting.txt", "@sorting.txt --max_steps 2 --eval_samples 8")
    for command in script.replace("\\\n", "").splitlines():
        printed = python(command.removeprefix("python "))
    assert "held-out accuracy" in printed and (tmp_path / "out/sorting/final").is_dir()
