"""lab/check_grpo/check_grpo.py: right losses of any style give no BUG, mutants are named."""
import json
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import train_grpo
from lab.experiments import pages
from reward.baselines import estimate
from support import ROOT

sys.path.insert(0, str(ROOT / "lab/check_grpo"))
import check_grpo  # noqa: E402
from check_grpo import check  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


# Right losses, as other people write them.
def returns_a_tuple(old_log_probs, log_probs, advantages, response_mask, cliprange=None,
                    ref_log_probs=None, kl_coef=0.0):
    def masked_mean(x):
        return (x * response_mask).sum() / response_mask.sum()

    ratio, gap = (log_probs - old_log_probs).exp(), ref_log_probs - log_probs
    losses = [-advantages * x for x in (ratio, ratio.clamp(1 - cliprange, 1 + cliprange))]
    loss = masked_mean(torch.max(*losses)) + kl_coef * masked_mean(torch.exp(gap) - gap - 1)
    return loss, masked_mean((losses[1] > losses[0]).double())


class IsAModule(nn.Module):
    def __init__(self, clip_eps=0.3):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, log_probs, old_log_probs, ref_log_probs, advantages, action_mask):
        r, a = (log_probs - old_log_probs).exp(), advantages[:, None]
        gain = torch.minimum(r * a, r.clip(1 - self.clip_eps, 1 + self.clip_eps) * a)
        loss = 0.04 * (log_probs - ref_log_probs) - gain
        return ((loss * action_mask).sum(1) / action_mask.sum(1)).mean()


def returns_a_dict(new_logprobs, behavior_logprobs, ref_logprobs, adv, loss_mask, kl_weight=0.0):
    rho, a = torch.exp(new_logprobs - behavior_logprobs), adv[:, None]
    kl = 0.5 * (new_logprobs - ref_logprobs).square()
    loss = kl_weight * kl - torch.min(rho * a, rho.clamp(0.8, 1.28) * a)
    return {name: (x * loss_mask).sum() / loss_mask.sum() for name, x in (
        ("kl", kl), ("total_loss", loss))}


def loss_of_each_token(logp, old_logp, advantages, mask):
    r, a = torch.exp(logp - old_logp.detach()), advantages.unsqueeze(-1)
    return torch.maximum(-a * r, -a * r.clamp(0.8, 1.2)) / len(mask)


def selects_by_mask(logprobs, old_logprobs, advantages, attention_mask, epsilon_max=5.0):
    keep = attention_mask.bool()
    lp, old, a = logprobs[keep], old_logprobs[keep], advantages[keep]       # A: (N, R)
    return -((lp - old).exp().clamp(max=epsilon_max).detach() * a * lp).mean()


def dual_clip(logprobs, logprobs_old, advantages, mask, num_items_in_batch=None):
    r, a = (logprobs - logprobs_old).masked_fill(~mask, 0.0).exp(), advantages.reshape(-1, 1)
    loss = torch.where(a > 0, -r.clamp(max=1.2) * a, -r.clamp(0.8, 3.0) * a)
    return (loss * mask).sum() / (num_items_in_batch or mask.sum())


def without_pi_old(lp, adv, mask):
    total = 0.0
    for row, a, kept in zip(lp, adv.tolist(), mask.tolist()):
        total = total - a * sum(x * w for x, w in zip(row, kept)) / sum(kept)
    return total / len(mask)


def smooth_weight_of_completions(logps, old_logps, advantages, mask):
    w, a = ((logps - old_logps) * mask).sum(1, keepdim=True).exp().detach(), advantages[:, None]
    weight = torch.where(a > 0, w**2 * (3 - 3 * w).exp(), w**3 * (2 - 2 * w).exp())
    return -(weight * a * logps * mask).sum() / mask.sum()


