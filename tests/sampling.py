"""What the tests of samplers share: small models of every family, prompts, a tool, an engine."""
import random
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import train_grpo
from dataset import PromptCollator, PromptDataset
from model import MiniMindConfig, MiniMindForCausalLM, eos_token_ids, sampler
from model.load import read_tensors
from model.lora import adapters, with_adapters
from reward.tools import Tool
from run.distributed import World
from run.extensions.tool import ToolCalls
from run.policy import Policy
from steps import state_of
from support import ROOT

# One prompt of a single token, two that are equal, one that begins another.
PROMPTS = [[3, 9, 27, 11, 2, 8, 8, 31, 5], [6, 4], [1, 30, 17, 3, 12], [6, 4], [6]]
PAD, EOS = 3, [13, 21, 38]                  # PAD is a token that the model may also sample
TEMPERATURE = 0.7
FAMILIES = {
    "qwen3": {},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "llama with one key head": {
        "qk_norm": False, "num_key_value_heads": 1, "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "a key head for each head": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "experts": {"num_experts": 3, "moe_intermediate_size": 96},
}


def wide(**changes):
    """Random weights, biases and norms too: their initial 0 or 1 would hide them."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "tie_word_embeddings": False, "initializer_range": 0.2}
    model = MiniMindForCausalLM(MiniMindConfig(**sizes | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def adapted():
    """With adapters whose B is not 0."""
    model = with_adapters(wide(), rank=4, alpha=32)
    torch.manual_seed(0)
    for layer in adapters(model).values():
        nn.init.normal_(layer.lora_B, std=0.05)
    return model


def model_of(name):
    """The model of a family, or the one with adapters."""
    return adapted() if name == "adapters" else wide(**FAMILIES[name])


def padded(sequences, side="left"):
    """Ids and mask, (N, T) each."""
    T, rows, masks = max(map(len, sequences)), [], []
    for ids in sequences:
        pads, real = [PAD] * (T - len(ids)), [1] * len(ids)
        rows.append(pads + ids if side == "left" else ids + pads)
        masks.append([0] * len(pads) + real if side == "left" else real + [0] * len(pads))
    return torch.tensor(rows), torch.tensor(masks)


def draw(sample, model, prompts=PROMPTS, *, num_generations=1, max_new_tokens=24, seed=0,
         eos=EOS, **options):
    device = next(model.parameters()).device
    return sample(model, *(x.to(device) for x in padded(prompts)), num_generations=num_generations,
                  max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=PAD,
                  generator=torch.Generator(device).manual_seed(seed), **options)


@torch.no_grad()
def trained_logps(model, prompts, completion_ids, mask, **options):
    """What the plain trainer makes of these completions (N, R), adjacent for each prompt."""
    G = len(completion_ids) // len(prompts)
    prompt_ids, prompt_mask = (x.repeat_interleave(G, 0).to(mask.device) for x in padded(prompts))
    return train_grpo.token_logps(
        model, torch.cat((prompt_ids, completion_ids), 1), torch.cat((prompt_mask, mask), 1),
        mask.shape[1], **options)


def sampler_is_off_by(model, completion_ids, logps):
    """How far what a sampler says of completions of PROMPTS is from token_logps, on average."""
    mask = train_grpo.completion_mask(completion_ids, EOS)
    trained = trained_logps(model, PROMPTS, completion_ids, mask, temperature=TEMPERATURE)
    return (logps - trained)[mask == 1].abs().mean().item()


def one_batch(pairs):
    """Prompts and completions as token_logps takes them: input_ids, attention_mask, R."""
    prompts, completions = zip(*pairs)
    left, right = padded(prompts), padded(completions, "right")
    return *(torch.cat(both, 1) for both in zip(left, right)), right[0].shape[1]


def pairs():
    """Shared beginnings of every kind, and none."""
    generator = torch.Generator().manual_seed(0)
    long, short, common = PROMPTS[0], PROMPTS[1], [25, 7, 30, 2, 11, 19]

    def random(length):
        return torch.randint(0, 40, (length,), generator=generator).tolist()

    return [
        *((long, common[:n] + random(4 * n)) for n in (1, 3, 6)),       # part after n tokens
        *((long, common[:n]) for n in (2, 6, 5)),                       # begin one another
        *((short, ids) for ids in ([9, 9, 9, 21], [9, 9, 9, 21], [9])),     # are the same
        *(([6], ids) for ids in ([4, 9, 9, 9, 21, 5], [4], [13])),      # go on as `short` does
        (long[:4], long[4:] + common[:3]),                              # goes on as `long` does
        *((PROMPTS[2], random(n)) for n in (17, 1, 30, 2)),
    ]


class FakeLLM:
    """In place of vLLM: random tokens, and a list of what it was asked to do."""

    def __init__(self, *weights, **options):
        self.events, self.awake, self.generator = [], True, torch.Generator().manual_seed(0)
        self.options, self.llm_engine = options, self
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and self.awake and kwargs["weights_iterator"]
        self.events.append("weights")

    def reset_prefix_cache(self):
        self.events.append("reset")

    def wake_up(self):
        assert not self.awake
        self.awake = True

    def sleep(self, level):
        assert level == 2 and self.awake
        self.awake = False
        self.events.append("sleep")

    def add_lora(self, request):
        """As vLLM does: it reads the adapter, in the dtype of its matrices."""
        self.events.append("adapter")
        tensors = read_tensors(Path(request.lora_path, "adapter_model.safetensors"))
        self.adapter = {name: tensor.bfloat16() for name, tensor in tensors.items()}

    def generate(self, prompts, options, use_tqdm, lora_request):
        assert self.awake and not torch.is_autocast_enabled("cpu")
        self.events.append("sample")
        return [SimpleNamespace(outputs=[self.answer() for _ in range(option.n)])
                for option in options]

    def answer(self):
        ids = torch.randint(3, 200, (4,), generator=self.generator).tolist()
        return SimpleNamespace(token_ids=ids,
                               logprobs=[{token: SimpleNamespace(logprob=-5.0)} for token in ids])


def dice(histories, answer, seeds, **columns):
    """Random words, some with an end token, for half of the rows."""
    answers = []
    for history, seed in zip(histories, seeds):
        rng = random.Random(seed + len(history))
        text = f"{rng.randint(1, 99)}*{rng.choice(['<|im_end|>', '2', ''])}\n"
        answers.append(rng.choice([text, None]))
    return answers


dice.stop = "\n"


def state_of_tool(model, tokenizer, flags=(), sample=sampler.sample, reader=train_grpo.token_logps):
    """The GRPO of a loaded model, without a reference."""
    world = World("cpu")
    return state_of(
        model, train_grpo.parse_args([*flags]), world, tokenizer=tokenizer,
        eos_ids=eos_token_ids(model, tokenizer), policy=Policy(model, sample, reader, world),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0))


def in_turns(tool, state, *given, **options):
    state.tool = tool
    return ToolCalls.generate(state, *given, **options)


def rollout_of(sample, policy, tokenizer, function=dice, count=3, greedy=False):
    items = PromptDataset(ROOT / "dataset/heldout.jsonl")[:count]
    return in_turns(
        Tool(function, tokenizer, 3),
        state_of_tool(policy, tokenizer, ["--max_gen_len", "40"], sample),
        PromptCollator(tokenizer, 99)(items), torch.Generator().manual_seed(0), 6, greedy=greedy)
