"""Trains a reward model on preference pairs: of two replies to one prompt, the better one is to get the higher score.

    python -m reward.train_reward_model --data out/sft/replies_train.jsonl out/sft/flaws_train.jsonl \\
        --heldout out/sft/replies_heldout.jsonl out/sft/flaws_heldout.jsonl \\
        --init out/pretrain_128 --save reward/weights/reward_128

The loss is Bradley and Terry's, -log sigmoid(score(chosen) - score(rejected)), which reads the difference of two scores
as the log-odds that the first reply is better; a small pull keeps the two centred on 0, where the clip expects them.

One bit for a whole reply is little to learn from. So the better reply is also to lead at every token from the one on
where the two part, until the shorter one ends: a slip is then felt where it happens, not thirty tokens later.
"""
import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from model import load_pretrained
from model.train_sft import optimize

from .reward_model import RewardModel
from .rules import extract_answer

CENTERING = 0.01


def read_pairs(paths):
    """[(chosen chat, rejected chat, kind)]"""
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rows += [json.loads(line) for line in file]
    def chat(row, side):
        return row["conversations"] + [{"role": "assistant", "content": row[side]}]

    return [(chat(row, "chosen"), chat(row, "rejected"), row.get("kind", "all")) for row in rows]


def with_bare_answers(pairs, rng, share=1 / 3):
    """For a share of the pairs of replies another pair, of which one side or both is only the answer that it comes to.

    Rewards score answers on their own too; a model that has never seen one scores it by chance, and by a lot.
    """
    bare = []
    for chosen, rejected, kind in pairs:
        if kind == "reply" and rng.random() < share:
            sides = rng.choice(((True, True), (True, False), (False, True)))
            bare.append((*(chat[:-1] + [chat[-1] | {"content": extract_answer(chat[-1]["content"])}] if strip else chat
                           for chat, strip in zip((chosen, rejected), sides)), "answer"))
    return pairs + bare


def accuracy_by_kind(model, pairs):
    """{kind: share of pairs whose chosen reply scores higher}, and of all of them."""
    chosen, rejected = (model.get_scores([pair[side] for pair in pairs]) for side in (0, 1))
    right = defaultdict(list)
    for (_, _, kind), better, worse in zip(pairs, chosen, rejected):
        right[kind].append(better > worse)
        right["all"].append(better > worse)
    return {kind: sum(values) / len(values) for kind, values in sorted(right.items())}


def loss_of(model, input_ids, last):
    """Of pairs input_ids (2 * pairs, T), first all the chosen replies, then all the rejected, which end at `last`."""
    (ids, other_ids), (end, other_end) = input_ids.chunk(2), last[:, None].chunk(2)             # (pairs, T), (pairs, 1)
    scores, other_scores = model(input_ids).chunk(2)                                            # (pairs, T)
    both_go_on = torch.arange(ids.shape[1], device=ids.device) < torch.min(end, other_end)      # (pairs, T)
    parted = ((ids != other_ids).cumsum(1) > 0) & both_go_on
    along = -F.logsigmoid(scores - other_scores)[parted].mean()
    chosen, rejected = scores.gather(1, end), other_scores.gather(1, other_end)                 # (pairs, 1)
    return -F.logsigmoid(chosen - rejected).mean() + along + CENTERING * (chosen + rejected).pow(2).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True,
                        help='jsonl files of {"conversations", "chosen", "rejected"}')
    parser.add_argument("--heldout", type=Path, nargs="+", required=True, help="the same, only to measure on")
    parser.add_argument("--init", type=Path, required=True, help="a language model to take the backbone from")
    parser.add_argument("--save", type=Path, required=True, help="the folder that the weights go to")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per step")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    backbone = load_pretrained(args.init, dtype=torch.float32)
    model = RewardModel(backbone.config, AutoTokenizer.from_pretrained(args.init))
    model.model = backbone.model
    torch.nn.init.normal_(model.score.weight, std=0.02)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    pairs, heldout = (with_bare_answers(read_pairs(paths), rng) for paths in (args.data, args.heldout))
    print(f"{len(pairs)} pairs; before training {accuracy_by_kind(model, heldout)}")

    def next_loss():
        batch = rng.sample(pairs, args.batch_size)
        return loss_of(model, *model.encode([pair[side] for side in (0, 1) for pair in batch]))

    optimize(model, next_loss, steps=args.steps, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps)
    ranked = accuracy_by_kind(model, heldout)
    print("held-out pairs ordered right: " + ", ".join(f"{kind} {value:.1%}" for kind, value in ranked.items()))
    model.to(torch.bfloat16).save_pretrained(args.save)
    print(f"saved {args.save}")


if __name__ == "__main__":
    main()
