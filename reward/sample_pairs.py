"""Preference pairs from policies' own replies: a right reply beats a wrong one to the same problem.

    python -m reward.sample_pairs --policies model/weights/reason_128 model/weights/full_sft_128 \\
        --prompts dataset/train.jsonl --save out/sft/replies_train.jsonl

writes lines of {"conversations", "chosen", "rejected", "kind": "reply"}.

A reward model learns whatever sets the two sides apart, whether or not that is what we mean by
better. Here most right replies are long and worked, and most wrong ones are guesses.
"""
import argparse
import random
from pathlib import Path

import torch

from dataset import PromptCollator, PromptDataset
from dataset.arithmetic import write
from model import load_pretrained, load_tokenizer, sample

from .rules import accuracy_reward


def reply_pairs(path, problems, *, num_generations, most, rng, seed):
    """At most `most` pairs for each problem, of what the policy in `path` samples, as rows."""
    model = load_pretrained(path, dtype=torch.float32)
    tokenizer = load_tokenizer(path, model.config.vocab_size, "choose other --policies")
    collate = PromptCollator(tokenizer, max_seq_len=66)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(problems), 64):
        chunk = problems[start:start + 64]
        batch = collate(chunk)
        ids, _ = sample(model, batch["prompt_ids"], batch["prompt_mask"],
                        num_generations=num_generations, max_new_tokens=96,
                        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                        generator=generator)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for i, problem in enumerate(chunk):
            group = texts[i * num_generations:(i + 1) * num_generations]
            answers = [problem.get("answer")] * len(group)
            for chosen, rejected in pairs_of(group, answers, rng)[:most]:
                yield {"conversations": problem["messages"], "chosen": chosen,
                       "rejected": rejected, "kind": "reply"}


def pairs_of(replies, answers, rng):
    """Pairs (right reply, wrong reply) of the replies to one prompt; no reply is used twice."""
    scores = accuracy_reward(None, replies, answers)
    right, wrong = ([text for text, score in zip(replies, scores) if score == side]
                    for side in (1.0, 0.0))
    rng.shuffle(right)
    rng.shuffle(wrong)
    return list(zip(right, wrong))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument
    flag("--policies", type=Path, nargs="+", required=True,
         help="folders of weights to sample from")
    flag("--prompts", type=Path, required=True, help="a jsonl file of problems with answers")
    flag("--save", type=Path, required=True, help="the jsonl file to write")
    flag("--num_generations", type=int, default=8, help="replies to each problem")
    flag("--most", type=int, default=2, help="maximum number of pairs per problem")
    flag("--seed", type=int, default=0)
    args = parser.parse_args()

    problems, rng = PromptDataset(args.prompts), random.Random(args.seed)
    write(args.save, (row for policy in args.policies for row in reply_pairs(
        policy, problems, num_generations=args.num_generations, most=args.most, rng=rng,
        seed=args.seed)))


if __name__ == "__main__":
    main()
