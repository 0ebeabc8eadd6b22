"""What a page computes on fixed inputs, function by function, and whether two agree."""
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from dataset import PromptCollator, PromptDataset
from errors import UserError, reason
from model import load_pretrained, load_tokenizer, rng_of

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "model/weights/reason_128"


def page_of(source):
    """The module of a page's source, which finds the repository as out/hunt.py does."""
    page = ModuleType("hunt")
    page.__file__ = str(ROOT / "out/hunt.py")
    try:
        exec(compile(source, page.__file__, "exec"), vars(page))
    except SyntaxError as error:
        raise UserError(f"out/hunt.py, line {error.lineno}: {error.msg}; edit it again") from None
    return page


def group_advantages(page):
    return page.group_advantages(torch.tensor([1.0, 0, 1, 3, 2, 2, 2, 2, 0.1, 0.2, 0.3, 0.7]), 4)


def completion_mask(page):
    ids = torch.tensor([[5, 2, 7, 2], [6, 7, 2, 0], [5, 6, 7, 8], [5, 9, 3, 2]])
    return page.completion_mask(ids, [2, 3])


def grpo_loss(page):
    """The loss, its gradient and its KL, with ratios beyond the clip, and numbers at padding."""
    rng = torch.Generator().manual_seed(0)
    old_logps, moved, ref_logps = (torch.randn(6, 5, generator=rng) for _ in range(3))
    logps = (old_logps + 0.5 * moved).requires_grad_()
    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 1, 4, 5])[:, None]).int()
    loss, metrics = page.grpo_loss(
        logps, old_logps, torch.tensor([1.0, -1, 2, -0.5, -1.5, 0]), mask,
        ref_logps=old_logps + 0.7 * ref_logps, beta=0.3)
    return [loss.detach(), torch.autograd.grad(loss, logps)[0], metrics["kl"]]


def token_logps(page):
    ids = torch.arange(24).view(2, 12) % 11 + 5
    attention_mask = (torch.arange(12) > torch.tensor([[2], [-1]])).int()
    return page.token_logps(state_and_batch()[0].policy, ids, attention_mask, 5).detach()


def generate(page):
    page.MAX_LEN = 24
    rollout = page.generate(*state_and_batch(), rng_of(1), 3)
    return [rollout.mask, rollout.lengths, rollout.completions, rollout.prompts, rollout.columns,
            *rollout.sequences]


def grpo_step(page):
    """Two steps: what the rollout of the second has, and how both have moved the weights."""
    state, batch = state_and_batch()
    page.MAX_LEN, before = 16, weights_of(state)
    page.grpo_step(state, batch, 1, 0.2)
    rollout, _ = page.grpo_step(state, batch, 2, 0.1)
    return [rollout.ref_logps, rollout.rewards, rollout.advantages, weights_of(state) - before]


def weights_of(state):
    return torch.cat([weight.detach().flatten() for weight in state.policy.parameters()])


def state_and_batch():
    """A policy that has moved away from its reference, with plain gradient steps; two prompts."""
    policy, reference = (load_pretrained(WEIGHTS, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.002 * torch.randn_like(weight)
    tokenizer = load_tokenizer(WEIGHTS, policy.config.vocab_size)
    return SimpleNamespace(
        policy=policy, reference=reference, tokenizer=tokenizer,
        optimizer=torch.optim.SGD(policy.parameters())
    ), PromptCollator(tokenizer, max_seq_len=66)(two_rows())


@cache
def two_rows():
    return PromptDataset(ROOT / "dataset/train.jsonl")[:2]


# The last one calls all others.
PROBES = group_advantages, completion_mask, grpo_loss, token_logps, generate, grpo_step


def computed(source):
    """{function: what it computes, or the reason why it fails}"""
    page, found = page_of(source), {}
    for probe in PROBES:
        with redirect_stdout(StringIO()):       # the reader's own prints
            try:
                found[probe.__name__] = probe(page)
            except Exception as error:          # of code that we do not know
                found[probe.__name__] = reason(error)
    return found


def alike(a, b):
    """Whether two results agree; tensors to 0.2% of the largest value, so an eps may differ."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        limit = 2e-3 * b.double().nan_to_num(0.0).abs().max()
        return a.shape == b.shape and torch.allclose(
            a.double(), b.double(), rtol=0, atol=limit, equal_nan=True)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b
