"""Extracts the final answers from completions and from gold answers, and compares them.

    extract_answer(reply)       returns the text of the reply's answer, or "" if there is none
    read(text)                  returns the number and its unit, or the words, in a text
    same_answer(given, gold)    returns True, False, or two expressions for math-verify to compare

A number may be written in any usual way: `1,234`, `.5`, `\\frac12`, `2 2/3`, `1e6` or `50%`.
An expression to be computed, such as `2^5`, `3-5` or `84/2`, is not a number. If the gold answer is
a number, only a number can equal it. Otherwise, repeating the question would count as right.
"""
import functools
import re
import unicodedata
from fractions import Fraction

from errors import UserError

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
IN_BRACES = r"[^{}]*"
for _ in range(8):      # nested braces, but no box inside a box
    IN_BRACES = rf"(?:(?!\\f?box)[^{{}}]|\{{{IN_BRACES}\}})*+"
BOX = re.compile(rf"\\f?box(?:ed)?\s*\{{({IN_BRACES})\}}|\\boxed\s*([^\s{{}}$]*[^\s{{}}$.,])")
BESIDE = re.compile(r"(?:[\s$,;&]|\\q?quad|\\[()]|\\text\{\s*and\s*\}|and)*")     # between boxes
LONGEST = 4000          # characters of an answer; longer ones are only compared as text

# What counts as a number in a text that in_one_line has rewritten.
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
TIMES_10 = re.compile(r"(?<=[\d.])\s*(?:\\times|\\cdot|[×·x*])\s*10\s*\^\s*(\{)?([-+]?\d+)(?(1)\})")
DIGITS = r"(?: \d{1,3} (?:,\d{3})+ (?!\d) | \d{1,3} (?:\ \d{3})+ (?!\d) | \d+ )"
DECIMAL = rf"(?: {DIGITS} (?:\.\d*)? | \.\d+ )"
MONEY = r"(?: \\?\$ | [€£¥₹] )"
NUMERAL = rf"""(?: (?P<money> {MONEY}) \s* )? (?P<sign> [-+]\s?)? (?P<money2> {MONEY} )?
    (?: (?: (?P<whole> \d+) \s+ )? (?P<over> -?{DECIMAL}) \s? / \s? (?P<under> {DECIMAL})
      | (?P<decimal> {DECIMAL}) (?: [eE] (?P<exponent> [-+]?\d{{1,3}}) )? )"""
# A unit follows a space, is in \text{}, is a sign such as %, or can't be a product of variables.
SIGN = rf"\\?% | {MONEY} | (?: \^?\s*\{{?\\circ\}}? | ° ) \s*[CF]?"
CHINESE = r"""(?:平方|立方)?(?:厘米|毫米|千米|公里|米) | 千克 | 公斤 | 毫升 | 小时 | 分钟
    | [元角个名人只头岁天年月日周本张块件支枝条位次度页棵颗箱袋瓶辆艘座户组双套份克斤吨升秒]"""
NO_UNIT = r"(?:or|and|not|to|st|nd|rd|th|pi|sqrt|mod|hundred|thousand|[mbtr]+illion|dozen)\b"
WORD = rf"(?!{NO_UNIT})[A-Za-z]"
UNIT = rf"""(?P<unit> \s* (?: {SIGN} | {CHINESE} )
    | (?: [\s/]* \\(?:text|math)[a-z]* \s* \{{ (?!\s*{NO_UNIT}) [^{{}}\d]+ \}}
          (?: \^\{{?-?\d\}}? )? )+
    | (?: \s+ | (?![abcijknpqrstuvwxyz]+\b) ) {WORD}[A-Za-z]+ (?: [\s/-]+ {WORD}[A-Za-z]* ){{0,3}}
      (?: \^\{{?-?\d\}}? )? )"""
NUMBER = re.compile(rf"{NUMERAL} {UNIT}?", re.VERBOSE)

# A number within a bare reply.
IN_A_TEXT = re.compile(
    rf"(?<![\d.,]) (?![-+]\s) {NUMERAL} (?: \s? (?:{SIGN}|[元个]) )?", re.VERBOSE)
