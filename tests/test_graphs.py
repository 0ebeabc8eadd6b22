"""CUDA graphs without CUDA: the same steps, and graphs that run a step instead of replaying it.

What only a GPU can show is in test_cuda.py. That results are right is tested in test_sampler.py.
"""
import copy
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_grpo
from errors import UserError
from model import sampler
from model.fast import graphs
from run.policy import policy_of
from sampling import (
    EOS,
    FAMILIES,
    PROMPTS,
    TEMPERATURE,
    draw,
    model_of,
    padded,
    sampler_is_off_by,
    wide,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Reads(TorchDispatchMode):
    """Collects the addresses of tensors that operations read, but that none of them has made."""

    def __init__(self):
        super().__init__()
        self.made, self.addresses = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in self.made}
        for x in chain(args, *(one for one in args if isinstance(one, list))):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.addresses.add(x.untyped_storage().data_ptr())
        found = function(*args, **kwargs or {})
        self.made += [x for x in (found if isinstance(found, (tuple, list)) else [found])
                      if isinstance(x, torch.Tensor)]
        return found


class Graph:
    """A stand-in for a CUDA graph. A real one would read the same addresses in each replay."""
    watched = False         # True: check that it does, which takes longer

    def __init__(self, buffers, n, S):
        self.buffers, self.addresses = buffers, None
        self.step = partial(buffers.step, n, S, buffers.generator)

    def replay(self):
        if not self.watched:
            return self.step()
        with Reads() as reads:
            self.step()
        self.addresses = self.addresses or reads.addresses
        assert reads.addresses == self.addresses


@pytest.fixture
def captured(monkeypatch):
    """Graphs are captured on a CPU too. Returns a list of the sizes of all that were captured."""
    sizes, make = [], graphs.Buffers.__init__

    def record(buffers, n, S):
        sizes.append((n, S))
        return Graph(buffers, n, S)

    def init(buffers, *args):
        make(buffers, *args)
        buffers.captures = True

    monkeypatch.setattr(graphs.Buffers, "__init__", init)
    monkeypatch.setattr(graphs.Buffers, "record", record)
    return sizes


def greedy_is_right(sample, model, **options):
    options |= {"greedy": True, "num_generations": 2, "max_new_tokens": 20}
    found, expected = (draw(one, model, **options) for one in (sample, sampler.sample))
    return torch.equal(found[0], expected[0])


# --- which weights a graph reads ------------------------------------------------------------------


def whole_copy():
    """As a rank samples from a sharded model in bfloat16: matrices and norms have been cast."""
    model = wide()
    for layer in model.model.layers:
        layer.to(torch.bfloat16)
    return model


COVERED = [*(name for name in FAMILIES if name != "experts"), "adapters"]


def changed(model, how):
    """The model with other weights: in the same tensors, or in new ones, the old being NaN."""
    other = model
    if how == "moved":
        other = copy.deepcopy(model)
        for weight in model.parameters():
            weight.data.fill_(float("nan"))
    generator = torch.Generator().manual_seed(7)
    for weight in other.parameters():
        weight.data += 0.3 * weight.std() * torch.randn(
            weight.shape, generator=generator).to(weight.dtype)
    return other


@pytest.mark.parametrize("how", ["in place", "moved"])
@pytest.mark.parametrize("name, in_bfloat16", [
    *((name, False) for name in COVERED),
    *((name, True) for name in ("qwen3", "qwen2", "adapters", "whole copy"))])
def test_graphs_never_sample_from_stale_weights(name, in_bfloat16, how, captured, monkeypatch):
    monkeypatch.setattr(Graph, "watched", True)
    model, own = whole_copy() if name == "whole copy" else model_of(name), graphs.Graphs(10)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            found = draw(own, model, num_generations=2, max_new_tokens=8, temperature=TEMPERATURE)
            assert sampler_is_off_by(model, *found) < (0.02 if in_bfloat16 else 1e-5)
        model = changed(model, how)
    assert captured


def test_graphs_are_captured_anew_for_moved_weights_and_not_for_changed_ones(captured):
    model, own = wide(), graphs.Graphs(10)
    for how in ("in place", "in place", "moved"):
        draw(own, model, num_generations=2, max_new_tokens=4, eos=[41])
        model = changed(model, how)
    assert captured == [(10, 128)]
    draw(own, model, num_generations=2, max_new_tokens=4, eos=[41])
    assert captured == [(10, 128)] * 2
    assert own.buffers.weights.layers is None           # no tensor of a copied model is kept


def test_graphs_keep_nothing_of_a_rollout_with_broken_weights(captured):
    model, own = wide(), graphs.Graphs()
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(float("nan"))
    broken.model.layers[0].self_attn.v_proj.weight.data.fill_(float("nan"))
    assert draw(own, broken, num_generations=2)[1].isnan().any()
    assert greedy_is_right(own, model)


# --- which graphs there are -----------------------------------------------------------------------


