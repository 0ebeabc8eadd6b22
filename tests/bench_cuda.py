"""A page about one GPU: rollouts, steps, memory. `python tests/bench.py --device cuda` prints it.

Ours beside transformers' generate, and beside vLLM and TRL where they are installed. The weights
are random, in the shape of Qwen3-0.6B; prompts have 32 tokens, and no completion ends early. All
sides multiply in bfloat16 (in float32 with --device cpu, where this code can be tried).

`limit` is a share of the memory's bandwidth, which a copy measures in the same run. A decode step
cannot take less time than it takes to read all weights, and the keys and values of all tokens so
far, once. Prompts, sampling and whatever our step reads beyond that count as waste.

Memory is the largest sum of live tensors in two steps, beside what model/storage/memory.py says.
"""
import gc
import importlib.util
import tempfile
from statistics import median

import bench
import torch

from model.storage.memory import SIZES, num_parameters, peak_bytes

SHAPE = vars(SIZES["Qwen3-1.7B"]) | {"hidden_size": 1024, "intermediate_size": 3072}
CASES = bench.CASES | {"0.6B": bench.Case(8, 8, 512, 16, SHAPE, betas=(0.02,))}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


def seconds(device, function, *args, **kwargs):
    """As in bench.py, but until the GPU is done."""
    def and_wait():
        function(*args, **kwargs)
        if device == "cuda":
            torch.cuda.synchronize()
    return bench.seconds(and_wait)[0]


def bandwidth(device):
    """Bytes per second that a copy reads and writes, the best of twenty."""
    source = torch.zeros(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = min(seconds(device, target.copy_, source) for _ in range(20))
    return 2 * source.numel() / best


def bytes_to_read(config, case, prompt_length, product):
    """What the decode steps of a rollout must read: see above. product: bytes of a number."""
    D, V = config.hidden_size, config.vocab_size
    copies = 1 if config.tie_word_embeddings else 2
    layers = num_parameters(config)[0] - copies * V * D
    weights = product * layers + 4 * V * D              # the head stays float32
    rows, steps = case.prompts * case.generations, case.new_tokens - 1      # the prompt gave one
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * product
    tokens = steps * prompt_length + steps * (steps + 1) // 2
    return steps * weights + rows * tokens * a_token


def generates(ours, case, path, device):
    """transformers' generate, as a function of a batch."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, DTYPES[device])).to(device).eval()

    def rollout(batch):
        ids, mask = (batch[name].repeat_interleave(case.generations, 0).to(device)
                     for name in ("prompt_ids", "prompt_mask"))
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=case.new_tokens, eos_token_id=[bench.NO_EOS],
            pad_token_id=ours.tokenizer.pad_token_id)
    return rollout


def vllms(ours, case, path, device):
    """vLLM's generate; it takes half of the GPU for itself."""
    from vllm import LLM, SamplingParams
    model = LLM(str(path), dtype=DTYPES[device], gpu_memory_utilization=0.5)
    options = SamplingParams(n=case.generations, temperature=1.0, max_tokens=case.new_tokens,
                             ignore_eos=True, detokenize=False)

    def rollout(batch):
        prompts = [{"prompt_token_ids": ids[mask.bool()].tolist()}
                   for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"])]
        model.generate(prompts, options, use_tqdm=False)
    return rollout


def turns(device, rollout, batches):
    """Seconds of each batch but the first, which warms up."""
    taken = [seconds(device, rollout, batch) for batch in batches][1:]
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return taken


def report_rollouts(case, path, batches, device):
    ours, plain = (bench.Ours(case, path, 0.0, plain=plain, device=device, dtype=DTYPES[device])
                   for plain in (False, True))
    P, config = batches[0]["prompt_ids"].shape[1], ours.policy.config
    rate = bandwidth(device)
    needed = bytes_to_read(config, case, P, 2 if device == "cuda" else 4) / rate
    sides = {"ours": lambda: ours.rollout, "ours, plain": lambda: plain.rollout,
             "transformers' generate": lambda: generates(ours, case, path, device)}
    if importlib.util.find_spec("vllm"):
        sides["vLLM"] = lambda: vllms(ours, case, path, device)
    print(f"\nA copy moves {rate / 1e9:.0f} GB/s.\n\n| rollout | seconds | tokens per second "
          "| ms per token of each | limit |\n|---|---|---|---|---|", flush=True)
    for name, rollout in sides.items():
        taken = median(turns(device, rollout(), batches))
        tokens, each = case.prompts * case.generations * case.new_tokens, taken / case.new_tokens
        print(f"| {name} | {taken:.2f} | {tokens / taken:.0f} | {1e3 * each:.2f} "
              f"| {needed / taken:.0%} |", flush=True)


def report_steps(case, path, batches, beta, device, folder):
    """A step beside TRL's; ours is alone first, and its memory beside the formula's."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    ours = bench.Ours(case, path, beta, device=device, dtype=DTYPES[device])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    sides = {"ours": turns(device, ours.step, batches)}
    config, peak = ours.policy.config, None
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    del ours
    gc.collect()
    if importlib.util.find_spec("trl"):
        def after_step(step, taken, tokens):
            sides.setdefault("TRL", []).append(taken)

        bench.trl_trainer(case, path, batches, beta, folder, after_step, device).train()
        sides["TRL"] = sides["TRL"][1:]
    print(f"\n| step, beta {beta} | seconds | tokens per second |\n|---|---|---|")
    for name, taken in sides.items():
        tokens = case.prompts * case.generations * case.new_tokens
        print(f"| {name} | {median(taken):.2f} | {tokens / median(taken):.0f} |")
    formula = peak_bytes(
        config, num_parameters(config), num_prompts=case.prompts, num_generations=case.generations,
        prompt_length=batches[0]["prompt_ids"].shape[1], completion_length=case.new_tokens,
        micro_batch_size=case.micro_batch, reference=beta > 0, gradient_checkpointing=False,
        gpu=device == "cuda")["peak"]
    measured = f"{peak / 2**30:.2f} GiB" if peak else "is only measured on a GPU"
    print(f"\nMemory of a step: {measured}; by the formula {formula / 2**30:.2f} GiB", flush=True)


def report(device, names, repetitions, tokenizer):
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("tests/bench.py: --device cuda: no GPU that this torch can use; --device "
                         "cpu tries the code")
    machine = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    print(f"{machine}, torch {torch.__version__}, {DTYPES[device]}, medians of {repetitions} turns")
    for name in names or ["0.6B"]:
        case = CASES[name]
        if case.config is None:
            raise SystemExit(f"tests/bench.py: --cases {name}: its completions end when they like, "
                             "and --device compares equal lengths; choose 1.7M, 26M or 0.6B")
        print(f"\n## {name}: {case.prompts} prompts x {case.generations} completions, "
              f"{case.new_tokens} new tokens, micro-batches of {case.micro_batch}")
        with tempfile.TemporaryDirectory() as folder:
            path = bench.weights_of(case, folder, tokenizer)
            batches = bench.batches_of(case, repetitions + 1, tokenizer)
            for beta in case.betas:
                report_steps(case, path, batches, beta, device, folder)
            report_rollouts(case, path, batches, device)
