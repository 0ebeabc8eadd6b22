"""Sentences: "Write one sentence of at most 20 words with the words cold, cat and jump."

A task for a chat model that already writes English, such as SmolLM2 (lab/tasks/from_gguf.py).
`python -m lab.tasks.sentences` writes the two files that we ship, sentences_train.jsonl and
sentences_heldout.jsonl, with lines of {"prompt", "words"}. They share no word, though some roots
(`paint`, `painter`). Each prompt asks for a noun, a verb and an adjective, in any order. All verbs
are regular, so that the judge (reward/functions.py) knows each of their forms by a rule.
"""
import random
from pathlib import Path

from dataset.jsonl import write_jsonl
from errors import Parser, user_errors

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


@user_errors("lab.tasks.sentences")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.sentences", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("dataset"), help="the folder")
    args = parser.parse_args(argv)
    for name, count in (("train", 2000), ("heldout", 300)):
        rng = random.Random(f"0 {name}")
        path = args.out_dir / f"sentences_{name}.jsonl"
        rows = prompts(rng, count, heldout=name == "heldout")
        print(f"wrote {write_jsonl(path, rows)} lines to {path}")


if __name__ == "__main__":
    main()