def masks_the_ratio(logps, rollout_logps, advantages, mask, low=0.5, high=2.0):
    r = (logps - rollout_logps).exp().detach()
    weight = torch.where((r < low) | (r > high), 0.0, r)
    return -(weight * logps * advantages[:, None] * mask).sum() / mask.sum()


ppo, by_row, by_token = {"ratio": "token", "bound": "0.2 and 0.2"}, {"average": "(GRPO)"}, {
    "average": "all tokens"}
RIGHT = [
    (returns_a_tuple, ppo | by_token | {"KL": "k3"}),
    (IsAModule(), by_row | {"ratio": "token", "bound": "0.3 and 0.3", "KL": "k1"}),
    (returns_a_dict, by_token | {"bound": "0.2 and 0.28", "KL": "k2"}),
    (loss_of_each_token, ppo | {"average": "sum over tokens, then of completions"}),
    (selects_by_mask, by_token | {"bound": "at most 5"}),
    (dual_clip, by_token | {"bound": "dual clip at 3"}),
    (without_pi_old, by_row | {"ratio": "none", "KL": "none"}),
    (masks_the_ratio, by_token | {"bound": "0.5 to 2"}),
    (smooth_weight_of_completions, by_token | {"ratio": "product", "bound": "smooth weight"}),
]
OURS = [
    ({"loss_type": "grpo", "beta": 0.1}, ppo | by_row | {"KL": "k3"}),
    ({"loss_type": "bnpo", "kl_type": "k2"}, ppo | by_token | {"KL": "k2"}),
    ({"loss_type": "dr_grpo", "kl_type": "k1"}, ppo | {"average": "L = 50", "KL": "k1"}),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, by_token | {"bound": "0.2 and 0.28"}),
    ({"loss_type": "cispo", "epsilon_high": 5.0, "kl_type": "abs"}, {"bound": "5", "KL": "abs"}),
    ({"loss_type": "dppo"}, {"bound": "DPPO"}),
    ({"loss_type": "sapo"}, by_row | {"bound": "tau 1 and 1.05"}),
    ({"loss_type": "gmpo", "epsilon_low": 0.4, "epsilon_high": 0.4}, {"bound": "GMPO"}),
    ({"loss_type": "luspo"}, ppo | {"average": "sum over tokens, then of completions"}),
    ({"importance_sampling_level": "sequence"}, by_row | {"ratio": "GSPO", "bound": "0.2 and 0.2"}),
    ({"loss_type": "r1"}, {"ratio": "product"}),
    ({"delta": 2.0, "kl_type": "k3+"}, {"bound": "dual clip at 2", "KL": "k3+"}),
    ({"use_bias_correction_kl": True}, {"KL": "k3", "KL times ratio": "yes"}),
]


@pytest.mark.parametrize("loss, facts", RIGHT + [
    (partial(train_grpo.family_loss, **options), facts) for options, facts in OURS])
