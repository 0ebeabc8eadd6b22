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
arrays of one real rollout. lab/check.md has recipes, and what neither can see.
"""
import argparse
import importlib
import inspect
import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import torch
except ImportError:
    lacking = "check-grpo needs torch: pip install torch"
    if Path(sys.argv[0]).stem in ("check-grpo", "check_grpo"):
        sys.exit(lacking)
    raise ImportError(lacking) from None

__version__ = "0.3.0"
CURVE = [i / 12.5 for i in range(-50, 51)]      # log-ratios at which a bound is looked at
WHAT = {        # of each BUG and note: what it means
    "no gradient": "nothing is learned: log-probs or advantages are detached, or not used",
    "sign": "good completions become less likely, or bad ones more",
    "misaligned": "a token meets the old or reference log-prob of another token, or row",
    "not in proportion": "twice the advantages do not give twice the gradient",
    "good side dead": "completions with A > 0 teach nothing",
    "bad side dead": "completions with A < 0 teach nothing",
    "completions left out": "some completions have no gradient, though their advantage is not 0",
    "another row's advantage": "a completion is taught by the advantage of another one",
    "normalised again": "advantages are normalised again in the loss, over this batch",
    "padding trained": "tokens after the EOS get a gradient",
    "padding trained under the KL": "the KL pulls at tokens after the EOS",
    "padding read": "what stands after the EOS changes the loss",
    "EOS left out": "the last token of a completion has no gradient: stopping is not learned",
    "mask shifted": "the first token of a completion has no gradient",
    "rows mixed": "the order of the rows changes their gradients",
    "ratio upside down": "it is pi_old / pi in place of pi / pi_old",
    "ratio over the width": "the mean log-ratio of a completion counts its padding",
    "ratio to the reference": "it is pi / pi_ref in place of pi / pi_old: another objective",
    "ratio to a power": "it is (pi / pi_old)^p, with another p than 1: another base of exp or log?",
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
    "KL leaves tokens out": "some tokens of a completion are not held back by the KL",
    "KL times the advantage": "the KL pulls otherwise at completions with another advantage",
    "lengths of other rows": "each completion is divided by the lengths of all: (N, 1) / (N,) is "
                             "(N, N)",
    "row without padding": "a completion that fills the width is averaged in another way",
    "mask counts": "tokens weigh 1, 2, 3 and so on: a running sum of the mask stands for the mask",
    "tokens weighted": "at ratio 1 the tokens of a completion have different weights",
    "k1 in the loss": "on policy its gradient is 0 on average: as a penalty it holds nothing back",
    "KL average": "the KL is averaged in another way than the policy's term",
    "NaN": "an ordinary batch gives no finite loss",
    "empty row": "a completion without a token gives no finite gradient",
    "overflow": "the KL of a token e^100 times as likely under pi_ref is not finite in float32",
    "weights of other rows": "the ratio of one completion changes the gradients of others",
    "another term": "something pulls without an advantage or a reference: an entropy bonus, a "
                    "penalty to pi_old?",
    "no ratio": "pi_old is taken, and A's gradient knows nothing of it: right for one update only",
    "groups misordered": "a prompt's completions are taken to stand apart: a b a b, not a a b b",
    "not of these groups": "rewards of another prompt change the advantages",
    "advantage falls": "in a group, a completion with more reward has less advantage: a wrong "
                       "sign, another order, or a square?",
    "equal rewards": "equal rewards give advantages other than exactly 0",
    "EOS not trained": "an EOS was sampled, and the mask leaves it out",
    "advantages not of these rewards": "in its group, a completion's does not go with its reward",
    "another temperature": "sampler and trainer divide their logits by different temperatures",
    "top-k or top-p": "the sampler's probabilities are of fewer tokens: higher than the trainer's",
    "stale weights": "the sampler has other weights than the trainer, or one has dropout",
    "tool's words trained": "the mask has tokens that the policy did not draw",
    "one EOS only": "of several ids that end a completion, the mask knows fewer",
    "shifted": "log-probs are those of the next or the last token",
    "softmax twice": "probabilities are taken for logits: their softmax is nearly flat",
    "temperature ignored": "log-probs at another temperature are those at 1",
    "unjudged": "a completion without a reward, NaN, is compared as if it had one",
    "inputs written to": "the function changes a tensor that it was given",
    "adds up": "the loss grows from call to call, by the same amount for the same inputs",
    "averaged twice": "the loss is divided by the number of completions, or of tokens, twice",
    "mean over the wrong axis": "a token is averaged with those at its place in other completions",
    "beta twice": "twice the beta gives four times the KL: it is multiplied in twice",
    "std twice": "advantages are divided by the std of the group twice",
    "max where A < 0": "where A < 0 the clip ends the gradient above 1 + epsilon, where pi has "
                       "gone wrong, and not below 1 - epsilon, where it has gone far enough",
    "dual clip too low": "where A < 0 the gradient ends as soon as pi has gone wrong a little: the "
                         "outer bound must be well above 1 + epsilon, say at 3",
    "no KL": "it is no estimate of a KL: at pi = pi_ref it pulls, or it pulls away from pi_ref",
    "NaN under the mask": "where padding is far from pi_ref or pi_old, NaN times 0 is NaN",
}
# What a convention costs, by a part of its line: the first that fits. "" is GRPO's default.
COSTS = {
    "average": {
        "then of completions (GRPO)": "",
        "length^-2": "divided by the length twice: short completions count far more",
        "of all tokens": "a long completion counts more than a short one",
        "/ (N R)": "divided by the padded width: one long completion shrinks all gradients",
        "(Dr. GRPO)": "a long completion counts more than a short one, by its length",
        "sum over tokens, then": "the longer the completions, the larger the gradient",
        "then a sum over": "the larger the batch, the larger the gradient",
        "width of the batch": "the larger the batch, the larger the gradient; padding shrinks it",
        "none: a sum": "the larger the batch, the larger the gradient",
        "of groups": "a group weighs as much as another, however long its completions are",
        "": "tokens weigh otherwise than in GRPO"},
    "ratio": {
        "of each token": "",
        "none": "right for one update per rollout only",
        "product": "it is far from 1 for long completions, and the bound then ends all they teach",
        "geometric mean": "epsilons must be about 3e-4; no bound sees a single token",
        "": "it is not the ratio of a single token"},
    "bound": {
        "good completions only": "bad completions are pushed down without an end",
        "bad completions only": "good completions are pushed up without an end",
        "alone": "good completions are pushed up without an end",
        "dual clip": "a bad token that pi finds ever likelier is pushed down no more",
        "outer ends": "a token that has moved far the wrong way is not pulled back",
        "PPO's clip, epsilons": "",
        "none": "no bound: with several updates per rollout nothing ends a token's gradient",
        "CISPO": "no token loses its gradient, however far pi has moved",
        "soft gate": "the gradient fades, and no token is ever done",
        "a mask": "a token that has moved the wrong way is not pulled back",
        "": "where the gradient ends is not where GRPO's does"},
    "KL": {
        "k3": "", "none in this function": "", "k3+": "",
        "k1": "as a penalty its gradient is 0 on average: it holds nothing back",
        "k2": "its gradient is the KL's, its value is not",
        "abs": "it pulls as hard near pi_ref as far from it",
        "in the advantage": "it counts as a reward: advantages are not those of the rewards alone",
        "": "it is no estimate that is known here"},
    "advantages": {
        "(r - mean) / (std": "",
        "r - mean of the group": "no std: groups with a large spread teach more",
        "RLOO": "no std: groups with a large spread teach more",
        "MaxRL": "no std, and hard prompts count more; for rewards from 0 to 1",
        "one number": "one scale for all groups: those with a large spread teach more",
        "without groups": "an easy prompt's completions all beat a hard one's",
        "max(0": "bad completions teach nothing: none is pushed down",
        "none is negative": "bad completions are not pushed down",
        "pass@k": "a group counts as its best completion: the others teach nothing",
        "": "twice as far above the mean is not twice the advantage, as it is in GRPO"},
}
LINK = "lab/check.md#conventions"


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

    @property
    def marks(self):
        """{name: what it costs} of the conventions that are not GRPO's default."""
        found = {}
        for name, text in self.facts.items():
            costs = COSTS.get(name.removesuffix(" function"), {"": ""})
            found[name] = next(costs[part] for part in costs if part in text)
        return {name: cost for name, cost in found.items() if cost}

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
        lines, marks = [], self.marks
        for kind, name, text in self.lines:
            cost = marks.get(name) if kind == "is" else None
            lines.append(f"{kind + ' *' * bool(cost):4}  {name}{': ' * bool(text)}{text}")
            if cost:
                lines.append(f"        * {cost}")
        if marks:
            lines.append(f"*: not GRPO's default, and no bug; {LINK}")
        count = f"bugs: {len(self.bugs)}, notes: {len(self.notes)}"
        if self.questions:
            count += f", not judged: {len(self.questions)}"
        return "\n".join([*lines, count])


