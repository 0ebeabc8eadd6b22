"""Writes weights, tokenizers and adapters in formats that load.py and transformers can read."""
import json
from pathlib import Path

from safetensors.torch import save_file

from .load import FAMILIES, eos_token_ids
from .lora import adapter_state, adapters, merged_state
from .transformers_model import AnyModel

MOE_FIELDS = "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"


def save_pretrained(model, tokenizer, path):
    """Saves the model to a folder that transformers can load. LoRA adapters are merged first."""
    path, state = Path(path), merged_state(model)
    path.mkdir(parents=True, exist_ok=True)
    if isinstance(model, AnyModel) and model.peft:
        model.peft.save_pretrained(path)            # only the adapters
    elif isinstance(model, AnyModel):
        model.model.save_pretrained(path, state_dict=state)
        for file in path.glob("*.safetensors"):
            file.chmod(0o644)           # as in save_tensors
    else:
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_tensors(state, path / "model.safetensors")
        write_json(hub_config(model), path / "config.json")
    generation = model.generation_config | {"eos_token_id": eos_token_ids(model, tokenizer)}
    if tokenizer.pad_token_id is not None:
        generation["pad_token_id"] = tokenizer.pad_token_id
    write_json(generation, path / "generation_config.json")
    tokenizer.save_pretrained(path)


def save_tensors(state, path):
    """Writes a safetensors file that all users of the machine may read."""
    save_file({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}, path,
              metadata={"format": "pt"})
    path.chmod(0o644)       # save_file makes it private; a folder's mode can still hide it


def write_json(content, path):
    path.write_text(json.dumps(content, indent=2) + "\n")


def hub_config(model):
    """Returns the content of the model's config.json as a dict."""
    if isinstance(model, AnyModel):
        return model.model.config.to_dict() | {"architectures": [type(model.model).__name__]}
    ours = vars(model.config).copy()
    model_type = next(kind for kind, (_, switches) in FAMILIES.items()
                      if switches.items() <= ours.items())      # the first with these switches
    if not model.config.num_experts:
        for name in MOE_FIELDS:
            del ours[name]
    scaling = ours.pop("rope_scaling")
    del ours["qk_norm"], ours["qkv_bias"]
    weights = [layer.weight for layer in adapters(model).values()] or [*model.parameters()]
    dtype = str(weights[0].dtype).removeprefix("torch.")
    return {
        "architectures": [FAMILIES[model_type][0]], "model_type": model_type, **ours,
        "hidden_act": "silu", "attention_dropout": 0.0,
        "rope_parameters": {**(scaling or {"rope_type": "default"}),
                            "rope_theta": model.config.rope_theta},
        "dtype": dtype}


def save_adapter(model, path):
    """Saves the LoRA adapters as adapter_config.json and adapter_model.safetensors, for PEFT."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    save_tensors(adapter_state(model), path / "adapter_model.safetensors")
    write_json({"peft_type": "LORA", "task_type": "CAUSAL_LM", **model.lora, "lora_dropout": 0.0,
                "bias": "none", "fan_in_fan_out": False, "inference_mode": True},
               path / "adapter_config.json")
