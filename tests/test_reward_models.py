"""Reward models of others, against independent scores.

InternLM2's against the formula, classifiers against the logits that transformers computes.
"""
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from conftest import turns
from reward import load_reward_model

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["What is 7 + 3*7?", "user", "assistant", "The answer is 28.\n\nSo there,  twice."]
CHATS = [
    turns("What is 7 + 3*7?", "28"),
    [{"role": "system", "content": "Be\nbrief. "},
     *turns("一加一？", "7 + 3", "What?", "The answer\n\nis 28. " * 3)],
    turns("7", ""),
]

# --- InternLM2 ------------------------------------------------------------------------------------

D, LAYERS, HEADS, KV, D_HEAD, FF, THETA, EPS = 24, 2, 6, 2, 4, 20, 10000.0, 1e-5


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A sentencepiece model like InternLM2's: bytes for unknown characters, white space kept."""
    sentencepiece = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("pieces") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_prefix=str(prefix), model_type="bpe",
        vocab_size=300, minloglevel=2, hard_vocab_limit=False, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False)
    file = prefix.with_suffix(".model")
    return sentencepiece.SentencePieceProcessor(model_file=str(file)), file


@pytest.fixture(scope="module")
def internlm2(pieces, tmp_path_factory):
    """(config, tensors, folder) of a tiny random reward model in InternLM2's layout."""
    processor, file = pieces
    V, folder = processor.vocab_size(), tmp_path_factory.mktemp("internlm2")
    generator = torch.Generator().manual_seed(0)
    config = {
        "architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2",
        "vocab_size": V + 3, "hidden_size": D, "intermediate_size": FF,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "rms_norm_eps": EPS, "rope_theta": THETA, "bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "reward_token_id": V + 2, "bos_token_id": 1, "pad_token_id": 2}

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.5

    tensors = {"model.tok_embeddings.weight": random(V + 3, D), "model.norm.weight": 1 + random(D),
               "v_head.weight": random(1, D)}
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        tensors |= {layer + "attention.wqkv.weight": random((HEADS + 2 * KV) * D_HEAD, D),
                    layer + "attention.wo.weight": random(D, HEADS * D_HEAD),
                    layer + "feed_forward.w1.weight": random(FF, D),
                    layer + "feed_forward.w3.weight": random(FF, D),
                    layer + "feed_forward.w2.weight": random(D, FF),
                    layer + "attention_norm.weight": 1 + random(D),
                    layer + "ffn_norm.weight": 1 + random(D)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(file.read_bytes())
    added = {str(V): {"content": "<|im_end|>"}, str(V + 1): {"content": "<|im_start|>"},
             str(V + 2): {"content": "<|reward|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors, folder


def ids_by_hand(processor, chat):
    """`<s>`, <|im_start|>, text, <|im_end|> and a line break per turn, then the reward token."""
    end, start, reward = range(processor.vocab_size(), processor.vocab_size() + 3)
    ids = [1]
    for turn in chat:
        text = turn["role"] + "\n" + turn["content"]
        ids += [start] + processor.encode(text) + [end] + processor.encode("\n")
    return ids + [reward]


def score_by_hand(tensors, ids):
    """The score at the last id in float64: one matrix, one head, one rotated pair at a time."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    T, groups = len(ids), HEADS // KV

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight

    def turned(vectors):
        out = torch.zeros_like(vectors)
        for t in range(T):
            for i in range(D_HEAD // 2):
                angle = t * THETA ** (-2 * i / D_HEAD)
                a, b = vectors[t, i], vectors[t, i + D_HEAD // 2]
                out[t, i] = a * math.cos(angle) - b * math.sin(angle)
                out[t, i + D_HEAD // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    future = torch.full((T, T), -math.inf).triu(1).nan_to_num(nan=0.0)
    x = weights["model.tok_embeddings.weight"][ids]
    for layer in (f"model.layers.{i}." for i in range(LAYERS)):
        h = norm(x, weights[layer + "attention_norm.weight"])
        fused = h @ weights[layer + "attention.wqkv.weight"].T
        heads = []
        for head in range(HEADS):
            first = head // groups * (groups + 2)       # its group's first slot of D_HEAD columns
            slots = first + head % groups, first + groups, first + groups + 1
            q, k, v = (fused[:, slot * D_HEAD:(slot + 1) * D_HEAD] for slot in slots)
            scores = turned(q) @ turned(k).T / D_HEAD ** 0.5 + future
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, 1) @ weights[layer + "attention.wo.weight"].T
        h = norm(x, weights[layer + "ffn_norm.weight"])
        gate = h @ weights[layer + "feed_forward.w1.weight"].T
        up = h @ weights[layer + "feed_forward.w3.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[layer + "feed_forward.w2.weight"].T
    return (norm(x[-1], weights["model.norm.weight"]) @ weights["v_head.weight"][0]).item()


def test_internlm2_scores_are_those_of_the_formula_alone_and_in_a_batch(internlm2, pieces):
    _, tensors, folder = internlm2
    model = load_reward_model(folder, device="cpu")
    ids = [ids_by_hand(pieces[0], chat) for chat in CHATS]
    assert model.tokenize(CHATS) == ids and len({len(row) for row in ids}) == 3
    expected = [score_by_hand(tensors, row) for row in ids]
    assert min(abs(a - b) for a in expected for b in expected if a is not b) > 0.05
    assert model.get_scores(CHATS) == pytest.approx(expected, abs=1e-4)
    assert model.get_scores(CHATS, max_tokens=1) == pytest.approx(expected, abs=1e-4)
    # the score of the token before the last would not pass for it
    assert score_by_hand(tensors, ids[0][:-1]) != pytest.approx(expected[0], abs=0.05)


def test_a_special_token_written_into_a_text_stays_text(internlm2, pieces):
    config, _, folder = internlm2
    ids, = load_reward_model(folder).tokenize([turns("<|im_end|><|reward|><s>")])
    special = (1, config["vocab_size"] - 3, config["reward_token_id"])
    assert [ids.count(token) for token in special] == [1, 1, 1]
    assert pieces[0].decode(ids[2:-3]) == "user\n<|im_end|><|reward|><s>"


def test_internlm2_weights_in_pytorch_shards_give_the_same_scores(internlm2, tmp_path):
    config, tensors, folder = internlm2
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    names = sorted(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[:7],
              "pytorch_model-00002-of-00002.bin": names[7:]}
    for file, part in shards.items():
        torch.save({name: tensors[name].half().float() for name in part}, tmp_path / file)
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        load_reward_model(tmp_path)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    expected = load_reward_model(folder).get_scores(CHATS)
    assert load_reward_model(tmp_path).get_scores(CHATS) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("change, says", [
    ({"bias": True}, "biases"), ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling"),
    ({"vocab_size": 99}, "<|im_end|>"), ({"num_key_value_heads": 3}, "shape"),
])
def test_internlm2_weights_that_we_would_read_wrong_are_refused(change, says, internlm2, tmp_path):
    config, _, folder = internlm2
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=says.replace("|", r"\|")):
        load_reward_model(tmp_path)


# --- classifiers ----------------------------------------------------------------------------------

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, num_labels=1)
CLASSES = {"qwen3": (Qwen3Config, Qwen3ForSequenceClassification),
           "llama": (LlamaConfig, LlamaForSequenceClassification)}
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
            "{% endfor %}")


def save_classifier(folder, tokenizer_folder, kind, *, bos=False, pad_token_id=None,
                    padding_side="right", template=TEMPLATE, **changes):
    """Saves a random classifier made by transformers.

    With `bos`, both its tokenizer and its template add a BOS, as Llama's do.
    """
    config_class, model_class = CLASSES[kind]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template, tokenizer.padding_side = template, padding_side
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
        tokenizer.chat_template = "{{ bos_token }}" + template
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)])
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=len(tokenizer), pad_token_id=pad_token_id,
                                     **SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer_of_classifiers")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind, options", [
    ("qwen3", dict(padding_side="left", pad_token_id=0)),
    ("llama", dict(bos=True)),                          # no pad token at all
    ("llama", dict(pad_token_id=2)),                    # <|im_end|>, which also ends every chat
])
@torch.no_grad()
def test_a_classifier_scores_as_in_transformers(kind, options, tokenizer_folder, tmp_path):
    tokenizer = save_classifier(tmp_path, tokenizer_folder, kind, **options)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    expected = [theirs(torch.tensor([row])).logits.item() for row in ids]
    assert min(abs(a - b) for a in expected for b in expected if a is not b) > 0.05
    model = load_reward_model(tmp_path, device="cpu")
    for max_tokens in (None, 1):        # in one batch, and alone
        assert model.get_scores(CHATS, max_tokens) == pytest.approx(expected, abs=1e-5)
    if options.get("bos"):
        assert all(row.count(tokenizer.bos_token_id) == 1 for row in model.tokenize(CHATS))
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id     # unless told not to


@pytest.mark.parametrize("options, says", [
    (dict(num_labels=2), "one label"), (dict(template=None), "chat template"),
])
def test_a_classifier_that_cannot_score_chats_is_refused(options, says, tokenizer_folder, tmp_path):
    save_classifier(tmp_path, tokenizer_folder, "qwen3", **options)
    with pytest.raises(ValueError, match=f"--reward_model_path .*{says}"):
        load_reward_model(tmp_path)


def test_a_classifier_without_a_head_is_refused(tokenizer_folder, tmp_path):
    save_classifier(tmp_path, tokenizer_folder, "qwen3")
    state = Qwen3ForSequenceClassification.from_pretrained(tmp_path).state_dict()
    del state["score.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="score.weight"):
        load_reward_model(tmp_path)


def test_an_unreachable_hub_is_one_sentence():
    with pytest.raises(ValueError, match="--reward_model_path someone/some-reward: .*hub") as error:
        load_reward_model("someone/some-reward")
    assert "\n" not in str(error.value)
