"""The reward of a sentence with given words (dataset/sentences.py)."""
import re
from collections import Counter

# Words that a sentence may well have more than once.
SMALL = set("""a about after all an and are as at back be because been before but by can could did
    do down each for from had has have he her him his i if in into is it its just me my no not of
    off on one or other our out over she so some than that the their them then there they this
    through to too under until up us very was we were what when where which while who will with
    would you your""".split())
PLURALS = {"child": "children", "fisherman": "fishermen", "mouse": "mice"}
LISTED = re.compile(r"(?:\w+[,;:/] *){3}")       # an enumeration, not a sentence
SENTENCE = re.compile(r"[^.!?;:\n]+[.!?][\"'”’]?")
TITLE = re.compile(r"\b(Mrs?|Ms|Dr|St)\.")


def sentence_reward(prompts, completions, words=None, **columns):
    """The share of the column `words` that the reply uses, times how much of a sentence it is.

        reward = share * (0.5 + 0.25 [it is one sentence] + 0.25 [it has 6 to 20 words])

    0 for what is no sentence of its own: three words in a row with a comma or the like after each;
    four words in a row that are the prompt's; a word of `words` in two forms, or any word twice,
    but for small ones like `the`, which may occur three times. A word counts in any form that
    `forms` makes of it. None for rows without the column. A rule knows no grammar: nonsense with
    the right words passes.
    """
    return [None if asked is None else judge(completion, prompt, asked)
            for completion, prompt, asked in zip(completions, prompts,
                                                 words or [None] * len(completions))]


def judge(text, prompt, asked):
    text = TITLE.sub(r"\1", text.strip())
    found = words_of(text)
    used = [sum(word in forms(one.lower()) for word in found) for one in asked]     # how often
    repeated = max(used) > 1 or any(
        count > (3 if word in SMALL else 1) for word, count in Counter(found).items())
    if repeated or fours(found) & fours(words_of(prompt)) or LISTED.search(text):
        return 0.0
    is_one, fits = SENTENCE.fullmatch(text) is not None, 6 <= len(found) <= 20
    return sum(used) / len(asked) * (0.5 + 0.25 * is_one + 0.25 * fits)


def words_of(text):
    """Its words and numbers in lower case, without a possessive 's."""
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower().replace("’", "'"))
    return [word.removesuffix("'s") for word in words]


def fours(words):
    """The runs of four words."""
    return set(zip(words, words[1:], words[2:], words[3:]))


def forms(word):
    """The word with its regular endings: stopped, dancing, happier, cities; not sing, sang."""
    stem, endings = word + word[-1], ("ed", "ing", "er", "est")
    if word.endswith("e"):
        stem = word[:-1]
    elif word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        stem, endings = word[:-1] + "i", ("es", "ed", "er", "est", "ly")
    return ({word + ending for ending in ("", "s", "es", "ed", "ing", "er", "est", "ly")}
            | {stem + ending for ending in endings} | {PLURALS.get(word, word)})
