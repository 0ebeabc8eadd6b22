"""Loads InternLM2's reward models (internlm2-1_8b-reward and larger) without their remote code.

The architecture is Llama's, but the tensors have other names, and the query, key and value
projections are one matrix. The score is the output at a special token, <|reward|>, at the end of
the chat:

    <s><|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n...<|im_end|>\\n<|reward|>
"""
import itertools

from model import MiniMindConfig
from model.load import read_json

ARCHITECTURE = "InternLM2ForRewardModel"
# InternLM2's tensor names -> our Decoder's. internlm2_state also splits the fused wqkv.
RENAMED = {
    "tok_embeddings": "embed_tokens", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj", "v_head": "score",
}
# The special tokens' ids in the published models. Files next to the weights take precedence.
SPECIAL = {"<s>": 1, "<|im_end|>": 92542, "<|im_start|>": 92543, "<|reward|>": 92527}


def internlm2_config(saved):
    """Converts a parsed config.json to a MiniMindConfig. Raises a ValueError if it can't."""
    rope, heads = saved.get("rope_scaling") or {}, saved["num_attention_heads"]
    # Dynamic scaling has no effect within the length that the model was trained on.
    if rope.get("type", rope.get("rope_type", "dynamic")) not in ("dynamic", "default"):
        raise ValueError(f"rope scaling {rope}")
    if saved.get("bias"):
        raise ValueError("it has biases")
    return MiniMindConfig(
        vocab_size=saved["vocab_size"], hidden_size=saved["hidden_size"],
        intermediate_size=saved["intermediate_size"],
        num_hidden_layers=saved["num_hidden_layers"], num_attention_heads=heads,
        num_key_value_heads=saved.get("num_key_value_heads") or heads,
        head_dim=saved["hidden_size"] // heads, rms_norm_eps=saved.get("rms_norm_eps", 1e-6),
        rope_theta=saved.get("rope_theta", 10000.0), tie_word_embeddings=False, qk_norm=False,
        qkv_bias=False)


def internlm2_state(tensors, config):
    """Renames InternLM2's tensors to the names in model/model.py, and splits wqkv into q, k and v.

    In wqkv, each group's query heads are followed by its key head and its value head: q q k v, ...
    """
    state, kv_heads, D = {}, config.num_key_value_heads, config.hidden_size
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        if "attention.wqkv" not in name:
            state[name] = tensor
            continue
        groups = tensor.view(kv_heads, -1, config.head_dim, D)              # (K, H/K + 2, d, D)
        parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
        for part, rows in parts.items():
            ours = name.replace("attention.wqkv", f"self_attn.{part}_proj")
            state[ours] = rows.reshape(-1, D)
    return state


class InternLM2Tokenizer:
    """Encodes chats: sentencepiece encodes the text, and special tokens are added by their ids.

    If a message contains the text of a special token, the text is encoded like any other text.
    """
    added_tokens_decoder = {}       # so RewardModel doesn't have to remove tokens from texts

    def __init__(self, folder, saved):
        from sentencepiece import SentencePieceProcessor
        self.pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        self.special = SPECIAL | {token["content"]: int(index) for index, token in added.items()}
        self.special["<|reward|>"] = saved.get("reward_token_id", SPECIAL["<|reward|>"])
        for token in SPECIAL:
            if not 0 <= self.special[token] < saved["vocab_size"]:
                raise ValueError(f"no id is known for {token}")

    def apply_chat_template(self, chats, **options):
        """Returns a list of token ids for each chat. Each list ends with the reward token."""
        special, encode = self.special, self.pieces.encode

        def ids_of(turn):
            return [special["<|im_start|>"], *encode(f"{turn['role']}\n{turn['content']}"),
                    special["<|im_end|>"], *encode("\n")]

        return [[special["<s>"], *itertools.chain.from_iterable(map(ids_of, chat)),
                 special["<|reward|>"]] for chat in chats]
