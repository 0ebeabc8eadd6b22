"""What the GRPO losses of packages on PyPI are, told by lab/check_grpo/check_grpo.py. By hand:

    pip install trl==1.16.0 verl==0.9.1     # and others of CASES; with --no-deps, if they want GPUs
    python lab/tests/check_public.py
    python lab/tests/check_public.py --rlhf-book PATH           # your copy of a course's file

It prints a table; what is not installed is left out. It holds no code of theirs: an adapter calls a
function of a package, or of a file that it executes, with the checker's batch. verl's adds the KL
as its trainer does, by two other functions; where the table has no KL, a package adds its own
elsewhere, or has none. lab/check.md has the table. What is wrong and not yet reported in public is
not in this file; there it stands without a name.
"""
import argparse
import os
import re
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "check_grpo"))
import torch  # noqa: E402

from check_grpo import check, random_case  # noqa: E402

# --- an adapter for each package: c is the checker's batch, c.A its advantages as (N, R) ----------


def trl_trainer(c, args):
    """A trainer of one process that has c's log-probs; its metrics go nowhere."""
    from trl import GRPOTrainer
    trainer = MagicMock(**vars(args), args=args, epsilon_low=args.epsilon, aux_loss_enabled=False,
                        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
                        get_gamma_weights=GRPOTrainer.get_gamma_weights)
    trainer.accelerator = MagicMock(num_processes=1, gather=lambda x: x)
    trainer._get_per_token_logps_and_entropies.return_value = c.logps, 0 * c.mask, None
    return trainer


def trl(c, **options):
    from trl import GRPOConfig, GRPOTrainer
    args = {"epsilon_high": 0.2, "bf16": False, "use_cpu": True, "report_to": []} | options
    trainer = trl_trainer(c, GRPOConfig(beta=c.beta, **args))
    return GRPOTrainer._compute_loss(trainer, trainer, {
        "prompt_ids": c.ids, "prompt_mask": c.mask, "completion_ids": c.ids,
        "completion_mask": c.mask, "advantages": c.advantages, "old_per_token_logps": c.old_logps,
        "ref_per_token_logps": c.ref_logps, "num_items_in_batch": c.mask.sum()})


def verl(c, name, kl_type="low_var_kl", **options):
    from verl.trainer.ppo import core_algos as v
    from verl.workers.config import ActorConfig
    mean = options.get("loss_agg_mode", "token-mean")
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **options)
    loss, _ = v.get_policy_loss_fn(name)(c.old_logps, c.logps, c.A, c.mask, mean, config)
    return loss + c.beta * v.agg_loss(v.kl_penalty(c.logps, c.ref_logps, kl_type), c.mask, mean)


def liger(c, **options):
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
    # What the class computes, in float64; around it a head's log-probs are taken in float32.
    return LigerFusedLinearGRPOFunction.ppo_loss_fn(
        c.logps, c.mask, c.advantages, c.mask, c.ref_logps, c.old_logps, beta=c.beta, **options)[0]


def unsloth(c, **options):
    from unsloth_zoo.rl_replacements import grpo_compute_loss
    return grpo_compute_loss(c.ref_logps, c.logps, c.old_logps, None, c.ids, c.mask, c.beta,
                             c.advantages, num_items_in_batch=c.mask.sum(), **options)[0]


def torchrl(c, name, **options):
    from tensordict import TensorDict
    from torchrl.objectives import llm
    dist = SimpleNamespace(mask=c.mask > 0, log_prob=lambda ids: c.logps)
    loss = getattr(llm, name)(SimpleNamespace(get_dist=lambda *args, **rest: dist),
                              kl_to_ref_coeff=c.beta, entropy_bonus=False, **options)
    found = loss(TensorDict({
        ("tokens", "full"): c.ids, ("log_probs", "full"): c.old_logps, "advantage": c.A[..., None],
        ("next", "ref_log_probs", "full"): c.ref_logps}, len(c.ids)))
    return found.loss_objective + (found.loss_kl_to_ref if c.beta else 0)


def torchtune(c, **options):
    from torchtune.rlhf.loss import PPOLoss
    none = torch.zeros_like(c.logps)        # a value function's part, which is 0 here
    return PPOLoss(**options)(c.old_logps, c.logps, c.A, none, none, none, c.mask > 0)[0]


def openrlhf(c, **options):
    from openrlhf.models.loss import PolicyLoss
    return PolicyLoss(**options)(c.logps, c.old_logps, c.A, c.mask)[0]


