"""CUDA graphs without CUDA: the same steps, and graphs that run a step instead of replaying it.

What only a GPU can show is in test_cuda.py. That results are right is tested in test_sampler.py.
"""
import copy
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_grpo
from errors import UserError
from model import sampler
from model.fast import graphs
from model.lora import adapters, with_adapters
from run.policy import policy_of
from sampling import (
    EOS,
    FAMILIES,
    PROMPTS,
    TEMPERATURE,
    draw,
    padded,
    trained_logps,
    wide,
)
from train_grpo import completion_mask

pytestmark = pytest.mark.usefixtures("one_thread")

BFLOAT16 = torch.autocast("cpu", torch.bfloat16)


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
        self.step, self.addresses = lambda: buffers.step(n, S, buffers.generator), None

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


def adapted(seed=0):
    model = with_adapters(wide(), rank=4, alpha=32)
    torch.manual_seed(seed)
    for layer in adapters(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.05)
    return model


def whole_copy():
    """As a rank samples from a sharded model in bfloat16: matrices and norms have been cast."""
    model = wide()
    for layer in model.model.layers:
        layer.to(torch.bfloat16)
    return model


MODELS = {name: (lambda family=family: wide(**family)) for name, family in FAMILIES.items()
          if name != "experts"} | {"adapters": adapted, "whole copy": whole_copy}


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
    *((name, False) for name in MODELS if name != "whole copy"),
    ("qwen3", True), ("qwen2", True), ("adapters", True), ("whole copy", True)])
def test_stale_weights_are_never_sampled_from(name, in_bfloat16, how, captured, monkeypatch):
    monkeypatch.setattr(Graph, "watched", True)
    model, own = MODELS[name](), graphs.Graphs(10)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            ids, logps = draw(own, model, num_generations=2, max_new_tokens=8,
                              temperature=TEMPERATURE)
            mask = completion_mask(ids, EOS)
            trained = trained_logps(model, PROMPTS, ids, mask, temperature=TEMPERATURE)
        apart = (logps - trained)[mask == 1].abs()
        assert apart.mean() < (0.02 if in_bfloat16 else 1e-5), apart
        model = changed(model, how)
    assert captured


def test_moved_weights_capture_anew_and_changed_ones_do_not(captured):
    model, own = wide(), graphs.Graphs(10)
    for how in ("in place", "in place", "moved"):
        draw(own, model, num_generations=2, max_new_tokens=4, eos=[41])
        model = changed(model, how)
    assert captured == [(10, 128)]
    draw(own, model, num_generations=2, max_new_tokens=4, eos=[41])
    assert captured == [(10, 128)] * 2
    assert own.buffers.weights.layers is None           # no tensor of a copied model is kept


def test_nothing_of_a_rollout_with_broken_weights_is_left(captured):
    model, own = wide(), graphs.Graphs()
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data.fill_(float("nan"))
    broken.model.layers[0].self_attn.v_proj.weight.data.fill_(float("nan"))
    assert draw(own, broken, num_generations=2)[1].isnan().any()
    assert greedy_is_right(own, model)


# --- which graphs there are -----------------------------------------------------------------------


def test_training_and_evaluation_share_few_graphs(captured):
    model, own = wide(), graphs.Graphs(40)
    for prompts, options in ((PROMPTS, {"num_generations": 8}),                     # a rollout
                             (PROMPTS * 20, {"greedy": True}),                      # in 3 parts
                             (PROMPTS * 8, {"num_generations": 2, "temperature": 0.5}),
                             (PROMPTS[:3], {"num_generations": 8})):
        found = draw(own, model, prompts, max_new_tokens=130, **options)
        assert len(found[0]) == len(prompts) * options.get("num_generations", 1)
    assert set(captured) <= {(n, S) for n in (40, 20, 10, 5) for S in (128, 256)}
    assert len(captured) == len(set(captured)) <= graphs.MOST_GRAPHS
    own.free()
    assert own.buffers is None


