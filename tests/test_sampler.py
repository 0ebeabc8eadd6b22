"""The samplers and learning passes against one full forward for each token, and each other.

The fast functions promise the numbers of the plain ones, and nothing here looks at how they do it.
"""
import contextlib
import functools
import math

import pytest
import torch
from torch import nn

import train_grpo
from model import fast, sampler
from model.fast import graphs, reading
from model.sampler import in_slices, next_token
from sampling import (
    EOS,
    FAMILIES,
    PAD,
    PROMPTS,
    TEMPERATURE,
    draw,
    one_batch,
    padded,
    pairs,
    trained_logps,
    wide,
)
from train_grpo import completion_mask

pytestmark = pytest.mark.usefixtures("one_thread")

every_family = pytest.mark.parametrize("family", FAMILIES)
SAMPLERS = {"plain": sampler.sample, "fast": fast.sample, "graphs": graphs.sample}


@pytest.fixture(autouse=True)
def packs_large_matrices(monkeypatch):
    """Those of the MLP are packed for oneDNN; smaller ones, and the head, take the other path."""
    monkeypatch.setattr(fast.shared_rows, "PACK_FROM", 64 * 96)


@pytest.fixture(params=SAMPLERS)
def sample(request):
    if request.param == "graphs" and request.node.callspec.params.get("family") == "experts":
        pytest.skip("CUDA graphs don't cover experts")
    return SAMPLERS[request.param]


# --- what is sampled ------------------------------------------------------------------------------


@functools.cache
@torch.no_grad()
def one_forward_per_token(family, max_new_tokens):
    """Greedy completions of PROMPTS, without a cache, padding or a batch."""
    model, completions = wide(**FAMILIES[family]), []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(max_new_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] in EOS:
                break
        completions.append(ids[len(prompt):])
    return completions


@every_family
def test_greedy_is_one_full_forward_for_each_token(family, sample):
    model, expected = wide(**FAMILIES[family]), one_forward_per_token(family, 24)
    assert len(set(map(len, expected))) > 1
    ids, mask = padded([row for row in expected for _ in range(2)], "right")
    got, logps = draw(sample, model, num_generations=2, greedy=True)
    assert got.tolist() == ids.tolist() and not logps.requires_grad
    trained = trained_logps(model, PROMPTS, ids, mask)
    torch.testing.assert_close(logps, trained, atol=1e-5, rtol=1e-6)
    for i in (0, 4):            # alone nothing is padded: there is no mask
        assert draw(sample, model, [PROMPTS[i]], greedy=True)[0].tolist() == [expected[i]]


@pytest.mark.parametrize("most, expected_sizes", [(5, [2, 2, 1]), (1, [1] * 5)])
def test_slices_are_whole_groups_and_give_what_all_at_once_does(most, expected_sizes):
    model, sizes = wide(), []

    def counting(model, prompt_ids, *others, **options):
        sizes.append(len(prompt_ids))
        return fast.sample(model, prompt_ids, *others, **options)

    sliced = in_slices(counting, most)
    ids, logps = draw(sliced, model, num_generations=2, greedy=True)
    expected_ids, expected_logps = draw(fast.sample, model, num_generations=2, greedy=True)
    assert sizes == expected_sizes and torch.equal(ids, expected_ids)
    torch.testing.assert_close(logps, expected_logps, atol=1e-5, rtol=1e-5)
    different = draw(sliced, model, num_generations=2)[0]       # a slice does not repeat another
    assert len({tuple(row) for row in different.tolist()}) > len(PROMPTS)


@every_family
def test_sampled_logps_are_the_trainers_while_rows_leave(family, sample):
    model = wide(**FAMILIES[family])
    ids, logps = draw(sample, model, num_generations=8, temperature=TEMPERATURE)
    mask = completion_mask(ids, EOS)
    assert mask.sum(1).unique().numel() > 8             # rows leave one after the other
    assert ids.shape[1] == mask.sum(1).max()
    trained = trained_logps(model, PROMPTS, ids, mask, temperature=TEMPERATURE)
    torch.testing.assert_close(logps, trained, atol=1e-5, rtol=1e-6)
    assert ids[mask == 0].eq(PAD).all() and logps[mask == 0].eq(0).all()
    assert logps[mask == 1].lt(0).all()                 # the EOS has a log-probability too


