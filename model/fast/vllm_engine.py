"""vLLM in place of the sampler, --sampler vllm. requirements-vllm.txt says what to install.

Each rank has an engine, made in its own process at the first call. The optimizer tells it when
weights have changed, and the next call hands all of them over. Tensors would not tell: AdamW's
fused step leaves a tensor's version as it was.
"""
import os
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from errors import UserError, reason

from ..lora import merged_state
from ..storage.write import hub_config, write_json


class Engine:
    """`sample` of model/sampler.py, but greedy log-probs are those at temperature 1. UserError if
    vLLM is missing or can't start. On a GPU it sleeps, which frees its memory, from the phase after
    the rollout until it samples again.
    """

    def __init__(self, world, args):
        self.world, self.args, self.llm = world, args, None
        self.may_sleep = world.device.type == "cuda"
        self.is_asleep, self.is_outdated = False, True
        world.at_phase.append(self.sleep)

    def outdate(self, *_):
        """The policy's weights have changed: a hook of the optimizer, after its step."""
        self.is_outdated = True

    def sleep(self, phase):
        """What comes after sampling needs the room."""
        samples = phase in (None, "rollout", "eval", "checkpoint")
        if self.may_sleep and self.llm is not None and not self.is_asleep and not samples:
            self.llm.sleep(level=2)             # frees weights and cache
            self.is_asleep, self.is_outdated = True, True

    @torch.no_grad()
    def __call__(self, model, prompt_ids, prompt_mask, **options):
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        try:
            if self.llm is None:
                self._start(model)
            if self.is_outdated:
                self._hand_over(model)
            return self._sample(prompt_ids, prompt_mask, **options)
        finally:        # vLLM leaves torch one thread, and a set_num_threads that does nothing
            torch.set_num_threads = set_num_threads
            set_num_threads(threads)

    def _start(self, model):
        world, args = self.world, self.args
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                       "VLLM_NO_USAGE_STATS": "1"}              # it would tell its makers
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")    # GiB
        try:
            with tempfile.TemporaryDirectory() as folder:
                from vllm import LLM, SamplingParams
                write_json(hub_config(model), Path(folder, "config.json"))
                self.SamplingParams = SamplingParams
                self.llm = LLM(
                    folder, load_format="dummy", skip_tokenizer_init=True, dtype=world.matrix_dtype,
                    max_model_len=args.max_seq_len + args.max_gen_len,
                    max_num_seqs=args.rollout_batch_size or 256, enable_sleep_mode=self.may_sleep,
                    gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                    logprobs_mode="processed_logprobs", enforce_eager=not self.may_sleep,
                    distributed_executor_backend="external_launcher" if world.size > 1 else "uni")
                world.ends.callback(self.llm.llm_engine.engine_core.shutdown)
                # Some models it builds, and says at the first token that it can't run them.
                self._generate([{"prompt_token_ids": [0]}],
                               SamplingParams(max_tokens=1, detokenize=False))
        except Exception as error:      # many classes, of vLLM and of what it imports
            raise UserError(f"--sampler vllm: it could not start with {args.model_path} "
                            f"({reason(error)}); see requirements-vllm.txt") from error

    def _hand_over(self, model):
        if self.is_asleep:
            self.llm.wake_up()
        # With the head's own name where it is the embedding, which a checkpoint would leave out: a
        # CPU's product reads a packed copy of the head, and else that would stay as it was.
        weights = list(merged_state(model).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()       # it was computed with other weights
        self.is_asleep, self.is_outdated = False, False

    def _generate(self, prompts, options):
        # Its weights are cast already.
        with torch.autocast(self.world.device.type, enabled=False):
            return self.llm.generate(prompts, options, use_tqdm=False)

    def _sample(self, prompt_ids, prompt_mask, *, num_generations, max_new_tokens, temperature=1.0,
                eos_token_id, pad_token_id, generator=None, greedy=False):
        n, device = 1 if greedy else num_generations, prompt_ids.device
        seeds = torch.randint(2**31, (len(prompt_ids),), generator=generator, device=device)
        options = [self.SamplingParams(
            n=n, temperature=0.0 if greedy else temperature, seed=seed, max_tokens=max_new_tokens,
            stop_token_ids=prompt_ids.new_tensor(eos_token_id).flatten().tolist(), ignore_eos=True,
            logprobs=0, detokenize=False) for seed in seeds.tolist()]
        prompts = [{"prompt_token_ids": ids[mask.bool()].tolist()}
                   for ids, mask in zip(prompt_ids, prompt_mask)]
        answers = self._generate(prompts, options)
        answers = [answer for group in answers for answer in group.outputs * (num_generations // n)]
        ids = [prompt_ids.new_tensor(answer.token_ids) for answer in answers]
        logps = [torch.tensor([of[token].logprob for token, of in zip(x.token_ids, x.logprobs)],
                              device=device) for x in answers]
        return pad_sequence(ids, True, pad_token_id), pad_sequence(logps, True)         # (N, R)
