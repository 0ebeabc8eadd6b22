"""The decode step of a GPU on a CPU: its shapes and addresses, and what a recording of it repeats.

That CUDA records it too is for tests/test_cuda.py to show.
"""
import pytest
import torch
from test_sampler import EOS, FAMILIES, draw, wide
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import fast, graph
from model.lora import with_adapters
from train_grpo import completion_mask

pytestmark = pytest.mark.usefixtures("one_thread")
BUCKET = 8              # so that a completion of 40 tokens sees several


class Recorder(TorchDispatchMode):
    """What a CUDA graph is, on the CPU: the operations of a function, with their very tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        for operation, args, kwargs, result in self.operations:
            for old, new in zip(tree_leaves(result), tree_leaves(operation(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(step, device, graphs):
    with Recorder() as recorder:
        result = step()
    graphs[:] = [recorder]

    def replay():
        recorder.replay()
        return result
    return result, replay


def after_others(decoding):
    """A GraphedStep where memory still holds what others left there."""
    decoding.cache[..., decoding.length:, :] = float("nan")
    return graph.GraphedStep(decoding)


def policy(family):
    if family != "adapters":
        return wide(**FAMILIES[family])
    adapted = with_adapters(wide(), rank=4, alpha=32)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    return adapted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, "adapters"])
def test_what_was_recorded_is_the_whole_step(family, dtype, monkeypatch):
    model, recordings = policy(family), []

    def recorded(*args):
        recordings.append(args)
        return record(*args)

    def sampled(step, record):
        monkeypatch.setattr(fast, "GraphedStep", step)
        monkeypatch.setattr(graph, "record", record)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return draw(fast.sample, model, num_generations=6)

    monkeypatch.setattr(fast, "CHECK_EVERY", {})
    monkeypatch.setattr(graph, "BUCKET", BUCKET)
    ids, logps = sampled(after_others, recorded)
    again_ids, again_logps = sampled(graph.GraphedStep, graph.record)
    assert len(recordings) >= 3 or family == "experts"
    assert len(completion_mask(ids, EOS).sum(1).unique()) > 8   # rows leave one after the other
    assert torch.equal(ids, again_ids) and torch.equal(logps, again_logps)
    eager_ids, eager_logps = sampled(lambda decoding: decoding.step, None)
    if dtype == torch.float32:          # bfloat16 rounds differently in another order of the keys
        assert torch.equal(ids, eager_ids)
        torch.testing.assert_close(logps, eager_logps, rtol=0, atol=2e-5)


def test_shapes_change_seldom_and_what_has_ended_is_then_left_out(monkeypatch):
    shapes, read = [], fast.Decoding.read

    def reading(self, tokens, cache, bias):
        shapes.append((len(tokens), cache.shape[4]))
        return read(self, tokens, cache, bias)

    monkeypatch.setattr(fast.Decoding, "read", reading)
    monkeypatch.setattr(fast, "CHECK_EVERY", {})
    ids, _ = draw(fast.sample, wide(), num_generations=6, max_new_tokens=160, eos=[1])
    assert ids.shape[1] == 160          # and the prompts have 9 tokens: 176 places, in eights
    steps = {size: [n for n, of in shapes if of == size] for _, size in shapes}
    assert {size: len(rows) for size, rows in steps.items()} == {64: 54, 128: 64, 176: 41}
    assert all(len(set(rows)) == 1 for rows in steps.values())
    unfinished = completion_mask(ids, [1]).sum(0)
    assert [rows[0] for rows in steps.values()] == [30, *unfinished[[48, 112]].tolist()]