def test_graphs_are_few_and_shared_by_training_and_evaluation(captured, monkeypatch):
    monkeypatch.setattr(graphs, "COLUMNS", 16)
    model, own = wide(), graphs.Graphs(40)
    for prompts, options in ((PROMPTS, {"num_generations": 8}),                     # a rollout
                             (PROMPTS * 20, {"greedy": True}),                      # in 3 parts
                             (PROMPTS * 8, {"num_generations": 2, "temperature": 0.5}),
                             (PROMPTS[:3], {"num_generations": 8})):
        found = draw(own, model, prompts, max_new_tokens=20, **options)
        assert len(found[0]) == len(prompts) * options.get("num_generations", 1)
    assert set(captured) <= {(n, S) for n in (40, 20, 10, 5) for S in (16, 32)}
    assert len(captured) == len(set(captured)) <= graphs.MOST_GRAPHS
    own.free()
    assert own.buffers is None


def test_graphs_too_many_replace_the_one_used_longest_ago(captured, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model, own = wide(), graphs.Graphs(40)
    assert greedy_is_right(own, model, prompts=PROMPTS * 4)
    draw(own, model, num_generations=8, max_new_tokens=60)
    assert len(own.buffers.graphs) == 2 < len(captured)


def test_graphs_of_longer_prompts_and_other_ends_get_new_buffers(captured):
    model, own = wide(), graphs.Graphs()
    for prompts, eos in ((PROMPTS, EOS), ([PROMPTS[0] * 15, *PROMPTS], EOS), (PROMPTS, [8])):
        assert greedy_is_right(own, model, prompts=prompts, eos=eos)
    assert own.buffers.S == 256         # buffers do not shrink


# --- what is drawn --------------------------------------------------------------------------------


def test_graphs_draw_tokens_as_often_as_they_are_probable():
    model, n = wide(vocab_size=7, head_dim=4, num_hidden_layers=1), 20_000
    ids, logps = draw(graphs.sample, model, [[1, 5, 2]], num_generations=n, max_new_tokens=1,
                      temperature=TEMPERATURE)
    logits = model(torch.tensor([[1, 5, 2]]))[0, -1].detach()
    probabilities = (logits / TEMPERATURE).softmax(-1)
    counts, expected = torch.bincount(ids.flatten(), minlength=7), n * probabilities
    assert ((counts - expected).abs() <= 4 * (expected * (1 - probabilities)).sqrt()).all(), counts
    torch.testing.assert_close(logps.exp(), probabilities[ids])


@pytest.mark.parametrize("most", [0, 10])
def test_graphs_draw_by_the_seed(most):
    model, own = wide(), graphs.Graphs(most)

    def twice(seed):
        """Two rollouts in turn from one generator."""
        generator = torch.Generator().manual_seed(seed)
        return [own(model, *padded(PROMPTS), num_generations=8, max_new_tokens=12, pad_token_id=3,
                    eos_token_id=EOS, generator=generator)[0].tolist() for _ in range(2)]

    first, second = twice(0)
    assert first != second and twice(0) == [first, second] and twice(1)[0] != first
    assert len(set(map(tuple, first))) > 20             # a part does not repeat another


# --- what may go wrong ----------------------------------------------------------------------------


def test_graphs_that_fail_to_be_captured_end_in_one_warning(captured, monkeypatch):
    def fails(*args):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.Buffers, "record", fails)
    model, own = wide(), graphs.Graphs()
    with pytest.warns(UserWarning, match="not permitted when stream") as seen:
        assert greedy_is_right(own, model) and greedy_is_right(own, model)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_graphs_free_their_buffers_when_another_error_goes_up(error, captured, monkeypatch):
    def fails(*args):
        raise error

    model, own = wide(), graphs.Graphs()
    assert greedy_is_right(own, model)
    monkeypatch.setattr(graphs.Buffers, "record", fails)
    with pytest.raises(type(error)):
        draw(own, model, [PROMPTS[0]] * 30)
    assert own.buffers is None


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_graphs_with_other_logits_end_the_run(wrong, captured, monkeypatch):
    def replay(graph):
        graph.step()
        graph.buffers.logits += wrong

    monkeypatch.setattr(Graph, "replay", replay)
    own = graphs.Graphs(tolerance=0.01)
    with pytest.raises(UserError, match="logits differ by .*--sampler plain"):
        draw(own, wide())


@pytest.mark.parametrize("family", ["qwen3", "experts"])
def test_graphs_of_the_size_of_a_rollout_are_a_gpus_sampler(family):
    """A world with a GPU that is not there chooses, but cannot run."""
    for flags, most in (([], 16 * 8), (["--rollout_batch_size", "24"], 24)):
        world = SimpleNamespace(device=torch.device("cuda"), matrix_dtype=torch.float32, rank=0,
                                cleanup=ExitStack())
        policy = policy_of(wide(**FAMILIES[family]), family, world, train_grpo.parse_args(flags),
                           train_grpo.token_logps, learns=True)
        if family == "experts":
            assert policy.slow_because == "its experts"
            continue
        assert policy.sampler.most == most and not policy.slow_because
        policy.sampler.buffers = object()
        world.cleanup.close()               # as a run does, however it ends
        assert policy.sampler.buffers is None
