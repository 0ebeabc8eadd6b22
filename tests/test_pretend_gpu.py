"""The script on a GPU that is not there: pretend_gpu.py has tensors that say cuda:0.

Shown: it never mixes devices, takes the branches it has for GPUs, gets the numbers of the CPU
there, and waits for the GPU while it learns no more often than is said here. Not shown: whether
CUDA's own kernels agree, how long they take, how much memory; anything about several GPUs; torch's
autograd engine, whose nodes are called in order instead.
"""
import copy
import json
import math

import pretend_gpu
import pytest
import torch
from test_real_weights import SHIPPED, reference
from test_run import ROOT, arguments, rollout_of_six

import train_grpo
from dataset import PromptCollator, PromptDataset
from model import World, fast, load_pretrained, load_tokenizer, sampler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    if reason := pretend_gpu.why_not(tmp_path_factory.mktemp("guard")):
        pytest.skip(reason)


@pytest.fixture
def gpu(guard, monkeypatch):
    pretend_gpu.install(monkeypatch)
    with pretend_gpu.PretendGPU() as gpu:
        yield gpu


# --- the pretend GPU itself -----------------------------------------------------------------------


def test_it_refuses_two_devices_as_cuda_does(gpu):
    x, here = torch.arange(6.0, device="cuda"), torch.arange(6.0)
    assert x.device == torch.device("cuda:0") and (x + torch.tensor(1.0)).is_cuda
    assert torch.equal(x[torch.tensor([4, 1])].cpu(), torch.tensor([4.0, 1.0]))
    for mixed in (
        lambda: x + here,
        lambda: torch.cat([here, x]),
        lambda: here[x.long()],
        lambda: here.add_(x[0]),
        lambda: torch.where(here > 2, x, 0.0),
        lambda: x.gather(0, here.long()),
        lambda: torch.rand(6, device="cuda", generator=torch.Generator()),
        lambda: torch.rand(6, generator=torch.Generator("cuda")),
    ):
        with pytest.raises(RuntimeError, match="two devices in"):
            mixed()


@pytest.mark.parametrize("waits, uploads, operation", [
    (1, 0, lambda x: x[0].item()),
    (1, 0, lambda x: x.tolist()),
    (1, 0, lambda x: x.to("cpu")),
    (1, 0, lambda x: bool((x > 3).any())),
    (2, 0, lambda x: torch.tensor([x[0], 5, x[1]])),
    (1, 0, lambda x: x[:x[3]]),
    (1, 0, lambda x: x[x > 3]),
    (1, 0, lambda x: x.nonzero()),
    (1, 0, lambda x: x.unique()),
    (1, 0, lambda x: x.repeat_interleave(x)),
    (1, 0, lambda x: torch.zeros(6).copy_(x)),
    (0, 1, lambda x: x.copy_(torch.zeros(6))),
    (0, 1, lambda x: torch.tensor([1, 2], device=x.device)),
    (0, 1, lambda x: x[torch.tensor([0, 3])]),
    (0, 0, lambda x: x.__setitem__(x > 3, 0)),
    (0, 0, lambda x: torch.zeros(6, device=x.device)[x].sort()),
])
def test_it_counts_waits_and_uploads(gpu, waits, uploads, operation):
    x = torch.arange(6, device="cuda")
    operation(x)
    assert (gpu.waits.total(), gpu.uploads.total()) == (waits, uploads)
    assert all(line.startswith("tests/test_pretend_gpu.py:") for line in gpu.waits + gpu.uploads)


# --- learning -------------------------------------------------------------------------------------


def on_gpu(rollout):
    """A copy; rewards stay on the CPU, where the functions give them."""
    return train_grpo.Rollout(**{
        name: x.cuda() if isinstance(x, torch.Tensor) and name != "rewards" else x
        for name, x in vars(rollout).items()})


def learn(policy, rollout, **changes):
    optimizer = torch.optim.SGD(policy.parameters())
    world, args = World("cpu"), arguments(num_generations=3, beta=0.02, **changes)
    updates = train_grpo.minibatches(rollout, world, args)
    return train_grpo.update_policy(policy, optimizer, 0.1, updates, world, fast.token_logps, args)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_update_is_the_one_of_the_cpu(guard, checkpointing, monkeypatch):
    policy = load_pretrained(SHIPPED, dtype=torch.float32)
    policy.model.gradient_checkpointing = checkpointing
    rollout, moved = rollout_of_six(policy), copy.deepcopy(policy)
    metrics = learn(moved, rollout, micro_batch_size=4, entropy_coef=0.01)
    pretend_gpu.install(monkeypatch)
    with pretend_gpu.PretendGPU():
        policy.cuda()
        assert policy.lm_head.weight is policy.model.embed_tokens.weight
        same = learn(policy, on_gpu(rollout), micro_batch_size=4, entropy_coef=0.01)
        state = {name: weight.cpu() for name, weight in policy.state_dict().items()}
    assert same == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    for name, weight in moved.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_waits_four_times(gpu):
    policy = load_pretrained(SHIPPED, dtype=torch.float32)
    rollout = on_gpu(rollout_of_six(policy))
    policy.cuda()
    counts = []
    for size in (6, 2):         # one micro-batch, and three
        gpu.waits.clear(), gpu.uploads.clear()
        learn(policy, rollout, micro_batch_size=size)
        counts.append((gpu.waits.copy(), gpu.uploads.copy()))
    (waits, uploads), (waits_of_three, uploads_of_three) = counts
    # For the two widths and the rows of `select`, and for the ids and the mask of the prefix tree;
    # nothing between the first layer and the last gradient.
    assert (waits_of_three - waits).total() <= 2 * 4, waits_of_three - waits
    # The tree's way back: five tensors, and three for each size of sequences.
    assert (uploads_of_three - uploads).total() <= 2 * 8, uploads_of_three - uploads
    # With those of the optimizer step around it: each metric, when the GPU has nothing left to do.
    assert waits.total() <= 22, waits