def test_right_loss_gives_no_bug_and_its_conventions(loss, facts):
    report = check(loss)
    assert (report.bugs, report.questions) == ([], []), str(report)
    for name, text in facts.items():
        assert text in report.facts[name], str(report)


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
BUGS = [        # in which loss, the old and the new text, and what the mutant must be called
    (A, "-torch.min", "torch.min", "sign"),
    (A, "logps - old_logps", "old_logps - logps", "sign"),
    (C, "logps - old_logps", "old_logps - logps", "ratio upside down"),
    (A, "logps - old_logps", "logps - ref_logps", "ratio to the reference"),
    (A, "logps - old_logps", "logps - logps.detach()", "no ratio"),
    (B, ".exp()", ".exp().detach()", "no gradient"),
    (A, "-torch.min", "-torch.max", "max for min"),
    (A, "-torch.min(ratio * A, clipped * A)", "-clipped * A", "no min"),
    (A, "1 - eps, 1 + eps", "-eps, eps", "good side dead"),
    (A, "= advantages[", "= advantages.clamp(min=0)[", "bad side dead"),
    (A, "= advantages[", "= advantages.flip(0)[", "another row's advantage"),
    (A, "= advantages[", "= (advantages - advantages.mean())[", "normalised again"),
    (B, "= adv.", "= (adv / adv.std()).", "NaN"),
    (A, ") * mask)", "))", "padding trained"),
    (B, ".masked_select(completion_mask)", "", "padding trained"),
    (A, "+ beta * kl) * mask)", "* mask + beta * kl))", "padding trained under the KL"),
    (A, "rows.mean()", "(rows / logps.sum(1).detach().abs()).mean()", "padding read"),
    (A, ") * mask).sum(1)", ")[:, :-1] * mask[:, 1:]).sum(1)", "EOS left out"),
    (A, ") * mask).sum(1)", ")[:, :-1] * mask[:, :-1]).sum(1)", "EOS left out"),
    (A, ") * mask).sum(1)", ")[:, 1:] * mask[:, 1:]).sum(1)", "mask shifted"),
    (A, "rows.mean()", "rows[:-1].mean()", "rows mixed"),
    (A, "clamp(min=1)", "clamp(min=1).flip(0)", "rows mixed"),
    (A, "A = ", "A = 0.9 ** torch.arange(logps.shape[1]) * ", "tokens weighted"),
    (A, "torch.exp(x) - x - 1", "torch.exp(x) - x", "KL not 0"),
    (A, "x = ref_logps - logps", "x = logps - ref_logps", "KL reversed"),
    (A, "policy + beta", "policy - beta", "KL sign"),
    (A, "x = ref_logps - logps", "x = ref_logps - logps.detach()", "KL without gradient"),
    (A, "beta * kl", "kl", "beta ignored"),
    (A, "beta * kl", "0 * kl", "reference ignored"),
    (B, "0.5 * dist", "dist", "KL scaled"),
    (A, "beta * kl", "beta * kl * mask.sum(1, keepdim=True)", "KL average"),
    (A, "beta * kl", "beta * kl * mask.roll(1, 1)", "KL leaves tokens out"),
    (A, "beta * kl", "beta * kl * A", "KL times the advantage"),
    (A, "beta * kl", "beta * kl * (A < 0)", "KL times the advantage"),
    (A, ".clamp(min=1)", "", "empty row"),
    (A, "clipped * A)", "clipped * A).where(A >= 0, torch.max(ratio * A, clipped * A))",
     "max where A < 0"),
    (A, "rows.mean()", "rows.mean() / len(rows)", "averaged twice"),
    (A, ").sum(1) / mask.sum(1)", ").sum(0) / mask.sum(0)", "mean over the wrong axis"),
    (A, "((policy + beta * kl) * mask).sum(1)",
     "((policy + beta * kl / mask.sum(0).clamp(min=1) * mask.sum(1, True)) * mask).sum(1)",
     "mean over the wrong axis"),
    (A, "beta * kl", "beta * beta * kl", "beta twice"),
    (A, "torch.exp(x) - x - 1", "torch.exp(x) + x - 1", "no KL"),
    (A, "torch.exp(x) - x - 1", "torch.exp(x) - 2 * x - 1", "no KL"),
    (A, "torch.exp(logps - old_logps)", "torch.exp(((logps - old_logps) * mask).mean(1, True))",
     "ratio over the width"),
    (A, "= torch.exp(x) - x", "= torch.exp(x.half()).to(x.dtype) - x", "NaN under the mask"),
    (A, "rows.mean()", "rows.mean() + logps.masked_fill(mask == 0, -torch.inf).mul(mask).sum()",
     "NaN"),
    (A, "advantages[", "advantages.mul_(0.5)[", "inputs written to"),
    (A, "clipped * A)\n    x = ref_logps - logps\n    kl = torch.exp(x) - x - 1", "clipped * A) - "
     "ratio * beta * (logps - ref_logps).detach()\n    kl = 0", "KL sign"),
    (A, "torch.exp(logps - old_logps)", "torch.exp2(logps - old_logps)", "ratio to a power"),
    (A, "clipped * A)", "clipped * A).clamp(min=1.1 * A.clamp(max=0))",
     "dual clip too low"),
    (A, ") * mask).sum(1)", ") * mask * mask.cumsum(1)).sum(1)", "mask counts"),
    (A, "mask.sum(1)", "(logps != 0).sum(1)", "padding read"),
    (A, "beta * kl", "beta * kl / len(mask)", "averaged twice"),
    (A, ".sum(1) / mask", ".sum(1, keepdim=True) / mask", "lengths of other rows"),
    (A, "mask.sum(1)", "mask.long().argmin(1)", "row without padding"),
    (A, "torch.exp(logps - old_logps)", "torch.exp((logps - old_logps).half()).double()",
     "NaN under the mask"),
]
CONVENTIONS = [     # the same, which fact changes, and what a mark says of it
    (A, "eps=0.2", "eps=0.3", "bound", ""),
    (A, "-torch.min(ratio * A, clipped * A)", "-ratio * A", "bound", "no bound"),
    (B, "max=1.28", "max=1.2", "bound", ""),
    (A, "rows.mean()", "rows.sum()", "average", "the larger the batch"),
    (A, ".sum(1) / mask.sum(1).clamp(min=1)", ".sum(1)", "average", "the longer the completions"),
    (B, "completion_mask.sum()", "completion_mask.numel()", "average", "padded width"),
    (A, "mask.sum(1).clamp(min=1)", "mask.sum(1).clamp(min=1)**2", "average", "length twice"),
    (A, "mask.sum(1).clamp(min=1)", "mask.shape[1]", "average", "padded width"),
    (A, "torch.exp(x) - x - 1", "x ** 2 / 2", "KL", "its value is not"),
    (A, "torch.exp(x) - x - 1", "-x", "KL", "holds nothing back"),
]


