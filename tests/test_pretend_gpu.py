"""The script on a GPU that is not there: it never mixes devices."""
import subprocess
import sys
from types import SimpleNamespace

import first_gpu_run
import pytest
import torch
import torch.distributed as dist
from pretend_gpu import CPU, CUDA, pretend_gpu
from test_real_weights import SHIPPED, reference
from torch.utils.checkpoint import checkpoint

import train_grpo
from conftest import ROOT, jsonl, write
from model.fast import pair as fast

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_cuda.py asks the real one")]


@pytest.fixture
def gpu(monkeypatch):
    with pretend_gpu(monkeypatch) as gpu:
        yield gpu


def test_it_refuses_two_devices_as_cuda_does(gpu):
    x, here = torch.arange(6.0, device=CUDA), torch.arange(6.0)
    assert x.device == CUDA == (x[2:] + torch.tensor(1.0)).device
    assert x.cpu().device == here.copy_(x).device == CPU
    assert torch.nn.Linear(2, 2).to(CUDA).weight.device == CUDA
    for mixed in (lambda: x + here, lambda: here[x.long()], lambda: here.add_(x[0]),
                  lambda: torch.cat((x, here))):
        with pytest.raises(RuntimeError, match="two devices in"):
            mixed()
    with pytest.raises(RuntimeError, match="a generator of another device"):
        torch.rand(2, device=CUDA, generator=torch.Generator())


def test_it_sees_what_a_backward_pass_computes_again(gpu):
    x, here, again = torch.ones(2, device=CUDA, requires_grad=True), torch.ones(2), []

    def layer(x):
        again.append(x.device)
        return (x * (here if len(again) > 1 else 2.0)).sin()

    loss = checkpoint(layer, x, use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="two devices in mul"):
        loss.backward()
    assert again == [CUDA, CUDA]


EVERYTHING = """--save_interval 1 --eval_interval 1 --eval_samples 4 --num_minibatches 2
    --num_iterations 2 --micro_batch_size 2 --oversample 2 --supervision process --kl_in_reward
    --entropy_coef 0.01 --mask_truncated_completions --ref_model_sync_steps 1
    --gradient_checkpointing --rollout_batch_size 6"""


@pytest.mark.parametrize("family, dtype, flags", [
    (None, "bfloat16", ""), ("qwen3_tied", "bfloat16", EVERYTHING),
    ("qwen3_moe_some_dense", "float32", "--lora_rank 2"), ("llama3", "float32", "--sampler plain")])
def test_a_run_and_a_resume_mix_no_devices(gpu, family, dtype, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "CHUNK_LOGITS", 0)
    monkeypatch.setattr(fast, "CHUNK_TOKENS", 50)      # of the head's inputs: one chunk, or several
    if family:                  # random weights, and a reward that they earn; many tokens are EOS
        sizes = {"vocab_size": 300, "eos_token_id": list(range(20, 50)), "hidden_size": 48,
                 "num_attention_heads": 6}                  # 3 heads share keys
        reference(family, **sizes).save_pretrained(tmp_path / "weights")
        flags += (f" --model_path {tmp_path}/weights --tokenizer_path {SHIPPED}"
                  " --reward_funcs format test_real_weights:any_score")
    data = tmp_path / "prompts.jsonl"
    write(data, jsonl(ROOT / "dataset/train.jsonl")[:24])
    flags += (f" --batch_size 2 --num_generations 3 --max_gen_len 18 --dtype {dtype} --data_path"
              f" {data} --eval_data_path {data} --out_dir {tmp_path} --run_name run")
    if "--lora_rank" in flags or EVERYTHING in flags:
        train_grpo.main(["--eval_interval", "0", *flags.split(), "--max_steps", "1"])
        flags += " --resume"
    train_grpo.main(["--eval_interval", "0", *flags.split(), "--max_steps", "2"])
    metrics = jsonl(tmp_path / "run/metrics.jsonl")
    assert len(metrics) == 2 and all(line["grad_norm"] > 0 for line in metrics)
    most = 1e-4 if dtype == "float32" else 0.1
    assert max(line["rollout_probs_diff_max"] for line in metrics) < most


def test_nccls_rules_hold_in_a_run_on_two_cards(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "tests/pretend_gpu.py", *"--max_steps 2 --batch_size 2 --num_generations 4".split(),
         *"--max_gen_len 16 --eval_interval 0 --run_name run --out_dir".split(),
         str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [line["grad_norm"] > 0 for line in jsonl(tmp_path / "run/metrics.jsonl")] == [True] * 2


def test_nccl_takes_contiguous_tensors_of_the_card(gpu):
    for refused in (torch.ones(2), torch.ones(2, 3, device=CUDA).T):
        with pytest.raises(RuntimeError, match="NCCL takes contiguous tensors"):
            dist.all_reduce(refused)


def test_a_row_of_the_first_run_that_fails_leaves_the_others(monkeypatch, capsys):
    def fails(gpu):
        raise ValueError("half")

    def skips(gpu):
        raise first_gpu_run.Skipped("no card")

    expected = {fails: "failed: ValueError: half", skips: "skipped: no card",
                lambda gpu: torch.ones(1, device=CUDA).device: "ran: cuda:0"}
    for row, how in expected.items():
        monkeypatch.setitem(first_gpu_run.ROWS, "lora", row)
        first_gpu_run.print_row("lora", pretend=True)
        assert capsys.readouterr().out == f"{how}\n"
    ends = iter([subprocess.TimeoutExpired("row", 300), SimpleNamespace(
        returncode=-9, stdout="", stderr="Killed\n"), SimpleNamespace(
        returncode=0, stdout="a warning\nran: 3\n", stderr="")])

    def end(*command, **options):
        how = next(ends)
        if isinstance(how, Exception):
            raise how
        return how

    monkeypatch.setattr(first_gpu_run.subprocess, "run", end)
    monkeypatch.setattr(sys, "argv", ["first_gpu_run.py", "--pretend", "--rows", *["pair"] * 3])
    first_gpu_run.main()
    rows = [line.split(" | ")[1].strip(" |") for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["failed: it took more than 300 s", "failed: Killed", "ran: 3"]
