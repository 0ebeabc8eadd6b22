"""--shard 1 on two ranks: the same numbers, and runs that can be stopped and resumed."""
import os
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_run import free_ports
from torch import multiprocessing
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_grpo
from conftest import interrupt, jsonl, resident
from model import (
    MiniMindConfig,
    MiniMindForCausalLM,
    World,
    load_checkpoint,
    load_pretrained,
    save_pretrained,
)
from model.fast import pair as fast
from model.lora import merged_state, with_adapters
from model.processes.shard import shard
from model.storage.memory import num_parameters

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends itself a signal to stop")
RUNS = {        # name -> flags
    "apart": [], "sharded": ["--shard", "1"],
    "kl_apart": ["--beta", "0.1", "--fast", "0", "--ref_model_sync_steps", "2"],
    "kl_sharded": ["--beta", "0.1", "--fast", "0", "--ref_model_sync_steps", "2", "--shard", "1"],
    "lora_apart": ["--beta", "0.1", "--lora_rank", "2"],
    "lora_sharded": ["--beta", "0.1", "--lora_rank", "2", "--shard", "1"],
    "half_sharded": ["--beta", "0.1", "--dtype", "bfloat16", "--shard", "1"]}
RUNS |= {name.replace("sharded", "stopped"): RUNS[name] for name in (
    "half_sharded", "lora_sharded")}
LARGE = MiniMindConfig(vocab_size=6400, hidden_size=512, intermediate_size=1408, head_dim=64,
                       num_hidden_layers=16, num_attention_heads=8)
STEPS, calls = 5, 0


def unequal(prompts, completions, completion_ids, **columns):
    """On rank 1 only every third group has a spread, in step 4 no group of any rank; in step 3 of a
    run to be stopped, a signal."""
    global calls
    calls += 1
    if calls == 3:
        interrupt(signal.SIGTERM)
    if calls == 104:
        return [1.0] * len(completions)
    dead = os.environ["RANK"] == "1"
    return [0.0 if dead and i // 4 % 3 else float(sum(ids) % 5)
            for i, ids in enumerate(completion_ids)]


@contextmanager
def peak():
    """A list that gets the most anonymous memory during the block above that at its start."""
    anonymous, found, ended = [resident("RssAnon")], [], threading.Event()

    def look():
        while not ended.wait(0.001):
            anonymous.append(resident("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    yield found
    ended.set()
    thread.join()
    found.append(max(anonymous) - anonymous[0])


def one_rank(rank, ports, weights, out):
    """All runs, one after the other, on one of two ranks."""
    global calls
    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(__file__))
    train_grpo.Report.draw = lambda report: None        # takes longer than a run
    for name, flags in RUNS.items():
        for resume in ([], ["--resume"]) if "stopped" in name else ([],):
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                           "MASTER_PORT": str(ports.pop(0))}
            calls = 103 if resume else 0 if "stopped" in name else 100
            fast.CHUNK, fast.SMALL = (4, 4) if name == "sharded" else (1024, 2**24)
            try:
                train_grpo.main([
                    "--model_path", weights, "--out_dir", out, "--run_name", name,
                    "--reward_funcs", "test_shard:unequal", "--beta", "0", "--batch_size", "3",
                    "--num_generations", "4", "--max_gen_len", "12", "--max_steps", str(STEPS),
                    "--eval_interval", "5", "--eval_samples", "5", "--eval_batch_size", "1",
                    "--micro_batch_size", "2", "--rollout_batch_size", "8",
                    "--learning_rate", "1e-3", *flags, *resume])
                assert "stopped" not in name or resume
            except SystemExit as error:
                assert error.code == 128 + signal.SIGTERM and not resume
    os.environ |= {"RANK": str(rank), "MASTER_PORT": str(ports.pop(0))}
    world = World("cpu")
    with peak() as anonymous:
        shard(load_pretrained(f"{out}/large", dtype=torch.float32, device="meta"), world, None)
    Path(out, f"peak_{rank}").write_text(str(*anonymous))
    world.close()


