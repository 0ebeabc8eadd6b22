"""Answers with the gradients of their log-probabilities: all of them, or many samples.

Tiny      a policy of the shipped architecture, so small that its answers can be enumerated
sampled   the included weights, or those of a run, on training prompts of the default task
"""
import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import train_grpo
from dataset import read_prompts
from model import MiniMindConfig, MiniMindForCausalLM
from model.model import RMSNorm
from run.distributed import World

END, A, B = 0, 1, 2
PROMPTS = [(A, A), (A, B), (B, A), (B, B)]
SKETCH = 4096


@dataclass
class Answers:
    """What an update needs to know of n answers."""
    prompt: torch.Tensor        # (n,) its number
    length: torch.Tensor        # (n,) in tokens, with the one that ends it
    shares: list                # pi(o | prompt) (n,), or the shares in two independent lots of them
    gradients: torch.Tensor     # (n, D) of log pi(o)
    rewards: dict               # kind -> (n,)
    limit: int                  # of the length

    def mean_gradient(self, weight, lot):
        """The mean over prompts of the sum over answers of share * weight * gradient, (D,)."""
        shares = self.shares[lot] / (self.prompt.max() + 1)
        return (shares * weight).to(self.gradients) @ self.gradients

    def by_prompt(self, weight, lot):
        """What each prompt adds to mean_gradient, (prompts, D)."""
        shares = self.shares[lot] / (self.prompt.max() + 1)
        weighted = (shares * weight).to(self.gradients)[:, None] * self.gradients
        prompts = int(self.prompt.max()) + 1
        return weighted.new_zeros(prompts, weighted.shape[1]).index_add_(0, self.prompt, weighted)


class Tiny:
    """A policy with three tokens: end, a and b. Prompt number i, from 0, asks for i + 1 a's among
    any number of b's. There are four, with n = 1,020 answers of at most 7 tokens. In float64."""

    def __init__(self, seed, limit=7):
        self.limit = limit
        torch.manual_seed(seed)
        self.policy = MiniMindForCausalLM(MiniMindConfig(
            vocab_size=3, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            initializer_range=0.3)).double()
        for part in self.policy.modules():
            if isinstance(part, RMSNorm):       # ours computes in float32
                part.forward = partial(F.rms_norm, normalized_shape=part.weight.shape,
                                       weight=part.weight, eps=part.eps)
        ended = [letters + (END,) for size in range(limit)
                 for letters in itertools.product((A, B), repeat=size)]
        cut_off = list(itertools.product((A, B), repeat=limit))
        pairs = list(itertools.product(range(len(PROMPTS)), ended + cut_off))
        self.prompt = torch.tensor([number for number, _ in pairs])                     # (n,)
        self.length = torch.tensor([len(answer) for _, answer in pairs])                # (n,)
        self.mask = (torch.arange(limit) < self.length[:, None]).int()                  # (n, R)
        self.ids = torch.tensor([PROMPTS[number] + answer + (END,) * (limit - len(answer))
                                 for number, answer in pairs])                          # (n, 2+R)
        missing = [abs(answer.count(A) - number - 1) if END in answer else limit
                   for number, answer in pairs]
        missing = torch.tensor(missing).double()
        self.rewards = {"two values": (missing == 0).double(),
                        "four values": (1 - missing / 3).clamp(min=0)}

    def logps(self):
        """log pi of each token, (n, R), 0 after the end."""
        logps = self.policy(self.ids)[:, -self.limit - 1:-1].log_softmax(-1)
        return logps.gather(-1, self.ids[:, -self.limit:, None]).squeeze(-1) * self.mask

    def solve_rates(self):
        """The probability of a right answer to each prompt, (4,)."""
        right = self.logps().sum(1).exp() * self.rewards["two values"]
        return right.view(len(PROMPTS), -1).sum(1)

    def train(self, rate):
        """Climb until the mean solve rate is at least `rate`: their logarithms, so that no prompt
        is left behind."""
        optimizer = torch.optim.Adam(self.policy.parameters(), 1e-3)
        while (rates := self.solve_rates()).mean() < rate:
            optimizer.zero_grad()
            (-rates.log().sum()).backward()
            optimizer.step()

    def token_gradients(self):
        """Each token's gradient of log pi: (m, D), and which of these it is, (n, R).

        Answers share prefixes, so m is much smaller than n R. The last one is 0, for padding. The
        inner products are those of the gradients, of which D is smaller than the numbers.
        """
        parameters, places, gradients = list(self.policy.parameters()), {}, []
        for ids, length in zip(self.ids.tolist(), self.length.tolist()):
            for end in range(3, 3 + length):
                places.setdefault(tuple(ids[:end]), len(places))
        for *prefix, token in places:
            logps = self.policy(torch.tensor([prefix]))[0, -1].log_softmax(-1)
            gradients.append(flat(torch.autograd.grad(logps[token], parameters)))
        gradients.append(torch.zeros_like(gradients[0]))
        index = [[places.get(tuple(ids[:end]), len(places)) if end < 3 + length else len(places)
                  for end in range(3, 3 + self.limit)]
                 for ids, length in zip(self.ids.tolist(), self.length.tolist())]
        return torch.stack(gradients), torch.tensor(index)

    def answers(self):
        gradients, index = self.token_gradients()
        return Answers(self.prompt, self.length, [self.logps().detach().sum(1).exp()],
                       gradients[index].sum(1), self.rewards, self.limit)


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def fewer_numbers(gradients):
    """Vectors (n, D) with the same inner products, in at most n numbers each."""
    return torch.linalg.qr(gradients.T)[1].T.contiguous()


