"""Loads weights and tokenizers from folders, from the hub, and from MiniMind's .pth files.

MiniMind's .pth files hold half-precision tensors, but no configuration. The configuration is
inferred from the tensors' names and shapes. There are two generations of MiniMind:

                heads   q/k-norm   rms eps   experts                             we save it as
    MiniMind2     8     no         1e-5      none (those with MoE are refused)   Llama
    MiniMind-3    8     yes        1e-6      none, or top-1 of several           Qwen3, Qwen3-MoE

Both generations have a vocabulary of 6,400 tokens, a RoPE base of 1e6, and tied embeddings. Their
source is jingyaogong/minimind, model/model_minimind.py.

Weights may come from a stranger, so code that comes with them never runs. If a file can't be read,
`explained` turns the exception into a one-line message for the user. If model/model.py supports the
model, the settings in config.json are converted to a MiniMindConfig; otherwise,
transformers_model.py loads the model.
"""
import json
import os
import re
import warnings
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from errors import GIVEN, UserError, explained

from . import transformers_model
from .model import MiniMindConfig, MiniMindForCausalLM

HEADS = 8       # in every MiniMind; without a q-norm, no tensor's shape shows the head size
# model_type in config.json -> (class in transformers, our switches that build it)
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": False, "num_experts": 0}),
    # q, k and v always have biases, and the output has none, whatever attention_bias says.
    "qwen2": ("Qwen2ForCausalLM", {"qk_norm": False, "qkv_bias": True, "attention_bias": False,
                                   "num_experts": 0}),
    "llama": ("LlamaForCausalLM", {"qk_norm": False, "qkv_bias": False, "num_experts": 0}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"qk_norm": True, "qkv_bias": False}),
}
ROPE_FIELDS = {     # rope_type -> fields that it needs
    "default": [], "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}
AGAIN = "download it again"


def read_json(path, advice=AGAIN):
    """Returns the object in a JSON file as a dict. `advice` is the end of any error message."""
    if not Path(path).exists():
        raise UserError(f"{path}: no such file; {advice}")
    with explained(path, "not a JSON object", advice):
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def read_tensors(path):
    """Returns {name: tensor} from a safetensors file or from a file that torch.save wrote.

    Unpickling with weights_only=True runs no code from the file. The tensors are memory-mapped, so
    that all ranks on a machine share the memory; copy the tensors that you keep.
    """
    with explained(path, "missing, truncated, a git-lfs pointer, or not tensors", AGAIN):
        if path.suffix == ".safetensors":
            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def refuse_code(saved, path):
    """Raises a UserError if a config.json names code that transformers would download and run.

    Most such code runs only with trust_remote_code=True, which we never pass. But an attention
    implementation from the hub, such as "somebody/kernel", would run even without this option.
    """
    for name, value in saved.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise UserError(f"{path}: its {name} is code from elsewhere, which never runs here; "
                            "choose other weights, or remove the field")
        if isinstance(value, dict):         # e.g. text_config of a vision-language model
            refuse_code(value, path)


def read_hub_config(path):
    """Returns a folder's config.json as a transformers configuration object."""
    file = Path(path) / "config.json"
    saved = read_json(file, "pass a folder with config.json and model.safetensors, a hub id like "
                            "Qwen/Qwen3-0.6B, or a MiniMind .pth file")
    refuse_code(saved, file)
    if saved.get("quantization_config"):
        raise UserError(f"{file}: its weights are quantized (quantization_config), so they cannot "
                        "be trained; choose weights that are not")
    with explained(file, "transformers cannot read it", "choose other weights"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def unbuilt(config):
    """Returns the setting that model/model.py does not support, or "" if it supports all."""
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type}"
    rope = config.rope_parameters
    options = {         # name -> its value, and the values that model/model.py supports
        "hidden_act": (config.hidden_act, "silu", "swish"),
        "rope_type": (rope["rope_type"], *ROPE_FIELDS),
        "partial_rotary_factor": (rope.get("partial_rotary_factor"), None, 1.0),
        "mlp_bias": (getattr(config, "mlp_bias", False), False),
        "sliding_window": (getattr(config, "sliding_window", None), None),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
        "mlp_only_layers": (getattr(config, "mlp_only_layers", None), None, []),
    }
    for name, (value, *built) in options.items():
        if value not in built:
            return f"{name} {value}"
    return ""


def read_config(path):
    """Reads config.json as a MiniMindConfig. Raises a UserError if that is not possible."""
    file, config = Path(path) / "config.json", read_hub_config(path)
    with explained(file, "a field is wrong", AGAIN):
        lacking = unbuilt(config)
        if lacking:
            raise UserError(f"{file}: model/model.py does not support {lacking}; choose weights "
                            f"without it, from one of the families {', '.join(FAMILIES)}")
        return as_ours(config)


def as_ours(config):
    """Converts a transformers config, which model/model.py must support, to a MiniMindConfig."""
    _, switches = FAMILIES[config.model_type]
    rope = config.rope_parameters
    scaling = {name: rope[name] for name in ROPE_FIELDS[rope["rope_type"]]}
    found = {field.name: getattr(config, field.name) for field in fields(MiniMindConfig)
             if hasattr(config, field.name)}
    found["head_dim"] = (getattr(config, "head_dim", None)
                         or config.hidden_size // config.num_attention_heads)
    found["rope_theta"] = rope["rope_theta"]
    found["rope_scaling"] = {"rope_type": rope["rope_type"], **scaling} if scaling else None
    return MiniMindConfig(**found | switches)


def as_ids(value):
    """Converts a token id field of a config (None, an id, or a list of ids) to a list."""
    if isinstance(value, list):
        return [int(item) for item in value]
    return [] if value is None else [int(value)]


def eos_token_ids(model, tokenizer):
    """Returns the sorted ids of all tokens that end a completion."""
    places = (tokenizer.eos_token_id, model.config.eos_token_id,
              model.generation_config.get("eos_token_id"), end_of_turn(tokenizer))
    return sorted({eos for place in places for eos in as_ids(place)})


def end_of_turn(tokenizer):
    """Returns the id of the token that the chat template writes after a reply, or None.

    The EOS token of a base model is often a different token, which does not occur in chats.
    """
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
    try:
        rest = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("bcd")[2]
        first, *_ = tokenizer(rest, add_special_tokens=False)["input_ids"]
    except Exception:           # there is no template, or it refuses such a chat
        return None
    return first if first in tokenizer.added_tokens_decoder else None


def decode(ids, tokenizer, eos_ids):
    """Returns the text of a completion, without EOS and padding tokens.

    Other special tokens are kept, because the reward functions look for tags.
    """
    hidden = {*eos_ids, tokenizer.pad_token_id}
    return tokenizer.decode([one for one in ids if one not in hidden])


def spelled_out(text, tokens):
    """Inserts a space into each of these tokens in the text: <|im_end|> becomes < |im_end|>."""
    for token in tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


# --- weights and tokenizers -----------------------------------------------------------------------


def load_pretrained(path, *, dtype=None, matrix_dtype=None, device=None):
    """Loads a model from a folder, a hub id or a MiniMind .pth file.

    The model is a MiniMindForCausalLM if model/model.py supports it, and an AnyModel otherwise.
    Raises a UserError if the weights are missing or broken, or if the model is not supported.
    dtype: None keeps the saved dtype. matrix_dtype: another dtype for the matrices in the layers.
    device: "meta" loads only shapes, for FSDP, unless the model is an AnyModel.
    """
    path, generation = local_path(path), {}
    if not path.is_file():
        theirs, file = read_hub_config(path), path / "generation_config.json"
        if file.exists():
            generation = read_json(file)
            with explained(file, "its eos_token_id is no token's id", AGAIN):
                as_ids(generation.get("eos_token_id"))
        asks = getattr(theirs, "output_router_logits", False)
        if asks and getattr(theirs, "router_aux_loss_coef", 0):
            warnings.warn(f"{path}: config.json asks for the router's balancing loss "
                          "(router_aux_loss_coef), which is not computed here", stacklevel=2)
        lacking = unbuilt(theirs)
        if lacking:
            model = transformers_model.load(
                path, theirs, lacking, dtype=dtype, matrix_dtype=matrix_dtype,
                device=None if device == "meta" else device)
            model.generation_config = generation
            return model
    config, state = read_state(path)
    dtype = dtype or getattr(state.get("model.norm.weight"), "dtype", None)
    model = build(MiniMindForCausalLM, config, state=state, path=path, dtype=dtype,
                  matrix_dtype=matrix_dtype, device=device)
    model.tie_weights()
    model.generation_config = generation
    return model


def read_state(path):
    """Returns (config, state): a MiniMindConfig and the tensors of a folder or .pth file."""
    if path.is_file():
        state = read_tensors(path)
        with explained(path, "no MiniMind since April 2025 has tensors of these names and shapes",
                       "pass a folder with config.json, or a .pth file of a whole model"):
            state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
            config = infer_config(state)
    else:
        config, state = read_config(path), read_weights(path)
    embedding = state.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and torch.is_tensor(embedding):
        head = state.setdefault("lm_head.weight", embedding)
        alike = torch.is_tensor(head) and torch.equal(embedding, head.to(embedding.dtype))
        if not alike:       # as in some merged adapters
            config.tie_word_embeddings = False
            warnings.warn(f"{path}: config.json ties head and embedding, but they differ in the "
                          "weights, so both are kept", stacklevel=2)
    return config, state


def local_path(path, *, weights=True):
    """Returns `path` itself or, for a hub id like Qwen/Qwen3-0.6B, the folder of its download.

    If weights=False, only the config and the tokenizer are downloaded.
    """
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return Path(path)
    from huggingface_hub import snapshot_download

    def download(*patterns):
        return Path(snapshot_download(
            str(path), ignore_patterns=["original/*"],
            allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", *patterns]))

    with explained(path, "no such folder on this machine, and downloading it from the hub failed",
                   "check the spelling and the network, and log in (hf auth login) if it needs it"):
        folder = download("*.safetensors") if weights else download()
        if weights and not list(folder.glob("*.safetensors")):
            folder = download("pytorch_model*.bin")
        return folder


def load_tokenizer(path, vocab_size, advice="pass another with --tokenizer_path"):
    """Loads the tokenizer from a folder or hub id, without running code that comes with it.

    Raises a UserError if there is no tokenizer, if it has no chat template, or if the id of its
    padding or EOS token is not below vocab_size. `advice` is the end of the error message.
    """
    tokenizer = GIVEN.get(path)
    if tokenizer is not None and not (
            hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "apply_chat_template")):
        raise UserError(f"{path} is no tokenizer of transformers; pass one, such as a processor's "
                        "attribute tokenizer")
    if tokenizer is None:
        path = local_path(path, weights=False)
        if not path.is_dir():
            raise UserError(f"{path}: not a folder, so it has no tokenizer; {advice}")
        with explained(path, "no tokenizer could be read there", advice):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            # If there are no files, transformers makes an empty tokenizer.
            if not tokenizer("a 1", add_special_tokens=False)["input_ids"]:
                raise ValueError("it has no token for any text")
    if tokenizer.chat_template is None:
        raise UserError(f"{path}: its tokenizer has no chat template; {advice}")
    # More rows than tokens are common: embeddings are often padded to a round number.
    for token in (tokenizer.pad_token, tokenizer.eos_token):
        if token and tokenizer.convert_tokens_to_ids(token) >= vocab_size:
            raise UserError(f"{path}: the id of its token {token} is beyond the {vocab_size} "
                            f"tokens that the weights know; {advice}")
    return tokenizer


def build(model_class, config, *more, state, path, dtype=torch.float32, matrix_dtype=None,
          device=None):
    """Returns model_class(config, *more) with copies of the tensors in `state` as its weights.

    The model is created on the meta device, since initializing a large model would be slow.
    """
    with explained(path, "the tensors do not fit the configuration", AGAIN):
        with torch.device("meta"):
            model = model_class(config, *more)
        copies = {}
        for name, tensor in state.items():      # one by one, to not hold a second model in memory
            is_matrix = ".layers." in name and tensor.dim() == 2
            kept = matrix_dtype if is_matrix and matrix_dtype else dtype
            copies[name] = tensor.to(device, kept, copy=True)
        model.load_state_dict(copies, assign=True)
    return model


def read_weights(path):
    """Returns {name: tensor} from a folder's safetensors files or, if it has none, its .bin files.

    As in transformers, if there is an index file, only the files that it lists are read.
    """
    for whole in (path / "model.safetensors", path / "pytorch_model.bin"):
        index, parts = Path(f"{whole}.index.json"), [whole]
        if not whole.exists():
            parts = sorted(path.glob(f"{whole.stem}-*-of-*{whole.suffix}"))
        if index.exists() and not whole.exists():
            with explained(index, "not an index of weights", AGAIN):
                parts = sorted({path / part for part in read_json(index)["weight_map"].values()})
        if parts:
            break
    else:
        raise UserError(f"{path}: there is neither model.safetensors nor model.safetensors.index."
                        "json; copy all files of the weights next to config.json")
    state = {}
    for file in parts:
        state |= read_tensors(file)
    # Llama 2's files also hold RoPE frequencies, which our model computes from its config.
    return {name: state[name] for name in state if not name.endswith("rotary_emb.inv_freq")}


def choose_device(name, size):
    """Returns the torch.device of this process. size: the number of processes."""
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    has_mps = torch.backends.mps.is_available() and size == 1   # Gloo cannot sum MPS tensors
    name = name or ("cuda" if gpus else "cpu")          # untested mps isn't the default
    kind, _, number = name.partition(":")
    number = number if here == 1 else ""            # several processes each have their own GPU
    if (not re.fullmatch(r"cuda(:\d+)?|mps|cpu", name) or kind == "mps" and not has_mps
            or kind == "cuda" and gpus < max(here, int(number or 0) + 1)):
        raise UserError(f"--device {name} is not available for {here} process(es) on a machine "
                        f"with {gpus} GPU(s); pass another, e.g. cpu, or another --nproc_per_node")
    return torch.device(f"cuda:{number or os.environ.get('LOCAL_RANK') or 0}" if kind == "cuda"
                        else kind)


def find_weights(kind, args, shipped):
    """Returns the path of the default weights, e.g. "reason_128" for kind="reason".

    Looks in --out_dir, then in `shipped`. The name also depends on --hidden_size and --use_moe.
    """
    name = f"{kind}_{args.hidden_size}{'_moe' if args.use_moe else ''}"
    paths = [folder / file for folder in (Path(args.out_dir), shipped)
             for file in (name, f"{name}.pth")]
    return str(next((path for path in paths if path.is_file() or (path / "config.json").is_file()),
                    shipped / name))


def infer_config(state):
    """Infers a MiniMindConfig from the names and shapes of MiniMind's tensors."""
    first = "model.layers.0."
    qk_norm = f"{first}self_attn.q_norm.weight" in state
    q_size, hidden_size = state[f"{first}self_attn.q_proj.weight"].shape
    head_dim = len(state[f"{first}self_attn.q_norm.weight"]) if qk_norm else q_size // HEADS
    router = state.get(f"{first}mlp.gate.weight")       # (experts, D), or None in a dense model
    gate_proj = "gate_proj" if router is None else "experts.0.gate_proj"
    feed_forward = len(state[f"{first}mlp.{gate_proj}.weight"])
    layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
    embedding = state["model.embed_tokens.weight"]      # (V, D)
    return MiniMindConfig(
        vocab_size=len(embedding), hidden_size=hidden_size, intermediate_size=feed_forward,
        num_hidden_layers=len(layers), num_attention_heads=q_size // head_dim,
        num_key_value_heads=len(state[f"{first}self_attn.k_proj.weight"]) // head_dim,
        head_dim=head_dim, qk_norm=qk_norm, rms_norm_eps=1e-6 if qk_norm else 1e-5,
        rope_theta=1e6, max_position_embeddings=32768,
        tie_word_embeddings=torch.equal(state["lm_head.weight"], embedding),
        num_experts=0 if router is None else len(router), num_experts_per_tok=1,
        moe_intermediate_size=feed_forward, norm_topk_prob=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0)
