"""A chat with any weights that train_grpo.py takes or leaves: python -m model.chat out/grpo_reason_128/final

An empty line, "exit" or Ctrl-D ends it. A prompt can also come from a pipe:

    echo "What is 7 + 3*7?" | python -m model.chat model/weights/reason_128
"""
import argparse
import sys

import torch

from .checkpoint import eos_token_ids, load_pretrained, load_tokenizer
from .sampler import Decoding, next_token


@torch.no_grad()
def stream(model, tokenizer, messages, *, max_new_tokens, temperature):
    """The assistant's next turn, piece by piece as its tokens come; temperature 0 takes the most likely token each time."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]], device=model.lm_head.weight.device)
    decoding, eos = Decoding(model, ids, torch.ones_like(ids), max_new_tokens), eos_token_ids(model, tokenizer)
    logits, reply, text, shown = decoding.logits, [], "", 0                                 # (1, V)
    for _ in range(max_new_tokens):
        token, _ = next_token(logits, temperature or 1.0, None, temperature == 0)           # (1,)
        if token.item() in eos:
            break
        reply.append(token.item())
        text = tokenizer.decode(reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):      # a character of several tokens: wait for the rest of it
            yield text[shown:]
            shown = len(text)
        logits = decoding.step(token)
    yield text[shown:]


def chat(model, tokenizer, **sampling):
    """Reads the user's turns and prints the replies; each reply sees all the turns before it."""
    messages, prompt = [], "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            break
        if text in ("", "exit"):
            break
        messages.append({"role": "user", "content": text})
        reply = ""
        for piece in stream(model, tokenizer, messages, **sampling):
            print(piece, end="", flush=True)
            reply += piece
        print()
        messages.append({"role": "assistant", "content": reply})


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m model.chat", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder of weights, a hub id like Qwen/Qwen3-0.6B, or a MiniMind .pth")
    parser.add_argument("--tokenizer_path", help="a folder or hub id with the tokenizer, if it is not with the weights")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the most likely token (default: 0.7)")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="tokens of a reply at most (default: 1024)")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        # Half precision is slow on a CPU.
        model = load_pretrained(args.path, dtype=torch.float32 if device == "cpu" else None, device=device)
        tokenizer = load_tokenizer(args.tokenizer_path or args.path, model.config.vocab_size)
        chat(model, tokenizer, temperature=args.temperature, max_new_tokens=args.max_new_tokens)
    except (ValueError, OSError) as error:
        print(f"model.chat: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