def sampled(weights, prompts, each, seed):
    """Answers to training prompts: `each` to every one, half of them in each lot.

    A gradient of 0.8 million numbers becomes a count sketch of 4,096 (Charikar et al., 2002): each
    number is added to one of them, chosen at random, with a random sign. Inner products stay what
    they are on average, with a standard deviation of about a 64th of the lengths' product.
    """
    args = train_grpo.parse_args([
        "--model_path", str(weights), "--beta", "0", "--device", "cpu", "--seed", str(seed)])
    world = World("cpu", "float32", seed)
    state = train_grpo.load(args, world)
    collate, problems, _ = read_prompts(args, state.tokenizer)
    model, rng = state.policy.model, world.rng(1)
    parameters = list(model.parameters())
    bucket = torch.randint(SKETCH, (sum(p.numel() for p in parameters),), generator=rng)
    sign = torch.randint(2, bucket.shape, generator=rng) * 2.0 - 1
    rows = []           # prompt, length, share in each lot, rewards of each kind
    gradients = torch.zeros(prompts * each, SKETCH)
    for number in range(prompts):
        batch = collate([problems[number]])
        rollout = state.generate(batch, rng, each)
        total, by_name = state.compute_rewards(rollout, state.reward_funcs, args.reward_weights)
        right, form = by_name["accuracy_reward"], by_name["format_reward"]
        answers = [tuple(ids) for ids in rollout.token_ids()]
        lots = [Counter(answers[lot::2]) for lot in (0, 1)]
        first = {answer: i for i, answer in reversed(list(enumerate(answers)))}
        for answer, i in first.items():
            ids = torch.cat((batch["prompt_ids"], torch.tensor([answer])), 1)
            logps = train_grpo.token_logps(model, ids, torch.ones_like(ids), len(answer))
            gradient = flat(torch.autograd.grad(logps.sum(), parameters))
            gradients[len(rows)].index_add_(0, bucket, gradient * sign)
            rows.append([number, len(answer), *(2 * lot[answer] / each for lot in lots),
                         right[i], (right[i] + form[i]) / 1.5, total[i]])
    prompt, length, *shares, two, four, all_four = torch.tensor(rows, dtype=torch.float64).T
    rewards = {"two values": two, "four values": four, "the default rewards": all_four}
    return Answers(prompt.long(), length.long(), shares, gradients[:len(rows)], rewards,
                   args.max_gen_len)
