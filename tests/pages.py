"""The pages, and what they consist of: blocks of code, commands, tables, links."""
import re
import shlex

from support import ROOT

PLACES = ["README*.md", ".github/CONTRIBUTING.md",
          *(f"{room}/{language}*.md" for room in ("docs", "lab") for language in ("", "zh/"))]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
         for place in PLACES for path in sorted(ROOT.glob(place))}
CHINESE = {page: text for page, text in PAGES.items() if page == "README_zh.md" or "/zh/" in page}
ENGLISH = {page: text for page, text in PAGES.items() if page not in CHINESE}


def blocks(text):
    """The fenced blocks of code: [(language, what stands in it)]."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text):
    """What stands outside of fenced blocks; a list or a table is one paragraph."""
    return re.split(r"\n\s*\n", without_blocks(text))


def inline(text):
    """The pieces of code within sentences and tables."""
    return [" ".join(code.split()) for part in paragraphs(text)
            for code in re.findall(r"`([^`]+)`", part)]


def tables(text):
    """The tables: rows of cells, without the two lines of the head."""
    return [[[cell.strip(" *") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
             for line in part.strip().splitlines()[2:]]
            for part in paragraphs(text) if part.lstrip().startswith("|")]


def links(text):
    """[("!" for a picture, its text, where it leads)]."""
    without_code = re.sub(r"`[^`]+`", "code", without_blocks(text))
    return re.findall(r"(!?)\[([^\[\]]*)\]\(([^()\s]+)\)", without_code)


def commands(script):
    """The commands of a shell script, as words, without `...`; shell variables stay as they are."""
    found = []
    for line in script.replace("\\\n", "").splitlines():
        words = []
        for word in shlex.split(line, comments=True) + [";"]:
            operator = re.fullmatch(r"[;&|]+|do|done|\.\.\.", word)
            if not operator and (words or not re.match(r"\w+=", word)):
                words.append(word.rstrip(";"))
            if word[-1] in ";&|" and words:
                if words[0] not in ("for", ""):
                    found.append(words)
                words = []
    return found


def commands_of(text):
    """Those in blocks, and those in sentences that begin with python or torchrun."""
    scripts = [script for language, script in blocks(text) if language == "bash"]
    scripts += [code for code in inline(text) if re.match(r"(python3?|torchrun) ", code)]
    return commands("\n".join(scripts))


def floats(text):
    return [float(x) for x in re.findall(r"-?\d+\.?\d*(?:e-\d+)?", text)]
