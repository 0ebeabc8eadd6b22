"""MiniMind's flags that MiniGRPO names differently: they work, but --help doesn't list them."""
import argparse

from errors import COUNT

FLAGS = {
    "accumulation_steps": {"type": COUNT, "default": 1},
    "hidden_size": {"type": COUNT, "default": 128},
    "use_moe": {"type": int, "choices": (0, 1), "default": 0},
    "num_hidden_layers": {"type": COUNT},
    "from_weight": {}, "from_resume": {"type": int, "choices": (0, 1), "dest": "resume"},
    "save_dir": {"dest": "out_dir"}, "save_weight": {},
    "use_wandb": {"action": "store_true"},
    "wandb_project": {"default": "MiniGRPO"},
    "ddp": {"action": "store_true"}, "num_workers": {"type": int}, "log_interval": {"type": int},
}


def add_flags(parser):
    for name, options in FLAGS.items():
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)
    parser.epilog = (
        "MiniMind's other flags also work: accumulation_steps multiplies batch_size; hidden_size "
        "(128) and use_moe select the default weights; num_hidden_layers only checks the weights; "
        "from_weight names weights in out_dir, without the size; from_resume 1 means resume, "
        "save_dir is out_dir, save_weight is the default run_name; use_wandb, as in MiniMind, "
        "means swanlab online, unless swanlab is set; wandb_project is its project.")
