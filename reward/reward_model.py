"""Reward models, which read a chat and score the assistant's last message."""
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from errors import GIVEN
from model import load_tokenizer
from model.fast.reading import read_tree
from model.load import (
    build,
    explained,
    local_path,
    read_config,
    read_hub_config,
    read_json,
    read_weights,
    spelled_out,
    unbuilt,
)
from model.model import Decoder
from model.save import hub_config, save_tensors, write_json

from .answers import answer_block
from .internlm2 import ARCHITECTURE, InternLM2Tokenizer, internlm2_config, internlm2_state

ANOTHER = "choose another reward model"


def with_reply(messages, text):
    return messages + [{"role": "assistant", "content": text}]


class RewardModel(nn.Module):
    """A causal language model with a head that outputs one score, read at a chat's last token.

    By default, the model is a Decoder (model/model.py), and the tensors have the same names as in
    Qwen3ForSequenceClassification.
    """
    centering = 0.01        # weight of the training penalty that keeps scores near 0

    def __init__(self, config, tokenizer, backbone=None):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.model = Decoder(config) if backbone is None else backbone
        self.shares_prefixes = isinstance(self.model, Decoder)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        added = tokenizer.added_tokens_decoder.values()
        self.markers = [token.content for token in added if token.special]

    def forward(self, input_ids):
        """Returns scores (N, T). The score at each position is that of the chat up to that token.

        input_ids (N, T) must be padded on the right. Causal attention makes a mask unnecessary.
        """
        hidden = self.model(input_ids)
        hidden = getattr(hidden, "last_hidden_state", hidden)       # transformers returns an object
        return self.score(hidden.float())[..., 0]       # bfloat16 would make close scores equal

    def tokenize(self, chats):
        """Returns each chat's token ids. Special tokens in a message become ordinary text."""
        chats = [[turn | {"content": self.without_markers(turn["content"])} for turn in chat]
                 for chat in chats]
        # The model's own chat template writes a BOS if one is needed; the tokenizer adds none.
        return self.tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)

    def without_markers(self, text):
        """Makes special tokens in the text ordinary text."""
        return spelled_out(text, self.markers)

    def pad(self, ids):
        """Returns (input_ids, last): ids (N, T), padded on the right, and last positions (N,)."""
        pad_id, device, T = self.config.pad_token_id, self.score.weight.device, max(map(len, ids))
        padded = [[*row] + [0] * (T - len(row)) for row in ids]     # any id: no token attends to it
        # If a template ends with the pad token itself, transformers reads the score before it, and
        # the model was trained that way, so we do the same.
        last = [next((t for t in reversed(range(len(row))) if row[t] != pad_id), 0) for row in ids]
        return torch.tensor(padded, device=device), torch.tensor(last, device=device)

    @torch.no_grad()
    def get_scores(self, chats, max_tokens=None):
        """Returns a list with a score for each chat. A chat is a list of {"role", "content"}.

        Scores are only comparable between completions of the same prompt.

        max_tokens: the maximum number of tokens in a batch, including padding.
        """
        on_cpu = self.score.weight.device.type == "cpu"
        max_tokens = max_tokens or (4096 if on_cpu else 16384)
        ids, scores = [tuple(chat) for chat in self.tokenize(chats)], {}
        # Sorting groups chats with common prefixes or, for other networks, of similar length.
        shares = self.shares_prefixes
        distinct = sorted(dict.fromkeys(ids), key=None if shares else len, reverse=not shares)
        while distinct:
            size = max(1, max_tokens // max(map(len, distinct)))
            batch, distinct = distinct[:size], distinct[size:]
            last = self.of_tree(batch) if shares else self.of_rows(batch)
            scores |= zip(batch, last.tolist())
        return [scores[chat] for chat in ids]

    def of_rows(self, ids):
        """Returns the scores of chats, (N,), given their token ids."""
        input_ids, last = self.pad(ids)
        return self(input_ids).gather(1, last[:, None])[:, 0]

    def of_tree(self, ids):
        """Returns the same scores as of_rows, but processes each shared prefix only once."""
        input_ids, last = self.pad(ids)                                         # on the right
        T = input_ids.shape[1]
        # read_tree finds the states that predict tokens, so each chat gets one more, unread token.
        mask = torch.arange(T + 1, device=last.device) < last[:, None] + 2
        hidden, predicts, _ = read_tree(self.model, F.pad(input_ids, (0, 1)), mask.int(), 1)
        row = predicts.gather(1, last[:, None].to(predicts.device))[:, 0].to(hidden.device)
        return self.score(hidden.index_select(0, row).float())[:, 0]

    def save_pretrained(self, path):
        """Saves the model to a folder that AutoModelForSequenceClassification can load, too."""
        path, config = Path(path), hub_config(self)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(self.state_dict(), path / "model.safetensors")
        architecture = config["architectures"][0].replace("CausalLM", "SequenceClassification")
        write_json(config | {"id2label": {"0": "score"}, "label2id": {"score": 0},
                             "architectures": [architecture]}, path / "config.json")
        self.tokenizer.save_pretrained(path)


def load_reward_model(path, *, device="cpu"):
    """Loads a reward model in eval mode from a folder or a Hugging Face model id (owner/name).

    The model must be a ...ForSequenceClassification of transformers with one label, or one of
    InternLM2's reward models. The weights are bfloat16 on CUDA, and float32 on other devices.
    Remote code is never run. From Python, you can also pass an object with a method get_scores.
    """
    given = GIVEN.get(path)
    if hasattr(given, "get_scores"):
        return given
    if given is not None:
        with explained(path, "not a reward model", "pass one with get_scores, or a path"):
            tokenizer = load_tokenizer(given.name_or_path, given.config.vocab_size, ANOTHER)
            return of_classifier(given, tokenizer).to(device).eval()
    with explained(f"--reward_model_device {device}", "torch has no such device here",
                   "pass cpu, or a GPU such as cuda:1"):
        torch.empty(0, device=device)
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    folder = local_path(path)
    saved = read_json(folder / "config.json", ANOTHER)
    if ARCHITECTURE in str(saved.get("architectures")):
        model = load_internlm2(folder, saved, dtype)
    else:
        model = load_classifier(folder, dtype)
    return model.to(device).eval()


def load_internlm2(folder, saved, dtype):
    with explained(folder, "not an InternLM2 reward model that can be built here",
                   "run pip install sentencepiece, or download all files of the model again"):
        config = internlm2_config(saved)
        state = internlm2_state(read_weights(folder), config)
        tokenizer = InternLM2Tokenizer(folder, saved)
    model = build(RewardModel, config, tokenizer, state=state, path=folder)
    model.model.to(dtype)           # the head stays in float32
    return model


def load_classifier(folder, dtype):
    from transformers import AutoModelForSequenceClassification
    theirs = read_hub_config(folder)
    tokenizer = load_tokenizer(folder, theirs.get_text_config().vocab_size, ANOTHER)
    if not unbuilt(theirs) and theirs.num_labels == 1:
        state = read_weights(folder)
        if "score.weight" in state:
            model = build(RewardModel, read_config(folder), tokenizer, state=state, path=folder,
                          dtype=dtype)
            model.score.float()
            return model
    with explained(folder, "transformers finds no reward model there", ANOTHER):
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"] or classifier.score.weight.shape[0] != 1:
            raise TypeError("it needs a backbone and a head named score with one label")
    return of_classifier(classifier, tokenizer)


def of_classifier(classifier, tokenizer):
    """Returns a RewardModel that shares the weights of a classifier from transformers."""
    classifier.config.use_cache = False     # each chat takes one forward pass, so nothing is cached
    model = RewardModel(classifier.config, tokenizer, backbone=classifier.base_model)
    model.score = classifier.score.float()
    return model


def reward_model_reward(model, *, reasoning=True, clip=3.0, answer_share=0.6):
    """Returns a reward function that gives the reward model's scores, clipped to [-clip, clip].

    If clip is 0, the scores are not clipped.

    With `reasoning`, the text in a completion's answer tags is also scored alone, as if this text
    were the whole completion:

        reward = (1 - answer_share) * score(completion) + answer_share * score(answer)

    Both scores are clipped first, so that good reasoning can't make up for a bad answer.
    """
    bound = clip or math.inf

    def reward_model(prompts, completions, messages, **columns):
        answers = [answer_block(completion) if reasoning else None for completion in completions]
        with_answer = [i for i, answer in enumerate(answers) if answer is not None]
        chats = [*map(with_reply, messages, completions),
                 *(with_reply(messages[i], answers[i]) for i in with_answer)]
        scores = [max(-bound, min(bound, score)) for score in model.get_scores(chats)]
        rewards = scores[:len(completions)]
        for i, answer_score in zip(with_answer, scores[len(completions):]):
            rewards[i] = (1 - answer_share) * rewards[i] + answer_share * answer_score
        return rewards

    return reward_model