@cache
def report_of(source, old="loss", new="loss"):
    assert source.count(old) == 1
    space = {"torch": torch}
    exec(source.replace(old, new), space)
    return check(space["loss"])


@pytest.mark.parametrize("source, old, new, name", BUGS)
def test_mutant_is_called_by_its_name(source, old, new, name):
    right, report = report_of(source), report_of(source, old, new)
    assert not right.bugs and name not in right.notes
    assert name in report.bugs + report.notes, str(report)


@pytest.mark.parametrize("source, old, new, name, mark", CONVENTIONS)
def test_convention_is_no_bug_and_carries_a_mark_if_it_is_not_grpos(source, old, new, name, mark):
    right, report = report_of(source), report_of(source, old, new)
    assert not report.bugs and report.facts[name] != right.facts[name], str(report)
    assert report.marks.keys() == right.marks.keys() | ({name} if mark else set()), str(report)
    assert not mark or mark in report.marks[name], str(report)
    assert ("not GRPO's default" in str(report)) == bool(report.marks)


@pytest.mark.parametrize("formula, text", [
    ("(r - r.mean(1, True)).clamp(min=0)", "max(0, r - mean)"),
    ("(r - r.topk(2, 1).values[:, 1:]).clamp(min=0)", "pass@k"),
    ("(r - r.mean(1, True)).sign() * (r - r.mean(1, True)).square()", "formula that is not known"),
    ("(r - r.mean(1, True)) / (r.std(1, keepdim=True) + 1e-4)**2", "std twice"),
    ("(r - r.mean(1, True)) / r.std(1, correction=0, keepdim=True).add(1e-4)**2", "std twice"),
    ("r.argsort(1).double() - 1.5", "advantage falls")])
def test_advantages_that_rise_are_said_to_do_what_they_do(formula, text):
    report = check(advantages=lambda rewards, G: eval(formula, {"r": rewards.view(-1, G)}))
    assert text in report.facts.get("advantages", "") + " ".join(report.bugs), str(report)
    assert report.bugs or report.marks["advantages"]