# A number is part of something larger if one of these is next to it. Chinese text has no blanks.
NOT_AFTER = re.compile(r"""(?: [^\W\u3400-\u9fff] | [)\]}] | [\w\\][(\[]        # x2, )2, f(2
    | [-_^/*+×÷·<>≤≥≠±|] [\ {]* | \\(?!text|math)[a-zA-Z]+ [\ {]*           # 5 - 2, \\sqrt{2
    | \d \s* (?: [,;:x] | \b(?:or|and|to)\b ) \s* | \b not \s* | 第 | 分之     # 1, 2
    | [(\[] [^()\[\]A-Za-z]* [^()\[\]A-Za-z\s] [^()\[\]A-Za-z]* )$""", re.VERBOSE)     # (1, 2
SIGN_NOT_AFTER = re.compile(r"(?:\d|[)}\]]|(?<![\w'’])[b-zB-HJ-Z])\s*$")      # 5 -2, x -2
NOT_BEFORE = re.compile(r"""[^\W\u3400-\u9fff] | [(\[] | [万亿千百十] | 分之 | [.,:] \d | !
    | [\ }]* (?: [_^/*+×÷·=<>≤≥≠±|] | \\(?!text|math) | - \s* [\w(\\] )
    | \s* (?:hundred|thousand|[mbtr]+illion|dozen)\b""", re.VERBOSE)