# --- sampling -------------------------------------------------------------------------------------


def test_completions_are_those_of_the_plain_sampler(guard, monkeypatch):
    model, tokenizer = load_pretrained(SHIPPED, dtype=torch.float32), load_tokenizer(SHIPPED, 10**6)
    batch = PromptCollator(tokenizer, 66)(PromptDataset(ROOT / "dataset/heldout.jsonl")[32:36])
    prompts = batch["prompt_ids"], batch["prompt_mask"]
    options = {"num_generations": 2, "max_new_tokens": 90, "greedy": True, "pad_token_id": 0,
               "eos_token_id": tokenizer.eos_token_id}
    ids, logps = sampler.sample(model, *prompts, **options)
    assert (ids != 0).sum(1).min() < 32 and not prompts[1].all()
    pretend_gpu.install(monkeypatch)
    with pretend_gpu.PretendGPU():
        same, same_logps = fast.sample(model.cuda(), *(x.cuda() for x in prompts), **options)
        assert torch.equal(same.cpu(), ids)
        torch.testing.assert_close(same_logps.cpu(), logps, rtol=1e-4, atol=1e-4)


# --- the whole script -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Few of them, since each run reads them all."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = (ROOT / "dataset/train.jsonl").read_text(encoding="utf-8").splitlines()[:24]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.fixture
def train(gpu, prompts, tmp_path):
    """A function that runs the script on the pretend GPU and returns its metrics."""
    def train(*flags, dtype):
        train_grpo.main([
            "--max_steps", "2", "--batch_size", "2", "--num_generations", "3", "--max_gen_len",
            "18", "--data_path", prompts, "--eval_data_path", prompts, "--eval_interval", "0",
            "--out_dir", str(tmp_path), "--run_name", "run", "--dtype", dtype, *flags])
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines]
        for line in metrics:
            # The sampler's probabilities are those of the learning pass.
            assert line["rollout_probs_diff_max"] < (1e-4 if dtype == "float32" else 0.1)
            assert line["grad_norm"] > 0 and math.isfinite(line["loss"])
        assert load_pretrained(tmp_path / "run/final").lm_head.weight.isfinite().all()
        return metrics
    return train


def tiny(family, folder, **sizes):
    """Flags for random weights, and a reward that they earn."""
    reference(family, vocab_size=300, **sizes).save_pretrained(folder / "weights")
    return ["--model_path", str(folder / "weights"), "--tokenizer_path", SHIPPED,
            "--reward_funcs", "format", "test_real_weights:any_score"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_script_with_the_default_rewards(train, dtype):
    first, _ = train(dtype=dtype)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and "rewards/reward_model/mean" in first


@pytest.mark.parametrize("family, dtype", [
    ("qwen3_biased", "bfloat16"), ("qwen2_tied", "float32"), ("llama3", "bfloat16"),
    ("qwen3_moe_some_dense", "float32"), ("qwen3_moe", "bfloat16"),
])
def test_the_script_with_each_family(train, tmp_path, family, dtype):
    train(*tiny(family, tmp_path), "--max_steps", "1", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_script_with_adapters_and_a_resume(train, tmp_path, dtype):
    flags = [*tiny("qwen3_tied", tmp_path), "--lora_rank", "2"]
    train(*flags, "--max_steps", "1", dtype=dtype)
    assert len(train(*flags, "--resume", dtype=dtype)) == 2


def test_the_script_with_everything_and_a_resume(train, tmp_path):
    many = list(range(20, 50))      # so that some completions end
    flags = [*tiny("qwen3_tied", tmp_path, eos_token_id=many), "--save_interval", "1",
             "--eval_interval", "1", "--eval_samples", "4", "--num_minibatches", "2",
             "--num_iterations", "2", "--micro_batch_size", "2", "--oversample", "2",
             "--supervision", "process", "--kl_in_reward", "--entropy_coef", "0.01",
             "--mask_truncated_completions", "--ref_model_sync_steps", "1",
             "--gradient_checkpointing", "--rollout_batch_size", "6"]
    train(*flags, "--max_steps", "1", dtype="bfloat16")
    assert len(train(*flags, "--resume", dtype="bfloat16")) == 2


def test_the_script_with_the_plain_pair(train, tmp_path):
    train(*tiny("qwen3_tied", tmp_path), "--fast", "0", "--max_steps", "1", dtype="float32")
