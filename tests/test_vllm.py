"""--sampler vllm: when its weights are handed over, with a stand-in; then with vLLM itself.

What needs vLLM is skipped without it: docs/requirements-vllm.txt. CI has it, in an environment of
its own.
"""
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers

import train_grpo
from model import fast, load_pretrained, sampler, vllm
from model.lora import adapters, with_adapters
from run.distributed import World
from sampling import FakeLLM, draw, rollout_of, trained_logps
from support import POLICY, ROOT, free_ports, jsonl

pytestmark = pytest.mark.usefixtures("one_thread")
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None,
                                reason="needs vLLM: docs/requirements-vllm.txt")

# --- the hand-over --------------------------------------------------------------------------------


def first_token(prompts, completions, completion_ids, **columns):
    return [float(ids[0]) for ids in completion_ids]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_vllm_gets_weights_once_an_update_and_sleeps_while_the_policy_learns(
        on_gpu, fake, tmp_path, monkeypatch):
    engines, update = [], train_grpo.GRPO.update_policy

    class Engine(vllm.Engine):
        def __init__(self, *args):
            super().__init__(*args)
            self.may_sleep = on_gpu
            engines.append(self)

    def update_policy(*args):
        assert engines[0].llm.awake is not on_gpu
        return update(*args)

    monkeypatch.setattr(vllm, "Engine", Engine)
    monkeypatch.setattr(train_grpo.GRPO, "update_policy", update_policy)
    train_grpo.main(["--sampler", "vllm", "--device", "cpu", "--max_steps", "2", "--batch_size",
                     "2", "--num_generations", "2", "--max_gen_len", "8", "--eval_interval", "1",
                     "--reward_funcs", "test_vllm:first_token",     # else nothing would be learned
                     "--eval_samples", "6", "--out_dir", str(tmp_path)])
    evaluation = ["weights", "reset", *["sample"] * 2]
    learning = ["sleep"] if on_gpu else []
    assert engines[0].llm.events == ["sample", *evaluation, *["sample", *learning, *evaluation] * 2]


@pytest.fixture
def fake(monkeypatch):
    """A module in place of vLLM, and an engine for a policy of a run with these flags."""
    class Request(SimpleNamespace):
        def __init__(self, name, number, path):
            super().__init__(lora_int_id=number, lora_path=path)

    def construct(*weights, **options):
        torch.set_float32_matmul_precision("highest")       # as vLLM's workers do
        assert not torch.is_autocast_enabled("cpu")
        return FakeLLM(*weights, **options)

    def make(*flags, on_gpu=False):
        args = train_grpo.parse_args(["--sampler", "vllm", "--device", "cpu", *flags])
        world = World("cpu", args.dtype)
        engine = vllm.Engine(world, args)
        engine.may_sleep = on_gpu
        return engine, world

    package = SimpleNamespace(LLM=construct, SamplingParams=lambda n=1, **_: SimpleNamespace(n=n))
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    return make


def test_vllm_gets_an_update_of_adapters_in_bfloat16(fake):
    engine, world = fake("--lora_rank", "12", "--dtype", "bfloat16")
    policy = with_adapters(load_pretrained(POLICY, dtype=torch.float32,
                                           matrix_dtype=torch.bfloat16), rank=12, alpha=32)
    with world.autocast():
        draw(engine, policy)
    assert engine.llm.options["max_lora_rank"] == 16        # one of those that vLLM takes
    layers = adapters(policy)
    for layer in layers.values():       # AdamW's first step, at a rate of 1e-5
        layer.lora_B.data = torch.randn_like(layer.lora_B).sign() * 1e-5
    engine.outdate()
    with world.autocast():
        draw(engine, policy)
    assert engine.llm.events == ["sample", "weights", "adapter", "reset", "sample",
                                 "adapter", "reset", "sample"]
    for name, layer in layers.items():
        A, B = (engine.llm.adapter[f"base_model.model.{name}.lora_{part}.weight"].float()
                for part in "AB")
        update = layer.lora_B @ layer.lora_A
        assert ((B @ A) * update).sum() / update.square().sum() > 0.99


