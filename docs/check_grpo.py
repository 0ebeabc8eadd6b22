"""What does this GRPO loss do, and is it meant? A black box is called, and its gradients tell.

    python check_grpo.py my_module:loss [--advantages m:f] [--mask m:f] [--kl m:f] [--logps m:f]

It needs torch, and executes the module that it is given. In a notebook or a test:

    report = check(loss, advantages=..., mask=..., kl=..., logps=...)
    print(report); report.bugs; report.notes            # lists of names

Each line is `ok`, a fact that holds; `is`, a convention, named before anything is judged; `note`,
what is worth a look; `BUG`, with what it means; or `?`, where this program refuses to judge. A
convention is never a bug. Exit code 0: no bug, 1: a bug, 2: something could not be judged.

How: the loss is computed in float64 for a few completions of random log-probs. Its gradient with
respect to logps (N, R), at chosen ratios, advantages and references, shows the average, the ratio,
the bound and the KL. check_batch does the other half, what no function shows: it looks at the
arrays of one real rollout. docs/check.md has recipes, and what neither can see.
"""
import argparse
import importlib
import inspect
import json
import math
import os
import sys
from dataclasses import dataclass, replace

import torch

CURVE = [i / 25 for i in range(-100, 101)]      # log-ratios at which a bound is looked at
WHAT = {        # of each BUG and note: what it means
    "no gradient": "nothing is learned: the log-probs are detached, or not used",
    "sign": "good completions become less likely, and bad ones more",
    "good side dead": "completions with A > 0 teach nothing",
    "bad side dead": "completions with A < 0 teach nothing",
    "another row's advantage": "a completion is taught by the advantage of another one",
    "normalised again": "advantages are normalised again in the loss, over this batch",
    "padding trained": "tokens behind the EOS get a gradient",
    "padding trained under the KL": "the KL pulls at tokens behind the EOS",
    "padding read": "what stands behind the EOS changes the loss",
    "EOS left out": "the last token of a completion has no gradient: stopping is not learned",
    "mask shifted": "the first token of a completion has no gradient",
    "rows mixed": "the order of the rows changes their gradients",
    "ratio upside down": "it is pi_old / pi: the gradient fades where pi has not moved",
    "ratio to the reference": "it is pi / pi_ref in place of pi / pi_old: another objective",
    "no min": "the clip ends the gradient on both sides: what has gone wrong is not pulled back",
    "max for min": "the clip ends the gradient on the wrong side, and lets the right side run",
    "bound on the wrong side": "the gradient ends where pi moves back, not where it moves away",
    "KL without gradient": "the KL is a number in the loss that pulls nowhere",
    "KL sign": "the KL pushes away from the reference",
    "KL reversed": "the estimator has log pi - log pi_ref the other way round",
    "KL not 0": "for pi = pi_ref the KL is not 0",
    "beta ignored": "another beta gives the same KL",
    "reference ignored": "a reference is taken, and changes nothing",
    "KL scaled": "the KL has another weight than beta",
    "KL average": "the KL is averaged in another way than the policy's term",
    "NaN": "an ordinary batch gives no finite loss",
    "empty row": "a completion without a token gives no finite gradient",
    "overflow": "in float32 a log-ratio of 100 gives no finite loss",
    "no ratio": "pi_old is taken, and changes nothing: the policy gradient of one update",
    "groups misordered": "a prompt's completions are taken to stand apart: a b a b, not a a b b",
    "not of these groups": "rewards of another prompt change the advantages",
    "equal rewards": "equal rewards give advantages other than exactly 0",
    "EOS not trained": "an EOS was sampled, and the mask leaves it out",
    "advantages not of these rewards": "in its group, a completion's does not go with its reward",
    "another temperature": "sampler and trainer divide their logits by different temperatures",
    "top-k or top-p": "the sampler's probabilities are of fewer tokens: higher than the trainer's",
    "stale weights": "the sampler has other weights than the trainer, or one has dropout",
    "tool's words trained": "the mask has tokens that the policy did not draw",
    "one EOS only": "of several ids that end a completion, the mask knows fewer",
    "shifted": "log-probs are those of the next or the last token",
}


class Report:
    """Lines of (kind, name, text); kinds are ok, is, note, BUG and ?."""

    def __init__(self, allow=()):
        self.lines, self.allow = [], set(allow)

    def add(self, kind, name, text=""):
        if kind in ("BUG", "note") and not text:
            text = WHAT[name]
        if kind == "BUG" and name in self.allow:
            kind, text = "is", f"allowed; {text}"
        self.lines.append((kind, name, text))

    def of(self, kind):
        return [name for found, name, _ in self.lines if found == kind]

    bugs = property(lambda self: self.of("BUG"))
    notes = property(lambda self: self.of("note"))
    questions = property(lambda self: self.of("?"))
    facts = property(lambda self: {name: text for kind, name, text in self.lines if kind == "is"})

    @property
    def exit_code(self):
        return 1 if self.bugs else 2 if self.questions else 0

    def __str__(self):
        lines = [f"{kind:4}  {name}: {text}" if text else f"{kind:4}  {name}"
                 for kind, name, text in self.lines]
        count = f"{len(self.bugs)} bugs, {len(self.notes)} notes"
        if self.questions:
            count += f", {len(self.questions)} questions that are not judged"
        return "\n".join([*lines, count])


class CannotJudge(Exception):
    """What is wrong with the call, and which wrapper would help."""


# --- calling anybody's function -------------------------------------------------------------------


@dataclass
class Case:
    """A batch: log-probs (N, R), advantages (N,), mask (N, R)."""
    logps: torch.Tensor
    old_logps: torch.Tensor
    ref_logps: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    beta: float = 0.0


def random_case(lengths=(6, 3, 4, 2), R=None, seed=0):
    """A case whose three policies are the same: every ratio is 1, every KL 0."""
    N, R = len(lengths), R or max(lengths)
    rng = torch.Generator().manual_seed(seed)
    mask = (torch.arange(R) < torch.tensor(lengths)[:, None]).double()
    logps = -0.5 - 1.5 * torch.rand(N, R, generator=rng, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0] * N, dtype=torch.float64)[:N]
    advantages = signs * (0.6 + torch.rand(N, generator=rng, dtype=torch.float64))
    return Case(logps, logps.clone(), logps.clone(), advantages, mask)


