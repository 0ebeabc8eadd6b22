"""--shard 1 on two ranks: the same numbers, and runs that can be stopped and resumed."""
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import multiprocessing

import train_grpo
from model import MiniMindConfig, MiniMindForCausalLM, fast, save_pretrained
from model.lora import merged_state
from run.checkpoint import load_checkpoint
from run.fsdp import is_sharded
from run.policy import load_models
from run.report.terminal import Report
from sampling import FakeLLM
from support import PLACE, ROOT, START, free_ports, jsonl, write

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends itself a signal to stop")
SHARD = ["--shard", "1"]
KL = "--beta 0.1 --sampler plain --ref_model_sync_steps 1 --eval_interval 2".split()
LORA = ["--beta", "0.1", "--lora_rank", "2", "--oversample", "2"]
HALF = ["--beta", "0.1", "--dtype", "bfloat16", "--shard", "1"]
RUNS = [        # (name, flags, calls of `unequal` so far)
    ("kl_apart", KL, 100), ("kl_sharded", [*KL, *SHARD, "--gradient_checkpointing"], 100),
    ("lora_apart", LORA, 100), ("lora_sharded", LORA + SHARD, 100),
    ("engine_sharded", SHARD + ["--sampler", "vllm"], 100),
    ("half_sharded", HALF, 100), ("half_stopped", HALF, 0),
    ("half_stopped", [*HALF, "--resume"], 101)]
STEPS, calls = 2, 0


def unequal(prompts, completions, completion_ids, **columns):
    """On rank 1 only every third group has a spread, in call 102 no group of any rank. In call 1
    comes a signal."""
    global calls
    calls += 1
    if calls == 1:
        signal.raise_signal(signal.SIGTERM)
    if calls == 102:
        return [1.0] * len(completions)
    dead = os.environ["RANK"] == "1"
    return [0.0 if dead and i // 4 % 3 else float(sum(ids) % 5)
            for i, ids in enumerate(completion_ids)]


class Fake(FakeLLM):
    def collective_rpc(self, method, kwargs):
        super().collective_rpc(method, kwargs)
        assert not any(is_sharded(weight) for _, weight in kwargs["weights_iterator"])


def package():
    """In place of vLLM."""
    return SimpleNamespace(LLM=Fake, SamplingParams=lambda n=1, **_: SimpleNamespace(n=n))


def one_rank(rank, ports, weights, out):
    """All runs, one after the other, on one of two ranks."""
    global calls
    torch.set_num_threads(1)
    sys.path.insert(0, os.path.dirname(__file__))
    Report.draw = lambda *report, **pause: None          # takes longer than a run
    sys.modules["vllm"] = package()
    for port, (name, flags, calls_before) in zip(ports, RUNS):
        calls = calls_before
        os.environ |= zip(PLACE, (str(rank), "2", "localhost", str(port)))
        limits = (4, 4) if name == "lora_sharded" else (1024, 2**24)
        fast.reading.CHUNK_TOKENS, fast.reading.CHUNK_LOGITS = limits
        code, expected = 0, 0 if calls_before else 128 + signal.SIGTERM
        try:
            train_grpo.main([
                "--model_path", weights, "--out_dir", out, "--run_name", name,
                "--data_path", f"{out}/data.jsonl", "--eval_data_path", f"{out}/data.jsonl",
                *f"""--reward_funcs test_shard:unequal --beta 0 --batch_size 3 --num_generations 4
                --max_gen_len 12 --max_steps {STEPS} --eval_interval 0 --rollout_batch_size 8
                --micro_batch_size 4 --eval_samples 3 --learning_rate 2e-3""".split(), *flags])
        except SystemExit as error:
            code = error.code
        assert code == expected, name


@pytest.fixture(scope="module")
def out(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shard")
    torch.manual_seed(0)        # of 57 rows the two ranks have unequal parts
    config = MiniMindConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=57,
                            num_hidden_layers=2, head_dim=8)
    save_pretrained(MiniMindForCausalLM(config), tokenizer, folder / "weights")
    write(folder / "data.jsonl", jsonl(ROOT / "dataset/train.jsonl")[100:160])
    arguments = free_ports(len(RUNS)), str(folder / "weights"), str(folder)
    multiprocessing.start_processes(one_rank, arguments, 2, start_method=START)
    return folder


def final(out, name):
    return load_file(out / name / "final/model.safetensors")


@pytest.mark.parametrize("names", [("kl_apart", "kl_sharded"), ("lora_apart", "lora_sharded")])
def test_shard_changes_no_number_of_a_run(names, out):
    apart, sharded = (final(out, name) for name in names)
    start = load_file(out / "weights/model.safetensors")
    assert apart.keys() == sharded.keys()
    for name in apart:
        assert (apart[name] - sharded[name]).abs().max() < 1e-5, name
    assert max((apart[name] - start[name]).abs().max() for name in apart) > 1e-3
    lines = [jsonl(out / name / "metrics.jsonl") for name in names]
    for ours, theirs in zip(*lines):
        for key in ("reward", "grad_norm", "kl", "loss", "eval/mean_length", "oversample/rounds"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-4, abs=1e-6), key
    assert len(lines[1]) == STEPS


def test_shard_in_bfloat16_starts_as_its_reference(out):
    first, *_, last = jsonl(out / "half_sharded/metrics.jsonl")
    assert first["kl"] == 0 < last["kl"] and first["rollout_probs_diff_max"] < 0.02


def test_engine_gets_whole_weights_of_shards(out):
    assert len(jsonl(out / "engine_sharded/metrics.jsonl")) == STEPS        # see Fake


def test_resume_of_shards_ends_the_same_bit_for_bit(out):
    ours, theirs = final(out, "half_stopped"), final(out, "half_sharded")
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("name, flags", [("kl_sharded", KL), ("lora_sharded", LORA)])
def test_resume_of_shards_on_another_number_of_ranks(name, flags, out, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    args = train_grpo.parse_args([*flags, "--model_path", str(out / "weights"),
                                  "--reward_funcs", "test_shard:unequal"])
    world = SimpleNamespace(device=torch.device("cpu"), matrix_dtype=torch.float32)
    policy = load_models(args, world, train_grpo.token_logps)[0].model
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    done, _ = load_checkpoint(out / name / "checkpoint", policy, optimizer)
    assert done == STEPS
    merged = merged_state(policy)
    for key, tensor in final(out, name).items():
        assert torch.equal(tensor, merged[key]), key
    for weight in filter(lambda weight: weight.requires_grad, policy.parameters()):
        assert optimizer.state[weight]["exp_avg_sq"].shape == weight.shape
        assert optimizer.state[weight]["exp_avg_sq"].any()
