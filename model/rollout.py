"""A rollout: what one rank sampled in one step, and what the later phases find out about it."""
from collections import namedtuple
from dataclasses import dataclass, field

import torch

from errors import UserError

# What an optimizer step learns from: totals over all ranks, named as in grpo_loss, and this rank's
# parts, a MicroBatch each.
Minibatch = namedtuple("Minibatch", "totals micro_batches")


class Sequences:
    """Prompts and completions, side by side."""

    def sequences(self):
        """input_ids and attention_mask (N, T), and R: what `token_logps` reads."""
        input_ids = torch.cat((self.prompt_ids, self.completion_ids), dim=1)
        mask = torch.cat((self.prompt_mask, self.attention), dim=1)
        return input_ids, mask, self.attention.shape[1]


@dataclass
class MicroBatch(Sequences):
    """What learning needs of n completions of a rollout."""
    prompt_ids: torch.Tensor                    # (n, P) padded on the left
    prompt_mask: torch.Tensor                   # (n, P)
    completion_ids: torch.Tensor                # (n, R) padded on the right
    attention: torch.Tensor                     # (n, R) 1 through the EOS; 0 if the row is not kept
    mask: torch.Tensor                          # (n, R) the same without a tool's tokens
    sampling_logps: torch.Tensor                # (n, R)
    per_token: dict                             # name -> (n, R): ref_logps, unless beta is 0
    advantages: torch.Tensor                    # (n,) or (n, R); None: not known yet
    old_logps: torch.Tensor = None              # (n, R); None: pi moves once


@dataclass
class Rollout(Sequences):
    """All that one rank knows of the completions of one step, a row each; groups are adjacent."""
    prompts: list                               # N texts, each prompt G times
    columns: dict                               # name -> N values: the data's other fields
    prefills: list                              # N texts: what the template wrote of the reply
    prompt_ids: torch.Tensor                    # (N, P) padded on the left
    prompt_mask: torch.Tensor                   # (N, P)
    completions: list                           # N texts, without the EOS
    completion_ids: torch.Tensor                # (N, R) padded on the right
    attention: torch.Tensor                     # (N, R) 1 through the EOS: what the network reads
    mask: torch.Tensor                          # (N, R) of these, what the policy chose
    ended: torch.Tensor                         # (N,) False: cut off at the length limit
    sampling_logps: torch.Tensor                # (N, R) as the sampler computed them
    per_token: dict = field(default_factory=dict)   # name -> (N, R): ref_logps, unless beta is 0
    rewards: torch.Tensor = None                # (N,) on the CPU; NaN: not judged
    rewards_per_func: dict = None               # name -> (N,)
    returns: torch.Tensor = None                # (N,) what is compared: by default the rewards
    advantages: torch.Tensor = None             # (N,) or (N, R)
    chosen: torch.Tensor = None                 # the rows to learn from: all, by default
    turns: list = None                          # N lists of texts: own words and a tool's, in turn
    failed_calls: list = None                   # N numbers; both None: no tool

    @classmethod
    def of(cls, batch, completion_ids, attention, sampling_logps, eos_ids, tokenizer, turns=None,
           drawn=None):
        """What a sampler returned, (N, R) each, for the prompts of a batch (dataset/prompts.py).

        attention is 1 through the first EOS. With a tool, whose words may hold one, its Turns know
        better; drawn (N, R) is 1 for what the policy chose.

        UserError if no completion begins with a probability: then the weights are broken.
        """
        if not sampling_logps[:, 0].isfinite().any():
            raise UserError("the policy's log-probabilities are not finite: its weights are "
                            "broken; give others with --model_path")
        G, device = len(completion_ids) // len(batch["prompts"]), completion_ids.device

        def repeat(items):
            if isinstance(items, torch.Tensor):
                return items.to(device).repeat_interleave(G, 0)
            return [item for item in items for _ in range(G)]                   # a a b b

        columns = {name: repeat(values) for name, values in batch["columns"].items()}
        prompts = {name: repeat(batch[name])
                   for name in ("prompts", "prefills", "prompt_ids", "prompt_mask")}
        ended = torch.isin(completion_ids, torch.tensor(eos_ids, device=device)).any(1)
        mask = attention
        if turns is not None:
            lengths, ended = torch.tensor(turns.lengths), torch.tensor(turns.ended)
            attention = (torch.arange(drawn.shape[1]) < lengths[:, None]).int().to(device)
            mask, ended = attention * drawn, ended.to(device)
        rollout = cls(
            **prompts, columns=columns, completions=[], completion_ids=completion_ids,
            attention=attention, mask=mask, ended=ended, sampling_logps=sampling_logps,
            chosen=torch.arange(len(mask), device=device))
        rollout.completions = tokenizer.batch_decode(rollout.token_ids(), skip_special_tokens=True)
        if turns is not None:
            rollout.turns, rollout.failed_calls = turns.finished(), turns.failures
        return rollout

    @property
    def lengths(self):
        """(N,) in tokens that the policy chose, the EOS included."""
        return self.mask.sum(1)

    @property
    def replies(self):
        """The completions with what the chat template had already written of them."""
        return [prefill + text for prefill, text in zip(self.prefills, self.completions)]

    @property
    def own_words(self):
        """The replies without a tool's words."""
        if self.turns is None:
            return self.replies
        return [prefill + "".join(turns[::2]) for prefill, turns in zip(self.prefills, self.turns)]

    def token_ids(self):
        """The completions as N lists of ids, through their EOS."""
        pairs = zip(self.completion_ids.tolist(), self.attention.sum(1).tolist())
        return [ids[:length] for ids, length in pairs]

    def select(self, rows, kept=None):
        """A MicroBatch of these rows, (n,), without positions that are padding in all of them.

        kept (N,): a row that is not has no token that counts.
        """
        longest = [mask[rows].sum(1).max() for mask in (self.prompt_mask, self.attention)]
        P, R = torch.stack(longest).tolist()

        attention, mask, advantages = self.attention[rows, :R], self.mask[rows, :R], self.advantages
        if kept is not None:
            attention, mask = attention * kept[rows, None], mask * kept[rows, None]
        if advantages is not None:
            advantages = advantages[rows] if advantages.dim() == 1 else advantages[rows, :R]
        return MicroBatch(
            self.prompt_ids[rows, -P:], self.prompt_mask[rows, -P:], self.completion_ids[rows, :R],
            attention, mask, self.sampling_logps[rows, :R],
            {name: values[rows, :R] for name, values in self.per_token.items()}, advantages)