class CannotJudge(Exception):
    """What is wrong with the call, and which wrapper would help."""


class Found(Exception):
    """The name of a BUG after which nothing else can be said."""


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

    def rows(self, rows):
        return Case(self.logps[rows], self.old_logps[rows], self.ref_logps[rows],
                    self.advantages[rows], self.mask[rows], self.beta)


def random_case(lengths=(6, 3, 4, 2), R=None, **changes):
    """A case whose three policies are the same: every ratio is 1, every KL 0."""
    N, R = len(lengths), R or max(lengths)
    rng = torch.Generator().manual_seed(0)
    mask = (torch.arange(R) < torch.tensor(lengths)[:, None]).double()
    logps = -0.5 - 1.5 * torch.rand(N, R, generator=rng, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0] * N, dtype=torch.float64)[:N]
    advantages = signs * (0.6 + torch.rand(N, generator=rng, dtype=torch.float64))
    return replace(Case(logps, logps, logps, advantages, mask), **changes)


def moved_case():
    """A case with ratios from e^-2 to e^2, a reference elsewhere and a beta of 0.5."""
    case = random_case()
    return replace(case, old_logps=case.logps - 2 * (9 * case.logps).sin(), beta=0.5,
                   ref_logps=case.logps + (7 * case.logps).sin())


LOGP = "(log_?p|logit|lp$|log_?prob)"
REF = "(ref|base|init|sft|anchor|teacher|frozen|prior)"
OLD = "(old|behav|sampl|rollout|gen|infer|prev|vllm|fixed|prox|stale|mu$|mu_)"
ROLES = {       # a parameter's name, or its beginning, and what it is; the first that fits
    "mask": "mask", "advantages": "adv|^A$", "one": "^temperature$",
    "group": "^G$|num_?gen|group_?size|per_prompt|^n_?samples",
    "ref_logps": f"{REF}.*({LOGP}|prob)|{LOGP}.*{REF}",
    "old_logps": f"{OLD}.*{LOGP}|{LOGP}.*{OLD}",
    "beta": "^beta$|^kl_?beta|beta_kl|kl.*(coef|weight|lambda|ctrl|scale)",
    "num_tokens": "^(num|total|global|batch_num).*(item|tok)",
    "num_sequences": "^(num|total|global).*(seq|sample|completion|example)",
    "max_length": "max.*len|^L$", "epsilon": "(^|_)eps|epsilon|clip", "logps": LOGP}
GIVEN = {"epsilon": 0.2, "max_length": 50, "one": 1.0, "group": 2}      # our batches are even


def role_of(name):
    """Which argument a parameter's name means, or None."""
    return next((role for role, pattern in ROLES.items()
                 if re.search(pattern, name if len(name) == 1 else name.lower())), None)


class Box:
    """A loss of anybody's, as a function of a Case: its value, and its gradient (N, R)."""

    def __init__(self, function):
        self.function, self.roles, self.constants, lacking = function, {}, {}, []
        target = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            parameters = inspect.signature(target).parameters
        except ValueError as error:             # of compiled code
            raise CannotJudge(f"its parameters have no names: {error}") from None
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            role, required = role_of(name), parameter.default is parameter.empty
            if role in GIVEN:
                # A clip range of None is asked for later; a lower or upper one falls back on it.
                if required or role == "group" or parameter.default is None and not re.search(
                        "low|high|min|max(?!.*len)|delta|_c$|dual", name.lower()):
                    self.constants[name] = GIVEN[role]
            elif role and not isinstance(parameter.default, (bool, str)) and (
                    role not in self.roles.values() or required and role == "old_logps"):
                self.roles[name] = role
            elif required:
                lacking.append(name)
        self.has = set(self.roles.values()).__contains__
        self.of_padding, self.written = False, set()
        if lacking or not (self.has("logps") and self.has("advantages")):
            what = f"{', '.join(lacking)} among its parameters" if lacking else (
                "its parameters, without log-probs or advantages,")
            raise CannotJudge(f"""it is not known what {what} mean; wrap it:

    def loss(logps, old_logps, advantages, mask, ref_logps, beta):
        return my_loss(...)         # a scalar, from (N, R), (N, R), (N,), (N, R), (N, R), 0.1
""")
        self.style, case = self.find_style(), random_case()
        # A padding mask may be 1 at padding, as torch's are: then the gradient is after the EOS.
        self.of_padding = any(role == "mask" and "pad" in name for name, role in (
            self.roles.items())) and not self.policy(case)[case.mask == 1].any()

    def find_style(self):
        """The shape of advantages, and the type of masks, that the function takes.

        Of several results with a gradient the loss is the first that advantages change.
        """
        errors, self.part = [], 0
        for self.style in itertools.product(
                ("(N,)", "(N, 1)", "(N, R)"), (torch.float64, torch.bool, torch.int64)):
            try:
                value, gradient = self(random_case())
            except (Exception, SystemExit) as error:        # of code that we do not know
                errors.append(f"{type(error).__name__}: {error}")
                continue
            if math.isfinite(value) and gradient.isfinite().all():
                taught, first = [], []
                for part in range(self.parts):
                    self.part = part
                    first.append(self.at_moved())
                    taught.append(bool(self.policy(random_case()).any()))
                self.part = taught.index(True) if any(taught) else 0
                self.first = first[self.part]
                self.check_growth()
                return self.style
            raise Found("NaN")
        raise CannotJudge(f"it can't be called: {errors[0]}")

    def __call__(self, case, dtype=torch.float64, totals=None):
        shape, kind = self.style
        logps = case.logps.to(dtype).detach().clone().requires_grad_()
        advantages = case.advantages.to(dtype)
        if shape != "(N,)":
            advantages = advantages[:, None].expand(-1, 1 if shape == "(N, 1)" else logps.shape[1])
        mask = 1 - case.mask if self.of_padding else case.mask
        tokens, sequences = totals or (case.mask.sum(), len(case.mask))
        values = {
            "logps": logps, "old_logps": case.old_logps.to(dtype).clone(), "num_tokens": tokens,
            "ref_logps": case.ref_logps.to(dtype).clone(), "advantages": advantages.clone(),
            "mask": mask.clone().to(dtype if kind == torch.float64 else kind),
            "beta": case.beta,
            "num_sequences": sequences}
        before = {role: value.detach().clone() for role, value in values.items()
                  if isinstance(value, torch.Tensor)}
        losses = losses_in(self.function(**self.constants, **{
            name: values[role] for name, role in self.roles.items()}))
        self.written |= {role for role, value in before.items()
                         if not torch.equal(value, values[role].detach())}
        loss, self.parts = losses[min(self.part, len(losses) - 1)], len(losses)
        loss = (loss * case.mask if loss.shape == case.mask.shape else loss).sum()
        gradient = None
        if loss.requires_grad:
            gradient, = torch.autograd.grad(loss, logps, allow_unused=True)
        return float(loss.detach()), torch.zeros_like(logps) if gradient is None else gradient

    def at_moved(self):
        """The loss at moved_case(), and its gradient there, as one tensor."""
        value, gradient = self(moved_case())
        return torch.cat((gradient.new_tensor([value]), gradient.flatten()))

    def check_growth(self):
        """Raises Found if equal calls have one gradient, and losses that grow by equal steps."""
        values, gradients = zip(*(self(moved_case()) for _ in range(4)))
        steps = [b - a for a, b in itertools.pairwise(values)]
        if abs(steps[0]) > 1e-12 and near(steps, steps[:1] * 3, 1e-4) and all(
                same(gradient, gradients[0]) for gradient in gradients):
            raise Found("adds up")

    def check_repeats(self):
        """Raises CannotJudge if the inputs of the first calls don't give now what they gave then.

        Eight calls, because a loss may also count modulo a small number.
        """
        for _ in range(8):
            now = self.at_moved()
            if not torch.allclose(now, self.first, rtol=1e-9, atol=1e-12, equal_nan=True):
                raise CannotJudge(
                    "the loss or its gradient is another one for the same inputs (the loss is "
                    f"{self.first[0]:.6g}, then {now[0]:.6g}), because it keeps state or draws "
                    "random numbers, so nothing is said about it; pass a function that makes a new "
                    "loss in each call, or switch the noise off")

    def without(self, case):
        """Value and gradient of what is there without advantages: the KL's."""
        return self(replace(case, advantages=torch.zeros_like(case.advantages)))

    def policy(self, case):
        """The gradient that comes from the advantages."""
        return self(case)[1] - self.without(case)[1]


