"""A language model as a judge: a reply's score is its log-likelihood.

    python train_grpo.py --reward_funcs accuracy lab.likelihood:likelihood

pays the mean log-probability of a reply's tokens under a language model: that in out/smollm2, or in
the folder that the environment names as MINIGRPO_JUDGE. Such a score is far below 0 and only makes
sense for whole replies, so it has no bound.

    python -m lab.likelihood --completions out/turns_1/completions.jsonl --init out/turns_1/final \\
        --data reward/weights/reward_128/pairs.jsonl --save out/judge_1

trains one on pairs, with the flags of reward.train_reward_model. Its score is then the sum over
the tokens, the implicit reward of DPO (Rafailov et al. 2023, arXiv 2305.18290) without the
reference.
"""
import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F

from errors import explained, user_errors
from model import load_pretrained, load_tokenizer, save_pretrained
from model.load import read_json
from model.save import write_json
from reward.reward_model import ANOTHER, RewardModel, with_reply
from reward.train_reward_model import arguments, train

MOST_TOKENS = 2048      # scored at once: each has logits for the whole vocabulary


class LikelihoodModel(RewardModel):
    """score = sum over the reply's tokens of log p(token | everything before it)

    or with `per_token` their mean, so that a reply is not better for being short.

    To see that a digit is wrong, a network must compute the right one and compare the two. A
    language model already does that; a new head would have to learn it, probably from many more
    pairs than a run produces.
    """
    centering = 0.0         # a log-likelihood has its own zero: certainty

    def __init__(self, policy, tokenizer, per_token=False):
        super().__init__(policy.config, tokenizer, backbone=policy.model)
        self.policy, self.score = policy, policy.lm_head    # `score` tells get_scores the device
        self.per_token, self.shares_prefixes = per_token, False     # it reads every token's score

        def ids_of(chat, **options):
            return tokenizer.apply_chat_template(chat, return_dict=False, **options)

        question = [{"role": "user", "content": ""}]
        with explained(tokenizer.name_or_path, "no chat template that shows where a reply begins",
                       ANOTHER):
            without, opened = ids_of(question), ids_of(question, add_generation_prompt=True)
            self.opening = opened[len(without):]            # <|im_start|>assistant\n
            answered = ids_of(with_reply(question, "a"))
            if not self.opening or answered[:len(opened)] != opened:
                raise ValueError("a reply in a chat does not begin as a prompt ends")
        self.markers.append(tokenizer.decode(self.opening))     # may be ordinary text

    def forward(self, input_ids):
        """Log-likelihoods (N, T): at each position, that of the last turn up to there."""
        positions = torch.arange(input_ids.shape[1] + 1, device=input_ids.device)   # (T+1,)
        opening = torch.tensor(self.opening, device=input_ids.device)               # (k,)
        opened = (input_ids.unfold(1, len(opening), 1) == opening).all(-1)          # (N, T-k+1)
        # the first token after the last opening
        start = (opened * positions[len(opening):]).amax(1, keepdim=True)           # (N, 1)
        logits = self.policy(input_ids)[:, :-1].float()                             # (N, T-1, V)
        chosen = logits.gather(2, input_ids[:, 1:, None])[..., 0]                   # (N, T-1)
        logps, replied = chosen - logits.logsumexp(-1), positions[1:-1] >= start
        total = (logps * replied).cumsum(1)
        return F.pad(total / replied.cumsum(1).clamp(min=1) if self.per_token else total, (1, 0))

    def save_pretrained(self, path):
        """Saves a language model's folder, with a word in config.json that it was trained to judge.
        """
        save_pretrained(self.policy, self.tokenizer, path)
        config = Path(path) / "config.json"
        write_json(read_json(config) | {"score": "likelihood"}, config)


def load(path):
    """The LikelihoodModel of a folder: a sum if it was trained to judge, else a mean per token."""
    policy = load_pretrained(path, dtype=torch.float32)     # small differences of long sums
    tokenizer = load_tokenizer(path, policy.config.vocab_size, ANOTHER)
    judges = read_json(Path(path) / "config.json").get("score") == "likelihood"
    return LikelihoodModel(policy, tokenizer, per_token=not judges)


@functools.cache
def judge():
    model = load(os.environ.get("MINIGRPO_JUDGE", "out/smollm2"))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def likelihood(prompts, completions, messages, **columns):
    """A reward function: the log-likelihood of each reply under MINIGRPO_JUDGE."""
    return judge().get_scores([*map(with_reply, messages, completions)], MOST_TOKENS)


@user_errors("lab.likelihood")
def main(argv=None):
    args = arguments(argv)
    torch.manual_seed(0)
    model = load(args.init)
    model.per_token = False
    train(model, args, bare_answers=False)      # to which bare answers are merely unlikely


if __name__ == "__main__":
    main()
