"""Sentences: "Write one sentence of at most 20 words with the words cold, cat and jump."

A task for a chat model that already writes English, such as SmolLM2 (lab/tasks/from_gguf.py).
`python -m lab.tasks.sentences` writes the two files that we ship, sentences_train.jsonl and
sentences_heldout.jsonl, with lines of {"prompt", "words"}. They share no word, though some roots
(`paint`, `painter`). Each prompt asks for a noun, a verb and an adjective, in any order. All verbs
are regular, so that the reward knows each of their forms by a rule:

    --reward_funcs lab.tasks.sentences:sentence_reward
"""
import random
import re
from collections import Counter
from pathlib import Path

from dataset.jsonl import write_new
from errors import Parser, user_errors

from .countdown import check

# Every third of a list is held out.
NOUNS = """
    apple artist baker bell bicycle bird boat book bottle bread bridge brother bucket button cake
    camera candle captain carpet cat chair child church city cloud coat cousin cup dancer
    doctor dog door dragon driver engine farmer field fire fisherman flower forest friend garden
    girl glass grandmother guitar hammer hill horse hospital house island king kitchen
    ladder lake lamp letter library lion market mirror monkey mountain mouse neighbor newspaper
    nurse ocean orange painter piano pilot pirate pocket poet police queen rabbit river
    robot roof sailor school shoe singer sister soldier song spider stone storm story
    student table teacher tiger tower train tree umbrella village violin wagon window winter
    wizard""".split()
VERBS = """
    answer arrive ask bake borrow call carry chase clean climb close collect cook count cover cross
    dance deliver discover drop enjoy explore fix fold follow gather guard help hunt invite
    jump kick kiss knock laugh learn lift listen look love mix move need notice offer open
    order pack paint pick plant play polish pour promise pull push raise reach remember repair
    rescue return roll save share shout smile stay stop talk taste touch travel turn visit wait
    walk wander warn wash watch whisper wish wonder work worry yell""".split()
ADJECTIVES = """
    angry ancient big bitter blue bold brave bright broken brown busy calm careful cheap clever
    cold curious damp dark deep dirty dry eager early empty fancy fast flat fresh friendly
    funny gentle giant golden gray green happy hard heavy honest huge hungry icy kind large lazy
    little lonely long loud lucky narrow new nervous noisy old orderly pale patient plain polite
    poor proud purple quick quiet rare red rich rough round rusty sad sharp shiny short shy silent
    silver simple sleepy slow small smooth soft sour steep strange strong sunny sweet tall thin
    tired tiny warm weak wet white wild wise wooden yellow young""".split()


def prompts(rng, count, *, heldout):
    """`count` lines, no two with the same words."""
    kinds = []
    for words in (NOUNS, VERBS, ADJECTIVES):
        held_out = words[2::3]
        kinds.append(held_out if heldout else [word for word in words if word not in held_out])
    lines = {}
    while len(lines) < count:
        words = [rng.choice(kind) for kind in kinds]
        rng.shuffle(words)
        text = "Write one sentence of at most 20 words with the words {}, {} and {}."
        lines.setdefault(frozenset(words), {"prompt": text.format(*words), "words": words})
    return list(lines.values())


# --- the reward -----------------------------------------------------------------------------------

# Of the reward. SMALL: words that a sentence may well have more than once.
SMALL = set("""a about after all an and are as at back be because been before but by can could did
    do down each for from had has have he her him his i if in into is it its just me my no not of
    off on one or other our out over she so some than that the their them then there they this
    through to too under until up us very was we were what when where which while who will with
    would you your""".split())
PLURALS = {"child": "children", "fisherman": "fishermen", "mouse": "mice"}
LISTED = re.compile(r"\b(?:\w+[,;:/] *){3}")     # an enumeration, not a sentence
SENTENCE = re.compile(r"[^.!?;:\n]+[.!?][\"'”’]?")
TITLE = re.compile(r"\b(Mrs?|Ms|Dr|St)\.")


def sentence_reward(prompts, completions, words=None, own_words=None, **columns):
    """The share of the column `words` that the reply uses, times how much of a sentence it is.

        reward = share * (0.5 + 0.25 [it is one sentence] + 0.25 [it has 6 to 20 words])

    0 for what is no sentence of its own: three words in a row with a comma or the like after each;
    four words in a row that are the prompt's; a word of `words` in two forms, or any word twice,
    but for small ones like `the`, which may occur three times. A word counts in any form that
    `forms` makes of it. None for rows without the column. A rule knows no grammar: nonsense with
    the right words passes.
    """
    return [None if asked is None else judge_sentence(completion, prompt, asked)
            for completion, prompt, asked in zip(
                own_words or completions, prompts, words or [None] * len(completions))]


def judge_sentence(text, prompt, asked):
    check("words", asked, isinstance(asked, (list, tuple)) and asked and all(
        isinstance(word, str) and word for word in asked), "a list of words")
    text = TITLE.sub(r"\1", text.strip())
    found = words_of(text)
    counts = Counter(found)
    used = [sum(counts[form] for form in forms(one.lower())) for one in asked]      # how often
    repeated = max(used) > 1 or any(
        count > (3 if word in SMALL else 1) for word, count in counts.items())
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
    elif word.endswith("y"):
        stem, endings = word[:-1] + "i", ("es", "ed", "er", "est", "ly")
    return ({word + ending for ending in ("", "s", "es", "ed", "ing", "er", "est", "ly")}
            | {stem + ending for ending in endings} | {PLURALS.get(word, word)})


@user_errors("lab.tasks.sentences")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.sentences", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("dataset"), help="the folder")
    args = parser.parse_args(argv)
    for name, count in (("train", 2000), ("heldout", 300)):
        rng = random.Random(f"0 {name}")
        path = args.out_dir / f"sentences_{name}.jsonl"
        rows = prompts(rng, count, heldout=name == "heldout")
        print(f"wrote {write_new(path, rows)} lines to {path}")


if __name__ == "__main__":
    main()