def losses_in(found):
    """What a function returned that may be its loss: a scalar, or one per token or row."""
    if isinstance(found, dict):
        found = [found[name] for name in sorted(found, key=lambda name: "loss" not in name)]
    found = getattr(found, "loss", found)
    parts = [part for part in (found if isinstance(found, (list, tuple)) else [found])
             if isinstance(part, torch.Tensor)]
    if not parts:
        raise CannotJudge("it returns no tensor")
    return [part for part in parts if part.requires_grad] or parts[:1]


def close(a, b, tolerance=1e-6):
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def near(found, wanted, tolerance=1e-6):
    """Whether two lists of numbers agree, with respect to the largest."""
    largest = max(max(map(abs, wanted)), 1e-12)
    return all(abs(a - b) <= tolerance * largest for a, b in zip(found, wanted))


def same(a, b):
    return torch.allclose(a, b, rtol=1e-6, atol=1e-12)


# --- the policy's term ----------------------------------------------------------------------------


def check_gradient(box, report):
    """Is there any, has it the right sign, and does each side teach? False: there is none."""
    case = random_case()
    gradient = box.policy(case)
    pushes = -(gradient * case.mask).sum(1) * case.advantages.sign()        # above 0: rightly
    if not gradient.any():
        report.add("BUG", "no gradient")
        return False
    if (pushes < 0).any():
        own = dependency(box, case).diagonal().abs().max() > 1e-9
        report.add("BUG", "sign" if own else "another row's advantage")
        return True
    dead = [name for side, name in ((1, "good side dead"), (-1, "bad side dead"))
            if not pushes[side * case.advantages > 0].any()]
    if not dead and not pushes.all():
        dead = ["completions left out"]
    for name in dead:
        report.add("BUG", name)
    if not dead:
        report.add("ok", "gradient", "good completions become more likely, bad ones less")
    return True


def check_alignment(box, report):
    """Does a token meet its own old and reference log-prob? True: yes, or it can't be told."""
    case = random_case(logps=torch.full((4, 6), -1.0, dtype=torch.float64))
    case = replace(case, old_logps=case.logps, ref_logps=case.logps, beta=1.0)
    for name in filter(box.has, ("old_logps", "ref_logps")):
        gradient_of = box.policy if name == "old_logps" else lambda case: box.without(case)[1]
        other = getattr(case, name).clone()
        other[0, 2] -= 0.01
        moved = (gradient_of(replace(case, **{name: other})) - gradient_of(case)).abs() > 1e-9
        if moved.any() and not moved[0, 2]:
            report.add("BUG", "misaligned")
            return False
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
    case, before = random_case(), box.policy(random_case())
    moved = dependency(box, case)
    others = (moved - moved.diagonal().diag()).max() > 1e-6 * moved.max()
    if others:
        changed = (3 * case.advantages, case.advantages + 0.3)
        again = any(torch.allclose(box.policy(replace(case, advantages=x)), before, rtol=1e-3,
                                   atol=1e-9) for x in changed)
        report.add(*("note", "normalised again") if again else ("BUG", "another row's advantage"))
    # All orders, or those that keep two neighbours together: a prompt's group may be weighted.
    any_order, by_group = (
        all(same(box.policy(case.rows(order)), before[order]) for order in orders)
        for orders in ([[1, 2, 0, 3], [2, 0, 3, 1]], [[2, 3, 0, 1], [1, 0, 2, 3]]))
    far = replace(moved_case(), ref_logps=case.logps, beta=0.0)
    twice = replace(far, advantages=2 * far.advantages)
    if not others and not same(box.policy(twice), 2 * box.policy(far)):
        report.add("note", "not in proportion")
    if any_order and not others:
        report.add("ok", "rows", "each completion is taught by its own advantage")
    elif not any_order:
        report.add(*("is", "rows", "weighted within groups of neighbours") if by_group else
                   ("BUG", "rows mixed"))


