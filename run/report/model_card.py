"""Writes the model card of a run's final weights: a README.md for the Hugging Face Hub."""
import shlex
from pathlib import Path
from string import Template

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dataset.prompts import R1_SYSTEM_PROMPT
from errors import GIVEN

from .picture import Run

# Flags that say nothing about the weights: where a run writes, what it prints, the machine.
OF_NO_WEIGHT = {"out_dir", "run_name", "save_weight", "resume", "save_interval", "swanlab",
                "use_wandb", "device", "sampler", "micro_batch_size", "rollout_batch_size",
                "gradient_checkpointing", "trainer"}


def write_card(folder, run_dir, args, defaults):
    """Writes README.md to `folder`. args: the run's flags; defaults: the default flags."""
    base, is_id = getattr(GIVEN.get(args.model_path), "name_or_path", "") or args.model_path, True
    try:
        validate_repo_id(base)      # the hub refuses a card with another base_model
    except HFValidationError:
        is_id = False
    if not is_id or Path(base).exists():
        base, is_id = Path(base).name.strip("<>"), False    # <Qwen3ForCausalLM> is an object
    rows = {"base": base, "prompts": Path(args.data_path).name.strip("<>"),
            "rewards": " + ".join(f"{weight:g} {name}" for weight, name in
                                  zip(args.reward_weights, args.reward_funcs)),
            "trainer": args.trainer if args.trainer != "GRPO" else "",
            "result": Run(run_dir).headline(),
            "flags that differ from the defaults": changed_flags(args, defaults)}
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items() if value)
    # An absolute path of this machine is left out.
    out_dir = "" if Path(args.out_dir).is_absolute() else args.out_dir
    system = R1_SYSTEM_PROMPT if args.system_prompt == "r1" else args.system_prompt
    chat = [{"role": "system", "content": system}] if system else []
    chat.append({"role": "user", "content": "What is 24 + 33*8?"})
    card = Template(Path(__file__).with_name("model_card.md").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(card.substitute(
        base_model=f"base_model: {base}\n" if is_id else "", base=base, table=table, chat=chat,
        thinks="on" if args.reasoning else "off", temperature=args.temperature, name=run_dir.name,
        path=Path(out_dir, run_dir.name, "final").as_posix(), tokens=args.max_gen_len,
        prompt=f" --system_prompt {shlex.quote(args.system_prompt)}" if args.system_prompt else "",
    ), encoding="utf-8")


def changed_flags(args, defaults):
    changed = []
    for name, value in sorted(vars(args).items()):
        if name in OF_NO_WEIGHT or name.endswith("_path") or value == getattr(defaults, name):
            continue
        values = value if isinstance(value, list) else [value]
        words = "" if value is True else " " + shlex.join(map(str, values))
        changed.append(f"`--{name}{words}`".replace("|", "\\|").replace("\n", " "))
    return ", ".join(changed)