def test_loss_that_only_grows_is_named_and_one_that_exits_has_failed():
    report = report_of("seen = []\n" + A.replace("rows.mean()", "rows.mean() + kept(kl)") + """
def kept(kl):
    seen.append(float(kl.sum().detach()))
    return sum(seen[:-1])
""")
    assert report.bugs == ["adds up"], str(report)
    assert "SystemExit: 7" in str(report_of(A, "rows.mean()", "exit(7)"))


# What keeps state or draws random numbers, in A: two calls in a row show only some of these.
STATE = """
import itertools
calls, average, coefficient = itertools.count(1), 0.0, 1.0

def moving(x):
    global average
    average = 0.9 * average + 0.1 * float(x)
    return average

def adapted(distance):
    global coefficient
    coefficient *= 1.1 if distance > 0.1 else 0.9
    return coefficient
"""


@pytest.mark.parametrize("old, new", [
    ("rows.mean()", "rows.mean() / next(calls)"),
    ("rows.mean()", "rows.mean() * (next(calls) % 4 == 1)"),
    ("= advantages[", "= (advantages - moving(advantages.mean()))["),
    ("beta * kl", "beta * adapted((kl * mask).sum()) * kl"),
    ("beta * kl", "beta * 0.99 ** max(0, next(calls) - 99) * kl"),
    ("= advantages[", "= (advantages + 0.1 * torch.randn(len(advantages)))["),
    ("(logps - old", "(torch.dropout(logps, 0.1, True) - old"),
], ids=["counter", "accumulation", "average", "adaptive", "late decay", "noise", "dropout"])
def test_loss_with_state_or_noise_is_not_judged(old, new):
    report = report_of(STATE + A, old, new)
    assert [(kind, name) for kind, name, _ in report.lines] == [("?", "loss")], str(report)
    assert "keeps state" in str(report) and report.exit_code == 2


def test_k1_is_worth_a_note_unless_it_is_multiplied_by_the_ratio():
    for corrected, notes in (False, ["k1 in the loss"]), (True, []):
        report = check(partial(train_grpo.family_loss, kl_type="k1",
                               use_bias_correction_kl=corrected))
        assert (report.facts["KL"], report.notes) == ("k1", notes), str(report)


def normal(rewards, G):
    r = rewards.view(-1, G)
    return (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)


def pass_at_2(rewards, G):
    """Of right and wrong answers, arXiv 2508.10751."""
    right = (rewards == 1).view(-1, G)
    n, pairs = G - right.sum(1, keepdim=True), G * (G - 1)                  # wrong ones
    mean = 1 - n * (n - 1) / pairs
    return torch.where(right, 1 - mean, 1 - mean - (n - 1) / (G - 1)) / (
        (mean * (1 - mean)).sqrt() + 1e-4)


def gdpo(rewards, G):
    """Of one reward function, (N,), or of several, (N, F)."""
    total = sum(normal(r.contiguous(), G) for r in rewards.view(len(rewards), -1).T)
    return (total - total.mean()) / (total.std() + 1e-4)


def gdpo_of_two(rewards, G):
    return gdpo(rewards[:, :2], G)      # one function's rewards have no second dimension


@pytest.mark.parametrize("bugs, function", [
    (["advantage falls"], lambda rewards, G: -normal(rewards, G)),
    (["advantage falls"], lambda rewards, G: normal(rewards, G).sort(1).values),
    (["advantage falls"], lambda rewards, G: normal(rewards, G).sort(1, descending=True).values),
    (["advantage falls"], lambda rewards, G: normal(rewards, G).square()),
    (["advantage falls"], lambda rewards, G: -pass_at_2(rewards, G)),
    ([], lambda rewards, G: normal(rewards, G).clamp(min=0)),
    ([], lambda rewards, G: (rewards.view(-1, G) / rewards.view(-1, G).mean(1)[:, None] - 1) / 2),
    ([], partial(estimate, baseline="grpo_passk", scale="none")),
    ([], pass_at_2), ([], gdpo), ([], gdpo_of_two)])