def check_tokens(box, report):
    """Is padding trained or read? Is each token trained, the EOS too, all of a row alike?"""
    if not box.has("mask"):
        report.add("?", "padding", "there is no mask among the parameters")
        return
    case, bugs = random_case(), len(report.bugs)
    padding, gradient = case.mask == 0, box.policy(case)
    wave = torch.linspace(-1, 1, case.mask.numel(), dtype=torch.float64).view_as(case.mask)
    moved = replace(case, old_logps=case.logps - 0.02 * wave, ref_logps=case.logps - 0.3 * wave,
                    beta=0.5)
    last = case.mask.sum(1).long() - 1, torch.arange(len(case.mask))
    if gradient[padding].any():
        report.add("BUG", "padding trained")
    elif box(moved)[1][padding].any():
        report.add("BUG", "padding trained under the KL")
    taught = gradient.any(1)                    # one side may be dead
    if not gradient[last[1], last[0]][taught].all():
        report.add("BUG", "EOS left out")
    elif not gradient[:, 0][taught].all():
        report.add("BUG", "mask shifted")
    elif not same(gradient * case.mask, gradient[:, :1] * case.mask):
        weights = gradient / case.advantages[:, None] * case.mask.sum(0)        # of each column
        counted = gradient[:, :1] * case.mask.cumsum(1)
        report.add(*("BUG", "mean over the wrong axis") if same(
            weights * case.mask, weights[0, 0] * case.mask) else ("BUG", "mask counts") if same(
                gradient * case.mask, counted * case.mask) else ("note", "tokens weighted"))
    pull = box.without(replace(case, ref_logps=case.logps - 0.5, beta=1.0))[1]
    columns = pull * case.mask.sum(0)
    if pull[~padding].all() and same(columns * case.mask, columns[0, 0] * case.mask):
        report.add("BUG", "mean over the wrong axis")
    if pull[~padding].any() and (gradient != 0)[~padding & (pull == 0)].any():
        report.add("BUG", "KL leaves tokens out")
    if len(report.bugs) > bugs:
        return

    def padded(*values):
        names = "logps", "old_logps", "ref_logps"
        return replace(moved, **{name: getattr(moved, name).where(~padding, value)
                                 for name, value in zip(names, values)})

    far = padded(-20.0, -0.1, -0.1), padded(-0.1, -20.0, -20.0)
    if not all(box(case)[1].isfinite().all() for case in far):
        report.add("BUG", "NaN under the mask")
        return
    value, before = box(moved)
    for other in padded(-7.0, -0.1, -3.0), padded(0.0, 0.0, 0.0):
        changed, after = box(other)
        if not (close(value, changed, 1e-9) and same(before[~padding], after[~padding])):
            report.add("BUG", "padding read")
            return
    report.add("ok", "padding", "is neither trained nor read, and the EOS is trained")


SHAPES = [((6, 3, 4, 2), 6), ((6, 3, 4, 2, 5, 1), 6), ((6, 3, 4, 2), 9), ((7, 2), 7),
          ((6, 6, 5, 1), 8), ((1, 2, 3, 4, 5, 6, 7, 8), 10), ((30, 12), 40)]
AVERAGES = {    # exponents of N, all tokens, the completion's length, the width R
    (-1, 0, -1, 0): "of each completion's tokens, then of completions (GRPO)",
    (0, -1, 0, 0): "of all tokens (DAPO, BNPO)",
    (-1, 0, 0, -1): "sum over tokens / (N R), R the width of the batch, padding included",
    (-1, 0, 0, 0): "sum over tokens, then of completions",
    (0, 0, 0, 0): "none: a sum over tokens",
    (0, 0, -1, 0): "of each completion's tokens, then a sum over completions",
    (0, 0, 0, -1): "sum over tokens / the width of the batch"}


TWICE = re.compile(r"\bN\^-[2-9]|tokens\^-[2-9]|\bN\^-\S+ tokens\^-")


def average_of(weights_of, shapes=SHAPES):
    """(name, factor) of an average, by a fit of the weights (N,) of a token of each row.

    log weight = a log N + b log tokens + c log length + d log R + log factor, over the shapes.
    """
    rows, logs = [], []
    for lengths, R in shapes:
        case = random_case(lengths, R)
        for length, weight in zip(lengths, weights_of(case).tolist()):
            if not weight > 0:
                return None, 1.0
            rows.append([math.log(x) for x in (len(lengths), sum(lengths), length, R)] + [1.0])
            logs.append(math.log(weight))
    rows, logs = (torch.tensor(x, dtype=torch.float64) for x in (rows, logs))
    found = torch.linalg.lstsq(rows, logs[:, None], driver="gelsd").solution[:, 0]
    exponents = (2 * found[:4]).round() / 2
    if (rows @ found - logs).abs().max() > 1e-4 or (exponents - found[:4]).abs().max() > 1e-3:
        return None, 1.0
    exponents = [x + 0.0 for x in exponents.tolist()]
    shown = " ".join(f"{name}^{x:g}" for name, x in zip(("N", "tokens", "length", "R"), exponents)
                     if x)
    return AVERAGES.get(tuple(exponents), f"a token weighs {shown}"), math.exp(found[4].item())


def check_average(box, report):
    """How tokens are weighted, in batches of several shapes; (name, factor)."""
    def weights_of(case):
        return -box.policy(case)[:, 0] / case.advantages

    echo = {"EOS left out", "mask shifted", "padding trained"} & {*report.bugs}
    if echo or not box.policy(random_case())[:, 0].all():       # another check has said why
        return None, 1.0
    name, factor = average_of(weights_of)
    if name is None and "rows" in report.facts:
        report.add("is", "average", "of groups, as DAPO's equation has it, or in a like way")
    elif name is None:
        lengths = torch.tensor(SHAPES[0][0], dtype=torch.float64)
        mixed = torch.full_like(lengths, (1 / lengths).mean() / len(lengths))
        if torch.allclose(weights_of(random_case()), mixed, rtol=1e-4):
            report.add("BUG", "lengths of other rows")
        elif average_of(weights_of, [(lengths, R + 2) for lengths, R in SHAPES])[0]:
            report.add("BUG", "row without padding")
        else:
            report.add("?", "average", "the weights of tokens follow no rule that is known here")
    elif TWICE.search(name):
        report.add("BUG", "averaged twice", f"{WHAT['averaged twice']}: {name}")
    elif close(factor, 1, 1e-3):
        report.add("is", "average", name)
    elif name.startswith("sum over tokens, then"):
        report.add("is", "average", f"sum over tokens / L, then of completions, L = "
                                    f"{1 / factor:.4g} (Dr. GRPO)")
    else:
        report.add("is", "average", f"{name}, times {factor:.4g}")
    return name, factor


# --- ratio and bound ------------------------------------------------------------------------------


def gradients(box, ds, whole_row=False, base=None):
    """(2, D, 3): at rows of three tokens with A = 1 and -1, as a share of those at ratio 1.

    In row i the log-ratio of the middle token, or of all, is ds[i]; base: its log-prob. Rows are
    padded to the width of four.
    """
    ds = torch.tensor([0.0, *ds], dtype=torch.float64)
    case = random_case((3,) * (2 * len(ds)), R=4 if box.has("mask") else 3)
    logps = case.logps[:1].repeat(len(case.logps), 1)
    logps[:, 1] = logps[:, 1] if base is None else base
    old_logps = logps.clone()
    old_logps[:, slice(None) if whole_row else slice(1, 2)] -= ds.repeat_interleave(2)[:, None]
    advantages = torch.tensor([1.0, -1.0] * len(ds), dtype=torch.float64)
    found = box.policy(replace(case, logps=logps, old_logps=old_logps, ref_logps=logps,
                               advantages=advantages))[:, :3].reshape(-1, 2, 3).transpose(0, 1)
    start = found[:, :1]
    return torch.where(start != 0, found / start, 1.0)[:, 1:]


