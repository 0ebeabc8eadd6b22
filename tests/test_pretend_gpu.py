"""The script on a GPU that is not there: it never mixes devices.

All tensors lie on the CPU, and some say cuda:0. Not shown: whether CUDA's own kernels agree, how
long they take, how much memory; anything about several GPUs.
"""
import pytest
import torch
from test_real_weights import SHIPPED, reference
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import train_grpo
from conftest import ROOT, jsonl, write
from model.fast import pair as fast

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_cuda.py asks the real one")]
CPU, CUDA, Tensor = torch.device("cpu"), torch.device("cuda:0"), torch.Tensor
COPIES = {"to", "copy_", "__set__"}


def tensors(*x):
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def on_gpu(x):
    return getattr(x.untyped_storage(), "on_gpu", False)        # a view shares it


class PretendGPU(TorchFunctionMode):
    """While it is active each call of torch passes through it. It refuses what CUDA refuses,
    tensors of two devices in one operation.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, there = func.__name__, kwargs or {}, any(map(on_gpu, tensors(args, kwargs)))
        if there and func == Tensor.device.__get__:
            return CUDA
        if name in ("_parse_to", "_has_compatible_shallow_copy_type"):      # in a module's `to`
            return func(*args, **kwargs)
        if func == Tensor.cpu:
            func, name, args = Tensor.to, "to", (*args, CPU)
        targets = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.device)]
        stays = (targets[0].type == "cuda" if targets else
                 on_gpu(args[0]) if name == "copy_" else there)         # on the GPU

        # CUDA takes single numbers and indices from the CPU, and nothing else.
        index = tensors(args[1:2]) if name in ("__getitem__", "__setitem__") else []
        used = (args[0], args[2:]) if index and on_gpu(args[0]) else args
        if there and name not in COPIES and any(
                x.dim() and not on_gpu(x) for x in tensors(used, kwargs)):
            raise RuntimeError(f"two devices in {name}")
        if there and kwargs.get("enable_gqa") and kwargs.get("attn_mask") is not None:
            raise RuntimeError("its fused attention takes no mask where heads share keys")

        if name == "to" and stays != there:
            args = args[0].clone(), *args[1:]
        result = func(*tree_map_only(torch.device, self.real, args),
                      **tree_map_only(torch.device, self.real, kwargs))
        for x in tensors(result):
            x.untyped_storage().on_gpu = stays
        return result

    def real(self, device):
        return CPU if device.type == "cuda" else device


class Generator(torch.Generator):
    device = None

    def __new__(cls, device=CPU):
        generator = super().__new__(cls)
        generator.device = device
        return generator


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)    # in the backward pass too, which has no modes
    monkeypatch.setattr(torch, "Generator", Generator)
    autocast, is_enabled, dtype = (
        torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: is_enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: dtype("cpu"))
    monkeypatch.setattr(torch.autocast, "__init__", lambda self, device_type, *args, **options:
        autocast(self, "cpu", *args, **options))
    with PretendGPU() as gpu:
        yield gpu


def test_it_refuses_two_devices_as_cuda_does(gpu):
    x, here = torch.arange(6.0, device=CUDA), torch.arange(6.0)
    assert x.device == CUDA == (x[2:] + torch.tensor(1.0)).device
    assert x.cpu().device == here.copy_(x).device == CPU
    assert torch.nn.Linear(2, 2).to(CUDA).weight.device == CUDA
    for mixed in (lambda: x + here, lambda: here[x.long()], lambda: here.add_(x[0])):
        with pytest.raises(RuntimeError, match="two devices in"):
            mixed()


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
