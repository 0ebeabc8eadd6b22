"""A rollout: what one rank sampled in one step, and what the later phases find out about it."""
from collections import namedtuple
from dataclasses import dataclass

import torch

from report import UserError

# The two tensors that are padded on the left; all others with two dimensions, on the right.
LEFT_PADDED = ("prompt_ids", "prompt_mask")
# What an optimizer step learns from: totals over all ranks, and this rank's parts, as Rollouts.
Minibatch = namedtuple("Minibatch", "num_sequences num_kept num_tokens micro_batches")


@dataclass
class Rollout:
    """All that one rank knows of the completions of one step, a row each; groups are adjacent.

    A micro-batch is a Rollout too: `select` of some rows.
    """
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
    old_logps: torch.Tensor = None              # (n, R) of a micro-batch; None: pi moves once
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
        prompts = {name: repeat(batch[name]) for name in ("prompts", "prefills", *LEFT_PADDED)}
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

    def sequences(self):
        """input_ids and attention_mask (N, T), and R: what `token_logps` reads."""
        input_ids = torch.cat((self.prompt_ids, self.completion_ids), dim=1)
        return input_ids, torch.cat((self.prompt_mask, self.mask), dim=1), self.mask.shape[1]

    def token_ids(self):
        """The completions as N lists of ids, through their EOS."""
        pairs = zip(self.completion_ids.tolist(), self.lengths.tolist())
        return [ids[:length] for ids, length in pairs]

    def select(self, rows):
        """These rows only, (n,), without the positions that are then padding in all of them."""
        masks = (self.prompt_mask, self.mask)
        P, R = torch.stack([mask[rows].sum(1).max() for mask in masks]).tolist()
        on_cpu = rows.cpu()             # once, not for each list

        def pick(name, x):
            if isinstance(x, dict):
                return {key: pick(key, values) for key, values in x.items()}
            if isinstance(x, list):
                return [x[i] for i in on_cpu.tolist()]
            if x is None:
                return None
            if x.dim() == 1:
                return x[on_cpu if x.device.type == "cpu" else rows]
            return x[rows, -P:] if name in LEFT_PADDED else x[rows, :R]

        return Rollout(**{name: pick(name, x) for name, x in vars(self).items()})
