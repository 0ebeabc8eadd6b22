"""Sample once, keep the right answers, fine-tune on them: what GRPO's samples teach without GRPO.

    python -m lab.experiments.imitation --passes 4 --max_steps 300 --run_name imitation

It takes the flags of train_grpo.py, and --passes. As many answers are sampled as that run would,
all of them from the weights that it starts with. What it leaves reads like a run of one step, of
which eval.jsonl has the evaluation of what was fine-tuned; the rest is in RUN_NAME_imitates.
"""
import argparse
from pathlib import Path
from shlex import join

import train_grpo
from dataset.jsonl import read_jsonl, write_jsonl
from errors import user_errors
from run.checkpoint import default_name

from .__main__ import python, quoted
from .tasks import is_right

STILL = "--learning_rate 1e-12"         # the weights stay as they are, up to rounding
BATCH = 32
FINE_TUNING = f"--batch_size {BATCH} --warmup_steps 10 --learning_rate 3e-4 --heldout 0"


@user_errors("lab.experiments.imitation")
def main():
    own, flags = parse_args()
    args = train_grpo.parse_args(flags)
    folder = Path(args.out_dir, f"{args.run_name or default_name(args)}_imitates")
    samples, chats, tuned = folder / "samples", folder / "right.jsonl", folder / "tuned"

    python(f"train_grpo.py {join(flags)} {STILL} --eval_interval 0 --out_dir {quoted(folder)} "
           "--run_name samples", folder / "samples.log")
    right = [row["columns"]["messages"] + [{"role": "assistant", "content": row["completion"]}]
             for row in read_jsonl(samples / "completions.jsonl")
             if is_right(row["completion"], row["columns"]["answer"])]
    write_jsonl(chats, [{"conversations": messages} for messages in right])
    steps = round(own.passes * len(right) / BATCH)
    print(f"{len(right)} right answers, {steps} steps", flush=True)
    python(f"-m model.train_sft --init {quoted(Path(args.model_path))} {FINE_TUNING} "
           f"--steps {steps} --data {quoted(chats)} --save {quoted(tuned)}", folder / "tuned.log")
    python(f"train_grpo.py {join(flags)} {STILL} --max_steps 1 --eval_interval 1 "
           f"--model_path {quoted(tuned)}", folder / "eval.log")


def parse_args(argv=None):
    """Our own flag, and the others as they are."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--passes", type=float, default=1, help="over the right answers")
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    main()
