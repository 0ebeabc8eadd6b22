"""The tasks' rewards, tools, texts to imitate, and their tokenizer."""
import functools
import random
import time

import pytest

from errors import UserError
from lab.tasks import calculator, guess, sentences
from lab.tasks.countdown import countdown_reward
from lab.tasks.tokenizer import TAGS, train_tokenizer
from model import train_sft
from reward import load_reward_funcs
from support import POLICY, assert_refused, turns, write_files


def test_the_game_is_won_by_own_words_and_its_tool_compares():
    own = ["31 5 ", "1 2 3 4 5 6 7 ", "6 high\n7"]
    assert guess.guess_reward(["?"] * 3, own, own, secret=[5, 7, 7]) == [1.0, 0.0, 1.0]
    games = [["32 "], ["5 high\n", "4 "], ["63 ", "low\n", "x "]]
    assert guess.guess(games, secret=[5, 4, 9]) == ["high\n", "yes\n", "?\n"]


def test_the_games_to_imitate_are_true_and_nobody_learns_the_tools_words(tokenizer):
    rng, kinds = random.Random(0), {"random": 1, "bounded": 1, "halving": 1}
    chats = [row["conversations"] for row in guess.games(rng, kinds, 300)]
    encoded = train_sft.encode(chats[:20], tokenizer)
    for (_, reply), (_, labels) in zip(chats, encoded):
        own, last = "", 0
        for start, end in reply["forced"]:
            own, last = own + reply["content"][last:start], end
        assert tokenizer.decode([x for x in labels if x != -100]) == own + "<|im_end|>"
    lengths = set()
    for _, reply in chats:
        lines, secret = reply["content"].splitlines(), None
        numbers, answers = zip(*(line.split() for line in lines))
        lengths.add(len(lines))
        if answers[-1] == "yes":
            secret = int(numbers[-1])
            assert guess.guess([[f"{number} "] for number in numbers], [secret] * len(numbers)) == [
                f"{answer}\n" for answer in answers]
        assert "yes" not in answers[:-1] and (secret or len(lines) == guess.MOST_GUESSES)
    assert lengths == {1, 2, 3, 4, 5, 6} and guess.PROMPT.endswith("1 to 63.")


def test_the_calculators_problems_have_right_answers_and_calls():
    rng = random.Random(0)
    for level in range(5):
        row = calculator.calculation(level, rng)
        call = row["prompt"].removeprefix("What is ").replace("?", "=")
        assert calculator.calculator([[call]]) == [f"{row['answer']}\n"]
        assert row["level"] == level + 1
        replies = [calculator.with_calculator(row, rng)["conversations"][1] for _ in range(20)]
        texts = {reply["content"] for reply in replies}
        assert texts == {f"{row['answer']}", f"{call}{row['answer']}\n{row['answer']}"}
        for reply in replies:
            for start, end in reply.get("forced", []):
                assert reply["content"][start:end] == f"{row['answer']}\n"


FILES = {"empty.jsonl": b"", "README": b"text", "full/config.json": b"{}",
         "chats.jsonl": b'{"prompt": "1+1", "answer": "2"}'}


@pytest.mark.parametrize("command, words", [
    ("tokenizer --data chats.jsonl --save new --vocab_size 7", "--vocab_size 263"),
    ("tokenizer --data chats.jsonl --save full", "--save full"),
    (f"pairs --sample {POLICY} --prompts chats.jsonl --save chats.jsonl", "chats.jsonl exists"),
    ("from_gguf _ --save new", "file empty"),
    *((f"{name} --out_dir README/new", "README/new")
      for name in ("arithmetic", "guess", "sentences"))])
def test_refused_commands_end_in_one_sentence_and_change_no_file(
        command, words, tmp_path):
    write_files(tmp_path, FILES)
    assert_refused(f"lab.tasks.{command}", words, tmp_path)


@pytest.mark.parametrize("name, columns, message", [
    ("countdown", {"nums": [["9", "8"]], "target": [1]}, r": .* nums must be .* has \['9', '8'\];"),
    ("countdown", {"nums": [[9]], "target": ["57"]}, ": the column target must be .* has '57'; m"),
    ("sentences", {"words": ["cat dog"]}, ": the column words must be a list of .* 'cat dog'"),
    ("sentences", {"words": [[]]}, ": the column words")])
def test_a_column_that_is_wrong_is_one_sentence(name, columns, message):
    function = f"{name.removesuffix('s')}_reward"
    reward, = load_reward_funcs([f"lab.tasks.{name}:{function}"])
    with pytest.raises(UserError, match=f"^reward function {function}{message}"):
        reward(prompts=["p"], completions=["a"], own_words=["a"], messages=[[]], **columns)


@pytest.mark.parametrize("text", ["7" * 50_000 + "x", "7" * 50_000, "<answer>" * 50_000, "+".join(
    f"1/{7**60 + i}" for i in range(400))])
def test_a_long_reply_is_read_in_linear_time(text):
    began = time.process_time()
    countdown_reward([""], [text], nums=[[9]], target=[57])
    guess.guess([[text]], secret=[5])
    calculator.calculator([[text + "="]])
    sentences.sentence_reward([""], [text], words=[["cat"]])
    assert time.process_time() - began < 1


def test_tokenizer_has_512_tokens_at_most_unless_asked_for_more():
    texts = ["a" * n + "bcd"[n % 3] * n for n in range(1, 200)]
    assert [len(train_tokenizer(texts, *size)) for size in ([], [300])] == [512, 300]


@pytest.mark.parametrize("which", ["trained", "shipped"])
def test_tokenizer_keeps_any_text_its_tags_and_digits_and_opens_a_turn_when_asked(
        which, tokenizer):
    if which == "trained":
        tokenizer = train_tokenizer(["<think>\n7+3=10\n</think>", "What is 7 + 3*7?"])
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    for text in ("小明有3个苹果，又买了12个。", "🙂👨‍👩‍👧 naïve é", "a\tb\r\n\n  c ",
                 " leading , and n't . spaces ", "7 + 3*7=28", ""):
        assert tokenizer.decode(encode(text)) == text
    assert [tokenizer.decode([i]) for i in encode("1234+56*78=90")] == list("1234+56*78=90")
    assert [len(encode(tag)) for tag in TAGS] == [1, 1, 1, 1]
    text = "<think>\n27*6=162\n</think>\n<answer>\n162\n</answer>"
    ids = encode(text) + [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    closed = tokenizer.apply_chat_template(turns("1+1?"), tokenize=False)
    assert closed == "<|im_start|>user\n1+1?<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns("1+1?"), tokenize=False,
                                         add_generation_prompt=True) == (
        closed + "<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert tokenizer.model_max_length == 2048
