"""docs/check_grpo.py: right losses of any style give no BUG, mutants are called by their name."""
import json
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import train_grpo
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from check_grpo import check  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


# --- right losses, as other people write them -----------------------------------------------------


def returns_a_tuple(old_log_probs, log_probs, advantages, response_mask, cliprange=None,
                    ref_log_probs=None, kl_coef=0.0):
    def masked_mean(x):
        return (x * response_mask).sum() / response_mask.sum()

    moved = log_probs - old_log_probs
    losses = -advantages * moved.exp(), -advantages * moved.exp().clamp(1 - cliprange,
                                                                        1 + cliprange)
    gap = ref_log_probs - log_probs
    clipfrac = masked_mean((losses[1] > losses[0]).double())
    loss = masked_mean(torch.max(*losses)) + kl_coef * masked_mean(torch.exp(gap) - gap - 1)
    return loss, clipfrac


class IsAModule(nn.Module):
    def __init__(self, clip_eps=0.3):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, log_probs, old_log_probs, ref_log_probs, advantages, action_mask):
        r = (log_probs - old_log_probs).exp()
        gain = torch.minimum(r * advantages, r.clip(1 - self.clip_eps, 1 + self.clip_eps)
                             * advantages)
        loss = 0.04 * (log_probs - ref_log_probs) - gain
        return ((loss * action_mask).sum(1) / action_mask.sum(1)).mean()


def returns_a_dict(new_logprobs, behavior_logprobs, ref_logprobs, adv, loss_mask, kl_weight=0.0):
    rho = torch.exp(new_logprobs - behavior_logprobs)
    kl = 0.5 * (new_logprobs - ref_logprobs).square()
    gain = torch.min(rho * adv[:, None], rho.clamp(0.8, 1.28) * adv[:, None])
    n = loss_mask.sum()
    return {"kl": (kl * loss_mask).sum() / n, "loss": ((kl_weight * kl - gain) * loss_mask).sum() / n}


def loss_of_each_token(logp, old_logp, advantages, mask):
    r, a = torch.exp(logp - old_logp.detach()), advantages.unsqueeze(-1)
    return torch.maximum(-a * r, -a * r.clamp(0.8, 1.2)) / len(mask)


def selects_by_mask(logprobs, old_logprobs, advantages, attention_mask, epsilon_max=5.0):
    keep = attention_mask.bool()
    lp, old, a = logprobs[keep], old_logprobs[keep], advantages[keep]       # A: (N, R)
    return -((lp - old).exp().clamp(max=epsilon_max).detach() * a * lp).mean()


def dual_clip(logprobs, logprobs_old, advantages, mask, num_items_in_batch=None):
    r = (logprobs - logprobs_old).masked_fill(~mask, 0.0).exp()
    a = advantages.reshape(-1, 1)
    loss = torch.where(a > 0, -r.clamp(max=1.2) * a, -r.clamp(0.8, 3.0) * a)
    return (loss * mask).sum() / (num_items_in_batch or mask.sum())


def sequence_ratio(logps, old_logps, advantages, mask, eps_low=3e-4, eps_high=4e-4):
    s = (((logps - old_logps) * mask).sum(-1) / mask.sum(-1)).exp()
    return -torch.min(s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages).mean()


def without_pi_old(lp, adv, mask):
    total = 0.0
    for row, a, kept in zip(lp, adv.tolist(), mask.tolist()):
        total = total - a * sum(x * w for x, w in zip(row, kept)) / sum(kept)
    return total / len(mask)


def masks_the_ratio(logps, rollout_logps, advantages, mask, low=0.5, high=2.0):
    r = (logps - rollout_logps).exp().detach()
    weight = torch.where((r < low) | (r > high), 0.0, r)
    return -(weight * logps * advantages[:, None] * mask).sum() / mask.sum()


