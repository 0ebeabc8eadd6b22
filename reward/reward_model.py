"""Reward models: a network reads a chat and says, in one number, how good the assistant's last turn is."""
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from model import load_pretrained, save_pretrained
from model.checkpoint import hub_config, load_state, local_path, read_weights, save_tokenizer
from model.model import Decoder

from .internlm2 import ARCHITECTURE, InternLM2Tokenizer, internlm2_config, internlm2_state
from .rules import answer_block


class RewardModel(nn.Module):
    """A causal backbone with a head of one output, which is read at the last token of a chat.

    Without a `backbone` it is the policy's; its tensors then have the names of Qwen3ForSequenceClassification.
    """
    centering = 0.01        # in training, the pull of the scores towards 0
    gpu_tokens = 16384      # in a batch of get_scores

    def __init__(self, config, tokenizer, backbone=None):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.model = Decoder(config) if backbone is None else backbone
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, input_ids):
        """Scores (N, T) of chats input_ids (N, T), padded on the right, as if each ended with that token."""
        hidden = self.model(input_ids)                                  # no mask: nothing looks at what stands behind it
        hidden = getattr(hidden, "last_hidden_state", hidden)           # transformers wraps it up
        return self.score(hidden.float())[..., 0]                       # float32: bfloat16 scores would come in steps

    def tokenize(self, chats):
        """The ids of each chat, by the model's own template; it renders a BOS itself, so the tokenizer adds none."""
        return self.tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)

    def pad(self, ids):
        """Lists of ids as a tensor (N, T), padded on the right, and the position of each one's last token, (N,)."""
        pad_id, device, T = self.config.pad_token_id, self.score.weight.device, max(map(len, ids))
        padded = [[*row] + [0] * (T - len(row)) for row in ids]                             # never looked at: any id does
        # Where a template ends in the pad token itself, transformers reads the score before it, and so was it trained.
        last = [next((t for t in reversed(range(len(row))) if row[t] != pad_id), 0) for row in ids]
        return torch.tensor(padded, device=device), torch.tensor(last, device=device)

    def encode(self, chats):
        return self.pad(self.tokenize(chats))

    @torch.no_grad()
    def get_scores(self, chats, max_tokens=None):
        """A score for each chat, a list of {"role", "content"}: unbounded; what counts is the difference on one prompt.

        Each distinct chat is read once: a group often agrees. A batch holds chats of like length, `max_tokens` with the
        padding: few on a CPU, so that they stay in its cache.
        """
        max_tokens = max_tokens or (2048 if self.score.weight.device.type == "cpu" else self.gpu_tokens)
        ids, scores = [tuple(chat) for chat in self.tokenize(chats)], {}
        distinct = sorted(dict.fromkeys(ids), key=len, reverse=True)
        while distinct:
            size = max(1, max_tokens // len(distinct[0]))
            batch, distinct = distinct[:size], distinct[size:]
            input_ids, last = self.pad(batch)
            scores |= zip(batch, self(input_ids).gather(1, last[:, None])[:, 0].tolist())
        return [scores[chat] for chat in ids]

    def get_score(self, chat):
        return self.get_scores([chat])[0]

    def save_pretrained(self, path):
        """A folder that load_reward_model and transformers' AutoModelForSequenceClassification load."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.contiguous().cpu() for name, tensor in self.state_dict().items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        config = hub_config(self) | {"id2label": {"0": "score"}, "label2id": {"score": 0}}         # one label: one number
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_tokenizer(self.tokenizer, path)


class LikelihoodModel(RewardModel):
    """A language model as a judge: a reply's score is its log-likelihood, the sum over its tokens of log p(token | before).

    To see that a digit is wrong, a network must compute the right one and compare the two. That is what a language model's
    layers and its head do already; with a new head the comparison has to be learnt, from many more pairs than a run leaves.
    Trained on pairs, it is the implicit reward of DPO (Rafailov et al. 2023, arXiv 2305.18290) without the reference.
    """
    centering = 0.0         # a likelihood has its own zero, certainty
    gpu_tokens = 2048       # each with logits for the whole vocabulary

    def __init__(self, policy, tokenizer):
        super().__init__(policy.config, tokenizer, backbone=policy.model)
        self.policy, self.score = policy, policy.lm_head      # the head: where get_scores looks for the device
        question = [{"role": "user", "content": ""}]
        without, opened = (tokenizer.apply_chat_template(question, add_generation_prompt=opening, return_dict=False)
                           for opening in (False, True))
        self.opening = opened[len(without):]                            # <|im_start|>assistant\n
        answered = tokenizer.apply_chat_template([*question, {"role": "assistant", "content": "a"}], return_dict=False)
        if not self.opening or answered[:len(opened)] != opened:
            raise ValueError("a likelihood is that of the last turn, and this chat template does not say where it begins; "
                             "choose a model whose generation prompt stands in its chats")

    def forward(self, input_ids):
        """Log-likelihoods (N, T) of the last turns of chats input_ids (N, T), each up to that token."""
        positions = torch.arange(input_ids.shape[1] + 1, device=input_ids.device)
        opening = torch.tensor(self.opening, device=input_ids.device)                           # (k,)
        opened = (input_ids.unfold(1, len(opening), 1) == opening).all(-1)                      # (N, T-k+1)
        start = (opened * positions[len(opening):]).amax(1, keepdim=True)                       # (N, 1): behind the last one
        logits = self.policy(input_ids)[:, :-1].float()                                         # (N, T-1, V)
        logps = logits.gather(2, input_ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)         # (N, T-1)
        return F.pad((logps * (positions[1:-1] >= start)).cumsum(1), (1, 0))

    def save_pretrained(self, path):
        """The folder of a language model, with a word in config.json for load_reward_model."""
        save_pretrained(self.policy, self.tokenizer, path)
        config = Path(path) / "config.json"
        saved = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps(saved | {"score": "likelihood"}, indent=2) + "\n", encoding="utf-8")


def is_likelihood(folder):
    """Whether a LikelihoodModel wrote this folder."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("score") == "likelihood"


def load_reward_model(path, *, device="cpu"):
    """The reward model in a folder or, by its name owner/name, on the hub: a classifier of one label that transformers
    knows, InternLM2's, or a LikelihoodModel. Ready to score, in bfloat16 on a GPU, else in float32 (the last one always).
    No code that comes with weights is run."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--reward_model_device {device}: {str(error).splitlines()[0]}; choose cpu, or a GPU as cuda:1"
                         ) from None
    folder = find_folder(path)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    if is_likelihood(folder):
        policy = load_pretrained(folder, dtype=torch.float32)           # small differences of long sums
        return LikelihoodModel(policy, AutoTokenizer.from_pretrained(folder)).to(device).eval()
    if ARCHITECTURE in (saved.get("architectures") or []):
        config = internlm2_config(saved, folder)
        model = RewardModel(config, InternLM2Tokenizer(folder, saved))
        load_state(model, internlm2_state(read_weights(folder), config), folder)
    else:
        model = load_classifier(folder, saved, dtype)
    model.model.to(dtype)
    model.score.float()
    return model.to(device).eval()


def find_folder(path):
    """The folder that `path` names, downloaded first if it is a name on the hub."""
    try:
        folder = local_path(path)
        if folder != Path(path) and not list(folder.glob("*.safetensors")):
            folder = local_path(path, weights="pytorch_model*")
    except ValueError as error:
        raise ValueError(f"--reward_model_path {error}") from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"--reward_model_path {path}: no config.json there; give a folder with a reward model, "
                         "or leave rm out of --reward_funcs")
    return folder


def load_classifier(folder, saved, dtype):
    """A ...ForSequenceClassification of transformers' as a RewardModel: its backbone and its head."""
    where = f"--reward_model_path {folder}"
    if not any(name.endswith("ForSequenceClassification") for name in saved.get("architectures") or []):
        raise ValueError(f"{where}: it holds {saved.get('architectures')}; give a reward model, one of transformers' "
                         f"...ForSequenceClassification or {ARCHITECTURE}, not a language model")
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        classifier, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"{where}: transformers can't load it: {' '.join(str(error).split())[:200]}; "
                         "choose another reward model") from None
    if info["missing_keys"] or classifier.config.num_labels != 1 or not hasattr(classifier, "score"):
        raise ValueError(f"{where}: its weights are no {type(classifier).__name__} with one label and a head named score "
                         f"(missing: {sorted(info['missing_keys'])}, labels: {classifier.config.num_labels}); "
                         "choose another reward model")
    if not tokenizer.chat_template:
        raise ValueError(f"{where}: its tokenizer has no chat template to write a chat with; add chat_template.jinja")
    classifier.config.use_cache = False                                 # keys and values are read once
    model = RewardModel(classifier.config, tokenizer, backbone=classifier.base_model)
    model.score = classifier.score
    return model