def test_advantages_may_not_fall_where_rewards_rise(bugs, function):
    report = check(advantages=function)
    assert report.bugs == bugs, str(report)
    assert bool(report.questions) == (function is gdpo_of_two)


def of_transformers(model, ids, attention, R):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -R - 1:-1]
    return logits.log_softmax(-1).gather(-1, ids[:, -R:, None]).squeeze(-1)


def softmax_twice(model, ids, attention, R):
    logits = model(ids, attention, logits_to_keep=R + 1)[:, :-1].softmax(-1)
    return logits.log_softmax(-1).gather(-1, ids[:, -R:, None]).squeeze(-1)


def test_log_probs_of_anybodys_model_and_advantages_with_any_second_name():
    report = check(logps=of_transformers)
    assert not report.questions + report.bugs, str(report)
    assert check(logps=softmax_twice).bugs == ["softmax twice"]
    report = check(advantages=lambda rewards, samples_of_each: normal(rewards, samples_of_each))
    assert not report.bugs + report.questions, str(report)


# The museum's exhibits that one function shows, and what each is called; test_check_batch.py makes
# four others, which are seen in the arrays of a rollout.
MUSEUM = {
    "logits shifted by one": ("logps", "token_logps", "shifted"),
    "std without eps": ("advantages", "group_advantages", "equal rewards"),
    "an unjudged reply earns 0": ("advantages", "group_advantages", "unjudged"),
    "k3 the wrong way round": ("loss", "grpo_loss", "KL reversed"),
    "temperature in sampling only": ("logps", "token_logps", "temperature ignored"),
    "k1 in the loss": ("loss", "grpo_loss", "k1 in the loss"),
    "the ratio is taken to the reference": ("loss", "grpo_loss", "ratio to the reference"),
    "padding is trained under the kl": ("loss", "grpo_loss", "padding trained under the KL"),
}
SCRIPT = Path(train_grpo.__file__).read_text(encoding="utf-8")


@cache
def report_of_script(hook, function, source=SCRIPT):
    module = ModuleType("an_exhibit")
    exec(compile(source, "train_grpo.py", "exec"), module.__dict__)
    return check(**{hook: getattr(module, function)})


@pytest.mark.parametrize("exhibit", MUSEUM)
def test_exhibit_is_called_by_its_name(exhibit):
    diff, _, _ = pages.changes(ROOT / "docs/museum.md")[exhibit]
    hook, function, name = MUSEUM[exhibit]
    right = report_of_script(hook, function)
    wrong = report_of_script(hook, function, pages.changed(SCRIPT, diff, "docs/museum.md"))
    assert not right.bugs + right.notes + right.questions, str(right)
    assert name in wrong.bugs + wrong.notes, str(wrong)


def test_command_prints_bugs_and_allows_what_it_is_told_to(tmp_path, monkeypatch, capsys):
    wrong = A.replace("loss(", "wrong(").replace("policy + beta", "policy - beta")
    (tmp_path / "not_ours.py").write_text(f"import torch\n{A}{wrong}\ndef odd(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["check_grpo.py", *flags])
        with pytest.raises(SystemExit) as ended:
            check_grpo.main()
        return ended.value.code, capsys.readouterr().out

    code, out = run("not_ours:loss")
    assert code == 0 and "BUG" not in out
    assert run("not_ours:odd")[0] == 2
    code, out = run("not_ours:wrong", "--json")
    assert code == 1 and ("BUG", "KL sign") in {(x["kind"], x["name"]) for x in json.loads(out)}
    code, out = run("not_ours:wrong", "--allow", "KL sign")
    assert code == 0 and "BUG" not in out
