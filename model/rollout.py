"""A rollout: what one rank sampled in one step, what later phases find out about it, its parts."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Rollout:
    """All that one rank knows of the completions of one step, a row each; groups are adjacent.

    A micro-batch is `select` of some rows. Groups are filtered with `select` and joined with `cat`.
    """
    prompts: list                               # N texts, each prompt G times
    columns: dict                               # name -> N values: the data's other fields
    opened: list                                # N texts: what the template wrote of the reply
    prompt_ids: torch.Tensor                    # (N, P) padded on the left
    prompt_mask: torch.Tensor                   # (N, P)
    completions: list                           # N texts, without the EOS
    completion_ids: torch.Tensor                # (N, R) padded on the right
    mask: torch.Tensor                          # (N, R)
    ended: torch.Tensor                         # (N,) False: cut off at the length limit
    sampling_logps: torch.Tensor                # (N, R) as the sampler computed them
    old_logps: torch.Tensor = None              # (N, R); None: pi has not moved since it sampled
    ref_logps: torch.Tensor = None              # (N, R); None: no reference model
    rewards: torch.Tensor = None                # (N,) NaN: not judged
    rewards_per_func: dict = None               # name -> (N,)
    advantages: torch.Tensor = None             # (N,) or (N, R)

    @property
    def lengths(self):
        """(N,) in tokens, the EOS included."""
        return self.mask.sum(1)

    @property
    def replies(self):
        """The completions with what the chat template had already written of them."""
        return [opened + text for opened, text in zip(self.opened, self.completions)]

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
        on_cpu = rows.cpu()             # once, as a GPU has to be waited for

        def pick(name, x):
            if isinstance(x, dict):
                return {key: pick(key, values) for key, values in x.items()}
            if isinstance(x, list):
                return [x[i] for i in on_cpu.tolist()]
            if x is None:
                return None
            if x.dim() == 1:
                return x[on_cpu if x.device.type == "cpu" else rows]
            # Prompts are padded on the left, all else on the right.
            return x[rows, -P:] if name.startswith("prompt") else x[rows, :R]

        return Rollout(**{name: pick(name, x) for name, x in vars(self).items()})

    @staticmethod
    def cat(rollouts):
        """Rollouts one after the other, padded to the widest."""
        def join(name, parts):
            if parts[0] is None:
                return None
            if isinstance(parts[0], dict):
                return {key: join(key, [part[key] for part in parts]) for key in parts[0]}
            if isinstance(parts[0], list):
                return [item for part in parts for item in part]
            if parts[0].dim() == 2:
                missing = [max(x.shape[1] for x in parts) - x.shape[1] for x in parts]
                left = name.startswith("prompt")
                parts = [F.pad(x, (n, 0) if left else (0, n)) for x, n in zip(parts, missing)]
            return torch.cat(parts)

        return Rollout(**{name: join(name, [vars(rollout)[name] for rollout in rollouts])
                          for name in vars(rollouts[0])})


def minibatches(rollout, args):
    """What each optimizer step of a pass learns from: [(totals, micro-batches), ...].

    A micro-batch is the rows, (n,), that go through the model together, at most `micro_batch_size`;
    those without a gradient are in none. totals are three numbers: the minibatch's completions, the
    tokens that averages run over, the tokens that go through the model.
    """
    counted, lengths = torch.ones_like(rollout.ended), rollout.lengths                  # (N,) both
    if args.mask_truncated_completions:     # these count as completions only
        counted = rollout.ended
    learned = counted
    if rollout.ref_logps is None and not args.entropy_coef:
        # Rows with zero advantage contribute no gradient then: skip their forward pass.
        learned = counted & rollout.advantages.view(len(counted), -1).any(1)
    totals = torch.stack((torch.ones_like(lengths), lengths * counted, lengths * learned), 1)
    all_rows = torch.arange(len(counted), device=counted.device)
    return [(totals[rows].sum(0).tolist(),
             [part for part in rows[learned[rows]].split(args.micro_batch_size) if len(part)])
            for rows in all_rows.tensor_split(args.num_minibatches) if len(rows)]