def check_ratio(box, report):
    """Token or sequence level; none, or to the reference. The level, None without a ratio."""
    case = random_case()
    if not box.has("old_logps"):
        report.add("is", "ratio", "none: there is no pi_old among the parameters")
    elif box.has("ref_logps") and not same(
            box.policy(replace(case, ref_logps=case.ref_logps - 1e-3)), box.policy(case)):
        report.add("BUG", "ratio to the reference")
    elif near(gradients(box, CURVE)[..., 1].flatten().tolist(), [1.0] * 2 * len(CURVE)):
        report.add("note", "no ratio")
    else:
        # How much of d the gradients grow by, at the token that moved and at another of its row:
        # close to 1, where no bound is so narrow, or else (a weight of at most 1, say) further off.
        for ds in ([1e-5, -1e-5], [0.1, -0.1]):
            growth = ((gradients(box, ds) - 1) / torch.tensor(ds)[:, None]).reshape(-1, 3)
            own, other = growth[growth.abs().amax(1).argmax()][1:].tolist()
            if max(abs(own), abs(other)) > 1e-3:
                break
        name, level = "of a completion, in a way that is not known here", "mean"
        if box.has("mask") and max(abs(own - 1 / 4), abs(other - 1 / 4)) < 1e-2:
            report.add("BUG", "ratio over the width")
            name = "of a completion: the mean log-ratio over the width"
        elif abs(other) < 1e-3:
            name, level = "of each token", "token"
        elif abs(own - other) < 1e-2:
            name, level = "of a completion: the product of its tokens' ratios", "sum"
        if level == "mean" and abs(other - 1 / 3) < 1e-2 or abs(own - other) < 1e-2 and abs(
                other - 1 / 3) < 1e-2:
            name, level = "of a completion: the geometric mean (GSPO)", "mean"
        report.add("is", "ratio", name)
        old_logps = case.old_logps.clone()
        old_logps[0] -= 0.1
        if not same(box.policy(replace(case, old_logps=old_logps))[1:], box.policy(case)[1:]):
            report.add("note", "weights of other rows")
        return level
    return None


class Curve:
    """The weights of grad log pi, for A = 1 and A = -1, over log-ratios, and where they end."""

    def __init__(self, box, level, base=None):
        self.box, self.level, self.whole_row, self.base = box, level, level != "token", base
        self.scale = 1 / 3 if level == "sum" else 1.0
        self.good, self.bad = self.at(CURVE)
        self.good_ends, self.bad_ends = self.ends(0), self.ends(1)

    def at(self, ds):
        ds = [d * self.scale for d in ds]
        return gradients(self.box, ds, self.whole_row, self.base)[..., 1].tolist()

    def ends(self, side):
        """The log-ratios below and above which the gradient is 0; None where it lives on."""
        found, values, middle = [], (self.good, self.bad)[side], len(CURVE) // 2
        for way in (-1, 1):
            place = middle
            while 0 <= place < len(CURVE) and abs(values[place]) > 1e-9:
                place += way
            if not 0 <= place < len(CURVE):
                found.append(None)
                continue
            alive, dead = CURVE[place - way], CURVE[place]
            for _ in range(5):
                ds = [alive + (dead - alive) * i / 50 for i in range(51)]
                lives = [abs(x) > 1e-9 for x in self.at(ds)[side]]
                first = max(1, [*lives, False].index(False))
                alive, dead = ds[first - 1], ds[min(first, 50)]
            found.append((alive + dead) / 2)
        return found


def check_bound(box, report, level):
    """Which bound, by the curve of the gradient over ratios from e^-4 to e^4."""
    if {"good side dead", "bad side dead"} & {*report.bugs}:
        return
    curve = Curve(box, level)
    both = curve.good + curve.bad
    name = None
    if not all(map(math.isfinite, both)):
        text = "the gradient is not finite at ratios far from 1"
    elif curve.at([1e-7, -1e-7])[0] == [1, 1] and curve.at([0.01])[0] != [1]:
        text = "the loss computes in a coarser precision than float64"
    else:
        text = "the curve of its gradient is none that is known here"
        name = "none" if near(both, [math.exp(d) for d in CURVE] * 2) else (
            clip(curve) or power(curve) or weight(curve.good, curve.bad))
    if name is None:
        report.add("?", "bound", text)
    else:
        report.add(*("BUG", name) if name in WHAT else ("is", "bound", name))


def clip(curve):
    """The name of a bound that ends the gradient, by the sides on which it does."""
    (good_low, good_high), (bad_low, bad_high) = curve.good_ends, curve.bad_ends
    ends = tuple(x is not None for x in (good_low, good_high, bad_low, bad_high))
    if not any(ends):
        return None
    if not curve.whole_row and good_high is not None:
        after = Curve(curve.box, "token", base=-4.0).good_ends[1]
        if after is None or not close(after, good_high, 1e-4):
            return "a region of probabilities (DPPO)"
    for values, (low, high) in ((curve.good, curve.good_ends), (curve.bad, curve.bad_ends)):
        if not all(close(value, math.exp(d)) for value, d in zip(values, CURVE)
                   if (low is None or d > low) and (high is None or d < high)):
            return None
    low, high = (math.exp(x or 0) for x in (bad_low, good_high))
    if curve.level == "mean" and good_high and good_high > 0.1 and not gradients(
            curve.box, [1.5 * good_high])[0, 0, 1]:     # one token alone, its mean well inside
        return f"of each token's log-ratio, {-(bad_low or 0):.4g} and {good_high:.4g} (GMPO)"
    if ends == (True,) * 4 and bad_low - good_low > 1e-3 and bad_high - good_high > 1e-3:
        return (f"PPO's clip, epsilons {1 - low:.4g} and {high - 1:.4g}, and outer ends at "
                f"{math.exp(good_low):.4g} and {math.exp(bad_high):.4g}")
    if ends == (False, True) * 2 and close(good_high, bad_high, 1e-3) and not is_mask(
            curve.box, good_high):
        return "max where A < 0"
    if ends == (False, True, True, True) and bad_high < good_high + 1e-3:
        return "dual clip too low"
    if ends[:2] == ends[2:] and all(
            x is None or close(x, y, 1e-3) for x, y in zip(curve.good_ends, curve.bad_ends)):
        least = math.exp(good_low) if good_low else 0
        return (f"a mask: tokens with a ratio outside of {least:.4g} to {high:.4g} are left out"
                if is_mask(curve.box, good_high or good_low) else "no min")
    return {
        (False, True, True, False): f"PPO's clip, epsilons {1 - low:.4g} and {high - 1:.4g}",
        (False, True, True, True): f"PPO's clip, epsilons {1 - low:.4g} and {high - 1:.4g}, and a "
                                   f"dual clip at {math.exp(bad_high or 0):.4g}",
        (True, False, False, True): "max for min",
        (False, True, False, False): f"of good completions only, epsilon {high - 1:.4g}",
        (False, False, True, False): f"of bad completions only, epsilon {1 - low:.4g}",
        (False, False, False, True): f"a dual clip at {math.exp(bad_high or 0):.4g}, alone",
        (False, True, False, True): f"good completions end at {high:.4g}, bad ones at "
                                    f"{math.exp(bad_high or 0):.4g}",
        (False, False, True, True): f"of bad completions only, epsilon {1 - low:.4g}, and a dual "
                                    f"clip at {math.exp(bad_high or 0):.4g}",
    }.get(ends, "bound on the wrong side")


def power(curve):
    """The name of a ratio that is raised to a power other than 1, clipped or not; or None."""
    powers = [math.log(value) / d for d, value in zip(CURVE * 2, curve.good + curve.bad)
              if value > 0 and d]
    if powers and near(powers, powers[:1] * len(powers)) and powers[0] > 0 and not close(
            powers[0], 1, 1e-3):
        return "ratio to a power"
    return None


