"""Samples with vLLM: --sampler vllm. docs/requirements-vllm.txt says what to install.

Each rank starts a vLLM engine in its own process when it first samples. When the weights have
changed since the last call, they are copied to the engine. If the policy has LoRA adapters, only
the adapters are copied, because merging them into bfloat16 weights would round small updates away.
An optimizer hook records that the weights have changed.
"""
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from errors import UserError, reason

from .lora import adapters, base_state, merged_state
from .save import hub_config, save_adapter, write_json

RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512    # ranks of adapters that vLLM supports


class Engine:
    """Replaces `sample` in model/sampler.py: the arguments and return values are the same.

    With `greedy`, log-probabilities are computed at temperature 1. Raises a UserError if vLLM is
    not installed or can't start. On a GPU, the engine frees its memory when sampling has ended.
    """

    def __init__(self, world, args):
        self.world, self.args, self.llm = world, args, None
        self.may_sleep = world.device.type == "cuda"
        self.is_asleep, self.is_outdated = False, True
        self.has_base, self.adapter = False, None       # for a policy with adapters

    def outdate(self, *_):
        """Records that the weights have changed. The optimizer calls this after each step."""
        self.is_outdated = True

    def sleep(self, phase):
        """Frees the engine's GPU memory if the phase that starts now does not sample."""
        samples = phase in (None, "rollout", "eval", "checkpoint")
        if self.may_sleep and self.llm is not None and not self.is_asleep and not samples:
            self.llm.sleep(level=2)             # frees weights and cache
            self.is_asleep, self.is_outdated, self.has_base = True, True, False

    @torch.no_grad()
    def __call__(self, model, prompt_ids, prompt_mask, **options):
        with as_before(self.world.device):
            if self.llm is None:
                self._start(model)
            if self.is_outdated:
                self._hand_over(model)
            return self._sample(prompt_ids, prompt_mask, **options)

    def _start(self, model):
        world, args, lora = self.world, self.args, {}
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                       "VLLM_NO_USAGE_STATS": "1"}              # otherwise vLLM sends usage data
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")    # GiB
        if adapters(model):
            rank = next((rank for rank in RANKS if rank >= args.lora_rank), args.lora_rank)
            lora = {"enable_lora": True, "max_lora_rank": rank}
        # By default vLLM opens a store of its own. Under torchrun, torch would wait for another
        # process to serve that store, so the engine uses the launcher's.
        launched = world.size > 1 or dist.is_torchelastic_launched()
        if world.rank == 0:
            print("starting vLLM, which may take a minute", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                from vllm import LLM, SamplingParams
                write_json(hub_config(model), Path(folder, "config.json"))
                self.SamplingParams = SamplingParams
                self.llm = LLM(
                    folder, load_format="dummy", skip_tokenizer_init=True, dtype=world.matrix_dtype,
                    max_model_len=args.max_seq_len + args.max_gen_len, **lora,
                    enable_sleep_mode=self.may_sleep, enforce_eager=not self.may_sleep,
                    gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                    logprobs_mode="processed_logprobs",
                    distributed_executor_backend="external_launcher" if launched else "uni")
                world.cleanup.callback(self.llm.llm_engine.engine_core.shutdown)
                # For some models, vLLM only fails at the first token.
                self._generate([[0]], [SamplingParams(max_tokens=1, detokenize=False)])
        except Exception as error:      # vLLM and its imports raise many classes
            raise UserError(f"--sampler vllm: vLLM could not start with {args.model_path} "
                            f"({reason(error)}); see docs/requirements-vllm.txt") from error

    def _hand_over(self, model):
        if self.is_asleep:
            # Frees the memory that torch still caches from the update.
            torch.cuda.empty_cache()
            self.llm.wake_up()
        if not self.has_base:
            # The state includes a tied head, although a checkpoint would leave it out: on a CPU,
            # vLLM multiplies by a packed copy of the head, which has to be updated.
            state = base_state(model) if adapters(model) else merged_state(model)
            self.llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": list(state.items())})
        if adapters(model):
            self.has_base = True
            self._hand_over_adapter(model)
        self.llm.reset_prefix_cache()       # it was computed with the old weights
        self.is_asleep, self.is_outdated = False, False

    def _hand_over_adapter(self, model):
        from vllm.lora.request import LoRARequest
        number = 1 + (self.adapter.lora_int_id if self.adapter else 0)      # replaces the old one
        with tempfile.TemporaryDirectory() as folder:
            save_adapter(model, folder)
            self.adapter = LoRARequest(f"update {number}", number, folder)
            self.llm.llm_engine.add_lora(self.adapter)

    def _generate(self, prompts, options):
        """Returns vLLM's outputs. prompts: a list of token ids for each prompt."""
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], options,
                                 use_tqdm=False, lora_request=self.adapter)

    def _sample(self, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
                eos_token_id, pad_token_id, generator=None, greedy=False, tool=None):
        eos_ids = prompt_ids.new_tensor(eos_token_id).flatten().tolist()
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, prompt_mask)]

        def write(prompts, n, rooms, stops):
            """Returns a list of (ids, log-probs), with n completions per prompt."""
            seeds = torch.randint(2**31, (len(prompts),), generator=generator,
                                  device=prompt_ids.device)
            options = [self.SamplingParams(
                n=n, temperature=0.0 if greedy else temperature, seed=seed, max_tokens=room,
                stop_token_ids=stop, ignore_eos=True, logprobs=0, detokenize=False)
                for seed, room, stop in zip(seeds.tolist(), rooms, stops)]
            return [(list(answer.token_ids), logps_of(answer))
                    for group in self._generate(prompts, options) for answer in group.outputs]

        if tool is None:
            count = len(prompts)
            rows = write(prompts, num_generations, [max_new_tokens] * count, [eos_ids] * count)
        else:
            prompts = [ids for ids in prompts for _ in range(num_generations)]
            rows = in_rounds(write, prompts, max_new_tokens, eos_ids, tool, prompt_ids)

        def padded(column, value):
            tensors = [torch.tensor(row, device=prompt_ids.device) for row in column]
            return pad_sequence(tensors, batch_first=True, padding_value=value)

        paddings = pad_token_id, 0.0, 1         # of ids, log-probs and, with a tool, the loss mask
        return tuple(padded(column, value) for column, value in zip(zip(*rows), paddings))