def role_of(name):
    """Which argument a parameter's name means, or None."""
    short = name.lower().replace("_", "")
    is_logp = any(part in short for part in ("logp", "logprob", "logit", "lp"))
    if "mask" in short and "coef" not in short:
        return "mask"
    if "adv" in short or name == "A":
        return "advantages"
    if "ref" in short and (is_logp or "prob" in short):
        return "ref_logps"
    if is_logp and any(part in short for part in (
            "old", "behav", "sampl", "rollout", "gener", "infer", "prev", "fixed")):
        return "old_logps"
    if short in ("beta", "klbeta") or "kl" in short and any(
            part in short for part in ("coef", "weight", "lambda", "beta", "ctrl", "scale")):
        return "beta"
    if short.startswith(("num", "total", "global", "batchnum")) and any(
            part in short for part in ("item", "token")):
        return "num_tokens"
    if short.startswith(("num", "total", "global")) and any(
            part in short for part in ("seq", "sample", "completion", "row", "example")):
        return "num_sequences"
    if "max" in short and "len" in short or short == "L".lower() and name == "L":
        return "max_length"
    if any(part in short for part in ("eps", "clip")):
        return "epsilon"
    if is_logp:
        return "logps"
    return None


class Box:
    """A loss of anybody's, as a function of a Case: its value, and its gradient (N, R)."""

    def __init__(self, function):
        self.function = function
        target = function.forward if isinstance(function, torch.nn.Module) else function
        self.roles, self.constants, lacking = {}, {}, []
        for parameter in inspect.signature(target).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            role, required = role_of(parameter.name), parameter.default is parameter.empty
            if role == "epsilon":
                if required or parameter.default is None and "low" not in parameter.name and (
                        "high" not in parameter.name and "range" in parameter.name):
                    self.constants[parameter.name] = 0.2
            elif role == "max_length":
                if required or parameter.default is None:
                    self.constants[parameter.name] = 50
            elif role in ("logps", "old_logps", "ref_logps", "advantages", "mask", "beta",
                          "num_tokens", "num_sequences") and role not in self.roles.values():
                self.roles[parameter.name] = role
            elif required:
                lacking.append(parameter.name)
        names = set(self.roles.values())
        if lacking or not {"logps", "advantages"} <= names:
            what = f"parameters {', '.join(lacking)} are" if lacking else (
                "no parameter for log-probs or advantages is")
            raise CannotJudge(
                f"{what} not known; wrap it:\n\n    def loss(logps, old_logps, advantages, mask, "
                "ref_logps, beta):\n        return my_loss(...)         # a scalar\n")
        self.has = names.__contains__
        self.style = self.find_style()

    def find_style(self):
        """The shape of advantages, and the type of masks, that the function takes."""
        case, errors = random_case(), []
        for shape in ("(N,)", "(N, 1)", "(N, R)"):
            for kind in (torch.float64, torch.bool, torch.int64):
                self.style = shape, kind
                try:
                    value, gradient = self(case)
                except Exception as error:      # of code that we do not know
                    errors.append(f"{type(error).__name__}: {error}")
                    continue
                if math.isfinite(value) and gradient.isfinite().all():
                    return self.style
                errors.append("its loss is not finite")
        raise CannotJudge(f"it can't be called: {errors[0]}")

    def __call__(self, case, dtype=torch.float64, totals=None):
        shape, kind = self.style
        logps = case.logps.to(dtype).detach().clone().requires_grad_()
        advantages = case.advantages.to(dtype)
        if shape != "(N,)":
            advantages = advantages[:, None]
        if shape == "(N, R)":
            advantages = advantages.expand(case.mask.shape).clone()
        tokens, sequences = totals or (case.mask.sum(), len(case.mask))
        values = {
            "logps": logps, "old_logps": case.old_logps.to(dtype),
            "ref_logps": case.ref_logps.to(dtype), "advantages": advantages,
            "mask": case.mask.to(dtype if kind == torch.float64 else kind), "beta": case.beta,
            "num_tokens": tokens, "num_sequences": sequences}
        found = self.function(**self.constants, **{
            name: values[role] for name, role in self.roles.items()})
        loss = scalar(found, case.mask)
        if not loss.requires_grad:
            return float(loss.detach()), torch.zeros_like(logps)
        gradient, = torch.autograd.grad(loss, logps, allow_unused=True)
        gradient = torch.zeros_like(logps) if gradient is None else gradient
        return float(loss.detach()), gradient

    def policy(self, case):
        """The gradient that comes from the advantages."""
        without = replace(case, advantages=torch.zeros_like(case.advantages))
        return self(case)[1] - self(without)[1]

    def kl(self, case, beta=1.0):
        """Value and gradient of what is there without advantages."""
        return self(replace(case, advantages=torch.zeros_like(case.advantages), beta=beta))


def scalar(found, mask):
    """The loss in what a function returned; the sum of losses per token, or per row."""
    if isinstance(found, dict):
        found = found.get("loss", list(found.values()))
    found = getattr(found, "loss", found)
    if isinstance(found, (list, tuple)):
        found = [part for part in found if isinstance(part, torch.Tensor)]
        found = next((part for part in found if part.requires_grad), found[0] if found else None)
    if not isinstance(found, torch.Tensor):
        raise CannotJudge("it returns no tensor")
    if found.shape == mask.shape:
        found = found * mask
    return found.sum()


def close(a, b, tolerance=1e-6):
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def near(found, wanted, tolerance=1e-6):
    """Whether two lists of numbers agree, with respect to the largest."""
    largest = max(max(map(abs, wanted)), 1e-12)
    return all(abs(a - b) <= tolerance * largest for a, b in zip(found, wanted))


# --- the policy's term ----------------------------------------------------------------------------


def check_gradient(box, report):
    """Is there any, does it have the right sign, and does each side teach?"""
    case = random_case()
    gradient = box.policy(case)
    rows = (gradient * case.mask).sum(1)                                                # (N,)
    if not gradient.any():
        report.add("BUG", "no gradient")
        return False
    pushes = -rows * case.advantages.sign()             # above 0: the right way
    if (pushes < 0).any():
        moved = dependency(box, case)
        if moved.diagonal().abs().max() < 1e-9:
            report.add("BUG", "another row's advantage")
        else:
            report.add("BUG", "sign")
        return True
    for side, name in ((case.advantages > 0, "good side dead"), (case.advantages < 0,
                                                                 "bad side dead")):
        if not rows[side].any():
            report.add("BUG", name)
    report.add("ok", "gradient", "good completions become more likely, bad ones less")
    return True


