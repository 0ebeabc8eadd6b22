"""InternLM2's reward models (internlm2-1_8b-reward and larger), loaded without their remote code.

The network is Llama with other tensor names, and the query, key and value matrices of each group of
heads are fused into one. It was trained to give its score at a special token, <|reward|>, at the
end of the chat:

    <s><|im_start|>user\\n...<|im_end|>\\n<|im_start|>assistant\\n...<|im_end|>\\n<|reward|>
"""
import itertools

from model import MiniMindConfig
from model.storage.files import explained, read_json
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
        sizes = {name: saved[name] for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        return MiniMindConfig(
            **sizes, num_attention_heads=heads,
            num_key_value_heads=saved.get("num_key_value_heads") or heads,
            head_dim=saved["hidden_size"] // heads, rms_norm_eps=saved.get("rms_norm_eps", 1e-6),
            rope_theta=saved.get("rope_theta", 10000.0), tie_word_embeddings=False, qk_norm=False,
            qkv_bias=False)


def internlm2_state(tensors, config):
    """Their tensors under our names.

    wqkv holds each group's query heads, then its key head and its value head: q q k v, q q k v, ...
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    state, shape = {}, ((heads + 2 * kv_heads) * config.head_dim, config.hidden_size)
    for name, tensor in tensors.items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        if "attention.wqkv" in name:
            if tensor.shape != shape:
                raise UserError(f"{name} has shape {tuple(tensor.shape)} in the weights, but "
                                f"{shape} according to config.json; use a config.json that belongs "
                                "to the weights")
            groups = tensor.view(kv_heads, -1, config.head_dim, config.hidden_size)
            parts = {"q": groups[:, :-2], "k": groups[:, -2], "v": groups[:, -1]}
            for part, rows in parts.items():                # groups: (K, H/K + 2, d, D)
                ours = name.replace("attention.wqkv", f"self_attn.{part}_proj")
                state[ours] = rows.reshape(-1, config.hidden_size)
        elif "rotary_emb" not in name:      # old checkpoints store these tables; we compute them
            state[name] = tensor
    return state


class InternLM2Tokenizer:
    """Encodes chats. Text goes through sentencepiece; special tokens are inserted by their ids.

    So a text that spells out a special token stays text.
    """
    added_tokens_decoder = {}       # of a tokenizer in transformers: what a text may not spell

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
        ids = [self.pieces.piece_to_id(token) for token in SPECIAL]
        self.special = SPECIAL | {token: index for token, index in zip(SPECIAL, ids)
                                  if index != self.pieces.unk_id()}
        file = folder / "tokenizer_config.json"
        if file.is_file():
            with explained(file, "it does not list its added tokens", "download it again"):
                added = read_json(file).get("added_tokens_decoder", {})
                self.special |= {token["content"]: int(index) for index, token in added.items()}
        for token, name in (("<s>", "bos_token_id"), ("<|reward|>", "reward_token_id")):
            if saved.get(name) is not None:
                self.special[token] = saved[name]
        for token in SPECIAL:
            index = self.special[token]
            if type(index) is not int or not 0 <= index < saved["vocab_size"]:
                raise UserError(f"{folder}: no valid id is known for {token}; copy "
                                "tokenizer_config.json next to config.json")

    def apply_chat_template(self, chats, **options):
        """The ids of each chat, each ending in the reward token."""
        special, encode = self.special, self.pieces.encode

        def ids_of(turn):
            return [special["<|im_start|>"], *encode(f"{turn['role']}\n{turn['content']}"),
                    special["<|im_end|>"], *encode("\n")]

        return [[special["<s>"], *itertools.chain.from_iterable(map(ids_of, chat)),
                 special["<|reward|>"]] for chat in chats]
