"""Trains a reward model on pairs of a better (chosen) and a worse (rejected) reply.

    python -m reward.train_reward_model --save reward/weights/reward_128 --init out/pretrain_128 \\
        --data out/sft/replies_train.jsonl out/sft/flaws_train.jsonl \\
        --heldout out/sft/replies_heldout.jsonl out/sft/flaws_heldout.jsonl

The loss is the Bradley-Terry loss, -log sigmoid(score(chosen) - score(rejected)). A small penalty
keeps the scores centered on 0, because --reward_model_clip clips scores symmetrically around 0.

The same loss is also applied at every token from the first difference between the two replies to
the end of the shorter reply. The model thus learns to lower the score right where a mistake occurs.

With --completions, the model is trained further on completions of a policy, as in iterative GRPO.
Each pair is a right and a wrong completion of the same prompt. A part of each batch (--replay)
still comes from --data, so that the model does not forget what it has learned from --data.
"""
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

from dataset.folders import new_folder
from dataset.jsonl import read_lines, write_jsonl
from dataset.prompts import is_chat
from errors import COUNT, Parser, UserError, number, user_errors
from model import load_pretrained, load_tokenizer
from model.load import explained, read_config, read_weights
from model.train_sft import optimize

from .answers import extract_answer
from .functions import accuracy_reward
from .reward_model import ANOTHER, RewardModel, load_classifier, with_reply

KEPT = 1000         # pairs saved next to the weights, for a later --replay


def read_pairs(paths):
    """Reads pairs from jsonl files, as a list of (chosen chat, rejected chat, kind)."""
    pairs = []
    for path in paths:
        for where, row in read_lines(path):
            with explained(where, "not a pair", 'write {"conversations", "chosen", "rejected"}'):
                chat = row["messages" if "messages" in row else "conversations"]
                chosen, rejected = (with_reply(chat, row[side]) for side in ("chosen", "rejected"))
                if not (is_chat(chosen, where) and is_chat(rejected, where)):
                    raise ValueError("a turn lacks its role or its text")
                if chosen == rejected:
                    raise ValueError("both sides are the same")
                pairs.append((chosen, rejected, str(row.get("kind", "all"))))
    if paths and not pairs:
        raise UserError(f"{paths[0]}: no pair in it; write one per line")
    return pairs


def pairs_of(replies, answers, rng):
    """Returns random pairs (right reply, wrong reply) for one prompt. No reply is used twice."""
    scores = accuracy_reward(None, replies, answers)
    right = [text for text, score in zip(replies, scores) if score == 1.0]
    wrong = [text for text, score in zip(replies, scores) if score == 0.0]
    rng.shuffle(right)
    rng.shuffle(wrong)
    return list(zip(right, wrong))


def held_out(messages):
    """Returns True for a random tenth of all prompts, which is the same in every run."""
    return random.Random(json.dumps(messages)).random() < 0.1


def pairs_of_run(path, rng):
    """Returns (training pairs, held-out pairs) from the completions.jsonl of a run.

    Each pair is a right and a wrong completion of the same prompt at the same step.
    """
    groups, pairs = defaultdict(list), {False: [], True: []}
    for where, row in read_lines(path):
        with explained(where, "not a completion", "pass the completions.jsonl of a run"):
            if not is_chat(with_reply(row["columns"]["messages"], row["completion"]), where):
                raise ValueError("a turn lacks its role or its text")
            if row["columns"].get("answer") is not None:
                groups[row["step"], row["prompt"]].append(row)
    for rows in groups.values():
        replies = [row["completion"] for row in rows]
        answers = [row["columns"]["answer"] for row in rows]
        messages = rows[0]["columns"]["messages"]
        pairs[held_out(messages)] += [
            (with_reply(messages, better), with_reply(messages, worse), "reply")
            for better, worse in pairs_of(replies, answers, rng)]
    if not (pairs[False] and pairs[True]):
        raise UserError(f"{path}: too few groups have both a right and a wrong completion; pass "
                        "that of a longer run, on data with answers")
    return pairs[False], pairs[True]


def load_init(path):
    """Loads a reward model, or a language model to which it adds a scoring head."""
    config, weights = read_config(path), read_weights(path)
    if "score.weight" in weights:
        return load_classifier(path, torch.float32)
    tokenizer = load_tokenizer(path, config.vocab_size, ANOTHER)
    model = RewardModel(config, tokenizer, load_pretrained(path, dtype=torch.float32).model)
    torch.nn.init.normal_(model.score.weight, std=0.02)
    return model.float()


def with_bare_answers(pairs, rng, share=1 / 3):
    """Adds copies of some pairs in which one or both replies are replaced by their answers alone.

    The reward function also scores answers without reasoning. A model that was never trained on
    such short texts gives them random, large scores.
    """
    def cut(chat):
        return with_reply(chat[:-1], extract_answer(chat[-1]["content"]))

    bare = []
    for chosen, rejected, kind in pairs:
        if kind == "reply" and rng.random() < share:
            cut_chosen, cut_rejected = rng.choice(((True, True), (True, False), (False, True)))
            better = cut(chosen) if cut_chosen else chosen
            worse = cut(rejected) if cut_rejected else rejected
            if better != worse:
                bare.append((better, worse, "answer"))
    return pairs + bare