def dependency(box, case):
    """(N, N): how much the gradient of row i changes with the advantage of row j."""
    before, columns = box.policy(case), []
    for j in range(len(case.advantages)):
        advantages = case.advantages.clone()
        advantages[j] *= 1.5
        columns.append((box.policy(replace(case, advantages=advantages)) - before).abs().sum(1))
    return torch.stack(columns, 1)


def check_rows(box, report):
    """Whose advantage moves whom, and does the order of the rows matter?"""
    case = random_case()
    moved = dependency(box, case)
    others = moved - moved.diagonal().diag()
    if others.max() > 1e-6 * moved.max():
        scaled = box.policy(replace(case, advantages=3 * case.advantages))
        shifted = box.policy(replace(case, advantages=case.advantages + 0.3))
        before = box.policy(case)
        same = [torch.allclose(x, before, rtol=1e-3, atol=1e-9) for x in (scaled, shifted)]
        if any(same):
            report.add("note", "normalised again")
        elif "another row's advantage" not in report.bugs:
            report.add("BUG", "another row's advantage")
    order = torch.tensor([2, 0, 3, 1])
    turned = Case(*(x[order] for x in (case.logps, case.old_logps, case.ref_logps, case.advantages,
                                       case.mask)))
    if not torch.allclose(box.policy(turned), box.policy(case)[order], rtol=1e-6, atol=1e-12):
        report.add("BUG", "rows mixed")
    elif others.max() <= 1e-6 * moved.max():
        report.add("ok", "rows", "each completion is taught by its own advantage")


def moved_case(box, seed=1):
    """A case whose three policies differ a little, so that no bound acts."""
    case, rng = random_case(), torch.Generator().manual_seed(seed)
    noise = torch.rand(2, *case.logps.shape, generator=rng, dtype=torch.float64)
    return replace(case, old_logps=case.logps - 0.05 * (noise[0] - 0.5),
                   ref_logps=case.logps - 0.6 * (noise[1] - 0.3), beta=0.5)


def check_padding(box, report):
    """Is padding trained or read, and are the first and the last token left out?"""
    if not box.has("mask"):
        report.add("?", "padding", "there is no mask among the parameters")
        return
    case = random_case()
    padding, gradient = case.mask == 0, box.policy(case)
    bug = False
    if gradient[padding].any():
        report.add("BUG", "padding trained")
        bug = True
    elif box(moved_case(box))[1][padding].any():
        report.add("BUG", "padding trained under the KL")
        bug = True
    last = case.mask.sum(1).long() - 1
    rows = torch.arange(len(last))
    if not gradient[rows, last].any():
        report.add("BUG", "EOS left out")
        bug = True
    elif not gradient[:, 0].any():
        report.add("BUG", "mask shifted")
        bug = True
    case = moved_case(box)
    other = replace(case, logps=case.logps.where(~padding, -7.0),
                    old_logps=case.old_logps.where(~padding, -0.1),
                    ref_logps=case.ref_logps.where(~padding, -3.0))
    (value, before), (changed, after) = box(case), box(other)
    if not close(value, changed, 1e-9) or not torch.allclose(
            before[~padding], after[~padding], rtol=1e-9, atol=1e-12):
        if not bug:
            report.add("BUG", "padding read")
    elif not bug:
        report.add("ok", "padding", "is neither trained nor read, and the EOS is trained")


SHAPES = [((6, 3, 4, 2), 6), ((6, 3, 4, 2, 5, 1), 6), ((6, 3, 4, 2), 9), ((7, 2), 7),
          ((6, 6, 5, 1), 8), ((1, 2, 3, 4, 5, 6, 7, 8), 10)]
AVERAGES = {    # exponents of N, all tokens, the completion's length, the width R
    (-1, 0, -1, 0): "of each completion's tokens, then of completions (GRPO)",
    (0, -1, 0, 0): "of all tokens (DAPO, BNPO)",
    (-1, 0, 0, -1): "sum over tokens / (N R), R the width of the batch, padding included",
    (0, 0, 0, 0): "none: a sum over tokens",
    (0, 0, -1, 0): "of each completion's tokens, then a sum over completions",
    (0, 0, 0, -1): "sum over tokens / the width of the batch",
}


def fitted(weights_of):
    """Exponents of N, tokens, length and width in weights_of(case) (N,), and the constant."""
    rows, logs = [], []
    for lengths, R in SHAPES:
        case = random_case(lengths, R)
        weights, tokens = weights_of(case), case.mask.sum().item()
        for length, weight in zip(lengths, weights.tolist()):
            if not weight > 0:
                return None
            rows.append([math.log(x) for x in (len(lengths), tokens, length, R)] + [1.0])
            logs.append(math.log(weight))
    rows, logs = (torch.tensor(x, dtype=torch.float64) for x in (rows, logs))
    found = torch.linalg.lstsq(rows, logs[:, None], driver="gelsd").solution[:, 0]
    if (rows @ found - logs).abs().max() > 1e-4:
        return None
    exponents = tuple(round(x) for x in found[:4].tolist())
    if max(abs(a - b) for a, b in zip(exponents, found[:4].tolist())) > 1e-3:
        return None
    return exponents, math.exp(found[4].item())


def named_average(fit):
    if fit is None:
        return None
    exponents, constant = fit
    if exponents == (-1, 0, 0, 0):
        if close(constant, 1.0, 1e-3):
            return "sum over tokens, then of completions"
        return f"sum over tokens / L, then of completions, with L = {1 / constant:.4g} (Dr. GRPO)"
    name = AVERAGES.get(exponents)
    if name and not close(constant, 1.0, 1e-3):
        name += f", times {constant:.4g}"
    return name


def check_average(box, report):
    """How tokens are weighted, by a fit of their weights in batches of several shapes."""
    def weights_of(case):
        gradient = -box.policy(case) / case.advantages[:, None]
        return (gradient * case.mask).sum(1) / case.mask.sum(1)

    name = named_average(fitted(weights_of))
    if name is None:
        report.add("?", "average", "the weights of tokens follow no rule that is known here")
    else:
        report.add("is", "average", name)
    return name


# --- ratio and bound ------------------------------------------------------------------------------


