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


def replies(path, problems, num_generations, seed):
    """For each problem a list of num_generations (text, 1.0 if right else 0.0).

    Sampled at temperature 1 from the policy in folder `path`.
    """
    model = load_pretrained(path, dtype=torch.float32)
    tokenizer = load_tokenizer(path, model.config.vocab_size, "choose other --policies")
    collate = PromptCollator(tokenizer, max_seq_len=66)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, len(problems), 64):
        batch = collate(problems[start:start + 64])
        ids, _ = sample(model, batch["prompt_ids"], batch["prompt_mask"],
                        num_generations=num_generations, max_new_tokens=96,
                        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
                        generator=generator)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        answers = [answer for answer in batch["columns"]["answer"] for _ in range(num_generations)]
        judged = list(zip(texts, accuracy_reward(None, texts, answers)))
        yield from (judged[i:i + num_generations] for i in range(0, len(judged), num_generations))


def pairs_of(group, rng, most):
    """At most `most` pairs (right reply, wrong reply) from a group; no reply is used twice."""
    right, wrong = ([text for text, score in group if score == side] for side in (1.0, 0.0))
    rng.shuffle(right)
    rng.shuffle(wrong)
    return list(zip(right, wrong))[:most]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=Path, nargs="+", required=True,
                        help="folders of weights to sample from")
    parser.add_argument("--prompts", type=Path, required=True,
                        help="a jsonl file of problems with answers")
    parser.add_argument("--save", type=Path, required=True, help="the jsonl file to write")
    parser.add_argument("--num_generations", type=int, default=8, help="replies to each problem")
    parser.add_argument("--most", type=int, default=2, help="maximum number of pairs per problem")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    problems, rng = PromptDataset(args.prompts), random.Random(args.seed)
    write(args.save, (
        {"conversations": problem["messages"], "chosen": chosen, "rejected": rejected,
         "kind": "reply"}
        for policy in args.policies
        for problem, group in zip(problems, replies(policy, problems, args.num_generations,
                                                    args.seed))
        for chosen, rejected in pairs_of(group, rng, args.most)))


if __name__ == "__main__":
    main()
