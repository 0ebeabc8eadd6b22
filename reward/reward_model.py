"""Reward models: a network reads a chat and says, in one number, how good the assistant's last turn is."""
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoTokenizer

from model.checkpoint import hub_config, load_state, read_config, read_weights, save_tokenizer
from model.model import Decoder

from .rules import answer_block


class RewardModel(nn.Module):
    """The policy's backbone with a head of one output; its tensors have the names of Qwen3ForSequenceClassification."""

    def __init__(self, config, tokenizer):
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.model = Decoder(config)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, input_ids):
        """Scores (N, T) of chats input_ids (N, T), padded on the right, as if each ended with that token."""
        return self.score(self.model(input_ids))[..., 0].float()        # no mask: nothing looks at what stands behind it

    def encode(self, chats):
        """Ids (N, T), padded on the right, and the position of the last token of each chat, (N,)."""
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False)
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        device, T = self.score.weight.device, max(map(len, ids))
        padded = [row + [0] * (T - len(row)) for row in ids]                                # never looked at: any id does
        last = [len(row) - 1 for row in ids]
        return torch.tensor(padded, device=device), torch.tensor(last, device=device)

    @torch.no_grad()
    def get_scores(self, chats, batch_size=128):
        """A score for each chat, a list of {"role", "content"}: unbounded; what counts is the difference on one prompt."""
        lengths = [sum(len(turn["content"]) for turn in chat) for chat in chats]
        order = sorted(range(len(chats)), key=lengths.__getitem__)                          # little padding in a batch
        scores = torch.zeros(len(chats))
        for start in range(0, len(chats), batch_size):
            rows = order[start:start + batch_size]
            input_ids, last = self.encode([chats[i] for i in rows])
            scores[rows] = self(input_ids).gather(1, last[:, None])[:, 0].cpu()
        return scores.tolist()

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


def load_reward_model(path, *, device="cpu"):
    """The reward model in a folder, ready to score. ValueError if the weights have no score head."""
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"--reward_model_path {path}: no config.json there; give a folder with a reward model, "
                         "or leave rm out of --reward_funcs")
    state = read_weights(path)
    if "score.weight" not in state:
        raise ValueError(f"--reward_model_path {path}: the weights have no score.weight; give a reward model, "
                         "not a language model")
    reward_model = RewardModel(read_config(path), AutoTokenizer.from_pretrained(path))
    load_state(reward_model, state, path)
    return reward_model.float().to(device).eval()


def reward_model_reward(model, *, reasoning, clip=3.0, answer_share=0.6):
    """A reward function out of a reward model: its score, clipped to +-clip against rewards that run away.

    With `reasoning` the answer is scored once more on its own, as if it were the whole reply, where there is an answer
    block: 0.4 * score(whole reply) + 0.6 * score(answer alone), each clipped, so that a fine speech does not make up for it.
    """

    def reward_model(prompts, completions, messages, **columns):
        answers = [answer_block(completion) if reasoning else None for completion in completions]
        with_answer = [i for i, answer in enumerate(answers) if answer is not None]
        chats = [chat + [{"role": "assistant", "content": completion}] for chat, completion in zip(messages, completions)]
        chats += [messages[i] + [{"role": "assistant", "content": answers[i]}] for i in with_answer]
        scores = [max(-clip, min(clip, score)) for score in model.get_scores(chats)]
        rewards = scores[:len(completions)]
        for i, answer_score in zip(with_answer, scores[len(completions):]):
            rewards[i] = (1 - answer_share) * rewards[i] + answer_share * answer_score
        return rewards

    return reward_model