def at_ratio(box, d, sign, whole_row, base=None):
    """The policy's gradient at a token of row 0 whose log-ratio is d, its row's or its own alone."""
    case = random_case()
    advantages = case.advantages.clone()
    advantages[0] = sign
    old_logps = case.old_logps.clone()
    logps, ref_logps = case.logps.clone(), case.ref_logps.clone()
    if base is not None:
        logps[0, 2] = old_logps[0, 2] = ref_logps[0, 2] = base
    if whole_row:
        old_logps[0] = logps[0] - d
    else:
        old_logps[0, 2] = logps[0, 2] - d
    return replace(case, advantages=advantages, old_logps=old_logps, logps=logps,
                   ref_logps=ref_logps)


def check_ratio(box, report):
    """Token or sequence level; none, upside down, to the reference. Returns the level."""
    if not box.has("old_logps"):
        report.add("is", "ratio", "none: there is no pi_old among the parameters")
        return None
    case = random_case()
    before = box.policy(case)[0]
    if box.has("ref_logps"):
        far = replace(case, ref_logps=case.ref_logps - 0.1)
        if not torch.allclose(box.policy(far)[0], before, rtol=1e-6, atol=1e-12):
            report.add("BUG", "ratio to the reference")
            return None
    d, length = 1e-5, case.mask[0].sum().item()         # no bound is so narrow
    after = box.policy(at_ratio(box, d, case.advantages[0], False))[0]
    # By how much of d the gradient grows at the token that moved, and at another of its row.
    own, other = (((after[t] / before[t]).item() - 1) / d for t in (2, 0))
    if max(abs(own), abs(other)) < 1e-3:
        report.add("note", "no ratio")
        return None
    if abs(other) < 1e-3:
        level, scale = "token", 1.0
    else:
        level, scale = ("sum", 1 / length) if abs(other - 1) < 1e-2 else ("mean", 1.0)
    if level == "token" and abs(own + 1) < 1e-2 and near(
            curve(box, 1.0, (level, scale)), [math.exp(-d) for d in CURVE], 1e-6):
        report.add("BUG", "ratio upside down")
        return None
    names = {"token": "of each token", "mean": "of a completion: the geometric mean (GSPO)",
             "sum": "of a completion: the product of its tokens' ratios"}
    report.add("is", "ratio", names[level])
    return level, scale


def curve(box, sign, level, base=None):
    """The weight of grad log pi, as a share of that at ratio 1, for each log-ratio in CURVE."""
    whole_row, scale = level[0] != "token", level[1]
    at_1 = box.policy(at_ratio(box, 0.0, sign, whole_row, base))[0, 2].item()
    return [box.policy(at_ratio(box, d * scale, sign, whole_row, base))[0, 2].item() / at_1
            for d in CURVE]


def end_of(box, sign, level, alive, dead, base=None):
    """The log-ratio between two at which the gradient ends."""
    whole_row, scale = level[0] != "token", level[1]
    for _ in range(50):
        middle = (alive + dead) / 2
        if box.policy(at_ratio(box, middle * scale, sign, whole_row, base))[0, 2].abs() > 1e-12:
            alive = middle
        else:
            dead = middle
    return (alive + dead) / 2


def ends(box, values, sign, level, base=None):
    """(log-ratio below which, above which) the gradient is 0; None where it lives on."""
    zero = [i for i, value in enumerate(values) if abs(value) < 1e-9]
    middle, low, high = len(CURVE) // 2, None, None
    below, above = [i for i in zero if i < middle], [i for i in zero if i > middle]
    if below and below[0] == 0:
        last = max(i for i in below if set(range(i + 1)) <= set(below))
        low = end_of(box, sign, level, CURVE[last + 1], CURVE[last], base)
    if above and above[-1] == len(CURVE) - 1:
        first = min(i for i in above if set(range(i, len(CURVE))) <= set(above))
        high = end_of(box, sign, level, CURVE[first - 1], CURVE[first], base)
    return low, high


