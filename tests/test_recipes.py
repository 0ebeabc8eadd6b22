"""docs/recipes.md: its files and diffs do what the page says, alone and together."""
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pages import PAGES, blocks, commands_of
from support import ROOT, jsonl, write
from train_grpo import GRPO, World

BLOCKS = blocks(PAGES["docs/recipes.md"])
DIFFS = [code for language, code in BLOCKS if language == "diff"]
FILES = {re.match(r"# (\w+\.py)\n", code)[1]: code for language, code in BLOCKS
         if language == "python"}
COMMANDS = [words[2:] for words in commands_of(PAGES["docs/recipes.md"])
            if words[0] == "python" and words[1].endswith(".py")]
FLAGS = """--max_steps 3 --batch_size 2 --num_generations 4 --eval_samples 4 --eval_interval 0
    --device cpu --dtype float32 --reward_funcs accuracy opinion:opinion --reward_weights 8 0 --seed
    3 --eval_reward_funcs all:right --loss_type smooth:smooth_clip
    --advantage_estimator median:above_median""".split()
IN_A_COPY = b"""
import json, sys, types
from unittest.mock import MagicMock, Mock
import torch, train_grpo
import after, behind, echo, hopeful, restarts
from reward import reward_model
from run.report import picture

torch.set_num_threads(1)
flags, *commands = json.loads(sys.argv[1])
args = [train_grpo.parse_args(command) for command in commands][-1]
state = MagicMock(reference=None, world=train_grpo.World("cpu"), eval_funcs=[None], args=args)
said = ["7", "5", "5.0", "5", "7", "5", "", "", "7", "cat", "dog", ""]      # right: 5, 7, 7, dog
state.generate().own_words = [f"<answer>{text}</answer>" for text in said]
state.generate().lengths, right = torch.ones(12), torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0])
state.compute_rewards.side_effect = [(torch.zeros(4), {}), (right.float(), {})]
found = {"maj@3": train_grpo.evaluate.evaluate(state, [{}] * 4, Mock(), 0)[0]["eval/maj@3"]}

class All(after.AfterUpdates, hopeful.Hopeful, restarts.Restarts, echo.Echo):
    pass

class Delayed(behind.OneStepBehind, All):       # apart: its resume drops a rollout
    pass

reward_model.load_reward_model = Mock(wraps=reward_model.load_reward_model)
board = Mock()          # in the place of TensorBoard's, which need not be installed
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=board)
sys.modules["all"] = types.SimpleNamespace(right=lambda completions, **_: [1.0] * len(completions))
picture.draw_curves = lambda folders, path: path.touch()        # to draw takes longer than a run
found["steps"] = []
for trainer, run, *more in ((All, "all", "--eval_interval", "2"), (All, "all", "--resume"),
                            (Delayed, "delayed")):
    train_grpo.main([*flags, "--run_name", run, *more], trainer=trainer)
    found["steps"].append(torch.load(f"out/{run}/checkpoint/optimizer.pt")["step"])
found["models"] = reward_model.load_reward_model.call_count
found["board"] = [args[2] for _, args, _ in board.mock_calls if args[:1] == ("reward",)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the program above finds in a copy with all files and diffs; each diff applies alone."""
    copy = tmp_path_factory.mktemp("recipes") / "copy"
    for name in ("dataset", "model", "reward", "run", "errors.py", "train_grpo.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    hard, easy = ({"prompt": f"What is {problem}?", "answer": eval(problem)}
                  for problem in ("31 + 7 - 21 + 37", "(13 + 11)*6"))
    write(copy / "dataset/train.jsonl", [hard, hard, hard, easy] * 10)
    for name, code in FILES.items():
        (copy / name).write_text(code, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    for check in (["--check"], []):
        for diff in DIFFS:
            subprocess.run(["git", "apply", *check], cwd=copy, input=diff.encode(), check=True)
    given = json.dumps([FLAGS, *COMMANDS, ["--num_generations_eval", "3"]])
    printed = subprocess.check_output([sys.executable, "-", given], cwd=copy, input=IN_A_COPY)
    return json.loads(printed.splitlines()[-1]) | {"out": copy / "out"}


def of_page(name):
    """The function or class of this name on the page."""
    code, = (code for code in FILES.values() if re.search(rf"^(def|class) {name}\b", code, re.M))
    names = {"__name__": "recipe"}
    exec(code, names)
    return names[name]


def test_recipes_of_losses_and_advantages_by_hand():
    ratios = torch.tensor([[0.3], [-0.3], [0.3]]).exp()         # completions of one token
    A, up, down = torch.tensor([[1.0], [1], [-1]]), math.exp(0.3), math.exp(-0.3)
    for width in (0.2, 0.5):
        loss, _ = of_page("smooth_clip")(ratios, A, None, None, width=width)
        smooth = 1 + width * math.tanh((up - 1) / width)
        assert loss.flatten().tolist() == pytest.approx([-smooth, -down, up])
    rewards = torch.tensor([1.0, 2, 9, 4, math.nan, 1, 7, 5])   # medians 3 and 5
    found = of_page("above_median")(rewards, 4)
    assert found.tolist() == [-2, -1, 6, 1, 0, -4, 2, 0]
    logps = torch.tensor([[0.75, 0.65, 0.05, 0.15]]).log()      # 0.75 and 0.05: too far from 0.4
    for sign in (1.0, -1.0):
        loss, _ = of_page("ipo")((logps - math.log(0.4)).exp(), torch.tensor([[sign]]), logps, None)
        assert loss[0].tolist() == pytest.approx([0, -1.625 * sign, 0, -0.375 * sign])


def test_recipes_of_classes_by_hand(monkeypatch):
    def bare(name, **fields):
        made = object.__new__(of_page(name))
        vars(made).update(fields)
        return made

    monkeypatch.setattr(GRPO, "compute_loss", lambda *_: (1, {}))
    part = SimpleNamespace(num_sequences=4, extra={"tool": torch.tensor([[0, 1, 1], [0, 0, 0]])})
    loss, metrics = bare("Echo").compute_loss(
        part, torch.tensor([[-1.0, -2, -4], [-1, -1, -1]]), None)
    assert loss.item() == pytest.approx(1 + 0.05 * (6 / 2) / 4)
    assert metrics["tools/cross_entropy"].value() == 6 / 2

    numbers = itertools.count(1)
    monkeypatch.setattr(GRPO, "generate", lambda *_: next(numbers))
    behind = bare("OneStepBehind")      # two at first; the third call is an evaluation
    assert [behind.generate({}, None, G) for G in (None, None, 8, None)] == [2, 1, 4, 3]

    monkeypatch.setattr(GRPO, "step", lambda self, batch, step, lr: lr)
    restarts = bare("Restarts", args=SimpleNamespace(max_steps=8, learning_rate=1))
    rates = [restarts.step({}, step, 0.5) for step in range(1, 9)]
    assert rates == pytest.approx([0.55, 0.1] * 4)

    monkeypatch.setattr(GRPO, "update_policy", lambda *_: {})
    logps = iter(torch.tensor([[[-1.0, -2], [-3, 0]], [[-1.1, -1.8], [-3, 9]]]))
    after = bare("AfterUpdates", world=World("cpu"), policy=None,
                 compute_logps=lambda *_: next(logps))
    rollout = SimpleNamespace(loss_mask=torch.tensor([[1, 1], [1, 0]]))
    kl = sum(math.exp(d) - 1 - d for d in (-0.1, 0.2, 0.0)) / 3
    assert after.update_policy(rollout)["kl_after_updates"] == pytest.approx(kl, rel=1e-4)


def test_recipes_all_in_one_run_that_stops_early_and_resumes(found):
    assert len(DIFFS) == 3 and len(FILES) == 9
    assert found["maj@3"] == 2 / 4      # 5 = 5.0, and 7, the only answer; but not 5, and not cat
    rows = jsonl(found["out"] / "all/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and found["steps"] == [2, 3, 3]
    for step, row in enumerate(rows, start=1):          # the share is not lost on the resume
        share = 0.25 + 0.05 * sum(row["reward"] > 2 for row in rows[:step])
        assert row["curriculum/share"] == pytest.approx(share), step
        assert row["kl_after_updates"] > 0, step
    assert rows[1]["curriculum/share"] > 0.25
    assert found["models"] == 1 and found["board"] == [1, 2, 3] * 2
    assert "eval/maj@2" in jsonl(found["out"] / "all/eval.jsonl")[-1]
    asked = [row["prompt"] for row in jsonl(found["out"] / "all/completions.jsonl")]
    assert all("(13 + 11)*6" in prompt for prompt in asked[:8])         # by step 1
    args = json.loads((found["out"] / "all/args.json").read_text())
    assert args["trainer"] == "All" and (found["out"] / "all/final/model.safetensors").exists()


def test_recipe_behind_trains_each_rollout_a_step_later_with_the_ratio_to_its_sampler(found):
    now, behind = ([row["prompt"] for row in jsonl(found["out"] / f"{run}/completions.jsonl")]
                   for run in ("all", "delayed"))
    assert behind[:24] == now[:8] + now[:16]
    drift = [abs(row["ppo_kl"]) for row in jsonl(found["out"] / "delayed/metrics.jsonl")]
    assert drift[0] < 1e-6 and min(drift[1:]) > 1e-5, drift