def accuracy_by_kind(model, pairs):
    """Returns {kind: share of pairs whose chosen reply scores higher}. "all" covers all pairs."""
    chosen, rejected = (model.get_scores([pair[side] for pair in pairs]) for side in (0, 1))
    right = defaultdict(list)
    for (_, _, kind), better, worse in zip(pairs, chosen, rejected):
        right[kind].append(better > worse)
        right["all"].append(better > worse)
    return {kind: sum(values) / len(values) for kind, values in sorted(right.items())}


def loss_of(model, input_ids, last):
    """Returns the loss of a batch of pairs.

    input_ids (2 * pairs, T): all chosen chats, then all rejected chats.
    last (2 * pairs,): the position of each chat's last token.
    """
    ids, other_ids = input_ids.chunk(2)                                     # (pairs, T)
    end, other_end = last[:, None].chunk(2)                                 # (pairs, 1)
    scores, other_scores = model(input_ids).chunk(2)                        # (pairs, T)
    neither_ended = torch.arange(ids.shape[1], device=ids.device) < torch.min(end, other_end)
    diverged = ((ids != other_ids).cumsum(1) > 0) & neither_ended           # (pairs, T)
    along = -F.logsigmoid(scores - other_scores)[diverged].mean()
    chosen, rejected = scores.gather(1, end), other_scores.gather(1, other_end)     # (pairs, 1)
    at_end = -F.logsigmoid(chosen - rejected).mean()
    return at_end + along + model.centering * (chosen + rejected).pow(2).mean()


def arguments(argv=None):
    parser = Parser(prog="python -m reward.train_reward_model", description=__doc__)
    flag, files = parser.add_argument, dict(type=Path, nargs="+", default=[])
    flag("--data", **files, help='jsonl files of {"conversations", "chosen", "rejected"}')
    flag("--heldout", **files, help="files of the same format, to evaluate on")
    flag("--completions", type=Path, help="completions.jsonl of a run, to retrain on")
    flag("--replay", type=number(float, 0, 1), default=0.1,
         help="with --completions, the share of each batch that comes from --data")
    flag("--init", type=Path, help="folder of the initial weights: a reward or language model")
    flag("--save", type=Path, required=True, help="folder to save the reward model to")
    flag("--steps", type=COUNT, default=1200, help="number of AdamW steps")
    flag("--batch_size", type=COUNT, default=32, help="pairs per step")
    flag("--learning_rate", type=number(float, 0, 1, above=True), default=2e-3,
         help="peak learning rate")
    args = parser.parse_args(argv)
    if not (args.init and args.data and (args.heldout or args.completions)):
        parser.error("initial weights, training pairs or held-out pairs are missing; pass --init, "
                     "--data and --heldout (or --completions)")
    return args


@user_errors("reward.train_reward_model")
def main(argv=None):
    args = arguments(argv)
    torch.manual_seed(0)
    train(load_init(args.init), args)


def train(model, args, *, bare_answers=True):
    """Trains the model with the options in `args`, and saves the model to args.save."""
    rng = random.Random(0)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    earlier = read_pairs(args.data)
    own, heldout = [], []
    if args.completions:
        earlier = [pair for pair in earlier if not held_out(pair[0][:-1])]
        own, heldout = pairs_of_run(args.completions, rng)
    heldout = heldout + read_pairs(args.heldout)
    args.save = new_folder(args.save, "--save")     # before the work
    if bare_answers:
        earlier, heldout, own = (with_bare_answers(pairs, rng) for pairs in (earlier, heldout, own))

    def percentages():
        shares = accuracy_by_kind(model, heldout)
        return ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())

    print(f"{len(own) or len(earlier)} pairs; before training {percentages()}")
    replayed = args.batch_size
    if own:
        replayed = round(args.replay * args.batch_size) if earlier else 0

    def next_loss():
        batch = rng.choices(earlier, k=replayed)
        if replayed < args.batch_size:
            batch += rng.choices(own, k=args.batch_size - replayed)
        chats = [pair[side] for side in (0, 1) for pair in batch]
        return loss_of(model, *model.pad(model.tokenize(chats)))

    optimize(model, next_loss, steps=args.steps, learning_rate=args.learning_rate,
             warmup_steps=min(100, args.steps // 10))
    print(f"held-out pairs ordered right: {percentages()}")
    model.to(torch.bfloat16).save_pretrained(args.save)
    kept = rng.sample(own + earlier, min(KEPT, len(own + earlier)))
    write_jsonl(args.save / "pairs.jsonl", (
        {"conversations": chosen[:-1], "kind": kind, "chosen": chosen[-1]["content"],
         "rejected": rejected[-1]["content"]} for chosen, rejected, kind in kept))
    print(f"saved {args.save}")


if __name__ == "__main__":
    main()