def check_bound(box, report, level):
    """Which bound, by the curve of the gradient over ratios from e^-4 to e^4."""
    good, bad = (curve(box, sign, level) for sign in (1.0, -1.0))
    exponential = [math.exp(d) for d in CURVE]
    if not all(math.isfinite(x) for x in good + bad):
        report.add("?", "bound", "the gradient is not finite at ratios far from 1")
        return
    step = good[len(CURVE) // 2 + 1] if good[len(CURVE) // 2 + 1] else bad[len(CURVE) // 2 + 1]
    if len({round(x, 12) for x in good[95:106]}) < 6 and not close(good[99], good[101], 1e-12):
        report.add("?", "bound", "the loss computes in a coarser precision than float64")
        return
    if near(good, exponential) and near(bad, exponential):
        report.add("is", "bound", "none")
        return
    if near(good, [1.0] * len(CURVE)) and near(bad, [1.0] * len(CURVE)):
        report.add("note", "no ratio")
        return
    (good_low, good_high), (bad_low, bad_high) = (
        ends(box, values, sign, level) for values, sign in ((good, 1.0), (bad, -1.0)))
    inside = [all(value in (0, 1) or abs(value) < 1e-9 or close(value, math.exp(d), 1e-6)
                  for value, d in zip(values, CURVE)) for values in (good, bad)]
    sides = tuple(x is not None for x in (good_low, good_high, bad_low, bad_high))
    if any(sides) and moves_with_pi(box, level, good_high, bad_low):
        report.add("is", "bound", "a region of probabilities (DPPO)")
        return
    if all(inside) and any(sides):
        report_clip(box, report, level, sides, (good_low, good_high, bad_low, bad_high))
        return
    capped = capped_at(good), capped_at(bad)
    if capped[0] and capped[1] and close(*capped, 1e-6):
        report.add("is", "bound", f"the ratio as a weight of at most {capped[0]:.4g} (CISPO)")
        return
    taus = soft(good), soft(bad)
    if all(taus):
        report.add("is", "bound", f"a soft gate, tau {taus[0]:.4g} and {taus[1]:.4g} (SAPO)")
        return
    del step
    report.add("?", "bound", "the curve of its gradient is none that is known here")


def moves_with_pi(box, level, good_high, bad_low):
    """Whether the ends depend on how likely the token is."""
    if level[0] != "token":
        return False
    for sign, side, before in ((1.0, 1, good_high), (-1.0, 0, bad_low)):
        if before is not None:
            values = curve(box, sign, level, base=-4.0)
            after = ends(box, values, sign, level, base=-4.0)[side]
            return after is None or not close(after, before, 1e-4)
    return False


def report_clip(box, report, level, sides, at):
    good_low, good_high, bad_low, bad_high = at
    if level[0] == "sum":
        at = tuple(x for x in at)
    in_log = clips_tokens(box, level, good_high)
    def shown(low, high):
        if in_log:
            return f"-{-low:.4g} and {high:.4g} of the log-ratio (GMPO)"
        return f"{1 - math.exp(low):.4g} and {math.exp(high) - 1:.4g}"

    if sides == (False, True, True, False):
        report.add("is", "bound", f"PPO's clip, epsilons {shown(bad_low, good_high)}")
    elif sides == (False, True, True, True):
        report.add("is", "bound", f"PPO's clip, epsilons {shown(bad_low, good_high)}, and a dual "
                                  f"clip at {math.exp(bad_high):.4g}")
    elif sides == (True, True, True, True):
        if is_masked(box, level, good_high):
            report.add("is", "bound", "a mask on both sides of the ratio, "
                                      f"{math.exp(good_low):.4g} to {math.exp(good_high):.4g}")
        else:
            report.add("BUG", "no min")
    elif sides == (True, False, False, True):
        report.add("BUG", "max for min")
    elif sides in ((False, True, False, True), (True, False, True, False)):
        report.add("is", "bound", "the same side for good and bad completions")
    elif sides == (False, True, False, False):
        report.add("is", "bound", f"above only, epsilon {math.exp(good_high) - 1:.4g}")
    else:
        report.add("BUG", "bound on the wrong side")


def clips_tokens(box, level, good_high):
    """GMPO: one token far outside loses its gradient, though its completion's mean is inside."""
    if level[0] != "mean" or good_high is None:
        return False
    far = at_ratio(box, 1.5 * good_high, 1.0, False)
    return box.policy(far)[0, 2].abs().item() < 1e-12


def is_masked(box, level, good_high):
    """Outside, is the loss 0 (a mask), or a constant (a clip)?"""
    whole_row, scale = level[0] != "token", level[1]

    def of_row(d):
        case = at_ratio(box, d * scale, 1.0, whole_row)
        without = case.advantages.clone()
        without[0] = 0.0
        return box(case)[0] - box(replace(case, advantages=without))[0]

    inside = of_row(0.0)
    outside, further = of_row(good_high + 0.3), of_row(good_high + 0.9)
    if whole_row:
        return abs(outside) < 1e-9 * abs(inside)
    length = 6
    share = inside / length             # of the token, where all have the same weight
    return close(outside, inside - share, 1e-6) and close(outside, further, 1e-9)


def capped_at(values):
    """c, if the values are min(e^d, c); else None."""
    cap = values[-1]
    wanted = [min(math.exp(d), cap) for d in CURVE]
    return cap if 1 < cap < 0.9 * math.exp(CURVE[-1]) and near(values, wanted) else None


def soft(values):
    """tau, if the values are those of SAPO's gate; else None."""
    def gate(tau):
        gates = [1 / (1 + math.exp(-tau * (math.exp(d) - 1))) for d in CURVE]
        return [4 * s * (1 - s) * math.exp(d) for s, d in zip(gates, CURVE)]

    low, high = 0.05, 20.0
    place = len(CURVE) // 2 + 10
    for _ in range(80):
        middle = (low + high) / 2
        if gate(middle)[place] > values[place]:
            low = middle
        else:
            high = middle
    return low if near(values, gate(low), 1e-5) else None


# --- the KL ---------------------------------------------------------------------------------------

XS = (-1.2, -0.7, -0.3, 0.2, 0.5, 0.9, 1.3)         # log pi_ref - log pi
KLS = {         # value, and its gradient with respect to log pi
    "k1": (lambda x: -x, lambda x: 1.0),
    "k2": (lambda x: x * x / 2, lambda x: -x),
    "k3": (lambda x: math.exp(x) - x - 1, lambda x: 1 - math.exp(x)),
    "k3+": (lambda x: math.exp(x) - x - 1, lambda x: -x),
    "abs": (abs, lambda x: -math.copysign(1.0, x)),
}
REVERSED = {
    "k1": (lambda x: x, lambda x: -1.0),
    "k3": (lambda x: math.exp(-x) + x - 1, lambda x: math.exp(-x) - 1),
}


def named_kl(values, slopes):
    """(name, scale, reversed) of a KL by its values and gradients at XS; None if it is none."""
    for table, is_reversed in ((KLS, False), (REVERSED, True)):
        for name, (value, slope) in table.items():
            wanted = [value(x) for x in XS]
            scale = sum(a * b for a, b in zip(values, wanted)) / sum(b * b for b in wanted)
            if scale and near(values, [scale * b for b in wanted]) and near(
                    slopes, [scale * slope(x) for x in XS]):
                if scale < 0 and name == "k1":      # the other sign is the other direction
                    continue
                return name, scale, is_reversed
    return None


def check_kl(box, report, average):
    """Which KL, by its value and its gradient; its sign, weight and average."""
    if not box.has("ref_logps"):
        report.add("is", "KL", "none in this function")
        return
    case = random_case()

    def at(x, beta=1.0, d=0.0):
        ref_logps, old_logps = case.ref_logps.clone(), case.old_logps.clone()
        ref_logps[0, 2] += x
        old_logps[0] -= d
        value, gradient = box.kl(replace(case, ref_logps=ref_logps, old_logps=old_logps), beta)
        return value, gradient[0, 2].item()

    nothing, slope_0 = at(0.0)
    values, slopes = zip(*(at(x) for x in XS))
    values = [value - nothing for value in values]
    if not any(abs(v) > 1e-12 for v in values) and not any(abs(s) > 1e-12 for s in slopes):
        report.add("note", "reference ignored")
        return
    if not any(abs(s) > 1e-12 for s in slopes):
        report.add("BUG", "KL without gradient")
        return
    found = named_kl(values, slopes)
    if found is None:
        flipped = named_kl([-v for v in values], [-s for s in slopes])
        if flipped and not flipped[2]:
            report.add("BUG", "KL sign")
            return
        report.add("?", "KL", "its values and gradients are those of no estimator known here")
        return
    name, scale, is_reversed = found
    if scale < 0:
        report.add("BUG", "KL sign")
        return
    if is_reversed:
        report.add("BUG", "KL reversed")
        return
    report.add("is", "KL", name)
    if not close(nothing, 0, 1e-9) or name != "k1" and abs(slope_0) > 1e-9:
        report.add("BUG", "KL not 0")
    if box.has("beta"):
        twice = at(0.9, beta=2.0)[0] - at(0.0, beta=2.0)[0]
        once = at(0.9)[0] - nothing
        if close(twice, once, 1e-9):
            report.add("BUG", "beta ignored")
        elif not close(twice, 2 * once, 1e-6):
            report.add("?", "beta", "the KL does not grow as beta does")
    check_kl_weight(box, report, name, average)
    if box.has("old_logps") and close(at(0.9, d=0.1)[0] - at(0.0, d=0.1)[0],
                                      (at(0.9)[0] - nothing) * math.exp(0.1), 1e-6):
        report.add("is", "KL times ratio", "yes, as DeepSeek-V3.2 corrects it")


def check_kl_weight(box, report, name, average):
    """Is the KL averaged as the policy's term, and weighted with beta?"""
    slope = KLS[name][1](0.5)

    def weights_of(case):
        far = replace(case, ref_logps=case.logps + 0.5)
        near_to = replace(case, ref_logps=case.logps)
        gradient = (box.kl(far)[1] - box.kl(near_to)[1] * (name != "k1")) / slope
        return (gradient * case.mask).sum(1) / case.mask.sum(1)

    fit = fitted(weights_of)
    if fit is None:
        report.add("?", "KL average", "its weights follow no rule that is known here")
        return
    weight = 1.0
    if box.has("beta"):
        bare = named_average((fit[0], 1.0))
        if named_average(fit) != average and bare and average and bare.split(",")[0] == (
                average.split(",")[0]):
            weight = fit[1]
    named = named_average(fit)
    if named == average:
        return
    if average and named_average(fit) and fit_name(fit) == average.split(", times")[0]:
        if box.has("beta"):
            report.add("note", "KL scaled", f"{WHAT['KL scaled']}: {fit[1]:.4g} beta")
        else:
            report.add("is", "KL weight", f"{fit[1]:.4g}")
        return
    del weight
    report.add("note", "KL average", f"{WHAT['KL average']}: {named}")


def fit_name(fit):
    return named_average((fit[0], 1.0))


# --- odd batches ----------------------------------------------------------------------------------


def check_odd(box, report):
    """A = 0, an empty row, float32 far away, and whether micro-batches add up."""
    case = random_case()
    nothing = replace(case, advantages=torch.zeros_like(case.advantages))
    value, gradient = box(nothing)
    if not math.isfinite(value) or not gradient.isfinite().all():
        report.add("BUG", "NaN")
    if box.has("mask"):
        mask = case.mask.clone()
        mask[1] = 0
        value, gradient = box(replace(case, mask=mask))
        if not math.isfinite(value) or not gradient.isfinite().all():
            report.add("note", "empty row")
    for name in ("old_logps", "ref_logps"):
        far = getattr(case, name).clone()
        far[0, 1] += -100 if name == "old_logps" else 100
        try:
            value, gradient = box(replace(case, beta=0.1, **{name: far}), torch.float32)
        except Exception:       # a loss may insist on its dtype
            continue
        if box.has(name) and not (math.isfinite(value) and gradient.isfinite().all()):
            report.add("note", "overflow")
            break
    if box.has("num_tokens") or box.has("num_sequences"):
        totals = case.mask.sum(), len(case.mask)
        parts = [Case(*(x[rows] for x in (case.logps, case.old_logps, case.ref_logps,
                                          case.advantages, case.mask)))
                 for rows in (slice(0, 1), slice(1, 4))]
        whole, sums = box(case)[0], sum(box(part, totals=totals)[0] for part in parts)
        kind = "ok" if close(whole, sums, 1e-9) else "note"
        text = "add up" if kind == "ok" else "do not add up with totals of the whole"
        report.lines.append((kind, "micro-batches", text))


# --- the other functions --------------------------------------------------------------------------


def check_advantages(function, report):
    """The formula, its std and eps; whose rewards count; equal rewards; unjudged ones."""
    B, G, rng = 3, 4, torch.Generator().manual_seed(3)
    rewards = torch.randn(B, G, generator=rng, dtype=torch.float64)

    def call(rewards):
        values = {}
        for parameter in inspect.signature(function).parameters.values():
            short = parameter.name.lower().replace("_", "")
            if "reward" in short or "score" in short or parameter.name == "r":
                values.setdefault("first", parameter.name)
            elif short in ("g", "n", "k", "groupsize", "numgenerations", "ngenerations", "group"):
                values[parameter.name] = G
        name = values.pop("first", next(iter(inspect.signature(function).parameters)))
        found = None
        for shaped in (rewards.flatten(), rewards):
            try:
                found = function(**{name: shaped}, **values)
            except Exception:
                continue
            found = found[0] if isinstance(found, tuple) else found
            if found.numel() == rewards.numel():
                return found.detach().reshape(-1)
        raise CannotJudge("advantages can't be called; give a function of rewards (N,), and of "
                          "num_generations if it needs it")

    found = call(rewards)
    formula = advantage_formula(found.view(B, G), rewards)
    if formula is None:
        crossed = advantage_formula(found.view(G, B).T, rewards.flatten().view(G, B).T)
        if crossed:
            report.add("BUG", "groups misordered")
            return
        other = rewards.clone()
        other[2] += torch.tensor([3.0, -1.0, 0.5, 2.0])
        if not torch.allclose(call(other)[:2 * G], found[:2 * G]):
            batch = rewards - rewards.mean()
            ratio = found / batch.flatten()
            if torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-5):
                report.add("is", "advantages", "normalised over the batch, without groups")
            else:
                report.add("BUG", "not of these groups")
            return
        report.add("is", "advantages", "of each group, by a formula that is not known here")
    else:
        report.add("is", "advantages", formula)
    equal = call(torch.full((B, G), 2.35, dtype=torch.float32))
    if not equal.isfinite().all() or equal.abs().max() > 1e-3:
        report.add("BUG", "equal rewards")
    elif equal.any():
        report.add("note", "equal rewards", f"{WHAT['equal rewards']}: up to {equal.abs().max():.1g}")
    unjudged = rewards.clone()
    unjudged[0, 1] = math.nan
    found = call(unjudged)[:G]
    if found.isfinite().all():
        report.add("is", "unjudged", "a NaN reward is left out")