def test_vllm_leaves_torch_its_settings_and_wakes_when_there_is_room(fake, policy, monkeypatch):
    engine, world = fake("--rollout_batch_size", "2", on_gpu=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.llm.events.append("cache"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            draw(engine, policy)
            engine.sleep("update")
            draw(engine, policy)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert engine.llm.events == ["sample", "weights", "reset", "sample", "sleep",
                                 "cache", "weights", "reset", "sample"]


def test_vllm_on_one_rank_of_torchrun_finds_the_store_that_is_there(fake, policy, monkeypatch):
    def rendezvous(*weights, distributed_executor_backend, **options):
        """What vLLM's executors do: a store of its own, or what the environment names."""
        method = {"uni": f"tcp://127.0.0.1:{free_ports(1)[0]}", "external_launcher": "env://"}
        dist.init_process_group("gloo", method[distributed_executor_backend], world_size=1, rank=0,
                                timeout=timedelta(seconds=3))
        dist.destroy_process_group()
        return FakeLLM()

    monkeypatch.setattr(sys.modules["vllm"], "LLM", rendezvous)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)       # torchrun's
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT":
                        store.port, "TORCHELASTIC_RUN_ID": "run",
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    draw(fake()[0], policy)


class WritesAhead(FakeLLM):
    """Greedy tokens of a policy, up to one of the stop ids: what an engine does with a prompt."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.answers = policy, {}

    def generate(self, prompts, options, use_tqdm, lora_request):
        return [SimpleNamespace(outputs=[self.known_answer(
            prompt["prompt_token_ids"], option.max_tokens, option.stop_token_ids)])
            for prompt, option in zip(prompts, options)]

    def known_answer(self, *task):
        if str(task) not in self.answers:
            prompt, most, stops = task
            ids, logps = (x[0].tolist() for x in draw(
                sampler.sample, self.policy, [prompt], greedy=True, max_new_tokens=most, eos=stops))
            self.answers[str(task)] = SimpleNamespace(token_ids=ids, logprobs=[
                {token: SimpleNamespace(logprob=logp)} for token, logp in zip(ids, logps)])
        return self.answers[str(task)]


def greedily(sample):
    return lambda *inputs, **options: sample(*inputs, **options | {"greedy": True})


def assert_same_game(sample, policy, tokenizer):
    """Both samplers say the same, and so does the tool, which is random, and answers half."""
    ours, theirs = (rollout_of(own, policy, tokenizer)
                    for own in (greedily(fast.sample), greedily(sample)))
    assert ours.turns == theirs.turns and {1, 3, 5} <= set(map(len, ours.turns))
    for name in ("completion_ids", "completion_mask", "loss_mask", "ended"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.sampling_logps, theirs.sampling_logps, atol=1e-4, rtol=1e-4)


def test_vllm_asks_a_tool_in_rounds(fake, policy, tokenizer):
    engine, _ = fake()
    engine.llm, engine.SamplingParams, engine.is_outdated = (
        WritesAhead(policy), SimpleNamespace, False)
    assert_same_game(engine, policy, tokenizer)


def test_vllm_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="2"):
        train_grpo.main(["--sampler", "vllm", "--batch_size", "2", "--out_dir", str(tmp_path)])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--sampler vllm" in said and "docs/requirements-vllm.txt" in said
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {".lock"}


# --- vLLM -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An engine with the shipped policy: itself, the sampler that a run makes of it, the policy."""
    args = train_grpo.parse_args(["--sampler", "vllm", "--device", "cpu", "--max_seq_len", "200",
                                  "--out_dir", str(tmp_path_factory.mktemp("vllm"))])
    world = World("cpu", args.dtype)
    policy = load_pretrained(POLICY, dtype=torch.float32)
    engine = vllm.Engine(world, args)
    threads = torch.get_num_threads()

    def sample(*inputs, **options):
        with world.autocast():
            return engine(*inputs, **options)

    draw(sample, policy)
    assert torch.get_num_threads() == threads
    yield engine, sample, policy
    world.close()
    assert not torch.distributed.is_initialized()


@needs_vllm
def test_vllm_samples_what_the_trainer_computes(made):
    _, sample, policy = made
    eos, prompts = [5, 6, 7, 8, 9, *range(60, 90)], [[3, 9, 27, 11, 2], [6, 4]]
    options = dict(num_generations=8, max_new_tokens=12, temperature=1.3, eos=eos)
    ids, logps = draw(sample, policy, prompts, **options)
    mask = train_grpo.completion_mask(ids, eos)
    assert ids.shape == logps.shape == (16, mask.sum(1).max()) and 0 < mask.float().mean() < 1
    assert len({tuple(row) for row in ids[:8].tolist()}) > 4            # a group is no copies
    assert ids[mask == 0].eq(3).all() and logps[mask == 0].eq(0).all()
    trained = trained_logps(policy, prompts, ids, mask, temperature=1.3)
    torch.testing.assert_close(logps, trained, atol=1e-4, rtol=1e-4)
    again = draw(sample, policy, prompts, **options)
    assert torch.equal(again[0], ids) and torch.equal(again[1], logps)
    other, _ = draw(sample, policy, prompts, seed=1, **options)
    assert other.shape != ids.shape or not torch.equal(other, ids)
    greedy, best = (draw(one, policy, prompts, max_new_tokens=12, greedy=True)
                    for one in (sample, fast.sample))
    assert torch.equal(greedy[0], best[0])
    torch.testing.assert_close(greedy[1], best[1], atol=1e-4, rtol=1e-4)


@needs_vllm
def test_vllm_plays_the_same_game_as_fast(made, tokenizer):
    _, sample, policy = made
    assert_same_game(sample, policy, tokenizer)


@needs_vllm
def test_vllm_gets_each_kind_of_tensor(made):
    engine, sample, policy = made
    kinds, generator = defaultdict(list), torch.Generator().manual_seed(0)
    for name, weight in policy.named_parameters():
        kinds[re.sub(r"\.\d+\.", ".*.", name)].append(weight)
    assert len(kinds) == 13
    # Long enough for the cache of prefixes.
    prompt = torch.randint(3, 250, (180,), generator=generator).tolist()
    for kind, weights in kinds.items():
        for hand_over in (False, True):
            if hand_over:
                engine.outdate()
            else:                           # one number in 32: all of them a norm would undo
                for weight in weights:
                    weight.data[..., ::32] *= 2
            ids, logps = draw(sample, policy, [prompt], num_generations=4, max_new_tokens=16,
                              eos=[])
            trained = trained_logps(policy, [prompt], ids, torch.ones_like(ids))
            near = (logps - trained).abs().mean() < 1e-4
            assert near == hand_over, kind


# --- vLLM in a run --------------------------------------------------------------------------------


def start(folder, *flags, ranks=0):
    """A run of the script, as a process of a session of its own."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return subprocess.Popen(
        [*command, "train_grpo.py", "--sampler", "vllm", "--out_dir", str(folder), "--batch_size",
         "4", "--num_generations", "4", "--eval_samples", "4", "--save_interval", "1",
         "--max_steps", "3", *flags],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")},
        start_new_session=True)


def finish(process):
    """What it printed, once it and all its processes have ended."""
    said = process.communicate(timeout=600)[0]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)           # nobody is left in its session
    return said


@needs_vllm
@pytest.mark.parametrize("tool", [[], ["--tool", "sampling:dice"]])
def test_vllm_resumes_a_run_that_ends_as_an_unbroken_one(tool, tmp_path):
    whole, parts = (start(tmp_path, "--run_name", name, *tool) for name in ("whole", "parts"))
    metrics = tmp_path / "parts/metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert parts.poll() is None
        time.sleep(0.1)
    parts.send_signal(signal.SIGINT)
    assert "WARNING" not in finish(whole) and whole.returncode == 0
    assert jsonl(tmp_path / "whole/metrics.jsonl")[2]["kl"] > 1e-5
    finish(parts)
    if parts.returncode:                    # 0: the signal came in its last step
        finish(start(tmp_path, "--run_name", "parts", "--resume", *tool))
    texts = [Path(tmp_path, name, "completions.jsonl").read_text() for name in ("whole", "parts")]
    assert texts[0] == texts[1]


@needs_vllm
@pytest.mark.parametrize("flags, ranks, most", [
    ("", 2, 1e-6), ("--lora_rank 4 --shard 1 --dtype bfloat16", 2, 2e-2),
    ("--lora_rank 12 --learning_rate 1e-2", 1, 1e-6), ("--tool sampling:dice", 2, 1e-6),
    ("--model_path gpt2 --max_gen_len 16 --reward_funcs repetition", 0, 1e-6)])
def test_vllm_runs_on_each_rank_with_our_models_and_others(
        flags, ranks, most, tokenizer, tmp_path):
    if "gpt2" in flags:
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_embd=64, n_layer=2, n_head=2, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
        tokenizer.save_pretrained(tmp_path / "gpt2")
        flags = flags.replace("gpt2", str(tmp_path / "gpt2")) + " --eval_interval 0"
    process = start(tmp_path, "--run_name", "run", *flags.split(), ranks=ranks)
    said = finish(process)
    if "bfloat16" in flags and "SIGILL" in said:
        pytest.skip("vLLM uses AMX where the processor has it, and this machine refuses to run it")
    assert process.returncode == 0 and "Traceback" not in said, said
    rows = jsonl(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 3 and max(row["rollout_probs_diff_mean"] for row in rows) < most
