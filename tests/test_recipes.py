"""docs/recipes.md: its files and diffs do what the page says, alone and together."""
import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from pages import PAGES, blocks, commands_of
from support import ROOT, jsonl, write

BLOCKS = blocks(PAGES["docs/recipes.md"])
DIFFS = [code for language, code in BLOCKS if language == "diff"]
FILES = {re.match(r"# (\w+\.py)\n", code)[1]: code for language, code in BLOCKS
         if language == "python"}
COMMANDS = [words[2:] for words in commands_of(PAGES["docs/recipes.md"])
            if words[0] == "python" and words[1].endswith(".py")]
FLAGS = """--max_steps 4 --batch_size 2 --num_generations 4 --eval_samples 8 --eval_interval 0
    --device cpu --dtype float32 --reward_funcs accuracy opinion:opinion --reward_weights 8 0 --seed
    3 --eval_reward_funcs all:right --loss_type smooth:smooth_clip
    --advantage_estimator median:above_median""".split()
IN_A_COPY = b"""
import itertools, json, math, os, sys, types
from unittest.mock import MagicMock, Mock
import torch, train_grpo
import after, behind, echo, hopeful, ipo, median, restarts, smooth
from reward import reward_model
from run.report import picture

torch.set_num_threads(1)
flags, *commands = json.loads(sys.argv[1])
args = [train_grpo.parse_args(command) for command in commands][-1]
one = torch.tensor([[0.3], [-0.3], [0.3]]).exp()        # ratios of completions of one token
A = torch.tensor([[1.0], [1], [-1]])
found = {"loss": [smooth.smooth_clip(one, A, None, None, **options)[0].mean().item()
                  for options in ({}, {"width": 0.5})]}
rewards = torch.tensor([1.0, 2, 9, 4, torch.nan, 1, 7, 5])
found["median"] = median.above_median(rewards, 4).tolist()

logps, old = torch.tensor([[0.75, 0.65, 0.05, 0.15]]).log(), math.log(0.4)
found["ipo"] = [ipo.ipo((logps - old).exp(), torch.tensor([[A]]), logps, None)[0][0].tolist()
                for A in (1.0, -1.0)]

right, train_grpo.GRPO.compute_loss = train_grpo.GRPO.compute_loss, lambda *_: (1, {})
part = Mock(num_sequences=4, extra={"tool": torch.tensor([[0, 1, 1], [0, 0, 0]])})
loss, metrics = object.__new__(echo.Echo).compute_loss(
    part, torch.tensor([[-1.0, -2, -4], [-1, -1, -1]]), None)
found["echo"] = [loss.item(), metrics["tools/cross_entropy"].value().item()]
train_grpo.GRPO.compute_loss = right
right, train_grpo.GRPO.generate = train_grpo.GRPO.generate, Mock(side_effect=itertools.count(1))
own = object.__new__(behind.OneStepBehind)
found["behind"] = [own.generate({}, None, G) for G in (None, None, 8, None)]
train_grpo.GRPO.generate = right

class All(after.AfterUpdates, hopeful.Hopeful, restarts.Restarts, echo.Echo):
    pass

class Delayed(behind.OneStepBehind, All):       # apart: its resume drops a rollout
    pass

own = object.__new__(All)
own.args = types.SimpleNamespace(max_steps=8, learning_rate=1)
right, train_grpo.GRPO.step = train_grpo.GRPO.step, lambda self, batch, step, lr: lr
found["rates"] = [own.step({}, step, 0.5) for step in range(1, 9)]
train_grpo.GRPO.step = right
own.world, own.policy, rollout = train_grpo.World("cpu"), None, Mock()
rollout.loss_mask = rollout.completion_mask = torch.tensor([[1, 1], [1, 0]])
rollout.extra = {}
own.compute_logps = Mock(side_effect=torch.tensor(
    [[[-1.0, -2], [-3, 0]], [[-1.1, -1.8], [-3, 9]]]))
right, train_grpo.GRPO.update_policy = train_grpo.GRPO.update_policy, lambda self, rollout: {}
found["kl"] = own.update_policy(rollout)["kl_after_updates"]
train_grpo.GRPO.update_policy = right
state = MagicMock(reference=None, world=train_grpo.World("cpu"), eval_funcs=[None], args=args)
said = ["7", "5", "5.0", "5", "7", "5", "", "", "7", "cat", "dog", ""]      # right: 5, 7, 7, dog
state.generate().own_words = [f"<answer>{text}</answer>" for text in said]
state.generate().lengths, right = torch.ones(12), torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0])
state.compute_rewards.side_effect = [(torch.zeros(4), {}), (right.float(), {})]
found["maj@3"] = train_grpo.evaluate.evaluate(state, [{}] * 4, Mock(), 0)[0]["eval/maj@3"]

reward_model.load_reward_model = Mock(wraps=reward_model.load_reward_model)
board = Mock()          # in the place of TensorBoard's, which need not be installed
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=board)
sys.modules["all"] = types.SimpleNamespace(right=lambda completions, **_: [1.0] * len(completions))
picture.draw_curves = lambda folders, path: path.touch()        # to draw takes longer than a run
for run, *more in (["whole"], ["parts", "--eval_interval", "2"], ["parts", "--resume"]):
    train_grpo.main([*flags, "--run_name", run, *more], trainer=All)
    saved = torch.load(f"out/{run}/checkpoint/optimizer.pt")
    found[" ".join([run, *more])] = (saved["step"], saved["curriculum"]["share"],
                                     os.path.exists(f"out/{run}/final/model.safetensors"))
train_grpo.main([*flags, "--run_name", "delayed"], trainer=Delayed)
found["models"] = "opinion" in sys.modules and reward_model.load_reward_model.call_count
found["board"] = [args[2] for _, args, _ in board.mock_calls if args[:1] == ("reward",)]
found["trainer"] = json.load(open("out/whole/args.json"))["trainer"]
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


def test_their_functions_return_numbers_worked_out_by_hand(found):
    up, down = math.exp(0.3), math.exp(-0.3)
    assert found["loss"] == pytest.approx([
        (up - down - 1 - width * math.tanh((up - 1) / width)) / 3 for width in (0.2, 0.5)])
    rises, falls = found["ipo"]                     # 0.75 and 0.05 are too far from 0.4
    assert falls == pytest.approx([0, 1.625, 0, 0.375]) == [-loss for loss in rises]
    assert found["echo"] == pytest.approx([1 + 0.05 * (6 / 2) / 4, 6 / 2])
    assert found["behind"] == [2, 1, 4, 3]      # two at first; the third call is an evaluation
    assert found["median"] == [-2, -1, 6, 1, 0, -4, 2, 0]           # from 3, and from 5
    assert found["rates"] == pytest.approx([0.55, 0.1] * 4)
    kl = sum(math.exp(d) - 1 - d for d in (-0.1, 0.2, 0.0)) / 3
    assert found["kl"] == pytest.approx(kl, rel=1e-4)
    assert found["maj@3"] == 2 / 4      # 5 = 5.0, and 7, the only answer; but not 5, and not cat


def test_a_run_with_all_of_them_stops_early_and_goes_on(found):
    assert len(DIFFS) == 3 and len(FILES) == 9 and found["trainer"] == "All"
    whole, parts = (jsonl(found["out"] / run / "metrics.jsonl") for run in ("whole", "parts"))
    shares, rewards = zip(*((row["curriculum/share"], row["reward"]) for row in whole))
    for step, share in enumerate(shares, start=1):
        assert share == pytest.approx(0.25 + 0.05 * sum(reward > 2 for reward in rewards[:step]))
    assert [(row["curriculum/share"], row["reward"]) for row in parts] == [*zip(shares, rewards)]
    assert found["parts --eval_interval 2"] == [2, shares[1], True]      # checkpoint/, final/
    assert found["parts --resume"] == found["whole"] == [4, shares[3], True]
    assert found["models"] == 1 and found["board"] == [1, 2, 3, 4] * 3
    assert "eval/maj@2" in jsonl(found["out"] / "parts/eval.jsonl")[-1]
    assert all(row["kl_after_updates"] > 0 for row in whole + parts)
    asked = [row["prompt"] for row in jsonl(found["out"] / "whole/completions.jsonl")]
    assert all("(13 + 11)*6" in prompt for prompt in asked[:8])         # by step 1


def test_behind_trains_each_rollout_a_step_later_with_the_ratio_to_its_sampler(found):
    prompts = [[row["prompt"] for row in jsonl(found["out"] / f"{run}/completions.jsonl")]
               for run in ("whole", "delayed")]
    assert prompts[1][:24] == prompts[0][:8] + prompts[0][:16]
    drift = [abs(row["ppo_kl"]) for row in jsonl(found["out"] / "delayed/metrics.jsonl")]
    assert drift[0] < 1e-6 and min(drift[1:]) > 1e-5, drift
