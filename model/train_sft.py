r"""Trains a policy on conversations, from scratch (pretraining) or from weights (fine-tuning).

The included policies were trained as follows (lab/weights.md lists all the steps):

    python -m model.train_sft --data out/sft/pretrain.jsonl \
        --tokenizer out/tokenizer --save out/pretrain_128
    python -m model.train_sft --data out/sft/reason.jsonl \
        --init out/pretrain_128 --save out/reason_128

The loss is the cross-entropy over the tokens of the assistant's turns. These include <|im_end|>,
since a model has to learn to end its turn.
"""
import copy
import functools
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from dataset.folders import new_folder
from dataset.jsonl import read_lines
from dataset.prompts import is_chat, is_missing, read_row
from errors import COUNT, COUNT_OR_0, Parser, UserError, explained, number, user_errors

from . import MiniMindConfig, MiniMindForCausalLM, load_pretrained, load_tokenizer, save_pretrained


def read_chats(path):
    """Returns the chats of a jsonl file, {"conversations": [{"role", "content"}, ...]} per line.

    The field may also be called "messages", as in OpenAI's files. Instead of a chat, a line may
    have a prompt and an answer; the answer then becomes the assistant's reply.
    """
    chats = []
    for where, row in read_lines(path):
        row = row if isinstance(row, dict) else {}
        chat = row.get("conversations") or row.get("messages")
        has_reply = is_chat(chat, where) and any(turn["role"] == "assistant" for turn in chat)
        if not has_reply:
            if is_missing(row.get("answer")):
                raise UserError(f"{where}: there is no turn by the role assistant and no answer, "
                                "so there is nothing to learn; remove the line")
            item = read_row(row, where)
            chat = [*item["messages"], {"role": "assistant", "content": str(item["answer"])}]
        chats.append(chat)
    if not chats:
        raise UserError(f"{path}: the file is empty; write one chat per line")
    return chats


def encode(chats, tokenizer):
    """Returns a pair (ids, labels) for each chat: labels are -100 outside of assistant turns.

    A reply starts where the chat template's generation prompt ends. It ends with its EOS token, or
    at the end of the turn if the template writes no EOS token.
    """
    render, examples = functools.partial(tokenizer.apply_chat_template, tokenize=False), []
    with explained("the chats", "the tokenizer's chat template rejects one of them",
                   "remove it, or pass another tokenizer"):
        texts = render(chats)
        replies = [find_replies(chat, text, render) for chat, text in zip(chats, texts)]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    for ids, offsets, spans in zip(encoded["input_ids"], encoded["offset_mapping"], replies):
        labels = [-100] * len(ids)
        for start, end in spans:
            for i, (first, last) in enumerate(offsets):
                if last > start and first < end:
                    labels[i] = ids[i]
                    if ids[i] == tokenizer.eos_token_id:
                        break
        if set(labels) == {-100}:
            raise UserError(f"chat {len(examples) + 1}: the tokenizer's chat template renders the "
                            "turns before a reply differently once the reply follows, so no reply "
                            "can be located; pass another tokenizer")
        examples.append((ids, labels))
    return examples


def find_replies(chat, text, render):
    """Returns the parts of a chat's text that the assistant has written, as (start, end) pairs.

    start and end are character positions. Text that a tool has inserted in a turn is left out: the
    turn's field "forced" lists the positions of such text, as [start, end] pairs.
    """
    spans = []
    for i, turn in enumerate(chat):
        if turn["role"] == "assistant":
            before, through = render(chat[:i], add_generation_prompt=True), render(chat[:i + 1])
            if text.startswith(before):
                # Some templates render the last turn differently; its EOS token then ends it.
                end = len(through) if text.startswith(through) else len(text)
                start, content = len(before), text.find(turn["content"], len(before))
                if content < 0 and "forced" in turn:
                    raise UserError("the tokenizer's chat template rewrites a turn with the field "
                                    f"forced, {turn['content']!r}; pass another tokenizer")
                for first, last in turn.get("forced", []):
                    spans.append((start, content + first))
                    start = content + last
                spans.append((start, end))
    return spans


def batches(examples, batch_size, rng):
    """Yields batches forever. Each epoch contains every example once, in a new random order.

    To reduce padding, examples of similar length are put in the same batch: groups of 32 *
    batch_size random examples are sorted by length, and then cut into batches.
    """
    while True:
        order = list(range(len(examples)))
        rng.shuffle(order)
        for start in range(0, len(order), 32 * batch_size):
            chunk = sorted(order[start:start + 32 * batch_size], key=lambda i: len(examples[i][0]))
            groups = [chunk[i:i + batch_size] for i in range(0, len(chunk), batch_size)]
            rng.shuffle(groups)
            for group in groups:
                yield [examples[i] for i in group]