def is_mask(box, end):
    """Outside, is a token's loss 0 (a mask on both sides, a convention) or a constant (a clip)?"""
    case = random_case((1, 3, 4, 2))
    old_logps, advantages = case.old_logps.clone(), case.advantages.clone()
    old_logps[0, 0] -= end + math.copysign(0.5, end)
    case = replace(case, old_logps=old_logps)
    advantages[0] = 0.0
    return close(box(case)[0], box(replace(case, advantages=advantages))[0], 1e-9)


def weight(good, bad):
    """The name of a bound that never ends the gradient."""
    cap, floor = good[-1], good[0]
    if 1 <= cap < 50 and near(good + bad, [min(math.exp(d), cap) for d in CURVE] * 2):
        return f"the ratio as a weight of at most {cap:.4g} (CISPO)"
    if floor <= 1 <= cap and near(good + bad, [max(floor, min(math.exp(d), cap))
                                               for d in CURVE] * 2):
        return f"the ratio as a weight from {floor:.4g} to {cap:.4g} (CISPO)"
    if all(a >= b for a, b in itertools.pairwise(good)) and good[0] > 1 > good[-1]:
        return "ratio upside down"
    taus = soft(good), soft(bad)
    if all(taus):
        return f"a soft gate, tau {taus[0]:.4g} and {taus[1]:.4g} (SAPO)"
    if min(good + bad) > 0 and len({round(x, 9) for x in good}) > 50 and all(
            torch.tensor(values, dtype=torch.float64).log().diff(n=3).abs().max() < 0.5
            for values in (good, bad)):
        return "a smooth weight of the ratio, of a kind that is not known here"
    return None


def soft(values):
    """tau, if the values are those of SAPO's gate, 4 s (1 - s) e^d, s = sigmoid(tau (e^d - 1))."""
    def gate(tau):
        gates = torch.sigmoid(tau * (torch.tensor(CURVE, dtype=torch.float64).exp() - 1))
        return (4 * gates * (1 - gates) * torch.tensor(CURVE, dtype=torch.float64).exp()).tolist()

    low, high, place = 0.05, 20.0, len(CURVE) // 2 + 10
    for _ in range(50):
        tau = (low + high) / 2
        low, high = (tau, high) if gate(tau)[place] > values[place] else (low, tau)
    return low if near(values, gate(low), 1e-5) else None


# --- the KL ---------------------------------------------------------------------------------------

XS = (-1.2, -0.7, -0.3, 0.2, 0.5, 0.9, 1.3)         # log pi_ref - log pi
KLS = {         # value, and its gradient with respect to log pi
    "k1": (lambda x: -x, lambda x: 1.0),
    "k2": (lambda x: x * x / 2, lambda x: -x),
    "k3": (lambda x: math.exp(x) - x - 1, lambda x: 1 - math.exp(x)),
    "k3+": (lambda x: math.exp(x) - x - 1, lambda x: -x),
    "abs": (abs, lambda x: -math.copysign(1.0, x)),
    "k3 reversed": (lambda x: math.exp(-x) + x - 1, lambda x: math.exp(-x) - 1)}


def named_kl(values, slopes):
    """(name, scale) of a KL by its values and gradients at XS; (None, 0) if it is none."""
    for name, (value, slope) in KLS.items():
        wanted = [value(x) for x in XS]
        scale = sum(a * b for a, b in zip(values, wanted)) / sum(b * b for b in wanted)
        if scale and near(values, [scale * b for b in wanted]) and near(
                slopes, [scale * slope(x) for x in XS]):
            return name, scale
    return None, 0.0


def verdict(values, slopes, pull=0.0):
    """A line of the report on a KL, (kind, name, text), by its values and gradients at XS.

    pull: its gradient where pi is pi_ref.
    """
    name, scale = named_kl(values, slopes)
    if not any(abs(slope) > 1e-12 for slope in slopes):
        return "BUG", "KL without gradient", ""
    wrong = any(x * slope > 1e-9 * max(map(abs, slopes)) for x, slope in zip(XS, slopes))
    if name is None and (wrong or abs(pull) > 1e-6 * max(map(abs, slopes))):
        return "BUG", "no KL", ""
    if name is None:
        return "?", "KL", "its values and gradients are those of no estimator that is known here"
    if scale < 0:
        return "BUG", "KL sign", ""
    if "reversed" in name:
        return "BUG", "KL reversed", ""
    return "is", "KL", name


def check_kl(box, report, average):
    """Which KL, by its value and its gradient; its sign, weight and average."""
    case, pulls = random_case(), box.without(random_case())[1]
    of_old = not same(box.without(replace(case, old_logps=case.logps - 0.3))[1], pulls)
    if of_old or pulls.any() and not box.has("ref_logps"):
        report.add("note", "another term")
    if not box.has("ref_logps"):
        report.add("is", "KL", "none in this function")
        return
    case = random_case(beta=1.0)

    def at(x, beta=1.0, d=0.0):
        ref_logps = case.ref_logps.clone()
        ref_logps[0, 2] += x
        value, gradient = box.without(replace(case, ref_logps=ref_logps, beta=beta,
                                              old_logps=case.old_logps - d))
        return value, gradient[0, 2].item()

    nothing, pull = at(0.0)
    values, slopes = zip(*(at(x) for x in XS))
    values = [value - nothing for value in values]
    if not any(abs(x) > 1e-12 for x in (*values, *slopes)):
        far = replace(case, ref_logps=case.ref_logps - 0.5)
        ignored = close(box(far)[0], box(case)[0], 1e-12)
        report.add("BUG" if box.has("beta") or not ignored else "note",
                   "reference ignored" if ignored else "KL times the advantage")
        return
    times_ratio = box.has("old_logps") and close(
        at(0.9, d=0.1)[0] - at(0.0, d=0.1)[0], values[5] * math.exp(0.1)) and values[5] != 0
    of_mean = "geometric" in report.facts.get("ratio", "")
    if times_ratio:         # the ratio's own gradient is the KL's value, of a mean a token's share
        share = 1 / case.mask[0].sum().item() if of_mean else 1
        slopes = [slope - value * share for slope, value in zip(slopes, values)]
        if not any(abs(slope) > 1e-12 for slope in slopes):
            report.add(*("BUG", "KL sign") if values[-1] > 0 else (
                "is", "KL", "in the advantage: its gradient is the ratio's"))
            return
    line = verdict(values, slopes, pull)
    report.add(*line)
    if line[0] != "is":
        return
    if times_ratio:
        report.add("is", "KL times ratio", "yes (DeepSeek-V3.2)")
    elif line[2] == "k1":
        report.add("note", "k1 in the loss")
    if abs(nothing) > 1e-6 * max(values) or line[2] != "k1" and abs(pull) > 1e-6 * max(slopes):
        report.add("BUG", "KL not 0")
    if box.has("beta"):
        twice = at(0.9, beta=2.0)[0] - at(0.0, beta=2.0)[0]
        if close(twice, values[5], 1e-9):
            report.add("BUG", "beta ignored")
        elif close(twice, 4 * values[5], 1e-6):
            report.add("BUG", "beta twice")
        elif not close(twice, 2 * values[5]):
            report.add("note", "KL scaled", "the KL does not grow as beta does")
    far = replace(case, ref_logps=case.ref_logps - 0.5)
    if "ratio to the reference" not in report.bugs and not same(
            box(far)[1] - box(case)[1], box.without(far)[1] - box.without(case)[1]):
        report.add("BUG", "KL times the advantage")
    check_kl_average(box, report, line[2], times_ratio, of_mean, average)


