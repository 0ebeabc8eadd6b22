"""--tool: the policy can call a tool while it writes a completion (reward/tools.py)."""
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


class ToolCalls:
    def __post_init__(self):
        super().__post_init__()
        function = import_function(NAME, self.args.tool)
        self.tool = Tool(function, self.tokenizer, self.args.max_tool_calls)

    def generate(self, batch, rng, num_generations=None, greedy=False):
        """Samples completions that contain a tool's answers. The answers are not trained on."""
        G = num_generations or self.args.num_generations
        args, turns = self.args, Turns(self.tool, batch, G, rng)
        completion_ids, logps, drawn = self.policy.sample(                              # (N, R)
            batch["prompt_ids"].to(rng.device), batch["prompt_mask"].to(rng.device),
            num_generations=G, max_new_tokens=args.max_gen_len, temperature=args.temperature,
            eos_token_id=self.eos_ids, pad_token_id=self.tokenizer.pad_token_id or 0,
            generator=rng, greedy=greedy, tool=turns)
        # The tool's words may contain an EOS, so lengths come from the turns.
        lengths = torch.tensor(turns.lengths)[:, None]
        completion_mask = (torch.arange(drawn.shape[1]) < lengths).int().to(drawn.device)
        rollout = Rollout.of(
            batch, completion_ids, completion_mask, logps, self.eos_ids, self.tokenizer)
        rollout.loss_mask = completion_mask * drawn
        rollout.ended = torch.tensor(turns.ended, device=drawn.device)
        rollout.turns, rollout.failed_calls = turns.finished(self.eos_ids), turns.failures
        return rollout