TEXT = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}")
GROUP = re.compile(rf"^(?:\\(?:text|math|bold)[a-z]*\s*)?\{{({IN_BRACES})\}}$")
CHOICE = re.compile(r"^\(?([A-Z])\)?$")
# Words, dates, versions and times are compared letter by letter, because they are not arithmetic.
WORDS = re.compile(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*|\d+(?:[-/.]\d+){2,}|\d+(?::\d+)+")


def extract_answer(reply):
    """Returns the first of these that exists, or "" if none does:

    - the last answer block after the thinking, or the last box in it if it has one;
    - the last box after the thinking: \\boxed{...}, \\fbox{...} or \\boxed 2;
    - in a reply without tags, the line after the last ####, or else the last number.
    """
    block = answer_block(reply)
    in_box = boxed(after_thinking(reply) if block is None else block)
    if in_box is not None:
        return in_box
    if any(tag in reply for tag in TAGS):
        return block or ""
    _, hashes, rest = reply.rpartition("####")
    return rest.strip().partition("\n")[0] if hashes else last_number(reply[-LONGEST:])


def answer_block(reply):
    """Returns the text of the last <answer> block after the thinking, or None if there is none."""
    closed = after_thinking(reply).split("</answer>")[:-1]
    blocks = [part.partition("<answer>")[2] for part in closed if "<answer>" in part]
    return blocks[-1].strip() if blocks else None


def after_thinking(reply):
    """Returns the part of a reply after its thinking. If <think> isn't closed, this part is ""."""
    thought, end, rest = reply.rpartition("</think>")
    return rest if end or "<think>" not in rest else ""


def boxed(text, default=None):
    """Returns the content of the last \\boxed{}, or `default`. Joins adjacent boxes with commas."""
    found, end = [], 0
    for box in BOX.finditer(text):
        if not BESIDE.fullmatch(text, end, box.start()):
            found = []
        found.append((box[1] or box[2] or "").strip())
        end = box.end()
    return ", ".join(dict.fromkeys(found)) if found else default


def last_number(text):
    """Returns the last number in a text, or "" if the number may be part of a larger expression."""
    text = in_one_line(plain(text))
    numbers = [*IN_A_TEXT.finditer(text)]
    if not numbers:
        return ""
    found = numbers[-1]
    before = text[max(0, found.start() - 200):found.start()]
    if (NOT_AFTER.search(before) or NOT_BEFORE.match(text, found.end())
            or found["sign"] and SIGN_NOT_AFTER.search(before)):
        return ""
    return found[0]


@functools.lru_cache(4096)      # all completions of a group have the same gold answer
def read(text):
    """Returns (number, unit, words): a Fraction or None, the unit or "", and the bare text."""
    if len(text) > LONGEST:
        return None, "", text.strip()
    text = unwrapped(plain(text))
    found = NUMBER.fullmatch(in_one_line(text))
    number = value_of(found) if found else None
    words = CHOICE.sub(r"\1", " ".join(TEXT.sub(r"\1", text).split()))
    return number, "" if number is None else unit_of(found), words


def plain(text):
    """Converts digits, minus signs and spaces to ASCII, and removes math and bold delimiters."""
    text = re.sub("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)", r"^{\1}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)            # NFKC would turn 2½ into 21/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = re.sub("[\u2010-\u2015\u2212]", "-", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]|\\!\s*", "", text)
    text = re.sub(r"\\[,;: ]|~", " ", text).replace("{,}", ",")
    text = re.sub(r"(?<!\\)(\$\$?)([^$]*)(?<!\\)\1", r"\2", text)
    return re.sub(r"(?<![\w)*])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?![\w(*])", r"\1", text)


def in_one_line(text):
    """Rewrites \\frac{1}{2} as 1/2, 2\\frac12 as 2 1/2, and 1 \\times 10^6 as 1e6."""
    text = re.sub(r"(?<=\d)(?=\\[dtc]?frac)", " ", text)
    text = FRACTION.sub(r"\1\2/\3\4 ", text)
    return TIMES_10.sub(r"e\2", text).strip()


def unwrapped(text):
    """Removes outer spaces, a final period, a leading `x =`, and \\text{} around the whole text."""
    before = None
    while text != before:
        before, text = text, text.strip("` \n\t")
        text = re.sub(r"(?<!\.\.)[.。]$", "", text)
        text = re.sub(r"^(?:[A-Za-z]|\\[a-z]+)?(?:_\w|_\{\w*\})?\s*=(?=[^=]*$)", "", text)
        text = GROUP.sub(r"\1", text)
    return text


def value_of(found):
    """Returns the value of a NUMBER match, or None for a division to compute, such as `84/2`."""
    over, under, value, exponent = (
        Fraction(re.sub(r"[, ]", "", found[name] or "0"))
        for name in ("over", "under", "decimal", "exponent"))
    if found["over"]:
        if under == 0 or (over / under).denominator == 1 or found["whole"] and not 0 < over < under:
            return None
        value = int(found["whole"] or 0) + over / under
    value *= Fraction(10) ** exponent
    return -value if "-" in (found["sign"] or "") else value


def unit_of(found):
    unit = "".join(found[name] or "" for name in ("money", "money2", "unit"))
    unit = re.sub(r"(?:\^?\s*\{?\\circ\}?|°)\s*", "°", TEXT.sub(r"\1", unit))
    unit = re.sub(r"\b(?:pct|per\s?cent(?:age)?)\b", "%", unit)
    return " ".join(re.sub(r"[\\{}]", "", unit).split())


def gold_text(gold):
    """Returns the gold answer alone: the text after ####, the content of a box, or all of it."""
    _, hashes, text = str(gold).rpartition("####")
    text = text.strip().partition("\n")[0] if hashes else text
    text = boxed(text, text)
    if not text.strip():
        raise UserError("the column answer is empty; add the gold answer, or leave the field out")
    return text


def kind_of(gold):
    """Returns the kind of a gold answer: "number", "words" or "expression"."""
    number, _, words = read(gold_text(gold[0] if isinstance(gold, list) else gold))
    if number is not None:
        return "number"
    return "words" if WORDS.fullmatch(words) else "expression"


def same_answer(given, gold):
    """Returns True, False, or a pair of expressions that math-verify has to compare."""
    number, unit, words = read(gold_text(gold))
    given_number, given_unit, given_words = read(given)
    if number is not None:
        return number == given_number and len({unit, given_unit} - {""}) < 2
    if words == given_words or not given_words or kind_of(gold) == "words":
        return words == given_words
    sides = [words, given_words]
    pair, other = sorted(sides)     # "(" sorts first
    if pair[:1] == "(" and other[:1] == "\\" and other.endswith("\\}"):
        return False                # math-verify equates the pair (1, 2) with the set {1, 2}
    if pair[:1] == "(" and "," in other and other[0] not in "([\\":
        sides[sides.index(other)] = f"({other})"        # it also ignores the order of 1, 3
    return tuple(sides)