def art(c, **options):
    from art.loss import loss_fn
    inputs = {"logprobs": c.old_logps, "advantages": c.A, "assistant_mask": c.mask > 0,
              "weights": torch.ones_like(c.mask), "group_ids": c.rows + 1}
    # These stand at a token, the log-probs of policy and reference at the one before it.
    inputs = {name: torch.nn.functional.pad(x, (1, 0)) for name, x in inputs.items()}
    policies = [torch.nn.functional.pad(x, (0, 1)) for x in (c.logps, c.ref_logps)]
    return loss_fn(inputs, *policies, None, {"kl_penalty_coef": c.beta} | options).policy_loss


def areal(c, **options):
    from areal.utils.functional import ppo_actor_loss_fn
    # Not decoupled: the proximal policy is the one that sampled.
    return ppo_actor_loss_fn(c.logps, c.old_logps, c.old_logps, c.A, 0.2, c.mask > 0, **options)[0]


# --- adapters for a file of a course: m is the file as a module -----------------------------------


def rlhf_book(m, c, **options):
    loss = m.GRPOLoss(clip_eps_lo=0.2, clip_eps_hi=0.2, beta=c.beta, **options)
    return loss(c.logps, SimpleNamespace(log_probs_old=c.old_logps, log_probs_ref=c.ref_logps,
                                         advantages=c.A, action_mask=c.mask))


def reasoning_from_scratch(m, c, **options):
    """A model is the log-probs of c's completions, in float64; sampling returns a row's number."""
    rows = iter(range(len(c.mask)))
    models = [MagicMock(logps=(x * c.mask).sum(1)) for x in (c.logps, c.old_logps, c.ref_logps)]
    # The file computes advantages from rewards: (r - mean) / (std + 1e-4) gives the checker's.
    rewards = MagicMock(std=lambda: 1 - 1e-4, __sub__=lambda self, mean: c.advantages)
    m.torch = SimpleNamespace(**vars(torch) | {"tensor": lambda x, **device: (
        rewards if isinstance(x, list) else torch.tensor(x))})
    m.sample_response = lambda **options: (torch.tensor([next(rows)]), 0, "")
    m.sequence_logprob_and_entropy = lambda model, row, length, return_entropy=False: (
        (model.logps[row[0]], torch.zeros(())) if return_entropy else model.logps[row[0]])
    return m.compute_grpo_loss_plus_kl(*models, None, MagicMock(), "cpu", len(c.mask),
                                       kl_coeff=c.beta, **options)["loss_tensor"]


# --- what to call them with -----------------------------------------------------------------------

GSPO, LUSPO = {"importance_sampling_level": "sequence"}, {"loss_type": "luspo"}
TYPES = [*({"loss_type": name} for name in ("grpo", "bnpo", "dapo", "sapo")),
         {"loss_type": "dr_grpo", "max_completion_length": 50}, {"loss_type": "grpo"} | GSPO,
         {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "grpo", "delta": 3.0}]
# Package, adapter, has it a KL?, configurations. Not here is what the checker can't see: Clip-Cov
# and KL-Cov change single tokens of a batch, and DRO pulls to the old policy. A row with a BUG, of
# a later version, say, is of "a published package".
CASES = [
    ("trl", trl, True, [*TYPES, LUSPO | GSPO, {"loss_type": "vespo"},
                        {"loss_type": "grpo", "use_bias_correction_kl": False}]),
    ("verl", verl, True, [
        *({"name": "vanilla", "loss_agg_mode": mean} for mean in (
            "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")),
        *({"name": name} for name in ("sapo", "cispo", "dppo_tv", "dppo_kl", "geo_mean", "gpg")),
        {"name": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
        *({"name": "vanilla", "kl_type": name} for name in ("k1", "abs", "k2", "k3+"))]),
    ("liger-kernel", liger, True, [
        *TYPES, {"loss_type": "vespo"}, {"loss_type": "grpo", "use_bias_correction_kl": True}]),
    ("unsloth-zoo", unsloth, True, [*TYPES, LUSPO]),
    ("torchrl", torchrl, False, [
        {"name": "GRPOLoss"}, {"name": "GRPOLoss", "aggregation": "prompt_mean"},
        {"name": "DAPO", "clip_epsilon": (0.2, 0.28)}]),
    ("torchtune", torchtune, False, [{}]), ("openrlhf", openrlhf, False, [
        {}, {"token_level_loss": False}, {"dual_clip": 3.0}, {"policy_loss_type": "gspo"}]),
    ("openpipe-art", art, True, [{}, {"ppo": True}, GSPO]),
    ("areal", areal, False, [{}, {"eps_clip_higher": 0.28, "c_clip": 3.0}, GSPO])]
FILES = {       # of courses: where, adapter, configurations
    "rlhf-book": ("natolambert/rlhf-book, code/policy_gradients/loss.py",
                  rlhf_book, [{"kl_estimator": name} for name in ("kl1", "kl2", "kl3")]),
    "reasoning-from-scratch": ("rasbt/reasoning-from-scratch, ch07/03_rlvr_grpo_scripts_advanced/"
                               "7_5_plus_kl.py", reasoning_from_scratch, [{}])}


def stub(name):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])


