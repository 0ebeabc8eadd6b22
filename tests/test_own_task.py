"""The page about changes and a task of one's own: each applies and runs as printed."""
import re
import shutil
import subprocess
import sys

from test_docs import ENGLISH, blocks

from conftest import ROOT


def changes():
    """The diffs of the page about changes; each is [(file, lines of a hunk), ...]."""
    page, = (text for text in ENGLISH.values() if "--- brevity.py\n" in text)
    return [[(hunk.partition("\n")[0].strip(), hunk.partition("\n")[2].splitlines())
             for hunk in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]]
            for kind, diff in blocks(page) if kind == "diff"]


def apply(hunk, folder):
    name, lines = hunk
    before = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
    after = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
    file = folder / name
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    assert text.count(before) == 1 or not text, f"{name} does not hold these lines once:\n{before}"
    file.write_text(text.replace(before, after) if text else after, encoding="utf-8")


def test_a_change_is_at_most_ten_lines_in_at_most_two_places():
    assert len(changes()) == 4
    for diff in changes():
        assert len(diff) <= 2
        assert sum(line.startswith(("+", "-")) for _, lines in diff for line in lines) <= 10, diff


def copy_of_the_code(folder):
    for name in ("dataset", "model", "report", "reward"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "train_grpo.py", folder)


def test_the_changes_apply_and_train(tmp_path):
    copy_of_the_code(tmp_path)
    for diff in changes():
        for hunk in diff:
            apply(hunk, tmp_path)
    process = subprocess.run(
        [sys.executable, "train_grpo.py", "--max_steps", "2", "--batch_size", "4",
         "--num_generations", "4", "--max_gen_len", "64", "--eval_interval", "0", "--loss_type",
         "sqrt", "--advantage_estimator", "median", "--reward_funcs", "accuracy",
         "brevity:brevity"], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "brevity" in process.stdout and (tmp_path / "out/grpo_reason_128/final").is_dir()


def own_task():
    """The blocks of the task of one's own: sorting.py, sorting.txt, the commands."""
    for start in ("import json\nimport random\n", "--model_path out/sorting_sft\n",
                  "python sorting.py\n"):
        code, = (code for text in ENGLISH.values() for _, code in blocks(text)
                 if code.startswith(start))
        yield code


def test_the_task_of_ones_own_runs(tmp_path):
    copy_of_the_code(tmp_path)
    python, flags, script = own_task()
    (tmp_path / "sorting.py").write_text(python)
    (tmp_path / "sorting.txt").write_text(flags)
    # The same commands, of fewer steps.
    script = script.replace("--steps 400", "--steps 2")
    script = script.replace("@sorting.txt", "@sorting.txt --max_steps 2 --eval_samples 8")
    for command in script.replace("\\\n", "").splitlines():
        process = subprocess.run([sys.executable, *command.split()[1:]], cwd=tmp_path,
                                 capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    assert "held-out accuracy" in process.stdout and (tmp_path / "out/sorting/final").is_dir()
