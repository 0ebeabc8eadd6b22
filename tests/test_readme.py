"""The README's changes and its task of one's own: each applies and runs as printed."""
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT


def changes(language):
    """The section's diffs; each is [(file, lines of a hunk), ...]."""
    text = (ROOT / language).read_text(encoding="utf-8")
    diffs = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    return [[(hunk.partition("\n")[0].strip(), hunk.partition("\n")[2].splitlines())
             for hunk in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]] for diff in diffs]


def apply(hunk, folder):
    name, lines = hunk
    before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
    after = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
    file = folder / name
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text.count(before) == 1 or not text, f"{name} does not hold these lines once:\n{before}"
    file.write_text(text.replace(before, after) if text else after, encoding="utf-8")


@pytest.mark.parametrize("language", ["README.md", "README_zh.md"])
def test_a_change_is_at_most_ten_lines_in_at_most_two_places(language):
    found = changes(language)
    assert len(found) == 4
    for diff in found:
        assert len(diff) <= 2
        assert sum(line.startswith(("+", "-")) for _, lines in diff for line in lines) <= 10, diff


def test_both_languages_show_the_same_changes():
    assert changes("README.md") == changes("README_zh.md")


def test_the_changes_apply_and_train(tmp_path):
    for name in ("dataset", "model", "report", "reward"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train_grpo.py", tmp_path)
    for diff in changes("README.md"):
        for hunk in diff:
            apply(hunk, tmp_path)
    process = subprocess.run(
        [sys.executable, "train_grpo.py", "--max_steps", "2", "--batch_size", "4",
         "--num_generations", "4", "--max_gen_len", "64", "--eval_interval", "0", "--loss_type",
         "sqrt", "--advantage_estimator", "median", "--reward_funcs", "accuracy",
         "brevity:brevity"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "brevity" in process.stdout and (tmp_path / "out/grpo_reason_128/final").is_dir()


def own_task(language):
    """The section's code blocks: sorting.py, sorting.txt, the commands."""
    text = (ROOT / language).read_text(encoding="utf-8")
    python, = re.findall(r"```python\n(import json\nimport random\n.*?)```", text, re.DOTALL)
    flags, = re.findall(r"```text\n(--model_path out/sorting_sft\n.*?)```", text, re.DOTALL)
    commands, = re.findall(r"```bash\n(python sorting.py\n.*?)```", text, re.DOTALL)
    return python, flags, commands


def test_both_languages_show_the_same_task():
    assert own_task("README.md") == own_task("README_zh.md")


def test_the_task_of_ones_own_runs(tmp_path):
    for name in ("dataset", "model", "report", "reward"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train_grpo.py", tmp_path)
    python, flags, commands = own_task("README.md")
    (tmp_path / "sorting.py").write_text(python)
    (tmp_path / "sorting.txt").write_text(flags)
    # The same commands, of fewer steps.
    commands = commands.replace("--steps 400", "--steps 2")
    commands = commands.replace("@sorting.txt", "@sorting.txt --max_steps 2 --eval_samples 8")
    for command in commands.replace("\\\n", "").splitlines():
        process = subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path,
                                 capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    assert "held-out accuracy" in process.stdout and (tmp_path / "out/sorting/final").is_dir()