def check_kl_average(box, report, name, times_ratio, of_mean, average):
    """Is the KL averaged as the policy's term, and weighted with beta?

    times_ratio: is it multiplied by the ratio? of_mean: is that one a completion's mean?
    """
    value, slope = (f(0.5) for f in KLS[name])

    def weights_of(case):       # of the first token of each row, where nothing else has a KL
        ref_logps = case.ref_logps.clone()
        ref_logps[:, 0] += 0.5
        pulled = box.without(replace(case, ref_logps=ref_logps, beta=1.0))[1][:, 0]
        share = value * times_ratio / (case.mask.sum(1) if of_mean else 1)
        return pulled / (slope + share)

    found, factor = average_of(weights_of)
    if average[0] is None:
        return
    if found is None:
        report.add("?", "KL average", "its weights follow no rule that is known here")
    elif found != average[0]:
        name = "averaged twice" if TWICE.search(found) else "KL average"
        report.add("note" if name == "KL average" else "BUG", name, f"{WHAT[name]}: {found}")
    elif not close(factor, average[1], 1e-3):
        shown = f"{factor / average[1]:.4g}"
        report.add(*("note", "KL scaled", f"{WHAT['KL scaled']}: {shown} of it")
                   if box.has("beta") else ("is", "weight of the KL", shown))


# --- odd batches ----------------------------------------------------------------------------------


def check_odd(box, report):
    """An empty row, float32 far away, and whether micro-batches add up."""
    def is_fine(case, dtype=torch.float64):
        value, gradient = box(case, dtype)
        return math.isfinite(value) and bool(gradient.isfinite().all())

    case = random_case()
    mask, far = case.mask.clone(), case.ref_logps.clone()
    mask[1], far[0, 1] = 0, far[0, 1] + 100
    if box.has("mask") and not is_fine(replace(case, mask=mask)):
        report.add("note", "empty row")
    try:
        if box.has("ref_logps") and not is_fine(replace(case, ref_logps=far, beta=0.1),
                                                torch.float32):
            report.add("note", "overflow")
    except Exception:           # a loss may insist on its dtype
        pass
    if box.has("num_tokens") or box.has("num_sequences"):
        totals = case.mask.sum(), len(case.mask)
        parts = [case.rows(rows) for rows in (slice(0, 1), slice(1, 4))]
        adds = close(box(case)[0], sum(box(part, totals=totals)[0] for part in parts), 1e-9)
        report.add("ok" if adds else "is", "micro-batches",
                   f"{'add' if adds else 'do not add'} up, with totals of the whole")


# --- the other functions --------------------------------------------------------------------------


def check_advantages(function, report):
    """The formula, its std and eps; whose rewards count; equal rewards; unjudged ones."""
    # No group is in order, so sorted advantages show. Each has a 0 and a 1, because some functions
    # count right answers, and no reward is negative, because MaxRL divides by their mean.
    rewards = torch.tensor([[0.3, 1.0, 0.0, 0.8], [0.9, 0.0, 0.4, 1.0], [1.0, 0.2, 0.6, 0.0]],
                           dtype=torch.float64)
    B, G = rewards.shape

    def call(rewards):
        _, *others = inspect.signature(function).parameters.values()
        sizes = {parameter.name: G for parameter in others if parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
                parameter.default is parameter.empty or re.search(
                    "^[gnk]$|group_?size|generation|num_", parameter.name.lower()))}
        for shaped in (rewards.flatten(), rewards):
            try:
                found = function(shaped, **sizes)
            except Exception as error:          # of code that we do not know
                reason = f"{type(error).__name__}: {error}"
                continue
            found = found[0] if isinstance(found, tuple) else found
            return found.detach().double().reshape(B, G)
        raise CannotJudge(f"it can't be called as f(rewards (N,), num_generations): {reason}")

    found, other = call(rewards), rewards.clone()
    other[2] += torch.tensor([3.0, -1.0, 0.5, 2.0])
    formula = advantage_formula(found, rewards)
    if formula is None and advantage_formula(found.reshape(G, B).T, rewards.reshape(G, B).T):
        report.add("BUG", "groups misordered")
        return
    # Without their scale, because GDPO divides by the std of the batch.
    before, after = (torch.nn.functional.normalize(x[:2].flatten(), dim=0)
                     for x in (found, call(other)))
    if formula is None and not torch.allclose(before, after):
        ratio = found / (rewards - rewards.mean())
        if not torch.allclose(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-5):
            report.add("BUG", "not of these groups")
            return
        formula = "normalised over the batch, without groups"
    if same_order(rewards, found)[0]:
        report.add("is", "advantages", formula or what_rises(found, rewards))
        twice = found * rewards.var(1, keepdim=True) / (rewards - rewards.mean(1, keepdim=True))
        if found.all() and torch.allclose(twice, twice[0, 0].expand_as(twice), rtol=1e-2):
            report.add("BUG", "std twice")
    else:
        report.add("BUG", "advantage falls")
    equal = call(torch.full((B, G), 2.35))
    if not equal.isfinite().all() or equal.abs().max() > 1e-3:
        report.add("BUG", "equal rewards")
    elif equal.any():
        report.add("note", "equal rewards", f"they give up to {equal.abs().max():.1g}, not 0")
    rewards[0, 1] = math.nan
    unjudged = call(rewards)
    if unjudged[0].isfinite().all():
        report.add(*("is", "unjudged", "a NaN reward is left out") if unjudged[0, 1] == 0 else
                   ("note", "unjudged"))


def what_rises(found, rewards):
    """What advantages (B, G) do that rise with the rewards by a formula that is not known here."""
    above = rewards > rewards.mean(1, keepdim=True)
    if ((found != 0).sum(1) <= 1).all():
        return "only the best of a group has any (pass@k)"
    if (found[~above] == 0).all() and (found >= 0).all():
        return "rise with the reward above the mean, and are 0 below it: max(0, r - mean)"
    if (found >= 0).all():
        return "rise with the reward, and none is negative"
    return (f"rise with the reward, by a formula that is not known here, from {found.min():.3g} to "
            f"{found.max():.3g}; {int((found == 0).sum())} of {found.numel()} are 0")


def advantage_formula(found, rewards):
    """The name of the formula that makes these advantages (B, G) of rewards (B, G), or None."""
    mean, G = rewards.mean(1, keepdim=True), rewards.shape[1]
    scale = ((rewards - mean) / found).mean(1)                                          # (B,)
    if not torch.allclose(found * scale[:, None], rewards - mean, rtol=1e-6, atol=1e-9):
        return None

    def is_scale(wanted):
        return torch.allclose(scale, wanted * torch.ones_like(scale), rtol=1e-7)

    for wanted, name in ((1.0, "r - mean of the group"), (mean[:, 0], "(r - mean) / mean (MaxRL)"),
                         ((G - 1) / G, "r - mean of the others (RLOO)"),
                         (scale[0], f"(r - mean) / one number of the batch, {scale[0]:.4g}")):
        if is_scale(wanted):
            return name
    for n, name in ((1, "n - 1"), (0, "n")):
        std = rewards.std(1, correction=n)
        eps = (scale - std).mean().item()
        if -1e-9 < eps < 0.05 and is_scale(std + eps):
            return f"(r - mean) / (std + {max(eps, 0):.0e}) of the group, std with {name}"
    return None


def check_mask(function, report):
    """A mask of ids and an EOS id: 1 through the first EOS, all 1 without one."""
    ids = torch.tensor([[5, 2, 7, 2], [2, 2, 2, 2], [5, 6, 7, 8], [5, 9, 2, 0]])
    wanted = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
    found = function(ids, 2).to(torch.int64)
    if torch.equal(found, wanted):
        report.add("ok", "mask", "1 through the first EOS, all 1 without one")
    elif (found < wanted).any():
        report.add("BUG", "EOS left out")
    else:
        report.add("BUG", "padding trained")