RIGHT = [
    (returns_a_tuple, {"average": "all tokens", "ratio": "token", "bound": "0.2 and 0.2",
                       "KL": "k3"}),
    (IsAModule(), {"average": "GRPO", "ratio": "token", "bound": "0.3 and 0.3", "KL": "k1"}),
    (returns_a_dict, {"average": "all tokens", "bound": "0.2 and 0.28", "KL": "k2"}),
    (loss_of_each_token, {"average": "sum over tokens, then of completions",
                          "bound": "0.2 and 0.2"}),
    (selects_by_mask, {"average": "all tokens", "bound": "at most 5"}),
    (dual_clip, {"average": "all tokens", "bound": "dual clip at 3"}),
    (sequence_ratio, {"average": "GRPO", "ratio": "GSPO", "bound": "0.0003 and 0.0004"}),
    (without_pi_old, {"average": "GRPO", "ratio": "none", "KL": "none"}),
    (masks_the_ratio, {"average": "all tokens", "bound": "0.5 to 2"}),
]
ppo, by_row = {"ratio": "token", "bound": "0.2 and 0.2"}, {"average": "GRPO"}
OURS = [
    ({"loss_type": "grpo", "beta": 0.1}, ppo | by_row | {"KL": "k3"}),
    ({"loss_type": "bnpo", "kl_type": "k2"}, ppo | {"average": "all tokens", "KL": "k2"}),
    ({"loss_type": "dr_grpo", "kl_type": "k1"}, ppo | {"average": "L = 50", "KL": "k1"}),
    ({"loss_type": "dapo", "epsilon_high": 0.28, "kl_type": "abs"},
     {"average": "all tokens", "bound": "0.2 and 0.28", "KL": "abs"}),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"bound": "at most 6"}),
    ({"loss_type": "dppo"}, {"bound": "DPPO"}),
    ({"loss_type": "sapo"}, by_row | {"bound": "tau 1 and 1.05"}),
    ({"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}, {"bound": "GMPO"}),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"},
     {"ratio": "GSPO", "average": "sum over tokens, then of completions"}),
    ({"importance_sampling_level": "sequence"}, by_row | {"ratio": "GSPO"}),
    ({"loss_type": "r1"}, {"ratio": "product"}),
    ({"delta": 2.0, "kl_type": "k3+"}, {"bound": "dual clip at 2", "KL": "k3+"}),
    ({"use_bias_correction_kl": True}, {"KL": "k3", "KL times ratio": "yes"}),
]


@pytest.mark.parametrize("loss, facts", RIGHT + [
    (partial(train_grpo.grpo_loss, **options), facts) for options, facts in OURS])
def test_a_right_loss_gives_no_bug_and_its_conventions(loss, facts):
    report = check(loss)
    assert (report.bugs, report.questions) == ([], []), str(report)
    for name, text in facts.items():
        assert text in report.facts[name], str(report)


# --- mutants --------------------------------------------------------------------------------------

