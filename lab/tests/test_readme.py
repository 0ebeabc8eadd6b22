"""The READMEs: what their example shows is so, and each of their numbers stands elsewhere."""
import re
from math import prod
from statistics import mean, median

import pytest
import torch
from safetensors import safe_open
from transformers import pipeline

from dataset.jsonl import read_jsonl
from lab.experiments.__main__ import RESULTS
from pages import PAGES, blocks, tables, without_blocks
from reward.functions import accuracy_reward
from run.extensions.losses import KL_TYPES
from support import POLICY, ROOT
from train_grpo import format_reward, group_advantages, tag_reward

pytestmark = pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
REWARDS = format_reward, tag_reward, accuracy_reward


def as_sampled(text):
    return text.strip("`").replace("⏎ ", "\n")


def test_readme_has_the_answer_of_the_initial_weights_and_a_right_one(page):
    text, _ = [code for kind, code in blocks(PAGES[page]) if kind == "text"]
    question, *replies = text.splitlines()
    before, after = (as_sampled(line.split(maxsplit=1)[1]) for line in replies)
    chat = pipeline("text-generation", str(POLICY))
    (reply,) = chat([{"role": "user", "content": question}], max_new_tokens=96, do_sample=False)
    assert reply["generated_text"][-1]["content"] == before
    assert accuracy_reward([""] * 2, [before, after], answer=["288"] * 2) == [0, 1]


def test_example_of_the_readme_has_the_rewards_and_advantages_of_its_answers(page):
    rows = [row for table in tables(PAGES[page]) for row in table if len(row) == 4]
    answers = [as_sampled(row[1]) for row in rows]
    rewards = sum(torch.tensor(f([""] * 4, answers, answer=["288"] * 4)) for f in REWARDS)
    assert [float(row[2]) for row in rows] == rewards.tolist()
    advantages = group_advantages(rewards, 4).tolist()
    assert [float(row[3]) for row in rows] == pytest.approx(advantages, abs=1e-3)
    assert f"(r - {rewards.mean():g}) / {rewards.std():g}" in PAGES[page]
    assert [f([""], answers[1:2], answer=["288"]) for f in REWARDS] == [[0.5], [1], [1]]


def lines(*places):
    return sum(len(path.read_text(encoding="utf-8").splitlines())
               for place in places for path in ROOT.glob(place))


def from_code():
    rooms = [f"{room}/**/*.py" for room in ("run", "reward", "model", "dataset")]
    whole = lines("train_grpo.py", "errors.py", *rooms)
    with safe_open(POLICY / "model.safetensors", "pt") as file:
        parameters = sum(prod(file.get_slice(name).get_shape()) for name in file.keys())
    return {str(lines("train_grpo.py")), str(lines("docs/grpo_on_one_page.py")),
            f"{round(whole, -3):,}", f"{parameters / 1e6:.1f}M",
            f"{round(parameters / 1e4, -1):.0f}"}       # Chinese counts in ten thousands


def from_results():
    """Of all default runs: accuracy at both ends, in percent, the last step, minutes."""
    runs = read_jsonl(RESULTS / "default.jsonl")
    found = {str(len(runs)), f"{runs[0]['eval']['step'][-1]:.0f}"}
    for name in ("eval/accuracy", "eval/greedy_accuracy"):
        begins, ends = zip(*((run["eval"][name][0], run["eval"][name][-1]) for run in runs))
        found |= {f"{100 * mean(begins):.0f}", f"{100 * mean(ends):.1f}"}
    minutes = sorted(run["seconds"] / 60 for run in runs)
    return found | {f"{minutes[0]:.1f}", f"{median(minutes):.1f}", f"{minutes[-1]:.0f}"}


def from_pages():
    """Of measurements that are reported on other pages, and of lists of which all is counted."""
    practice, models = PAGES["docs/in_practice.md"], PAGES["docs/real_models.md"]
    speedups = [float(row[4]) for table in tables(practice) for row in table
                if re.search(r"\bstep", row[0]) and len(row) == 6]
    on_gpus = re.findall(r"TRL [\d.]+\d, .*?between ([\d.]+) and ([\d.]+) seconds", " ".join(
        practice.split()))[0]
    for start in ("the default run", "a step of 64"):
        rows = [row for table in tables(practice) for row in table if row[0].startswith(start)]
        on_gpus += *re.findall(r"\d[\d.]*", " ".join(row[0] + row[-1] for row in rows)),
    trained = next(row for table in tables(models) for row in table if row[0] == "mean of three")
    museum = PAGES["docs/museum.md"].count("**Caught by**")
    versions = re.findall(r"(?:TRL|verl) ([\d.]+\d)", PAGES["docs/coming_from.md"])
    accuracy = next(row for table in tables(PAGES["docs/watching.md"]) for row in table
                    if "accuracy_reward" in row[0])         # at steps 1 and 30
    ends = [f"{float(end):.1f}" for end in re.findall(r"[\d.]+", " ".join(accuracy[2:]))]
    (python,) = re.findall(r"requires-python = .>=([\d.]+)", (
        ROOT / "lab/check_grpo/pyproject.toml").read_text(encoding="utf-8"))
    return {*map(str, (min(speedups), max(speedups), museum)), *on_gpus, *versions,
            *trained[1].split(" → "), *re.findall(r"A (\d+) GB card", models), *ends, python}


def test_numbers_of_the_readme_are_those_of_code_results_and_other_pages(page):
    text = re.sub(r"`[^`]*`|\(\S+\)", "", without_blocks(PAGES[page]))
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\| \d \|", line))
    others = {"2026", "11", "0.5", "1", "1.75"}         # a date; the example's rewards, see above
    found = {*re.findall(r"(?<![\w.-])-?\d+(?:,\d{3})*(?:\.\d+)*M?(?![\w-]|\.\d)", text)}
    example = " ".join(row[1] for table in tables(PAGES[page]) for row in table if len(row) == 4)
    assert found - from_code() - from_results() - from_pages() - others - {
        *re.findall(r"\d+", example)} == set()


def test_readme_counts_losses_kl_estimators_and_recipes(page):
    losses = [row for table in tables(PAGES["docs/losses.md"]) for row in table
              if len(row) == 5 and row[3].startswith("`--")]
    recipes = re.findall(r"^## \d+\.", PAGES["docs/recipes.md"], re.MULTILINE)
    assert (len(losses), len(KL_TYPES), len(recipes)) == (11, 5, 11)
    words = {"README.md": ("eleven variants", "five KL estimators", "eleven changes"),
             "README_zh.md": ("十一种变体", "五种 KL 估计", "十一种改法")}
    assert all(word in PAGES[page] for word in words[page])