def module_of(path):
    """A file as a module; what it imports and is not installed is a stub."""
    spec = spec_from_file_location("course.file", path)
    stub("course")
    while True:
        try:
            spec.loader.exec_module(module := module_from_spec(spec))
            return module
        except ModuleNotFoundError as error:
            stub(error.name)


def loss_of(adapter, has_kl, options):
    def with_kl(logps, old_logps, advantages, mask, ref_logps, beta):
        rows = torch.arange(len(mask))[:, None].expand(mask.shape)
        return adapter(SimpleNamespace(
            logps=logps, old_logps=old_logps, advantages=advantages, mask=mask, ref_logps=ref_logps,
            beta=beta, A=advantages[:, None].expand_as(logps), rows=rows, ids=0 * rows), **options)

    def without_kl(logps, old_logps, advantages, mask):
        return with_kl(logps, old_logps, advantages, mask, logps.detach(), 0.0)
    return with_kl if has_kl else without_kl


def short(fact):
    """The name in brackets at its end, if there is one."""
    name = re.search(r"\(([^()]+)\)$", fact)
    return name[1] if name else fact.removeprefix("of ")


def row(package, adapter, has_kl, **options):
    """The cells of a row. An ImportError: it is not installed, or not all that it imports."""
    number, c = "read" if package in FILES else version(package), random_case()
    loss_of(adapter, False, options)(c.logps, c.old_logps, c.advantages, c.mask)
    found = check(loss_of(adapter, has_kl, options))
    facts = found.facts | {name: "?" for name in found.questions}
    cells = [short(facts.get(name, "")) for name in ("average", "ratio")]
    cells += [facts.get("bound", ""), facts.get("KL", "").removesuffix(" in this function")]
    cells[3] += ", times the ratio" if "KL times ratio" in facts else ""
    cells.append("; ".join(f"{kind} {name}" for kind, name, _ in found.lines
                           if kind in ("BUG", "note", "?")))
    if found.bugs and package not in FILES:
        return ["a published package", "", "", *cells]
    shown = ", ".join(f"`{value}`" if name in ("loss_type", "name") else f"`{name}={value}`"
                      for name, value in options.items()) or "defaults"
    return [package, number, shown, *cells]


def main():
    parser = argparse.ArgumentParser(description="What are public GRPO losses? A table.")
    for name, (where, *_) in FILES.items():
        parser.add_argument(f"--{name}", dest=name, metavar="PATH", help=f"execute a copy: {where}")
    paths = {name: path for name, path in vars(parser.parse_args()).items() if path}
    for path in paths.values():
        if not Path(path).is_file():
            parser.error(f"{path}: no such file")
    cases = [(name, partial(FILES[name][1], module_of(path)), True, FILES[name][2])
             for name, path in paths.items()] or CASES
    # When imported, some want a GPU, the network, or modules for a GPU; some write files and print.
    os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_IS_PRESENT": "1",
                   "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for name in ("", ".bert_padding", ".utils", ".utils.distributed"):
        stub("flash_attn" + name)
    stub("deepspeed")
    rows, left_out = [], {}
    with (tempfile.TemporaryDirectory() as folder, chdir(folder), open(os.devnull, "w") as null,
          redirect_stdout(null), redirect_stderr(null)):
        for package, adapter, has_kl, configurations in cases:
            for options in configurations:
                try:
                    rows.append(row(package, adapter, has_kl, **options))
                except ImportError as error:
                    left_out[package] = error
    head = "package|version|configuration|average|ratio|bound|KL|bugs, notes, questions".split("|")
    for cells in (head, ["---"] * len(head), *sorted(rows, key=lambda cells: not cells[1])):
        print(f"| {' | '.join(cells)} |")
    for package, error in left_out.items():
        print(f"left out: {package}, {error}")


if __name__ == "__main__":
    main()
