"""Trains a policy on conversations: from nothing (pretraining) or from other weights (fine-tuning).

The shipped weights are three runs of this script, of which the last two start from the first:

    python -m dataset.arithmetic --sft out/sft
    python -m model.tokenizer --data out/sft/pretrain.jsonl out/sft/reason.jsonl out/sft/full_sft.jsonl --save out/tokenizer
    python -m model.train_sft --data out/sft/pretrain.jsonl --tokenizer out/tokenizer --save out/pretrain_128
    python -m model.train_sft --data out/sft/full_sft.jsonl --init out/pretrain_128 --save model/weights/full_sft_128 ...
    python -m model.train_sft --data out/sft/reason.jsonl --init out/pretrain_128 --save model/weights/reason_128 ...

The loss is the cross-entropy of the tokens of the assistant's turns, <|im_end|> included: a model that never learns to
stop never stops.
"""
import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from . import MiniMindConfig, MiniMindForCausalLM, load_pretrained, save_pretrained


def encode(chats, tokenizer):
    """For each chat its token ids, and labels: the same ids where the assistant speaks, -100 elsewhere."""
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    examples = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        labels, speaking = [], False
        for i, token in enumerate(ids):
            labels.append(token if speaking else -100)
            if token == tokenizer.eos_token_id:
                speaking = False
            elif ids[max(0, i + 1 - len(header)):i + 1] == header:
                speaking = True
        examples.append((ids, labels))
    return examples


def batches(examples, batch_size, rng):
    """Endless batches of examples of similar length, padded on the right; every epoch in a new order."""
    while True:
        order = list(range(len(examples)))
        rng.shuffle(order)
        for start in range(0, len(order) - 32 * batch_size + 1, 32 * batch_size):
            chunk = sorted(order[start:start + 32 * batch_size], key=lambda i: len(examples[i][0]))
            groups = [chunk[i:i + batch_size] for i in range(0, len(chunk), batch_size)]
            rng.shuffle(groups)
            for group in groups:
                yield [examples[i] for i in group]


def loss_of(model, batch, tokens_per_batch, device):
    length = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch], device=device)                # (N, T)
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in batch], device=device)
    # Padding on the right needs no mask: nothing before it can see it.
    logits = model(ids)[:, :-1].float()                                                                      # (N, T-1, V)
    # Divided by what a batch holds on average, not by what this one holds: a batch of short replies would else count more
    # per token, and the model would give short replies more often than its teacher.
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return total / tokens_per_batch


def optimize(model, next_loss, *, steps, learning_rate, warmup_steps):
    """AdamW on `next_loss()`, so many steps of it: a linear warm-up, then a cosine to a hundredth of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup_steps)
                                                 * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2))
    start = time.time()
    for step in range(1, steps + 1):
        loss = next_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a jsonl file of conversations")
    parser.add_argument("--save", type=Path, required=True, help="the folder that the weights go to")
    parser.add_argument("--init", type=Path, help="weights to start from, with their tokenizer; without it a new model")
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer of a new model")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--num_hidden_layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open(args.data, encoding="utf-8") as file:
        chats = [json.loads(line)["conversations"] for line in file]
    tokenizer = AutoTokenizer.from_pretrained(args.init or args.tokenizer)
    if args.init:
        model = load_pretrained(args.init, dtype=torch.float32, device=device)
    else:
        model = MiniMindForCausalLM(MiniMindConfig(
            vocab_size=len(tokenizer), hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers,
            intermediate_size=32 * math.ceil(args.hidden_size * 8 / 3 / 32), num_attention_heads=args.hidden_size // 32,
            num_key_value_heads=args.hidden_size // 64,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).to(device)
    examples = encode(chats, tokenizer)
    print(f"{len(examples)} chats, {sum(len(ids) for ids, _ in examples) / len(examples):.0f} tokens each; "
          f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")

    source = batches(examples, args.batch_size, rng)
    tokens_per_batch = args.batch_size * sum(label != -100 for _, labels in examples for label in labels) / len(examples)
    optimize(model, lambda: loss_of(model, next(source), tokens_per_batch, device), steps=args.steps,
             learning_rate=args.learning_rate, warmup_steps=args.warmup_steps)
    save_pretrained(model.to(torch.bfloat16), tokenizer, args.save)
    print(f"saved {args.save}")


if __name__ == "__main__":
    main()
