"""Chats with any weights that train_grpo.py reads or writes:

    python -m model.chat out/grpo_reason_128/final

The chat template comes with the weights. In weights saved by a training run, the template switches
thinking on or off as in that run. If you trained with --system_prompt, pass it again. An empty line
or Ctrl-D ends the chat. You can also pipe in a prompt:

    echo "What is 7 + 3*7?" | python -m model.chat model/weights/reason_128
"""
import sys

import torch

from dataset import PromptCollator
from errors import COUNT, POSITIVE_OR_0, Parser, printable, user_errors

from . import eos_token_ids, load_pretrained, load_tokenizer
from .load import choose_device, decode
from .sampler import next_token


@torch.no_grad()
def reply_to(model, tokenizer, messages, *, max_new_tokens, temperature, system_prompt=None):
    """Generates the assistant's reply, prints it token by token, and returns it."""
    prompt = PromptCollator(tokenizer, None, system_prompt, thinking=None).render(messages)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt_ids], device=model.lm_head.weight.device)                # (1, P)
    cache, eos_ids = model.new_cache(), eos_token_ids(model, tokenizer)
    reply, shown = [], ""
    for _ in range(max_new_tokens):
        logits = model(ids, logits_to_keep=1, cache=cache)[:, 0]                        # (1, V)
        token, _ = next_token(logits, max(temperature, 1e-3), None, temperature == 0)   # (1,)
        if token.item() in eos_ids:
            break
        ids = token[None]
        reply.append(token.item())
        text = decode(reply, tokenizer, eos_ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else its last character is incomplete
            print(printable(text[len(shown):]), end="", flush=True)
            shown = text
    print()
    return shown


def chat(model, tokenizer, **sampling):
    """Reads the user's messages and prints a reply to each, until the user ends the chat."""
    messages, prompt = [], "> " if sys.stdin.isatty() else ""
    while text := input(prompt).strip():
        messages.append({"role": "user", "content": text})
        reply = reply_to(model, tokenizer, messages, **sampling)
        messages.append({"role": "assistant", "content": reply})


@user_errors("model.chat")
def main(argv=None):
    parser = Parser(prog="python -m model.chat", description=__doc__)
    flag = parser.add_argument
    flag("path", help="weights: a folder, a hub id like Qwen/Qwen3-0.6B, or a MiniMind .pth file")
    flag("--tokenizer_path", help="folder or hub id of the tokenizer, if not that of the weights")
    flag("--system_prompt", help="pass the one of training; r1: a text that asks for the tags")
    flag("--temperature", type=POSITIVE_OR_0, default=0.7, help="sampling temperature; 0: greedy")
    flag("--max_new_tokens", type=COUNT, default=1024, help="maximum tokens per reply")
    args = parser.parse_args(argv)
    device = choose_device(None, 1)
    dtype = torch.float32 if device.type == "cpu" else None     # half precision is slow on a CPU
    model = load_pretrained(args.path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(args.tokenizer_path or args.path, model.config.vocab_size)
    try:
        chat(model, tokenizer, temperature=args.temperature, max_new_tokens=args.max_new_tokens,
             system_prompt=args.system_prompt)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