@contextmanager
def as_before(device):
    """Restores the settings of torch that vLLM changes: thread count and matmul precision.

    Autocast is off inside the context.
    """
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def logps_of(answer):
    return [of[token].logprob for token, of in zip(answer.token_ids, answer.logprobs)]


def in_rounds(write, prompts, max_new_tokens, eos_ids, tool, like):
    """Samples with a tool. Returns (ids, log-probs, mask of sampled tokens) for each prompt.

    In each round, vLLM samples each completion until it calls the tool or ends. Then the tool
    answers all calls, and its answers are appended. The next round continues from there.
    """
    rows, going = [([], [], []) for _ in prompts], list(range(len(prompts)))
    ahead = [[] for _ in prompts]       # per row, what vLLM has already written: (token, log-prob)
    tool.begin(len(rows))
    while going:
        if not any(ahead[place] or tool.waits(place) for place in going):
            written = write([prompts[place] + rows[place][0] for place in going], 1,
                            [max_new_tokens - len(rows[place][0]) for place in going],
                            [eos_ids + tool.stops(place) for place in going])
            for place, (tokens, logps) in zip(going, written):
                ahead[place] = list(zip(tokens, logps))
        # The last tokens of all rows are taken together, so the tool answers all rows at once.
        ready = [place for place in going if len(ahead[place]) > 1 or tool.waits(place)] or going
        tokens, logps = zip(*[(0, 0.0) if tool.waits(place) else ahead[place].pop(0)
                              for place in ready])
        alive = like.new_tensor([token not in eos_ids for token in tokens]).bool()
        taken = tool.take(like.new_tensor(ready), like.new_tensor(tokens), alive)
        tokens, is_drawn, goes_on = (x.tolist() for x in taken)
        for place, *token in zip(ready, tokens, logps, is_drawn):
            for column, value in zip(rows[place], token):
                column.append(value)
        ended = {place for place, on in zip(ready, goes_on)
                 if not on or len(rows[place][0]) == max_new_tokens}
        going = [place for place in going if place not in ended]
    return rows