def advantage_formula(found, rewards):
    """The name of the formula that makes these advantages (B, G) of rewards (B, G), or None."""
    mean = rewards.mean(1, keepdim=True)
    difference = rewards - mean
    G = rewards.shape[1]
    scale = (difference / found).mean(1)                                                # (B,)
    if not torch.allclose(found * scale[:, None], difference, rtol=1e-6, atol=1e-9):
        return None
    if torch.allclose(scale, torch.ones_like(scale), rtol=1e-9):
        return "r - mean of the group"
    if torch.allclose(scale, torch.full_like(scale, (G - 1) / G), rtol=1e-9):
        return "r - mean of the others (RLOO)"
    if torch.allclose(scale, scale[0].expand_as(scale), rtol=1e-9):
        return f"(r - mean of the group) / one number of the batch, {scale[0]:.4g}"
    for n, name in ((1, "n - 1"), (0, "n")):
        eps = scale - rewards.std(1, correction=n)
        if torch.allclose(eps, eps[0].expand_as(eps), atol=1e-7) and -1e-9 < eps[0] < 0.05:
            shown = f"{eps[0].item():.0e}" if eps[0] > 1e-9 else "0"
            return f"(r - mean) / (std + {shown}) of the group, std with {name}"
    if torch.allclose(scale, mean[:, 0], rtol=1e-6):
        return "(r - mean) / mean of the group (MaxRL)"
    return None


