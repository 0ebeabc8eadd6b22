"""Rollout: the completions that a rank sampled in a step, and data about them, such as rewards."""
from dataclasses import dataclass, field, fields, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from errors import UserError
from model.load import decode


@dataclass(slots=True)                          # so a mistyped field raises an AttributeError
class Sequences:
    """The tensors that training needs for N completions, with one row per completion."""
    prompt_ids: torch.Tensor                    # (N, P) padded on the left
    prompt_mask: torch.Tensor                   # (N, P)
    completion_ids: torch.Tensor                # (N, R) padded on the right
    completion_mask: torch.Tensor               # (N, R) 1 through the EOS: what the network reads
    loss_mask: torch.Tensor                     # (N, R) 1: train on this token; by default the same
    sampling_logps: torch.Tensor                # (N, R) as the sampler computed them
    ref_logps: torch.Tensor = None              # (N, R) under the reference; None with --beta 0
    advantages: torch.Tensor = None             # (N,) or (N, R)
    extra: dict = field(default_factory=dict)   # name -> (N, R), for options

    def sequences(self):
        """Returns the inputs of `token_logps`: input_ids (N, T), attention_mask (N, T) and R."""
        input_ids = torch.cat((self.prompt_ids, self.completion_ids), dim=1)
        mask = torch.cat((self.prompt_mask, self.completion_mask), dim=1)
        return input_ids, mask, self.completion_mask.shape[1]


@dataclass(slots=True)
class MicroBatch(Sequences):
    """A micro-batch: completions that go through the model in one forward pass."""
    num_sequences: int = None                   # completions in the optimizer step, all ranks
    num_tokens: int = None                      # trained tokens in that step, on all ranks
    old_logps: torch.Tensor = None              # (n, R) under pi_old
    rows: torch.Tensor = None                   # (n,) indices of its rows in the rollout