def loss_of(model, batch, num_tokens, device):
    """Returns the sum of the cross-entropy over all labeled tokens, divided by num_tokens.

    In training, num_tokens is the mean number of labeled tokens per batch. If each batch's own
    number were used, tokens in batches of short replies would get more weight, and the model would
    write short replies too often.
    """
    # No mask is needed: padding is on the right, where causal attention hides it from all tokens.
    ids = pad_sequence([torch.tensor(ids) for ids, _ in batch], True).to(device)    # (N, T)
    labels = pad_sequence([torch.tensor(labels) for _, labels in batch], True, -100).to(device)
    logits = model(ids)[:, :-1].float()                                             # (N, T-1, V)
    total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100,
                            reduction="sum")
    return total / num_tokens


def num_labels(examples):
    return sum(label != -100 for _, labels in examples for label in labels)


def optimize(model, next_loss, *, steps, learning_rate, warmup_steps, progress=None):
    """Takes `steps` steps with AdamW. next_loss() returns the loss of a step.

    The learning rate rises linearly over warmup_steps, and follows a cosine down to 1% of its peak.
    Every 100 steps and at the end, prints the mean loss since the last print, and progress().
    """
    def factor(step):
        warmup = min(1, (step + 1) / warmup_steps) if warmup_steps else 1
        return warmup * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95),
                                  weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    start, losses = time.time(), []
    for step in range(1, steps + 1):
        loss = next_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            mean, losses = sum(losses) / len(losses), []
            text = progress() if progress else ""
            print(f"step {step}/{steps}  loss {mean:.4f}{text}  {time.time() - start:.0f} s",
                  flush=True)


def parse_args(argv=None):
    parser = Parser(prog="python -m model.train_sft", description=__doc__)
    flag = parser.add_argument
    flag("--data", type=Path, required=True, help="jsonl file of chats, or of prompts and answers")
    flag("--save", type=Path, required=True, help="folder to save the weights to")
    start = parser.add_mutually_exclusive_group(required=True).add_argument
    start("--init", type=Path, help="folder of the initial weights and their tokenizer")
    start("--tokenizer", type=Path,
          help="tokenizer for a new model; python -m lab.tasks.tokenizer makes one")
    flag("--learning_rate", type=number(float, 0, 1, above=True), default=3e-3, help="peak value")
    flag("--warmup_steps", type=COUNT_OR_0, default=100, help="steps to reach that learning rate")
    flag("--heldout", type=COUNT_OR_0, default=200, help="held-out chats: the last ones of the "
         "file, at most a tenth, which only measure the loss")
    flag("--seed", type=COUNT_OR_0, default=0, help="seed of new weights and of the order of chats")
    flag("--hidden_size", type=number(int, 64, 2**14), default=128, help="for a new model")
    flag("--num_hidden_layers", type=number(int, 1, 1000), default=4, help="for a new model")
    flag("--steps", type=COUNT, default=3000, help="number of AdamW steps")
    flag("--batch_size", type=COUNT, default=32, help="chats per step")
    args = parser.parse_args(argv)
    if args.hidden_size % 64:
        parser.error(f"--hidden_size {args.hidden_size}: it must be a multiple of 64")
    return args


@user_errors("model.train_sft")
def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chats = read_chats(args.data)
    args.save = new_folder(args.save, "--save")     # before the work
    if args.init:
        model = load_pretrained(args.init, dtype=torch.float32, device=device)
        tokenizer = load_tokenizer(args.init, model.config.vocab_size)
    else:
        tokenizer = load_tokenizer(args.tokenizer, math.inf)
        model = MiniMindForCausalLM(MiniMindConfig(
            vocab_size=len(tokenizer), hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            intermediate_size=32 * math.ceil(args.hidden_size * 8 / 3 / 32),
            num_attention_heads=args.hidden_size // 32, num_key_value_heads=args.hidden_size // 64,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)).to(device)
    examples = encode(chats, tokenizer)
    count = min(args.heldout, len(examples) // 10)
    examples, heldout = examples[:len(examples) - count], examples[len(examples) - count:]
    print(f"{len(examples)} chats to train on, and {count} held out", flush=True)

    @torch.no_grad()
    def progress():
        save_pretrained(copy.deepcopy(model).to(torch.bfloat16), tokenizer, args.save)
        if not heldout:
            return ""
        parts = [heldout[i:i + args.batch_size] for i in range(0, count, args.batch_size)]
        per_token = (loss_of(model, part, num_labels(heldout), device).item() for part in parts)
        return f"  held-out {sum(per_token):.4f}"

    source = batches(examples, args.batch_size, rng)
    tokens_per_batch = num_labels(examples) / math.ceil(len(examples) / args.batch_size)
    optimize(model, lambda: loss_of(model, next(source), tokens_per_batch, device),
             steps=args.steps, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps,
             progress=progress)
    print(f"saved {args.save}")


if __name__ == "__main__":
    main()