def test_a_graph_too_many_replaces_the_one_used_longest_ago(captured, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model, own = wide(), graphs.Graphs(40)
    assert greedy_is_right(own, model, prompts=PROMPTS * 4)
    draw(own, model, num_generations=8, max_new_tokens=60)
    assert len(own.buffers.graphs) == 2 < len(captured)


def test_longer_prompts_and_other_ends_get_new_buffers(captured):
    model, own = wide(), graphs.Graphs()
    for prompts, eos in ((PROMPTS, EOS), ([PROMPTS[0] * 15, *PROMPTS], EOS), (PROMPTS, [8])):
        assert greedy_is_right(own, model, prompts=prompts, eos=eos)
    assert own.buffers.S == 256         # buffers do not shrink


# --- what is drawn --------------------------------------------------------------------------------


def test_frequencies_are_probabilities():
    model, n = wide(vocab_size=7), 20_000
    ids, logps = draw(graphs.sample, model, [[1, 5, 2]], num_generations=n, max_new_tokens=1,
                      temperature=TEMPERATURE)
    logits = model(torch.tensor([[1, 5, 2]]))[0, -1].detach()
    probabilities = (logits / TEMPERATURE).softmax(-1)
    counts, expected = torch.bincount(ids.flatten(), minlength=7), n * probabilities
    assert ((counts - expected).abs() <= 4 * (expected * (1 - probabilities)).sqrt()).all(), counts
    torch.testing.assert_close(logps.exp(), probabilities[ids])


@pytest.mark.parametrize("most", [0, 10])
def test_seeds_decide_the_draws(most):
    model, own = wide(), graphs.Graphs(most)

    def twice(seed):
        generator = torch.Generator().manual_seed(seed)
        return [own(model, *padded(PROMPTS), num_generations=8, max_new_tokens=12, pad_token_id=3,
                    eos_token_id=EOS, generator=generator)[0].tolist() for _ in range(2)]

    first, second = twice(0)
    assert first != second and twice(0) == [first, second] and twice(1)[0] != first
    assert len(set(map(tuple, first))) > 20             # a part does not repeat another


# --- what may go wrong ----------------------------------------------------------------------------


def test_a_failed_capture_samples_without_graphs_and_warns_once(captured, monkeypatch):
    def fails(*args):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.Buffers, "record", fails)
    model, own = wide(), graphs.Graphs()
    with pytest.warns(UserWarning, match="no CUDA graph could be captured .*not permitted") as seen:
        assert greedy_is_right(own, model) and greedy_is_right(own, model)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_other_errors_go_up_after_the_buffers_are_freed(error, captured, monkeypatch):
    def fails(*args):
        raise error

    model, own = wide(), graphs.Graphs()
    assert greedy_is_right(own, model)
    monkeypatch.setattr(graphs.Buffers, "record", fails)
    with pytest.raises(type(error)):
        draw(own, model, [PROMPTS[0]] * 30)
    assert own.buffers is None


@pytest.mark.parametrize("wrong", [0.1, float("nan")])
def test_a_graph_with_other_logits_ends_the_run(wrong, captured, monkeypatch):
    class Shifted(Graph):
        def __init__(self, buffers, n, S):
            super().__init__(buffers, n, S)
            self.logits = buffers.logits

        def replay(self):
            super().replay()
            self.logits += wrong

    monkeypatch.setattr(graphs.Buffers, "record", lambda *args: Shifted(*args))
    own = graphs.Graphs(tolerance=0.01)
    with pytest.raises(UserError, match="a CUDA graph's logits differ by .*--sampler plain"):
        draw(own, wide())


def test_a_gpu_samples_with_graphs_of_the_size_of_a_rollout():
    """A world with a GPU that is not there chooses, but cannot run."""
    for name, family in FAMILIES.items():
        for flags, most in (([], 16 * 8), (["--rollout_batch_size", "24"], 24)):
            world = SimpleNamespace(device=torch.device("cuda"), matrix_dtype=torch.float32, rank=0,
                                    cleanup=ExitStack())
            policy = policy_of(wide(**family), name, world, train_grpo.parse_args(flags),
                               train_grpo.token_logps, learns=True)
            if name == "experts":
                assert policy.slow_because == "its experts"
                continue
            assert isinstance(policy.sampler, graphs.Graphs) and policy.sampler.most == most
            policy.sampler.buffers = object()
            world.cleanup.close()               # as a run does, however it ends
            assert policy.sampler.buffers is None and not policy.slow_because


def test_lacking_names_experts():
    for name, family in FAMILIES.items():
        lacks = graphs.lacking(wide(**family), torch.bfloat16, torch.device("cpu"))
        assert lacks == ("its experts" if name == "experts" else "")
