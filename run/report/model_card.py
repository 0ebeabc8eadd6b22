"""The model card of a run's final weights: README.md in the hub's format."""
import shlex
from pathlib import Path

from huggingface_hub import ModelCardData

from .picture import Run

# Where a run writes, what it prints, the machine: no word on the weights.
OF_NO_WEIGHT = {"out_dir", "run_name", "resume", "save_interval", "swanlab", "device", "sampler",
                "micro_batch_size", "rollout_batch_size", "gradient_checkpointing"}


def write_card(folder, run_dir, args, defaults):
    """args: of the run; defaults: of a run without flags."""
    base, is_id = args.model_path, not Path(args.model_path).exists()
    if not is_id:
        base = Path(base).name      # of a folder of this machine
    data = ModelCardData(library_name="transformers", pipeline_tag="text-generation",
                         tags=["grpo", "minigrpo"], base_model=base if is_id else None)
    rows = {"base": base, "prompts": Path(args.data_path).name,
            "rewards": " + ".join(f"{weight:g} {name}" for weight, name in
                                  zip(args.reward_weights, args.reward_funcs)),
            "result": Run(run_dir).headline(),
            "flags that differ from the defaults": changed_flags(args, defaults)}
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value)
    prompt = f" --system_prompt {shlex.quote(args.system_prompt)}" if args.system_prompt else ""
    thinks = "on" if args.reasoning else "off"
    (folder / "README.md").write_text(f"""---
{data.to_yaml()}
---

# {run_dir.name}

{base}, trained with Group Relative Policy Optimization (GRPO) by MiniGRPO.

| | |
|---|---|
{table}

## How to ask

As in training. Where the chat template has a switch for thinking, it is {thinks} by default.

```bash
python -m model.chat FOLDER{prompt}
```
""", encoding="utf-8")


def changed_flags(args, defaults):
    changed = []
    for name, value in sorted(vars(args).items()):
        if name in OF_NO_WEIGHT or name.endswith("_path") or value == getattr(defaults, name):
            continue
        values = value if isinstance(value, list) else [value]
        words = "" if value is True else " " + shlex.join(map(str, values))
        changed.append(f"`--{name}{words}`".replace("|", "\\|").replace("\n", " "))
    return ", ".join(changed)
