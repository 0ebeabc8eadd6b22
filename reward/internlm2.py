"""InternLM2's reward models (internlm2-1_8b-reward and larger), loaded without their remote code.

The network is Llama with other tensor names, and the query, key and value matrices of each group of
heads are fused into one. It was trained to give its score at a special token, <|reward|>, at the
end of the chat:

    <s><|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n...<|im_end|>\\n<|reward|>
"""
from model import MiniMindConfig
from model.storage.files import check_fields, explained, read_json
from report import UserError

ARCHITECTURE = "InternLM2ForRewardModel"
# Their names -> those of the policy's backbone. The fused wqkv is also split: see internlm2_state.
RENAMED = {
    "tok_embeddings": "embed_tokens", "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj", "v_head": "score",
}
# The special tokens' ids in the published models. Files next to the weights take precedence.
SPECIAL = {"<s>": 1, "<|im_end|>": 92542, "<|im_start|>": 92543, "<|reward|>": 92527}


def internlm2_config(saved, where):
    """Their config.json, parsed, as a MiniMindConfig. UserError for what our Decoder lacks."""
    file = where / "config.json"
    with explained(file, "a field is missing or wrong", "download the file again"):
        rope, heads = saved.get("rope_scaling") or {}, saved["num_attention_heads"]
        # Dynamic scaling changes nothing within the length that the model was trained on.
        if rope.get("type", rope.get("rope_type", "dynamic")) not in ("dynamic", "default"):
            raise UserError(f"{file}: rope scaling {rope!r} is not supported; choose "
                            "weights with dynamic scaling or none")
        if saved.get("bias"):
            raise UserError(f"{file}: InternLM2 with biases is not supported; choose "
                            "weights without them")
        return check_fields(MiniMindConfig(
            vocab_size=saved["vocab_size"], hidden_size=saved["hidden_size"],
            intermediate_size=saved["intermediate_size"],
            num_hidden_layers=saved["num_hidden_layers"], num_attention_heads=heads,
            num_key_value_heads=saved.get("num_key_value_heads") or heads,
            head_dim=saved["hidden_size"] // heads, rms_norm_eps=saved.get("rms_norm_eps", 1e-6),
            rope_theta=saved.get("rope_theta", 10000.0), tie_word_embeddings=False, qk_norm=False,
            qkv_bias=False), file)


def internlm2_state(tensors, config):
    """Their tensors under our names.

    wqkv holds each group's query heads, then its key head and its value head: q q k v, q q k v, ...
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    state, fused = {}, (heads + 2 * kv_heads) * config.head_dim
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        if "attention.wqkv" in name:
            if tensor.shape != (fused, config.hidden_size):
                raise UserError(f"{name} has shape {tuple(tensor.shape)} in the weights, but "
                                f"{(fused, config.hidden_size)} according to config.json; use a "
                                "config.json that belongs to the weights")
            groups = tensor.view(kv_heads, -1, config.head_dim, config.hidden_size)
            q, k, v = groups[:, :-2], groups[:, -2], groups[:, -1]      # groups: (K, H/K + 2, d, D)
            for part, rows in (("q", q), ("k", k), ("v", v)):
                ours = name.replace("attention.wqkv", f"self_attn.{part}_proj")
                state[ours] = rows.reshape(-1, config.hidden_size)
        elif "rotary_emb" not in name:      # old checkpoints store these tables; we compute them
            state[name] = tensor
    return state


class InternLM2Tokenizer:
    """Encodes chats. Text goes through sentencepiece; special tokens are inserted by their ids.

    So a text that spells out a special token stays text.
    """

    def __init__(self, folder, saved):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise UserError(f"{folder}: InternLM2's tokenizer needs the library sentencepiece; "
                            "run pip install sentencepiece") from None
        if not (folder / "tokenizer.model").is_file():
            raise UserError(f"{folder}: tokenizer.model is missing; copy it next to config.json")
        with explained(folder / "tokenizer.model", "not a sentencepiece model",
                       "download it again"):
            self.pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        configured = {"<s>": saved.get("bos_token_id"), "<|reward|>": saved.get("reward_token_id")}
        self.special = self.special_ids(folder) | {
            token: index for token, index in configured.items() if index is not None}
        vocab_size = saved["vocab_size"]
        if wrong := [token for token, index in self.special.items()
                     if not (type(index) is int and 0 <= index < vocab_size)]:
            raise UserError(f"{folder}: no valid id is known for {wrong[0]}; copy "
                            "tokenizer_config.json next to config.json")

    def special_ids(self, folder):
        """The ids in tokenizer_config.json, else in the vocabulary, else as published."""
        file, ids = folder / "tokenizer_config.json", {}
        if file.is_file():
            with explained(file, "it does not list its added tokens", "download it again"):
                added = read_json(file).get("added_tokens_decoder", {})
                ids = {token["content"]: int(index) for index, token in added.items()}
        pieces = {token: self.pieces.piece_to_id(token) for token in SPECIAL}
        known = {token: index for token, index in pieces.items() if index != self.pieces.unk_id()}
        return {token: ids.get(token, known.get(token, published))
                for token, published in SPECIAL.items()}

    def apply_chat_template(self, chats, **options):
        """The ids of each chat, each ending in the reward token."""
        return [self.chat_ids(chat) for chat in chats]

    def chat_ids(self, chat):
        ids = [self.special["<s>"]]
        for turn in chat:
            text = self.pieces.encode(f"{turn['role']}\n{turn['content']}")
            ids += [self.special["<|im_start|>"], *text, self.special["<|im_end|>"],
                    *self.pieces.encode("\n")]
        return ids + [self.special["<|reward|>"]]
