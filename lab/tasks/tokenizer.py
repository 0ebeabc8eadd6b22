"""A byte-level BPE tokenizer for arithmetic: each digit is a token, and so is each tag.

With `--merge_digits` a number that is frequent in the texts is one token instead. Being byte-level,
it encodes any text and decodes it back unchanged.
"""
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dataset.folders import new_folder
from errors import Parser, number, user_errors
from model.train_sft import read_chats

# Ids 0, 1, 2. Special tokens: decoding can skip them, and a user's text should not contain them.
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Ordinary tokens, because the rewards have to find them in the decoded text.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts, vocab_size=512, *, merge_digits=False):
    """Train BPE over bytes: at most vocab_size tokens, fewer if no pair is left to merge."""
    tokenizer = Tokenizer(models.BPE())
    # Letters merge into words. Signs, line breaks and, unless asked for, digits never merge, so
    # that the model reads arithmetic one symbol at a time.
    piece = r" ?\p{L}+| |\n|[^\s\p{L}]"
    if merge_digits:
        piece = r"\d+|" + piece
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(piece), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS), special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
        model_max_length=2048, clean_up_tokenization_spaces=False)


@user_errors("lab.tasks.tokenizer")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.tokenizer", description=__doc__)
    flag = parser.add_argument
    flag("--data", type=Path, nargs="+", required=True,
         help="jsonl files, of which the first 5,000 lines are read")
    flag("--save", type=Path, required=True, help="the folder to save the tokenizer in")
    flag("--vocab_size", type=number(int, 263, 10**6), default=512,
         help="tokens at most; 256 bytes, 3 special tokens and 4 tags are always there")
    flag("--merge_digits", action="store_true", help="let frequent numbers become one token each")
    args = parser.parse_args(argv)
    chats = [chat for path in args.data for chat in read_chats(path)[:5000]]
    args.save = new_folder(args.save, "--save")
    # The tags are tokens already: spend no merges on their letters.
    texts = [re.sub("|".join(TAGS), "", text) for chat in chats for turn in chat
             for text in (turn["role"], turn["content"])]
    tokenizer = train_tokenizer(texts, args.vocab_size, merge_digits=args.merge_digits)
    tokenizer.save_pretrained(args.save)
    print(f"{len(tokenizer)} tokens, saved in {args.save}")


if __name__ == "__main__":
    main()
