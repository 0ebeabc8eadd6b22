"""The reward of a sentence with given words (dataset/sentences.py)."""
import re

ENDINGS = ("", "s", "es", "d", "ed", "ing", "r", "er", "st", "est", "ly")
# Words that a sentence may well have twice.
SMALL = set("""a an and are as at be but by for from had has have he her his i if in into is it its
    me my of on or our out over she so than that the their them then they this to under up was we
    were when where which while who will with you your""".split())
LISTED = re.compile(r"(?:\w+, *){3}")        # an enumeration, not a sentence


def sentence_reward(prompts, completions, words=None, **columns):
    """The share of the column `words` that the reply uses, times how much of a sentence it is.

        reward = share * (0.5 + 0.25 [it is one sentence] + 0.25 [it has 6 to 20 words])

    0 for what is no sentence of its own: three words in a row with a comma after each, four words
    in a row that are the prompt's, or the same word twice, but for small ones like `the`. A word
    counts in any form that `forms` makes of it. None for rows without the column.
    """
    return [None if asked is None else judge(completion, prompt, asked)
            for completion, prompt, asked in zip(completions, prompts,
                                                 words or [None] * len(completions))]


def judge(text, prompt, asked):
    text = text.strip()
    found = words_of(text)
    large = [word for word in found if word not in SMALL]
    repeated, copied = len(set(large)) < len(large), fours(found) & fours(words_of(prompt))
    if repeated or copied or LISTED.search(text):
        return 0.0
    used = sum(not forms(word).isdisjoint(found) for word in asked)
    is_one = re.fullmatch(r"[^.!?\n]+[.!?][\"']?", text) is not None
    return used / len(asked) * (0.5 + 0.25 * is_one + 0.25 * (6 <= len(found) <= 20))


def words_of(text):
    return re.findall(r"[a-z]+(?:['-][a-z]+)*", text.lower())


def fours(words):
    """The runs of four words."""
    return set(zip(words, words[1:], words[2:], words[3:]))


def forms(word):
    """The word with each ending; also without its e, with i for its y, with its last letter twice.

    So of `stop`, stopped; of `dance`, dancing; of `happy`, happier; but not of `sing`, sang.
    """
    stems = {word, word + word[-1]}
    if word[-1] in "ey":
        stems.add(word[:-1] + "i" * (word[-1] == "y"))
    return {stem + ending for stem in stems for ending in ENDINGS}
