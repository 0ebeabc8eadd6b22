"""What the GRPO losses of packages on PyPI are, told by lab/check_grpo/check_grpo.py. By hand:

    pip install trl==1.16.0 verl==0.9.1     # and others of CASES; with --no-deps, if they want GPUs
    python lab/tests/check_public.py

It prints a table; what is not installed is left out. It holds no code of these packages: an adapter
calls a function of theirs with the checker's batch. verl's adds the KL as its trainer does, by two
other functions; where the table has no KL, a package adds its own elsewhere, or has none.
lab/check.md has the table. What is wrong and not yet reported in public is not in this file; there
it stands without a name.
"""
import os
import re
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec
from importlib.metadata import version
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


# --- what to call them with -----------------------------------------------------------------------

GSPO, LUSPO = {"importance_sampling_level": "sequence"}, {"loss_type": "luspo"}
TYPES = [*({"loss_type": name} for name in ("grpo", "bnpo", "dapo", "sapo")),
         {"loss_type": "dr_grpo", "max_completion_length": 50}, {"loss_type": "grpo"} | GSPO,
         {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "grpo", "delta": 3.0}]
# Package, adapter, has it a KL?, configurations; `report`: a public one of what is wrong. Not here
# is what the checker can't see: Clip-Cov and KL-Cov change single tokens of a batch, and DRO pulls
# to the old policy. A BUG without a report, of a later version, say, is of "a published package".
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
    ("unsloth-zoo", unsloth, True, [*TYPES, LUSPO | {      # tokens weigh length / width, not 1
        "report": "https://github.com/unslothai/unsloth-zoo/pull/1282"}]),
    ("torchrl", torchrl, False, [
        {"name": "GRPOLoss"}, {"name": "GRPOLoss", "aggregation": "prompt_mean"},
        {"name": "DAPO", "clip_epsilon": (0.2, 0.28)}]),
    ("torchtune", torchtune, False, [{}]), ("openrlhf", openrlhf, False, [
        {}, {"token_level_loss": False}, {"dual_clip": 3.0}, {"policy_loss_type": "gspo"}]),
    ("openpipe-art", art, True, [{}, {"ppo": True}, GSPO]),
    ("areal", areal, False, [{}, {"eps_clip_higher": 0.28, "c_clip": 3.0}, GSPO])]


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


def row(package, adapter, has_kl, report=None, **options):
    """The cells of a row. An ImportError: it is not installed, or not all that it imports."""
    number, c = version(package), random_case()
    loss_of(adapter, False, options)(c.logps, c.old_logps, c.advantages, c.mask)
    found = check(loss_of(adapter, has_kl, options))
    facts = found.facts | {name: "?" for name in found.questions}
    cells = [short(facts.get(name, "")) for name in ("average", "ratio")]
    cells += [facts.get("bound", ""), facts.get("KL", "").removesuffix(" in this function")]
    cells[3] += ", times the ratio" if "KL times ratio" in facts else ""
    cells.append("; ".join(f"{kind} {name}" for kind, name, _ in found.lines
                           if kind in ("BUG", "note", "?")))
    if found.bugs and not report:
        return ["a published package", "", "", *cells]
    shown = ", ".join(f"`{value}`" if name in ("loss_type", "name") else f"`{name}={value}`"
                      for name, value in options.items()) or "defaults"
    return [package, number, f"{shown} ([report]({report}))" if report else shown, *cells]


def main():
    # When imported, some want a GPU, the network, or modules for a GPU; some write files and print.
    os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_IS_PRESENT": "1",
                   "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for name in ("", ".bert_padding", ".utils", ".utils.distributed"):
        sys.modules["flash_attn" + name] = MagicMock(__spec__=ModuleSpec("flash_attn" + name, None))
    sys.modules["deepspeed"] = MagicMock(__spec__=ModuleSpec("deepspeed", None))
    rows, left_out = [], {}
    with (tempfile.TemporaryDirectory() as folder, chdir(folder), open(os.devnull, "w") as null,
          redirect_stdout(null), redirect_stderr(null)):
        for package, adapter, has_kl, configurations in CASES:
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