@pytest.fixture(scope="module")
def out(tiny_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shard")
    tokenizer, model = tiny_policy
    save_pretrained(model, tokenizer, folder / "weights")
    save_pretrained(MiniMindForCausalLM(LARGE).to(torch.bfloat16), tokenizer, folder / "large")
    ports = free_ports(len(RUNS) + 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")     # freed memory goes back at once
        multiprocessing.spawn(one_rank, (ports, str(folder / "weights"), str(folder)), nprocs=2)
    return folder


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("rank, size", [(1, 2), (2, 3), (4, 5)])    # DTensor keeps one of each size
def test_a_rank_reads_its_rows(rank, size, adapted, tokenizer, tmp_path, request):
    config = MiniMindConfig(vocab_size=301, hidden_size=28, intermediate_size=7, head_dim=6,
                            qk_norm=False, qkv_bias=True)
    save_pretrained(MiniMindForCausalLM(config).to(torch.bfloat16), tokenizer, tmp_path)
    dtypes = {"dtype": torch.float32, "matrix_dtype": torch.bfloat16 if adapted else None}
    whole, part = load_pretrained(tmp_path, **dtypes), load_pretrained(
        tmp_path, **dtypes, device="meta")
    if adapted:
        whole, part = (with_adapters(model, rank=3, alpha=1) for model in (whole, part))
    init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    request.addfinalizer(destroy_process_group)
    shard(part, SimpleNamespace(device=torch.device("cpu"), size=size), torch.bfloat16)
    assert part.lm_head.weight is part.model.embed_tokens.weight
    parts = {name: weight.to_local() for name, weight in part.named_parameters()}
    for name, weight in whole.named_parameters():
        rows = -(-len(weight) // size)          # the last ranks have fewer, or none
        expected = weight[rank * rows:(rank + 1) * rows]
        assert torch.equal(parts[name], expected) and parts[name].dtype == weight.dtype, name
        assert parts[name].requires_grad == weight.requires_grad, name
    name = "model.layers.3.mlp.gate_proj.base.weight"
    assert len(parts[name if adapted else name.replace("base.", "")]) == {2: 3, 3: 1, 5: 0}[size]


def final(out, name):
    return load_file(out / name / "final/model.safetensors")


@pytest.mark.parametrize("prefix", ["", "kl_", "lora_"])
def test_sharded_runs_learn_the_same(prefix, out):
    apart, sharded = final(out, f"{prefix}apart"), final(out, f"{prefix}sharded")
    start = load_file(out / "weights/model.safetensors")
    assert apart.keys() == sharded.keys()
    for name in apart:
        assert (apart[name] - sharded[name]).abs().max() < 1e-6, name
    assert max((apart[name] - start[name]).abs().max() for name in apart) > 1e-3
    lines = [jsonl(out / f"{prefix}{kind}/metrics.jsonl") for kind in ("apart", "sharded")]
    for ours, theirs in zip(*lines):
        for key in ("reward", "grad_norm", "kl", "loss", "eval/mean_length"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4, abs=1e-6), key
    assert len(lines[1]) == STEPS


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is anonymous")
def test_a_rank_takes_no_more_memory_to_load_than_its_part_and_a_layer(out):
    weights, matrices, _ = num_parameters(LARGE)
    for rank in range(2):
        measured = int((out / f"peak_{rank}").read_text())
        assert 2 * weights < measured < 2 * weights + 4 * matrices / 16


def test_in_bfloat16_a_sharded_policy_starts_as_its_reference(out):
    first, *_, last = jsonl(out / "half_sharded/metrics.jsonl")
    assert first["kl"] == 0 < last["kl"] and first["rollout_probs_diff_max"] < 0.02


@pytest.mark.parametrize("prefix", ["half_", "lora_"])
def test_a_sharded_run_that_is_stopped_and_resumed_ends_the_same_bit_for_bit(prefix, out):
    ours, theirs = final(out, f"{prefix}stopped"), final(out, f"{prefix}sharded")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["sharded", "lora_sharded"])
def test_another_number_of_ranks_resumes_it(name, out, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    flags = [*RUNS[name], "--model_path", str(out / "weights"), "--max_steps", str(STEPS + 1)]
    args = train_grpo.parse_args([*flags, "--beta", "0", "--reward_funcs", "test_shard:unequal"])
    world = SimpleNamespace(device=torch.device("cpu"), matrix_dtype=torch.float32)
    _, policy, *_ = train_grpo.load_models(args, world)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    done, _ = load_checkpoint(out / name / "checkpoint", policy, optimizer)
    assert done == STEPS
    merged = merged_state(policy)
    assert all(torch.equal(tensor, merged[key]) for key, tensor in final(out, name).items())
    for weight in filter(lambda weight: weight.requires_grad, policy.parameters()):
        assert optimizer.state[weight]["exp_avg_sq"].shape == weight.shape
        assert optimizer.state[weight]["exp_avg_sq"].any()
