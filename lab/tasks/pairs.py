"""Pairs for a reward model, of what policies reply: a right reply against a wrong one.

    python -m lab.tasks.pairs --sample FOLDERS --prompts dataset/train.jsonl --save pairs.jsonl

A reward model (reward/train_reward_model.py) learns whatever sets the two sides apart, whether or
not that is what we mean by better: most right replies are long and worked, most wrong ones guesses.
"""
import random
from pathlib import Path

import torch

from dataset import PromptCollator, PromptDataset
from dataset.jsonl import write_new
from errors import Parser, UserError, user_errors
from model import load_pretrained, load_tokenizer, sample
from model.load import decode
from reward.train_reward_model import pairs_of

REPLIES, MOST = 8, 2        # replies to a problem, and pairs of them at most


def sampled_pairs(path, problems, rng):
    """Pairs of what the policy in `path` replies to the problems, as rows for read_pairs."""
    model = load_pretrained(path, dtype=torch.float32)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    collate = PromptCollator(tokenizer, max_seq_len=66)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, len(problems), 64):
        chunk = problems[start:start + 64]
        batch = collate(chunk)
        ids, _ = sample(model, batch["prompt_ids"], batch["prompt_mask"], num_generations=REPLIES,
                        max_new_tokens=96, eos_token_id=tokenizer.eos_token_id,
                        pad_token_id=tokenizer.pad_token_id, generator=generator)
        texts = [decode(row.tolist(), tokenizer, [tokenizer.eos_token_id]) for row in ids]
        for i, problem in enumerate(chunk):
            group = texts[i * REPLIES:(i + 1) * REPLIES]
            answers = [problem.get("answer")] * REPLIES
            for chosen, rejected in pairs_of(group, answers, rng)[:MOST]:
                yield {"conversations": problem["messages"], "chosen": chosen,
                       "rejected": rejected, "kind": "reply"}


@user_errors("lab.tasks.pairs")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.pairs", description=__doc__)
    flag = parser.add_argument
    flag("--sample", type=Path, nargs="+", required=True, help="folders of policies")
    flag("--prompts", type=Path, required=True, help="a jsonl file of problems with answers")
    flag("--save", type=Path, required=True, help="the file to write")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    rng, problems = random.Random(0), PromptDataset(args.prompts)
    if all(problem.get("answer") is None for problem in problems):
        raise UserError(f"{args.prompts}: no line has an answer to tell right from wrong; add the "
                        "field answer")
    count = write_new(args.save, (row for path in args.sample
                                  for row in sampled_pairs(path, problems, rng)))
    print(f"wrote {count} pairs to {args.save}")


if __name__ == "__main__":
    main()