@every_family
def test_the_same_seed_gives_the_same_completions_from_both_samplers(family):
    # Of a small vocabulary, for two reasons: many completions begin alike, and hardly ever does a
    # random number fall where rounding decides between two tokens.
    model, prompts = wide(**FAMILIES[family], vocab_size=6), [[0, 5, 3, 1, 2, 2], [3, 1], [5]]
    options = {"num_generations": 16, "eos": [4], "temperature": TEMPERATURE, "seed": 5}
    plain_ids, plain_logps = draw(sampler.sample, model, prompts, **options)
    fast_ids, fast_logps = draw(fast.sample, model, prompts, **options)
    assert plain_ids.tolist() == fast_ids.tolist()
    torch.testing.assert_close(plain_logps, fast_logps, atol=1e-5, rtol=0)


def test_rows_of_completions_part_where_a_device_sorts_only_32_bits(monkeypatch):
    """As kernels for a Mac's GPU have done."""
    model, unique = wide(), torch.unique
    expected = draw(fast.sample, model, num_generations=4)

    def of_32_bits(x, **options):
        values, inverse = unique(x.to(torch.int32), **options)
        return values.long(), inverse

    monkeypatch.setattr(torch, "unique", of_32_bits)
    for ours, theirs in zip(draw(fast.sample, model, num_generations=4), expected):
        assert torch.equal(ours, theirs)


# --- the distribution ---------------------------------------------------------------------------


PROBABILITIES = torch.tensor([0.0, 0.05, 0.5, 0.0, 0.25, 0.2, 0.0])     # zeros at both ends too


def test_tokens_are_as_frequent_as_they_are_probable():
    n, logits = 20_000, 0.7 * PROBABILITIES.log()           # divided by the temperature again
    tokens, logps = next_token(logits.expand(n, -1), 0.7, torch.Generator().manual_seed(0), False)
    counts, expected = torch.bincount(tokens, minlength=7), n * PROBABILITIES
    assert ((counts - expected).abs() <= 4 * (expected * (1 - PROBABILITIES)).sqrt()).all()
    torch.testing.assert_close(logps.exp(), PROBABILITIES[tokens])


@pytest.mark.parametrize("u, token", [(0.0, 1), (1 - 2**-24, 5)])
def test_the_extreme_random_numbers_draw_no_impossible_token(u, token, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.full(size, u))
    assert next_token(PROBABILITIES.log()[None], 1.0, None, greedy=False)[0].tolist() == [token]
    # Of many tokens the probabilities add up to a little more or less than 1.
    logits = torch.randn(64, 4000, generator=torch.Generator().manual_seed(0))
    logits[:, :9] = logits[:, -9:] = float("-inf")
    tokens, logps = next_token(logits, 1.0, None, greedy=False)
    assert tokens.eq(9 if u == 0 else 3990).all() and logps.isfinite().all()


def test_attention_in_bfloat16_tells_scores_of_30_and_30_and_a_sixteenth_apart():
    q, keys, values = torch.zeros(1, 1, 16), torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)
    q[..., :2] = 4                                      # divided by sqrt(16): 1
    keys[0, :, 0], keys[0, 1, 1], values[0, 1] = 30, 1 / 16, 1
    out = fast.shared_rows.fused_attention(q, keys.bfloat16(), values.bfloat16(), None)
    assert out.dtype == torch.bfloat16          # between 16 and 32 its numbers are 1/8 apart
    torch.testing.assert_close(out.float(), torch.full((1, 16), 1 / (1 + math.exp(-1 / 16))),
                               rtol=0, atol=2**-9)


# --- the learning pass ----------------------------------------------------------------------------


