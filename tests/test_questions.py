"""docs/questions.md: its small numbers are what the code computes.

That the Chinese page has the same ones is test_docs.py's to check.
"""
import re

import pytest
import torch

from conftest import ROOT
from train_grpo import grpo_loss, kl_penalty

PAGE = (ROOT / "docs/questions.md").read_text(encoding="utf-8")


def row(start):
    """The cells of the table row that begins so."""
    line, = re.findall(rf"^\| {re.escape(start)}.*", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def numbers(text):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", text)]


def test_the_loss_is_0_and_its_gradient_is_not(capsys):
    code, = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    value, *gradient = numbers(capsys.readouterr().out)
    promised, *promised_gradient = numbers(code.split("#")[-1])
    assert abs(value) < 1e-6 and abs(promised) < 1e-6
    assert gradient == pytest.approx(promised_gradient, abs=1e-4)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_the_estimates_of_the_kl(kl_type):
    logits = torch.zeros(2, requires_grad=True)                     # pi = (0.5, 0.5)
    logps, reference = logits.log_softmax(-1), torch.tensor([0.9, 0.1]).log()
    estimate = kl_penalty(logps, reference, kl_type=kl_type)
    mean = (estimate * logps.exp().detach()).sum()
    mean.backward()
    _, values, of_mean, gradient, _ = row(kl_type)[-5:]
    assert estimate.tolist() == pytest.approx(numbers(values), abs=6e-3)
    assert mean.item() == pytest.approx(numbers(of_mean)[0], abs=6e-4)
    assert logits.grad[0].item() == pytest.approx(numbers(gradient)[0], abs=6e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "r1"])
def test_the_weight_of_a_token(loss_type):
    mask = (torch.arange(40) < torch.tensor([[10], [40]])).int()
    logps = torch.full((2, 40), -1.0, requires_grad=True)
    loss, _ = grpo_loss(logps, logps.detach(), torch.tensor([1.0, -1.0]), mask,
                        loss_type=loss_type, max_completion_length=96)
    loss.backward()
    right, wrong = (numbers(cell)[-1] for cell in row(f"`{loss_type}`")[1:3])
    assert -logps.grad[0, 0].item() == pytest.approx(right, abs=6e-5)
    assert logps.grad[1, 0].item() == pytest.approx(wrong, abs=6e-5)