def reward_model_reward(model, *, reasoning=True, clip=3.0, scale=1.0, answer_share=0.6):
    """A reward function out of a reward model: scale * its score, clipped to +-clip against rewards that run away.

    With `reasoning` the answer is scored once more on its own, as if it were the whole reply, where there is an answer
    block: 0.4 * score(whole reply) + 0.6 * score(answer alone), each clipped, so that a fine speech does not make up for
    it; 0.6 is answer_share. A clip of 0 is none.
    """
    bound = clip or math.inf
    if isinstance(model, LikelihoodModel) and (clip or reasoning and answer_share):
        raise ValueError("the reward model is a likelihood, far below 0 and made for whole replies: with it goes "
                         "--reward_model_clip 0 --reward_model_answer_share 0")

    def reward_model(prompts, completions, messages, **columns):
        answers = [answer_block(completion) if reasoning else None for completion in completions]
        with_answer = [i for i, answer in enumerate(answers) if answer is not None]
        chats = [chat + [{"role": "assistant", "content": completion}] for chat, completion in zip(messages, completions)]
        chats += [messages[i] + [{"role": "assistant", "content": answers[i]}] for i in with_answer]
        scores = [max(-bound, min(bound, scale * score)) for score in model.get_scores(chats)]
        rewards = scores[:len(completions)]
        for i, answer_score in zip(with_answer, scores[len(completions):]):
            rewards[i] = (1 - answer_share) * rewards[i] + answer_share * answer_score
        return rewards

    return reward_model