@pytest.fixture(params=["tree", "packed"])
def either_reader(request, monkeypatch):
    """Makes `token_logps` use this reader, which the device would choose otherwise."""
    if request.param == "packed":
        packed = functools.partial(reading.read_packed, attend=reading.sdpa_attention)
        monkeypatch.setattr(reading, "reader_of", lambda *sequences: packed)


def assert_near(got, expected, name="log-probs or entropies"):
    """Near, as measured by the largest."""
    assert got.dtype == expected.dtype == torch.float32 and got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max() > 0, name


@pytest.mark.parametrize("family, recompute, chunk", [
    *((family, False, 1024) for family in FAMILIES), ("qwen3", True, 1024), ("experts", True, 7),
    ("qwen3", False, 7), ("qwen2", False, 1)])
def test_fast_logps_entropies_and_gradients_are_those_of_token_logps(
        family, recompute, chunk, either_reader, monkeypatch):
    monkeypatch.setattr(fast.reading, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(fast.reading, "CHUNK_LOGITS", 0)
    model, sequences = wide(**FAMILIES[family]), one_batch(pairs())
    mask = sequences[1][:, -sequences[2]:]
    model.model.gradient_checkpointing = recompute
    plain, fast_one = (reader(model, *sequences, with_entropy=True, temperature=TEMPERATURE)
                       for reader in (train_grpo.token_logps, fast.token_logps))
    for expected, got in zip(plain, fast_one):      # log-probs, and entropies
        assert_near(got, expected)
        assert got[mask == 0].eq(0).all()
    weights = torch.randn(2, *mask.shape)                       # at padding too
    gradients = [torch.autograd.grad((weights * torch.stack(both)).sum(), [*model.parameters()])
                 for both in (plain, fast_one)]
    for (name, _), expected, got in zip(model.named_parameters(), *gradients):
        assert_near(got, expected, name)


def test_attention_over_segments_is_aligned_at_the_end_of_the_keys():
    """Where a segment has fewer queries than keys, its last query sees all of them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    starts = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])           # 2 of 4, and 3 of 3
    out = reading.sdpa_attention(q, k, v, starts=starts, longest=(3, 4)).view(5, 4, 8)
    seen = [range(0, 3), range(0, 4), range(4, 5), range(4, 6), range(4, 7)]
    for i, keys in enumerate(seen):
        for head in range(4):
            scores = [float(q[i, head] @ k[j, head // 2]) / 8**0.5 for j in keys]
            total = sum(map(math.exp, scores))
            expected = sum(math.exp(s) / total * v[j, head // 2] for s, j in zip(scores, keys))
            torch.testing.assert_close(out[i, head], expected)


def test_the_head_keeps_one_chunk_of_logits_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(fast.reading, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(fast.reading, "CHUNK_TOKENS", 64)
    head, tokens, kept = nn.Linear(4, 1000, bias=False), torch.arange(256), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()),
                                                  lambda x: x):
        fast.reading.log_probs(head, torch.randn(256, 4), tokens, tokens, temperature=1.0,
                       with_entropy=True)
    assert sum(kept) < 64 * 1000


@pytest.mark.parametrize("dtype, wrong", [("float32", 0.0), ("float32", 0.05), ("bfloat16", 0.5)])
def test_fast_logps_are_compared_once_in_a_run_which_ends_if_they_differ(
        dtype, wrong, tmp_path, monkeypatch, capsys):
    right = fast.token_logps

    def token_logps(*args, **options):
        logps, *entropy = right(*args, **options)
        return logps + wrong * logps.ne(0), *entropy

    monkeypatch.setattr("model.fast.token_logps", token_logps)
    flags = ("--batch_size 1 --num_generations 2 --max_gen_len 8 --max_steps 2 --beta 0 "
             f"--eval_interval 0 --loss_type bnpo --entropy_coef 0.1 --dtype {dtype}").split()
    with pytest.raises(SystemExit, match="2") if wrong else contextlib.nullcontext():
        train_grpo.main([*flags, "--out_dir", str(tmp_path)])
    out, err = capsys.readouterr()
    if wrong:
        assert f"token_logps differ by {wrong:.1g}" in err
    else:
        assert out.count("model/fast equals token_logps") == 1