def check_kl_function(function, report):
    """A function of logps and ref_logps, by its values and gradients at XS."""
    logps = torch.zeros(len(XS), dtype=torch.float64, requires_grad=True)
    value = function(logps, torch.tensor(XS, dtype=torch.float64))
    slopes, nothing = torch.zeros_like(logps), function(
        *torch.zeros(2, 1, dtype=torch.float64)).sum().item()
    if value.requires_grad:
        slopes, = torch.autograd.grad(value.sum(), logps)
    line = ("BUG", "KL not 0", "") if abs(nothing) > 1e-6 else verdict(
        value.tolist(), slopes.tolist())
    report.add(line[0], line[1] if line[0] == "BUG" else "KL function", line[2])


class Bigrams(torch.nn.Module):
    """A model whose next token depends on the last alone; logits (N, T, V)."""

    def __init__(self, V=7):
        super().__init__()
        rng = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(V, V, generator=rng, dtype=torch.float64))

    def forward(self, input_ids, attention_mask=None, **options):
        logits = self.table[input_ids]
        logits = logits[:, -options.get("logits_to_keep", 0):]      # -0: all of them
        logits.logits = logits              # as transformers' models return them
        return logits


def check_logps(function, report):
    """f(model, input_ids, attention_mask, R): log-probs of the last R tokens, (N, R)."""
    model, R = Bigrams(), 3
    ids = torch.tensor([[1, 4, 2, 6, 3, 5], [0, 3, 3, 1, 5, 2]])
    attention = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])

    def is_those(start, twice=False, **options):
        """Are they those of the last R tokens, given the tokens that `start` selects?"""
        found = function(model, ids, attention, R, **options)
        found = (found[0] if isinstance(found, tuple) else found).detach().double()
        table = model.table.detach() / options.get("temperature", 1.0)
        table = (table.softmax(-1) if twice else table).log_softmax(-1)
        return torch.allclose(found, table[ids[:, start], ids[:, -R:]], atol=1e-5)

    before = slice(-R - 1, -1)
    if is_those(slice(-R, None)) or is_those(slice(-R - 2, -2)):
        report.add("BUG", "shifted")
    elif is_those(before, twice=True):
        report.add("BUG", "softmax twice")
    elif not is_those(before):
        report.add("?", "log-probs", "they are not those of the model at temperature 1")
    elif "temperature" in inspect.signature(function).parameters and not is_those(
            before, temperature=2.0):
        report.add("BUG", "temperature ignored")
    else:
        report.add("ok", "log-probs", "each token's, given what stands before it")


def check(loss=None, *, advantages=None, mask=None, kl=None, logps=None, allow=()):
    """A Report on these functions; each may be left out."""
    report = Report(allow)
    for function, judge in ((loss, check_loss), (advantages, check_advantages),
                            (mask, check_mask), (kl, check_kl_function), (logps, check_logps)):
        if function is not None:
            try:
                judge(function, report)
            except Found as error:
                report.add("BUG", str(error))
            except (Exception, SystemExit) as error:        # most often of code that we do not know
                text = str(error)
                if not isinstance(error, CannotJudge):
                    text = f"it failed, with {type(error).__name__}: {error}"
                report.add("?", getattr(function, "__name__", type(function).__name__), text)
    return report


def check_loss(loss, report):
    """Judges a loss, and takes all back if the inputs of its first calls give something else now.

    Two calls in a row show neither a moving average nor a decay that begins late.
    """
    box = Box(loss)
    try:
        check_function(box, report)
    finally:
        lines, report.lines = report.lines, []
        box.check_repeats()
        report.lines = lines


def check_function(box, report):
    """Judges a loss that gives the same for the same inputs."""
    kinds = {torch.float64: "floats", torch.bool: "bools", torch.int64: "integers"}
    mask = f", a mask of {kinds[box.style[1]]}" if box.has("mask") else ""
    mask += ", 1 at padding" if box.of_padding else ""
    report.add("is", "called with", f"advantages {box.style[0]}{mask}")
    average, value = (None, 1.0), box.without(random_case())
    if not (math.isfinite(value[0]) and value[1].isfinite().all()):
        report.add("BUG", "NaN")
        return
    if check_alignment(box, report) and check_gradient(box, report):
        check_rows(box, report)
        check_tokens(box, report)
    if {"rows mixed", "another row's advantage", "misaligned"} & {*report.bugs}:
        return              # all else would be an echo
    if "sign" in report.bugs:
        if box.has("old_logps") and near(gradients(box, CURVE)[..., 1].flatten().tolist(),
                                         [math.exp(-d) for d in CURVE] * 2):
            report.add("BUG", "ratio upside down")
    elif "no gradient" not in report.bugs:
        average = check_average(box, report)
        level = check_ratio(box, report)
        if level:
            check_bound(box, report, level)
    check_kl(box, report, average)
    check_odd(box, report)
    if box.written:
        names = [name for name, role in box.roles.items() if role in box.written]
        report.add("BUG", "inputs written to", f"{WHAT['inputs written to']}: {', '.join(names)}")


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
    """Is the EOS after the last trained token trained, and no token right after it? Exact."""
    is_eos, none = torch.isin(ids, eos), torch.zeros_like(mask[:, :1])
    before, after = torch.cat((none, mask[:, :-1]), 1), torch.cat((mask[:, 1:], none), 1)
    last = mask.cumsum(1) == mask.sum(1, keepdim=True)      # a tool's words may hold an EOS, before
    left_out, too_far = is_eos & before & ~mask & last, is_eos & mask & after
    wrong, right = ids[left_out | too_far], ids[:, :-1][(is_eos & mask & ~after)[:, :-1]]
    if len(wrong):
        report.add("BUG", "one EOS only" if len(right) and not torch.isin(wrong, right).any() else
                   "EOS not trained" if left_out.any() else "padding trained")
    else:
        report.add(*("ok", "EOS", "trained, and nothing after it") if (is_eos & mask).any() else
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
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name} is no module:function")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), function)


def main():
    parser = argparse.ArgumentParser(description="What does this GRPO loss do? It runs the module.")
    parser.add_argument("loss", nargs="?", help="module:function, or a .pt of one rollout")
    for name in ("advantages", "mask", "kl", "logps"):
        parser.add_argument(f"--{name}", metavar="MODULE:FUNCTION")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME", help="of a BUG")
    args = parser.parse_args()
    names = {name: getattr(args, name) for name in ("loss", "advantages", "mask", "kl", "logps")
             if getattr(args, name)}
    try:
        if args.loss and args.loss.endswith(".pt"):
            report = check_batch(torch.load(args.loss, map_location="cpu", weights_only=True),
                                 allow=args.allow)
        elif names:
            report = check(**{name: imported(value) for name, value in names.items()},
                           allow=args.allow)
        else:
            parser.error("give module:function, of a module in this folder, or a .pt")
    except Exception as error:          # exit code 2: nothing was judged
        parser.error(f"{type(error).__name__}: {error}")
    if args.json:
        print(json.dumps([{"kind": kind, "name": name, "text": text}
                          | ({"mark": report.marks[name]} if name in report.marks else {})
                          for kind, name, text in report.lines], indent=2))
    else:
        print(report)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
