"""A byte-level tokenizer: any text survives a round trip, digits stand alone, the tags are one token each."""
import argparse
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Ids 0, 1, 2. Special: decoding can leave them out, and text from a user is not meant to contain them.
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Ordinary tokens: the rewards must still see them in decoded text.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts, vocab_size=512):
    """Byte-pair encoding over 256 bytes: at most vocab_size tokens, fewer when nothing is left to merge."""
    tokenizer = Tokenizer(models.BPE())
    # Words merge; a digit, a sign or a line break never does, so that arithmetic reads one symbol at a time.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r" ?\p{L}+| |\n|[^\s\p{L}]"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS), special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
                                   model_max_length=2048, clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="trains a tokenizer on the conversations of jsonl files")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--save", type=Path, required=True, help="the folder that the tokenizer goes to")
    parser.add_argument("--vocab_size", type=int, default=512, help="tokens at most; fewer when nothing is left to merge")
    args = parser.parse_args()
    texts = []
    for path in args.data:
        with open(path, encoding="utf-8") as file:
            for line, _ in zip(file, range(5000)):
                texts += [message[key] for message in json.loads(line)["conversations"] for key in ("role", "content")]
    # The tags are tokens of their own: their letters need no merges.
    tokenizer = train_tokenizer([re.sub("|".join(TAGS), "", text) for text in texts], args.vocab_size)
    tokenizer.save_pretrained(args.save)
    print(f"{len(tokenizer)} tokens, saved {args.save}")
