"""--tool: the policy can call a tool while it writes a completion (reward/tools.py)."""
from functools import partial

import torch

from errors import COUNT
from reward.load import import_function
from reward.tools import Tool
from reward.turns import Turns

from ..rollout import Rollout

NAME = "--tool"


def add_flags(parser):
    flag = parser.group("1. generate").add_argument
    flag("--tool", metavar="NAME", help="a tool that the policy can call in a completion, as "
         "module:function; its answers are read, but not trained on (docs/turns.md)")
    flag("--max_tool_calls", type=COUNT, default=8, help="maximum calls per completion")


def install(state):
    args = state.args
    tool = Tool(import_function(NAME, args.tool), state.tokenizer, args.max_tool_calls)
    state.replace(NAME, generate=partial(in_turns, tool))


def in_turns(tool, state, batch, rng, num_generations=None, greedy=False):
    """Samples completions that contain a tool's answers. The answers are not trained on."""
    G = num_generations or state.args.num_generations
    args, turns = state.args, Turns(tool, batch, G, rng)
    completion_ids, logps, drawn = state.policy.sample(                                     # (N, R)
        batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
        num_generations=G, max_new_tokens=args.max_gen_len, temperature=args.temperature,
        eos_token_id=state.eos_ids, pad_token_id=state.tokenizer.pad_token_id or 0, generator=rng,
        greedy=greedy, tool=turns)
    # The tool's words may contain an EOS, so lengths come from the turns.
    lengths = torch.tensor(turns.lengths)[:, None]
    completion_mask = (torch.arange(drawn.shape[1]) < lengths).int().to(drawn.device)
    rollout = Rollout.of(
        batch, completion_ids, completion_mask, logps, state.eos_ids, state.tokenizer)
    rollout.loss_mask = completion_mask * drawn
    rollout.ended = torch.tensor(turns.ended, device=drawn.device)
    rollout.turns, rollout.failed_calls = turns.finished(state.eos_ids), turns.failures
    return rollout