def check_mask(function, report):
    """A mask of ids: 1 through the first EOS, all 1 without one."""
    ids = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8], [5, 9, 2, 0]])
    wanted = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
    found = function(ids, 2).to(torch.int64)
    if torch.equal(found, wanted):
        report.add("ok", "mask", "1 through the first EOS, all 1 without one")
    elif (found[0, 1] == 0 or found[3, 2] == 0) and found[0, 0]:
        report.add("BUG", "EOS left out")
    elif found[2].sum() < 4:
        report.add("BUG", "no EOS", "a completion without an EOS loses tokens")
    else:
        report.add("BUG", "padding trained")


def check_kl_function(function, report):
    """A function of logps and ref_logps, or of their difference, by values and gradients."""
    logps = torch.zeros(len(XS), dtype=torch.float64, requires_grad=True)
    value = function(logps, torch.tensor(XS, dtype=torch.float64))
    slopes = torch.zeros_like(logps)
    if value.requires_grad:
        slopes, = torch.autograd.grad(value.sum(), logps)
    found = named_kl(value.tolist(), slopes.tolist())
    if found is None and not slopes.any():
        report.add("BUG", "KL without gradient")
    elif found is None:
        report.add("?", "KL function", "its values and gradients are those of no known estimator")
    elif found[1] < 0:
        report.add("BUG", "KL sign")
    elif found[2]:
        report.add("BUG", "KL reversed")
    else:
        report.add("is", "KL function", found[0] if close(found[1], 1) else
                   f"{found[1]:.4g} times {found[0]}")


class Bigrams(torch.nn.Module):
    """A model whose next token depends on the last alone; logits (N, T, V)."""

    def __init__(self, V=7):
        super().__init__()
        rng = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=rng, dtype=torch.float64))

    def forward(self, input_ids, attention_mask=None, **options):
        logits = self.table[input_ids]
        keep = options.get("logits_to_keep", 0)
        return logits[:, -keep:] if keep else logits