@dataclass(slots=True, kw_only=True)
class Rollout(Sequences):
    """The data about one rank's completions in one step; completions of a group are adjacent."""
    prompts: list                               # N texts, each prompt G times
    columns: dict                               # name -> N values: the data's other fields
    prefills: list                              # N texts: completion starts from the chat template
    completions: list                           # N texts, without the EOS
    ended: torch.Tensor                         # (N,) False if truncated at the length limit
    rewards: torch.Tensor = None                # (N,) on the CPU; NaN if not scored
    rewards_per_func: dict = None               # name -> (N,)
    turns: list = None                          # N lists of texts, alternately policy's and tool's
    failed_calls: list = None                   # N counts; this and turns are None without a tool

    @classmethod
    def of(cls, batch, completion_ids, completion_mask, sampling_logps, eos_ids, tokenizer):
        """Creates a Rollout from a batch of prompts and the outputs of the sampler, (N, R) each.

        Raises a UserError if every completion's first log-prob is infinite or NaN (broken weights).
        """
        if not sampling_logps[:, 0].isfinite().any():
            raise UserError("the policy's log-probabilities are not finite, so its weights are "
                            "broken; pass others with --model_path")
        G, device = len(completion_ids) // len(batch["prompts"]), completion_ids.device

        def repeat(items):
            if isinstance(items, torch.Tensor):
                return items.to(device).repeat_interleave(G, 0)
            return [item for item in items for _ in range(G)]                   # a a b b

        columns = {name: repeat(values) for name, values in batch["columns"].items()}
        prompts = {name: repeat(batch[name])
                   for name in ("prompts", "prefills", "prompt_ids", "prompt_mask")}
        rollout = cls(
            **prompts, columns=columns, completions=[], completion_ids=completion_ids,
            completion_mask=completion_mask, loss_mask=completion_mask,
            ended=torch.isin(completion_ids, torch.tensor(eos_ids, device=device)).any(1),
            sampling_logps=sampling_logps)
        rollout.completions = [decode(ids, tokenizer, eos_ids) for ids in rollout.token_ids()]
        return rollout

    @property
    def lengths(self):
        """The number of sampled tokens in each completion, (N,), including the EOS."""
        return self.loss_mask.sum(1)

    @property
    def replies(self):
        """The texts of the completions, including any beginning that the chat template wrote."""
        return [prefill + text for prefill, text in zip(self.prefills, self.completions)]

    @property
    def own_words(self):
        """The same texts as `replies`, but without the answers of a tool."""
        if self.turns is None:
            return self.replies
        return [prefill + "".join(turns[::2]) for prefill, turns in zip(self.prefills, self.turns)]

    def own_ids(self):
        """Returns the token ids of each completion, without the tokens of a tool's answers."""
        if self.turns is None:
            return self.token_ids()
        pairs = zip(self.completion_ids, self.loss_mask.bool())
        return [ids[drawn].tolist() for ids, drawn in pairs]

    def token_ids(self):
        """Returns the token ids of each completion, up to and including the EOS."""
        pairs = zip(self.completion_ids.tolist(), self.completion_mask.sum(1).tolist())
        return [ids[:length] for ids, length in pairs]

    def has_gradient(self, every_row_has_gradient):
        """Returns a mask, (N,), of the completions that contribute to the gradient.

        A completion contributes if it has trained tokens and an advantage other than 0. With
        `every_row_has_gradient`, e.g. because the loss has a KL term, its advantage may be 0.
        """
        moves = self.advantages.view(len(self.loss_mask), -1).any(1) | every_row_has_gradient
        return self.loss_mask.any(1) & moves

    def for_rewards(self):
        """Returns the keyword arguments of a reward function (reward/functions.py)."""
        return {**self.columns, "prompts": self.prompts, "completions": self.replies,
                "completion_ids": self.token_ids(), "own_words": self.own_words,
                "own_ids": self.own_ids()}

    def only(self, rows):
        """Returns a Rollout with only the rows at these indices, (n,)."""
        return replace(self, **{one.name: rows_of(getattr(self, one.name), rows)
                                for one in fields(self)})

    def joined(self, other):
        """Returns a Rollout with the rows of both rollouts, which must come from the same batch."""
        def join(one, two):
            if isinstance(one, torch.Tensor):
                return pad_sequence([*one, *two], True) if one.dim() > 1 else torch.cat((one, two))
            if isinstance(one, dict):
                return {name: join(one[name], two[name]) for name in one}
            return one and one + two

        return replace(self, **{one.name: join(getattr(self, one.name), getattr(other, one.name))
                                for one in fields(self)})

    def minibatches(self, args, world, every_row_has_gradient):
        """Splits the rows, in order, into num_minibatches lists of MicroBatches; call on all ranks.

        A group may be split between two minibatches. Rows without a gradient are counted in
        num_sequences and num_tokens, but left out, as they need not go through the model. With FSDP
        (--shard) none is left out, since all ranks need the same number of passes.
        """
        runs = self.has_gradient(every_row_has_gradient) | bool(args.shard)             # (N,)
        minibatches = []
        for rows in torch.arange(len(runs), device=runs.device).tensor_split(
                min(len(runs), args.num_minibatches)):
            num_sequences, num_tokens = world.sum(
                torch.tensor([len(rows), self.lengths[rows].sum()])).tolist()
            parts = [self.select(part) for part in rows[runs[rows]].split(args.micro_batch_size)
                     if len(part)]
            for part in parts:
                part.num_sequences, part.num_tokens = num_sequences, num_tokens
            minibatches.append(parts)
        return minibatches

    def select(self, rows):
        """Returns a MicroBatch of the rows at these indices, (n,), and removes excess padding."""
        longest = [mask[rows].sum(1).max() for mask in (self.prompt_mask, self.completion_mask)]
        P, R = torch.stack(longest).tolist()

        def cut(values):                            # (N,), (N, R) or None
            if values is None:
                return None
            return values[rows] if values.dim() == 1 else values[rows, :R]

        return MicroBatch(
            self.prompt_ids[rows, -P:], self.prompt_mask[rows, -P:], cut(self.completion_ids),
            cut(self.completion_mask), cut(self.loss_mask), cut(self.sampling_logps),
            cut(self.ref_logps), cut(self.advantages),
            {name: cut(values) for name, values in self.extra.items()}, rows=rows)


def rows_of(value, rows):
    """Returns the rows at these indices of a tensor, a list, or each value of a dict."""
    if isinstance(value, torch.Tensor):
        return value[rows.to(value.device)]
    if isinstance(value, dict):
        return {name: rows_of(one, rows) for name, one in value.items()}
    return value and [value[row] for row in rows.tolist()]
