"""Trains a reward model on preference pairs: of two replies to one prompt, the better one is to get the higher score.

    python -m reward.train_reward_model --data out/sft/replies_train.jsonl out/sft/flaws_train.jsonl \\
        --heldout out/sft/replies_heldout.jsonl out/sft/flaws_heldout.jsonl \\
        --init out/pretrain_128 --save reward/weights/reward_128

The loss is Bradley and Terry's, -log sigmoid(score(chosen) - score(rejected)), which reads the difference of two scores
as the log-odds that the first reply is better; a small pull keeps a classifier's centred on 0, where the clip expects them.

With --completions it is retrained on what a policy has learnt to write, as iterative GRPO asks: right completions of a run
against wrong ones of the same prompt, and --replay of each batch from what it was trained on before, so as not to forget.
With --likelihood the reward model is a language model, and its score the reply's log-likelihood, which sees slips:
LikelihoodModel says why. A run that it judges wants --reward_model_clip 0 --reward_model_answer_share 0.

    python -m reward.train_reward_model --completions out/grpo_reason_128/completions.jsonl --replay 0.1 --likelihood \\
        --init out/grpo_reason_128/final --data reward/weights/reward_128/pairs.jsonl --save out/reward_likelihood \\
        --steps 100 --learning_rate 3e-4 --warmup_steps 10

One bit for a whole reply is little to learn from. So the better reply is also to lead at every token from the one on
where the two part, until the shorter one ends: a slip is then felt where it happens, not thirty tokens later.
"""
import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from model import load_pretrained
from model.checkpoint import load_state, read_config, read_weights
from model.train_sft import optimize

from .reward_model import LikelihoodModel, RewardModel, is_likelihood
from .rules import accuracy_reward, extract_answer
from .sample_pairs import pairs_of

KEPT = 1000         # pairs that are saved with the weights, for a later --replay


def read_pairs(paths):
    """[(chosen chat, rejected chat, kind)]"""
    def chat(row, side):
        return row["conversations"] + [{"role": "assistant", "content": row[side]}]

    return [(chat(row, "chosen"), chat(row, "rejected"), row.get("kind", "all")) for row in read_rows(paths)]


def read_rows(paths):
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file; give a jsonl file")
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def held_out(messages):
    """Whether a prompt is among the tenth that retraining never sees; the same one in every run, by the text alone."""
    return random.Random(json.dumps(messages)).random() < 0.1


def pairs_of_runs(paths, rng):
    """The pairs to train on and the pairs to measure on, of the completions.jsonl of runs: a right one and a wrong one of
    the same group, each completion once at most. A prompt is on one side only: see held_out."""
    groups = defaultdict(list)
    for path in paths:
        for row in read_rows([path]):
            if row.get("answer") is not None:
                groups[path, row["step"], row["prompt"]].append(row)
    pairs = {False: [], True: []}
    for rows in groups.values():
        right = accuracy_reward(None, [row["completion"] for row in rows], [row["answer"] for row in rows])
        for sides in pairs_of([(row["completion"], score) for row, score in zip(rows, right)], rng, len(rows)):
            chats = (rows[0]["messages"] + [{"role": "assistant", "content": text}] for text in sides)
            pairs[held_out(rows[0]["messages"])].append((*chats, "reply"))
    if not (pairs[False] and pairs[True]):
        raise ValueError(f"{' '.join(map(str, paths))}: hardly a group in which one completion is right and one wrong; "
                         "give a longer run, on data with an answer")
    return pairs[False], pairs[True]


def load_init(path, *, likelihood=False):
    """A reward model to go on with, or a language model: under a new head, or with its likelihood as the score."""
    if likelihood or is_likelihood(path):
        return LikelihoodModel(load_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path))
    model = RewardModel(read_config(path), AutoTokenizer.from_pretrained(path))
    weights = read_weights(path)
    if "score.weight" in weights:
        load_state(model, weights, path)
    else:
        model.model = load_pretrained(path, dtype=torch.float32).model
        torch.nn.init.normal_(model.score.weight, std=0.02)
    return model.float()


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
    return -F.logsigmoid(chosen - rejected).mean() + along + model.centering * (chosen + rejected).pow(2).mean()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[],
                        help='jsonl files of {"conversations", "chosen", "rejected"} (default: pairs.jsonl beside the '
                             'weights of --init, a reward model)')
    parser.add_argument("--heldout", type=Path, nargs="+", default=[], help="the same, only to measure on")
    parser.add_argument("--completions", type=Path, nargs="+", default=[], help="completions.jsonl of runs, to retrain on")
    parser.add_argument("--replay", type=float, default=0.1, help="with --completions, the share of --data in each batch")
    parser.add_argument("--init", type=Path, required=True, help="a reward model, or a language model to make one of")
    parser.add_argument("--likelihood", action="store_true",
                        help="score a reply by its log-likelihood under --init, a language model, not by a new head")
    parser.add_argument("--save", type=Path, required=True, help="the folder that the weights go to")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch_size", type=int, default=32, help="pairs per step")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 0 <= args.replay < 1:
        parser.error(f"--replay is {args.replay}; it is a share, from 0 to below 1")
    if not (args.data or args.completions):
        parser.error("nothing to learn from; give --data or --completions")
    return args


def main():
    args = arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = load_init(args.init, likelihood=args.likelihood).to("cuda" if torch.cuda.is_available() else "cpu")
    earlier = read_pairs(args.data or [args.init / "pairs.jsonl"])
    if args.completions:
        earlier = [pair for pair in earlier if not held_out(pair[0][:-1])]
    own, heldout = pairs_of_runs(args.completions, rng) if args.completions else ([], [])
    heldout = heldout + read_pairs(args.heldout)
    if not isinstance(model, LikelihoodModel):          # to which an answer without its thoughts is just unlikely
        earlier, heldout, own = (with_bare_answers(pairs, rng) for pairs in (earlier, heldout, own))
    print(f"{len(own) or len(earlier)} pairs; before training {percentages(model, heldout)}")
    replayed = round(args.replay * args.batch_size) if own else args.batch_size

    def next_loss():
        batch = rng.choices(earlier, k=replayed) + rng.choices(own or [None], k=args.batch_size - replayed)
        return loss_of(model, *model.encode([pair[side] for side in (0, 1) for pair in batch]))

    optimize(model, next_loss, steps=args.steps, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps)
    print(f"held-out pairs ordered right: {percentages(model, heldout)}")
    model.to(torch.bfloat16).save_pretrained(args.save)
    with open(args.save / "pairs.jsonl", "w", encoding="utf-8") as file:
        for chosen, rejected, kind in rng.sample(own + earlier, min(KEPT, len(own + earlier))):
            row = {"conversations": chosen[:-1], "kind": kind} | {
                side: chat[-1]["content"] for side, chat in (("chosen", chosen), ("rejected", rejected))}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"saved {args.save}")


def percentages(model, pairs):
    return ", ".join(f"{kind} {value:.1%}" for kind, value in accuracy_by_kind(model, pairs).items())


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"train_reward_model.py: error: {error}")