A = """
def loss(logps, old_logps, advantages, mask, ref_logps, beta=0.1, eps=0.2):
    A = advantages[:, None]
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - eps, 1 + eps)
    policy = -torch.min(ratio * A, clipped * A)
    x = ref_logps - logps
    kl = torch.exp(x) - x - 1
    rows = ((policy + beta * kl) * mask).sum(1) / mask.sum(1).clamp(min=1)
    return rows.mean()
"""
B = """
def loss(new_lp, behav_lp, reference_lp, adv, completion_mask, kl_coef=0.1):
    assert completion_mask.dtype == torch.bool
    a = adv.unsqueeze(-1).expand_as(new_lp)
    r = (new_lp - behav_lp).exp()
    gain = torch.where(a > 0, r.clamp(max=1.28), r.clamp(min=0.8)) * a
    dist = new_lp - reference_lp
    cost = (kl_coef * 0.5 * dist ** 2 - gain).masked_select(completion_mask)
    return cost.sum() / completion_mask.sum()
"""
C = """
def loss(logps, old_logps, advantages, mask):
    weight = (logps - old_logps).exp().clamp(max=5.0).detach()
    return -(weight * advantages[:, None] * logps * mask).sum() / mask.sum()
"""
BUGS = [        # of which loss, the old and the new text, and what the mutant must be called
    (A, "-torch.min", "torch.min", "sign"),
    (B, "return cost", "return -cost", "sign"),
    (A, "logps - old_logps", "old_logps - logps", "sign"),
    (C, "logps - old_logps", "old_logps - logps", "ratio upside down"),
    (A, "logps - old_logps", "logps - ref_logps", "ratio to the reference"),
    (A, "logps - old_logps", "logps.detach() - old_logps", "no gradient"),
    (B, ".exp()", ".exp().detach()", "no gradient"),
    (A, "logps - old_logps", "logps - logps.detach()", "no ratio"),
    (C, "weight * adv", "adv", "no ratio"),
    (A, "-torch.min", "-torch.max", "max for min"),
    (B, "a > 0", "a < 0", "max for min"),
    (A, "-torch.min(ratio * A, clipped * A)", "-clipped * A", "no min"),
    (A, "1 - eps, 1 + eps", "-eps, eps", "good side dead"),
    (A, "= advantages[", "= advantages.clamp(min=0)[", "bad side dead"),
    (A, "= advantages[", "= advantages.flip(0)[", "another row's advantage"),
    (C, "advantages[", "advantages.roll(1)[", "another row's advantage"),
    (A, "= advantages[", "= advantages.abs()[", "sign"),
    (A, "= advantages[", "= (advantages - advantages.mean())[", "normalised again"),
    (B, "= adv.", "= (adv / adv.std()).", "normalised again"),
    (A, ") * mask)", "))", "padding trained"),
    (B, ".masked_select(completion_mask)", "", "padding trained"),
    (A, "* mask)", "* mask.roll(1, 1))", "padding trained"),
    (A, "((policy + beta * kl) * mask)", "(policy * mask + beta * kl)",
     "padding trained under the KL"),
    (A, "rows.mean()", "(rows / logps.sum(1).detach().abs()).mean()", "padding read"),
    (A, ") * mask).sum(1)", ")[:, :-1] * mask[:, 1:]).sum(1)", "EOS left out"),
    (A, ") * mask).sum(1)", ")[:, :-1] * mask[:, :-1]).sum(1)", "EOS left out"),
    (A, ") * mask).sum(1)", ")[:, 1:] * mask[:, 1:]).sum(1)", "mask shifted"),
    (A, "rows.mean()", "rows[:-1].mean()", "rows mixed"),
    (A, "clamp(min=1)", "clamp(min=1).roll(1)", "rows mixed"),
    (A, "kl = torch.exp(x) - x - 1", "kl = torch.exp(x) - x", "KL not 0"),
    (A, "x = ref_logps - logps", "x = logps - ref_logps", "KL reversed"),
    (B, "0.5 * dist ** 2", "(dist.exp() - dist - 1)", "KL reversed"),
    (A, "policy + beta", "policy - beta", "KL sign"),
    (A, "= ref_logps - logps", "= ref_logps - logps.detach()", "KL without gradient"),
    (B, "dist ** 2", "dist.detach() ** 2", "KL without gradient"),
    (A, "beta * kl", "kl", "beta ignored"),
    (A, "beta * kl", "0 * kl", "reference ignored"),
    (B, "0.5 * dist", "dist", "KL scaled"),
    (A, "beta * kl", "beta * kl * mask.sum(1, keepdim=True)", "KL average"),
    (A, ".clamp(min=1)", "", "empty row"),
]
CONVENTIONS = [
    (A, "rows.mean()", "rows.sum()", "average"),
    (A, ".sum(1) / mask.sum(1).clamp(min=1)", ".sum(1)", "average"),
    (A, "mask.sum(1).clamp(min=1)", "64", "average"),
    (B, "completion_mask.sum()", "completion_mask.numel()", "average"),
    (B, " / completion_mask.sum()", "", "average"),
    (A, "torch.exp(x) - x - 1", "x ** 2 / 2", "KL"),
    (B, "max=1.28", "max=1.2", "bound"),
    (A, "-torch.min(ratio * A, clipped * A)", "-ratio * A", "bound"),
    (C, ".clamp(max=5.0)", "", "bound"),
]


def mutant(source, old="", new=""):
    assert source.count(old) == 1 or not old, old
    space = {"torch": torch}
    exec(source.replace(old, new) if old else source, space)
    return space["loss"]


@pytest.mark.parametrize("source, old, new, name", BUGS)
def test_a_mutant_is_called_by_its_name(source, old, new, name):
    report = check(mutant(source, old, new))
    assert name in report.bugs + report.notes, str(report)


def test_what_is_only_a_convention_is_no_bug():
    right = {source: check(mutant(source)).facts for source in (A, B, C)}
    for source, old, new, name in CONVENTIONS:
        report = check(mutant(source, old, new))
        assert not report.bugs and report.facts[name] != right[source][name], str(report)


# --- the command ----------------------------------------------------------------------------------


def test_the_command(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n" + C + C.replace("loss(", "wrong(").replace("-(w", "(w")
        + "\ndef strange(x, y):\n    return x\n")

    def run(*flags):
        return subprocess.run([sys.executable, str(ROOT / "docs/check_grpo.py"), *flags],
                              cwd=tmp_path, capture_output=True, text=True)

    right, wrong, strange, allowed = (
        run("mine:loss"), run("mine:wrong", "--json"), run("mine:strange"),
        run("mine:wrong", "--allow", "sign"))
    assert [x.returncode for x in (right, wrong, strange, allowed)] == [0, 1, 2, 0]
    assert "BUG" not in right.stdout and "wrap it" in strange.stdout
    assert ["BUG", "sign"] in [[line["kind"], line["name"]] for line in json.loads(wrong.stdout)]
