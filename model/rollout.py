"""A rollout: what one rank sampled in one step, and what the later phases find out about it."""
from collections import namedtuple
from dataclasses import dataclass

import torch

from report import UserError

# What an optimizer step learns from: totals over all ranks, named as in grpo_loss, and this rank's
# parts, a MicroBatch each.
Minibatch = namedtuple("Minibatch", "totals micro_batches")


class Sequences:
    """Prompts and completions, side by side."""

    def sequences(self):
        """input_ids and attention_mask (N, T), and R: what `token_logps` reads."""
        input_ids = torch.cat((self.prompt_ids, self.completion_ids), dim=1)
        return input_ids, torch.cat((self.prompt_mask, self.mask), dim=1), self.mask.shape[1]


@dataclass
class MicroBatch(Sequences):
    """What learning needs of n completions of a rollout."""
    prompt_ids: torch.Tensor                    # (n, P) padded on the left
    prompt_mask: torch.Tensor                   # (n, P)
    completion_ids: torch.Tensor                # (n, R) padded on the right
    mask: torch.Tensor                          # (n, R) 1 through the EOS; 0 if the row is not kept
    sampling_logps: torch.Tensor                # (n, R)
    ref_logps: torch.Tensor                     # (n, R); None: no reference model
    advantages: torch.Tensor                    # (n,) or (n, R); None: not known yet
    old_logps: torch.Tensor = None              # (n, R); None: pi moves once
    sampler_weights: torch.Tensor = None        # (n, 1 or R); None: advantages are not weighted


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
    mask: torch.Tensor                          # (N, R) 1 through the EOS
    ended: torch.Tensor                         # (N,) False: cut off at the length limit
    sampling_logps: torch.Tensor                # (N, R) as the sampler computed them
    policy_logps: torch.Tensor = None           # (N, R), with --kl_in_reward
    ref_logps: torch.Tensor = None              # (N, R); None: no reference model
    rewards: torch.Tensor = None                # (N,) on the CPU; NaN: not judged
    rewards_per_func: dict = None               # name -> (N,)
    advantages: torch.Tensor = None             # (N,) or (N, R)

    @classmethod
    def of(cls, batch, completion_ids, mask, sampling_logps, eos_ids, tokenizer):
        """What a sampler returned, (N, R) each, for the prompts of a batch (dataset/prompts.py).

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
        rollout = cls(
            **prompts, columns=columns, completions=[], completion_ids=completion_ids, mask=mask,
            ended=torch.isin(completion_ids, torch.tensor(eos_ids, device=device)).any(1),
            sampling_logps=sampling_logps)
        rollout.completions = tokenizer.batch_decode(rollout.token_ids(), skip_special_tokens=True)
        return rollout

    @property
    def lengths(self):
        """(N,) in tokens, the EOS included."""
        return self.mask.sum(1)

    @property
    def replies(self):
        """The completions with what the chat template had already written of them."""
        return [prefill + text for prefill, text in zip(self.prefills, self.completions)]

    def token_ids(self):
        """The completions as N lists of ids, through their EOS."""
        pairs = zip(self.completion_ids.tolist(), self.lengths.tolist())
        return [ids[:length] for ids, length in pairs]

    def select(self, rows, kept=None):
        """A MicroBatch of these rows, (n,), without positions that are padding in all of them.

        kept (N,): a row that is not has no token that counts.
        """
        longest = [mask[rows].sum(1).max() for mask in (self.prompt_mask, self.mask)]
        P, R = torch.stack(longest).tolist()

        def of_tokens(x):
            return None if x is None else x[rows, :R]

        mask, advantages = self.mask[rows, :R], self.advantages
        if kept is not None:
            mask = mask * kept[rows, None]
        if advantages is not None:
            advantages = advantages[rows] if advantages.dim() == 1 else advantages[rows, :R]
        return MicroBatch(
            self.prompt_ids[rows, -P:], self.prompt_mask[rows, -P:], self.completion_ids[rows, :R],
            mask, of_tokens(self.sampling_logps), of_tokens(self.ref_logps), advantages)