def check_logps(function, report):
    """f(model, input_ids, attention_mask, R): log-probs of the last R tokens, (N, R)."""
    model, R = Bigrams(), 3
    ids = torch.tensor([[1, 4, 2, 6, 3, 5], [0, 3, 3, 1, 5, 2]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    found = function(model, ids, attention, R)
    found = (found[0] if isinstance(found, tuple) else found).detach().double()
    table = model.table.detach().log_softmax(-1)
    wanted = table[ids[:, -R - 1:-1], ids[:, -R:]]
    if torch.allclose(found, wanted, atol=1e-5):
        report.add("ok", "log-probs", "each token's, given what stands before it")
        return
    for shifted in (table[ids[:, -R:], ids[:, -R:]], table[ids[:, -R - 2:-2], ids[:, -R:]]):
        if torch.allclose(found, shifted, atol=1e-5):
            report.add("BUG", "shifted")
            return
    report.add("?", "log-probs", "they are not those of the model at temperature 1")


def check(loss=None, *, advantages=None, mask=None, kl=None, logps=None, allow=()):
    """A Report on these functions; each may be left out."""
    report = Report(allow)
    for function, judge in ((loss, check_loss), (advantages, check_advantages),
                            (mask, check_mask), (kl, check_kl_function), (logps, check_logps)):
        if function is not None:
            try:
                judge(function, report)
            except CannotJudge as error:
                report.add("?", getattr(function, "__name__", "function"), str(error))
    return report


def check_loss(loss, report):
    box = Box(loss)
    if not check_gradient(box, report):
        return
    check_rows(box, report)
    check_padding(box, report)
    average = check_average(box, report)
    if "sign" not in report.bugs:
        level = check_ratio(box, report)
        if level:
            check_bound(box, report, level)
    check_kl(box, report, average)
    check_odd(box, report)


# --- a rollout ------------------------------------------------------------------------------------


def check_batch(batch, allow=()):
    """A Report on the arrays of one real rollout, N completions, the G of a prompt adjacent.

    batch: a dict of completion_ids, mask (1: trained), sampler_logps, trainer_logps (N, R), rewards
    (N,), advantages (N,) or (N, R), eos_token_ids (a list) and num_generations; any may be missing.
    The trainer's log-probs are those of the weights that sampled, the sampler's those it drew with.
    """
    report = Report(allow)
    ids, mask, x, y, r, a, eos, G = (
        None if batch.get(name) is None else torch.as_tensor(batch[name]).detach().cpu().double()
        for name in ("completion_ids", "mask", "sampler_logps", "trainer_logps", "rewards",
                     "advantages", "eos_token_ids", "num_generations"))
    G, mask = int(G or 0), None if mask is None else mask > 0
    logps = x is not None and y is not None and x.any()
    if mask is not None:
        mask = without_tool(x, y, mask, report) if logps else mask
        mask = mask if ids is None or eos is None else check_eos(ids, mask, eos, report)
        if logps and mask.any():
            check_sampler((y - x)[mask], x[mask], *parting(x, y, mask, ids, G), report)
    if r is not None and a is not None and G:
        check_groups(r, a, G, report)
    return report


def without_tool(x, y, mask, report):
    """The mask without a tool's words: log-probs 0 or NaN, before a drawn token; 60% of a rollout.
    A sure token has 0, too, and the trainer's below -1 with very stale weights: 0.1%. So 0.5%."""
    drawn = mask & (x != 0) & (x + y).isfinite()
    foreign = mask & ~drawn & ~(y >= -1) & (drawn.flip(1).cumsum(1).flip(1) > 0)
    if foreign.sum() <= 0.005 * mask.sum():
        return mask & (x + y).isfinite()
    report.add("BUG", "tool's words trained")
    return drawn


def check_eos(ids, mask, eos, report):
    """Is the EOS behind the last trained token trained, and no token straight behind it? Exact."""
    is_eos, none = torch.isin(ids, eos), torch.zeros_like(mask[:, :1])
    before, after = torch.cat((none, mask[:, :-1]), 1), torch.cat((mask[:, 1:], none), 1)
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)      # a tool's words may hold an EOS, before
    left_out, too_far = is_eos & before & ~mask & last, is_eos & mask & after
    wrong, right = ids[left_out | too_far], ids[:, :-1][(is_eos & mask & ~after)[:, :-1]]
    if len(wrong):
        report.add("BUG", "one EOS only" if len(right) and not torch.isin(wrong, right).any() else
                   "EOS not trained" if left_out.any() else "padding trained")
    else:
        report.add(*("ok", "EOS", "trained, and nothing behind it") if (is_eos & mask).any() else
                   ("?", "EOS", "no trained token is one"))
    return mask & (too_far.cumsum(1) - too_far.int() == 0)


def check_sampler(change, x, dx, dy, report):
    """Why do the sampler's log-probs x change in the trainer, if by more than float32's 2e-5?
    Where completions part, dx = dy / temperature, with a top-k too. The scatter of dx is 0.05 of it
    in bfloat16, 0.08 in float8, 0.23 with other weights: 0.13. A top-k lowers 96%, by number and by
    sum, others 83%: 90%. Else the std of unsure tokens: float8 0.08, other weights 0.39: 0.18."""
    moved, unsure, slope, scatter = change[change.abs() > 1e-4], change[x < -0.02], 1.0, 0.0
    spread = unsure.std().item() if len(unsure) > 1 else 0.0
    if len(dx):
        slope = ((dx * dy).sum() / dy.square().sum()).item()
        scatter = (1 - slope * (dx * dy).sum() / dx.square().sum()).clamp(min=0).sqrt().item()
    if not len(moved):
        report.add("ok", "sampler", "its log-probs are the trainer's")
    elif not scatter <= 0.13:
        report.add("BUG", "stale weights")
    elif abs(slope - 1) * len(dx)**0.5 > 0.25:          # 5 errors, at a scatter of 0.05
        report.add("BUG", "another temperature", f"the sampler's is {1 / slope:.2f} times as high")
    elif min((moved < 0).double().mean(), -moved.sum() / moved.abs().sum()) > 0.9:
        report.add("BUG", "top-k or top-p")
    elif spread < 0.18:
        report.add("is", "sampler", f"rounds otherwise: log-probs differ by {spread:.1g}")
    else:
        report.add(*("BUG", "stale weights") if len(dx) else ("?", "sampler", "no group shows why"))


def parting(x, y, mask, ids, G):
    """dx, dy (n,) where two completions of a prompt part; equal pairs once, and dy > 0."""
    found, (i, j) = [torch.zeros(2, 0)], torch.triu_indices(G, G, 1)
    for rows in () if ids is None or not G else torch.arange(len(ids)).view(-1, G):
        apart = ids[rows[i]] != ids[rows[j]]                                    # (pairs, R)
        one, other = ((rows[k], apart.int().argmax(1)) for k in (i, j))
        both = apart.any(1) & mask[one] & mask[other]
        found.append(torch.stack([z[one] - z[other] for z in (x, y)])[:, both])
    pairs = torch.cat(found, 1)
    pairs = (pairs * pairs[1].sign() * 1e4).round().unique(dim=1) / 1e4
    return pairs[:, pairs[1] > 1e-3]


def check_groups(r, a, G, report):
    """Do advantages rise with rewards, in groups of neighbours, or of rows that stand N / G apart?
    Exact for formulas of rewards. GDPO's correlation is over 0.8, strangers' below 0.25: 0.5."""
    of_tokens = a.dim() == 2 and ((a != a[:, :1]) & (a != 0)).any()
    a = a[:, 0] if a.dim() == 2 else a
    rises, correlation = same_order(r.view(-1, G), a.view(-1, G))
    if rises:
        report.add("ok", "advantages", "never fall where the rewards of their group rise")
    elif same_order(r.view(G, -1).T, a.view(G, -1).T)[0]:
        report.add("BUG", "groups misordered")
    elif correlation > 0.5:
        report.add("is", "advantages", f"of more than these rewards, {correlation:.2f} correlated")
    elif of_tokens or math.isnan(correlation):
        report.add("?", "advantages", "of tokens, or of equal rewards: they can't be compared")
    else:
        report.add("BUG", "advantages not of these rewards")


def same_order(r, a):
    """Of groups (B, G): is more reward never less advantage? And the correlation, or NaN."""
    dr, da, limit = *(z[:, :, None] - z[:, None] for z in (r, a)), 1e-3 * a.abs().max()
    wrong = (dr > 1e-6) & (da < -limit) | (dr.abs() <= 1e-6) & (da.abs() > limit)  # (B, G, G)
    r, a = (z.where(~r.isnan(), math.nan) for z in (r, a))
    r, a = ((z - z.nanmean(1, keepdim=True)).nan_to_num(0.0) for z in (r, a))
    return not wrong.any(), ((r * a).sum() / (r.norm() * a.norm())).item()


# --- the command ----------------------------------------------------------------------------------


def imported(name):
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def main():
    parser = argparse.ArgumentParser(description="What does this GRPO loss do? It runs the module.")
    parser.add_argument("loss", nargs="?", help="module:function, or a .pt of one rollout")
    for name in ("advantages", "mask", "kl", "logps"):
        parser.add_argument(f"--{name}", metavar="MODULE:FUNCTION")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME", help="of a BUG")
    args = parser.parse_args()
    if args.loss and args.loss.endswith(".pt"):
        report = check_batch(torch.load(args.loss, weights_only=True), allow=args.allow)
    else:
        functions = {name: imported(getattr(args, name))
                     for name in ("loss", "advantages", "mask", "kl", "logps")
                     if getattr(args, name)}
        report = check(**functions, allow=args.allow)
    if args.json:
        print(json.dumps([{"kind": kind, "name": name, "text": text}
                          for kind, name, text in report.lines], indent=2))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
