"""Extracts the final answers from completions and from gold answers, and compares them.

    extract_answer(reply)       returns the text of the reply's answer, or "" if there is none
    read(text)                  returns the number and its unit, or the words, in a text
    same_answer(given, gold)    returns True, False, or two expressions for math-verify to compare

An answer is a number, mathematics, or text; docs/own_task.md gives the rule for each. An expression
to be computed, such as `2^5`, `3-5` or `84/2`, is not a number. If the gold answer is a number,
only a number can equal it. Otherwise, repeating the question would count as right.
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

# Spellings of one unit stand in one line; plurals in s and capital letters are the same spelling.
UNITS = {spelling: line.split()[0] for line in r"""
    mm millimeter millimetre 毫米; cm centimeter centimetre 厘米; m meter metre 米
    km kilometer kilometre 千米 公里; in inch inches 英寸; ft foot feet 英尺; yd yard; mi mile 英里
    mg milligram 毫克; g gram 克; kg kgs kilogram 千克 公斤; lb lbs pound 磅; oz ounce; ton 吨
    ml milliliter millilitre 毫升; l L liter litre 升; s sec second 秒; min minute 分钟
    h hr hrs hour 小时 时; day 天; week 周; month 月 个月; year yr yrs 年; mi/h mph; km/h kph kmh
    am a.m; pm p.m; % percent percentage pct; ° deg degree 度; C celsius 摄氏度; F fahrenheit
    $ dollar USD 美元; ¢ cent; € euro EUR 欧元; £ GBP; ¥ 元 块 圆 人民币 yuan RMB CNY 块钱 元钱
    ₹ rupee Rs INR; person people 人 个人; unit""".replace("\n", ";").split(";") if line.strip()
    for spelling in line.split()}
# A number with one of these words after it is another number, or none.
CHANGES = """half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth
    thousandth millionth billionth dozen score gross hundred thousand million billion trillion crore
    lakh mn bn squared cubed factorial minus plus below above negative""".split()
NO_UNITS = [*CHANGES, *"""and or not to of is times over under st nd rd th pi sqrt mod wrong incorrect
    false binary hex bc bce""".split()]
NO_UNIT = re.compile(r"(?i)\b(?:%s)s?\b|[万亿千百十半多余几不非是或和到至与加减乘除错负成折打下]|分之|以上" % "|".join(NO_UNITS))
MEASURE_WORD = re.compile("^[个名只头本张件支枝条位棵颗辆艘座匹朵]")     # they only count a noun

# What counts as a number in a text that in_one_line has rewritten.
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
TIMES_10 = re.compile(r"(?<=[\d.])\s*(?:\\times|\\cdot|[x*])\s*10\s*\^\s*(\{)?([-+]?\d+)(?(1)\})")
DIGITS = r"""(?: \d{1,3} (?:,\d{3})+ (?!\d) | \d{1,3} (?:\ \d{3})+ (?!\d)
    | \d{1,2} (?:,\d{2})+ ,\d{3} (?!\d) | \d+ )"""
DECIMAL = rf"(?: {DIGITS} (?:\.\d*)? | \.\d+ )"
MONEY = r"(?: (?:US)? \\?\$ | [€£¥₹] | Rs\.? )"
NUMERAL = rf"""(?P<open> \( )? (?: (?P<money> {MONEY}) \s* )? (?P<sign> [-+]\s?)?
    (?P<money2> {MONEY} )?
    (?: (?P<start> \d*\.\d* ) (?: \\(?:overline|bar|dot) \s* \{{? | \( ) (?P<again> \d+ ) [)}}]?
      | (?: (?P<whole> \d+) \s+ )? (?P<over> -?{DECIMAL}) \s? / \s? (?P<under> -?{DECIMAL})
      | (?P<decimal> {DECIMAL}) (?: [eE] (?P<exponent> [-+]?\d{{1,3}}) )? ) (?(open) \) )"""
NUMBER = re.compile(NUMERAL, re.VERBOSE)
KNOWN = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
KNOWN = rf"(?:{KNOWN}|\\[%$]|\^?\{{?\\circ\}}?) s? (?![A-Za-z])"
PER = r"\s*(?:/|\bper\b|每)\s*"

# A number within a bare reply.
IN_A_TEXT = re.compile(rf"(?<![\d.,]) (?![-+]\s) {NUMERAL} (?: \s? {KNOWN} (?: {PER} [^\W\d_]+ )? )?",
                       re.VERBOSE)
# A number is part of something larger if one of these is next to it. Chinese text has no blanks.
NOT_AFTER = re.compile(rf"""(?: [^\W\u3400-\u9fff] | [)\]}}] | [\w\\][(\[]        # x2, )2, f(2
    | [-_^/*+×÷·<>|] [\ {{]* | \\(?!text|math)[a-zA-Z]+ [\ {{]*              # 5 - 2, \sqrt{{2
    | \d \s* [^\W\d]* \s* (?: [,;:x~、到至和与或] | \b(?:or|and|to)\b ) \s*   # 1, 2 and 1 cm or 2
    | \d \s* {KNOWN} \s*                                            # 5 feet 3
    | (?: \b(?:not|than) | n['’]t ) \s* | 第 | 分之 | 零下 | 或者? | 也可能是? | [大小]于 | 超过 | [不非][是为等于]*
    | [(\[] [^()\[\]A-Za-z]* [^()\[\]A-Za-z\s] [^()\[\]A-Za-z]* )$""", re.VERBOSE)     # (1, 2
SIGN_NOT_AFTER = re.compile(r"(?:\d|[)}\]]|(?<![\w'’])[b-zB-HJ-Z])\s*$")      # 5 -2, x -2
NOT_BEFORE = re.compile(rf"""[^\W\u3400-\u9fff] | [(\[] | [万亿千百十半多余几成折不] | 个半 | 分之 | 以[上下]
    | [.,:] \d | ! | [\ }}]* (?: [_^/*+×÷·=<>|] | \\(?!text|math) | - \s* [\w(\\] )
    | \s* (?: (?:{'|'.join(CHANGES)}) s? | (?:is\s+)? (?:not|wrong|incorrect) )\b""", re.VERBOSE)

TEXT = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
GROUP = re.compile(rf"^(?:\\(?:text|math|bold)[a-z]*\s*)?\{{({IN_BRACES})\}}$")
CHOICE = re.compile(r"^\(?([A-Za-z])(?:\)[.:]?)?$")
LABEL = re.compile(r"^(?!-|not\b|.*\\sqrt)((?:[^\d=<>]|_\{?\d\}?)*)(?:=|\\in(?![a-z]))([^=]*)$", re.S)
LAST_UNIT = re.compile(rf"(?<=\S)(?:\s*\\(?:text|math)[a-z]*\s*\{{[^{{}}\d]*\}}|\s+[a-z]{{2,}}(?:\s*/\s*[a-z]+)?"
                       r"|\^?\s*\{?\\circ\}?|°|\\?%)(?:\^\{?\d\}?)?$")
# Mathematics has a command, a power, a bracket, a relation, or an operator beside a single letter.
MATHEMATICS = re.compile(r"\\[a-zA-Z{]|[\^<>=!|(\[{]|(?<![A-Za-z])(?:[A-Za-z]\s*[-+*/]|\d+[A-Za-z]{1,2}(?![A-Za-z]))"
                         r"|[-+*/]\s*[A-Za-z](?![A-Za-z])")
COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w*\}|\\[a-zA-Z]+|a?(?:sin|cos|tan|cot|sec|csc)h?"
                     r"|log|exp|lim|max|min|gcd|lcm|mod|abc|xyz|\binf(?:inity)?\b|\band\b")
PROSE = re.compile(r"[A-Za-z)\]]\d|[^\W\d_]{3,}|(?<!_)\d\s+\d")      # H2O, (OH)2, words, 1 2
SYMBOLS = {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
           "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ",
           "θ": r"\theta ", "∅": r"\emptyset ", "负": "-"}
SYMBOLS = str.maketrans(SYMBOLS | {"⋅": r"\cdot "})


def extract_answer(reply):
    """Returns the first of these that exists after the thinking, or "" if none does:

    - the last answer block, or the last box in it if it has one;
    - the last box: \\boxed{...}, \\fbox{...} or \\boxed 2;
    - without a block that is not closed, the line after the last ####, or else the last number.
    """
    block = answer_block(reply)
    rest = after_thinking(reply) if block is None else block
    in_box = boxed(rest)
    if in_box is not None or block is not None:
        return block if in_box is None else in_box
    if "<answer>" in rest or "</answer>" in rest:
        return ""
    _, hashes, line = rest.rpartition("####")
    return line.strip().partition("\n")[0] if hashes else last_number(rest[-LONGEST:])


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
    """Returns (number, unit, words): a Fraction or None, the unit or "", and the text in LaTeX.

    The words have no label before `=`. If they are mathematics, they have no unit either.
    """
    if len(text) > LONGEST:
        return None, "", text.strip()
    text = labelled(text)[1]
    line = " ".join(in_one_line(TEXT.sub(r" \1 ", text)).split())
    found = NUMBER.match(re.sub(r"^\( ?([^()]*)\)$", r"\1", line))
    unit = unit_of(found.string[found.end():], found["money"] or found["money2"]) if found else None
    number = None if unit is None else value_of(found)
    if number is not None:
        return number, unit, line
    end = LAST_UNIT.search(text)
    unit = unit_of(TEXT.sub(r" \1 ", end[0]), unknown=0) if end else None
    if unit and is_mathematics(text[:end.start()]):
        text = text[:end.start()]
    else:
        unit = ""
    return None, unit, CHOICE.sub(r"\1", " ".join(TEXT.sub(r"\1", text).split()))


def plain(text):
    """Writes digits, signs and symbols in ASCII and LaTeX; removes math and Markdown delimiters."""
    text = re.sub("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)", r"^{\1}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)            # NFKC would turn 2½ into 21/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").translate(SYMBOLS)
    text = text.replace("<=", "\\le ").replace(">=", "\\ge ")
    text = re.sub("[\u2010-\u2015\u2212]", "-", text)
    text = re.sub(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+|[a-z]))",
                  r"\\sqrt{\1\2\3}", text)
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"\{([^{}]*)\\over\b([^{}]*)\}|^([^{}]*)\\over\b([^{}]*)$", r"\\frac{\1\3}{\2\4}", text)
    text = re.sub(r"(?i)\b(?:minus|negative)\s+(?=[\d.])", "-", text)
    text = re.sub(r"</?(?:br|p|b|i|em|strong|span|div)\s*/?>|\\(?:left|right)(?![a-z])", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]|\\!\s*", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~", " ", text).replace("{,}", ",")
    text = re.sub(r"(?<!\\)(\$\$?)([^$]*)(?<!\\)\1", r"\2", text)
    return re.sub(r"(?<![\w)*])(\*{1,3}|__?)(?=\S)([^*_]+)(?<=\S)\1(?![\w(*])", r"\2", text)


def in_one_line(text):
    """Rewrites \\frac{1}{2} as 1/2, 2\\frac12 as 2 1/2, and 1 \\times 10^6 as 1e6."""
    text = re.sub(r"(?<=\d)(?=\\[dtc]?frac)", " ", text)
    text = FRACTION.sub(r"\1\2/\3\4 ", text)
    return TIMES_10.sub(r"e\2", text).strip()


def labelled(text):
    """Returns (label, rest) of a text like `x = 5`, without delimiters and a final period."""
    text = unwrapped(plain(text))
    label = LABEL.search(text)
    return (label[1].strip(), unwrapped(label[2])) if label else ("", text)


def unwrapped(text):
    """Removes outer spaces, a final period, and \\text{} around the whole text."""
    before = None
    while text != before:
        before, text = text, GROUP.sub(r"\1", re.sub(r"(?<!\.\.)[.。]$", "", text.strip("` \n\t")))
    return text


def value_of(found):
    """Returns the value of a NUMBER match, or None for a division to compute, such as `84/2`."""
    over, under, value, exponent, start = (
        Fraction(re.sub(r"[, ]", "", (found[name] or "0").rstrip(".") or "0"))
        for name in ("over", "under", "decimal", "exponent", "start"))
    if found["over"]:
        if under == 0 or (over / under).denominator == 1 or found["whole"] and not 0 < over < under:
            return None
        value = int(found["whole"] or 0) + over / under
    if found["again"]:          # 0.1\overline{6} is 1/10 and 6/90
        places, repeated = len(found["start"].partition(".")[2]), len(found["again"])
        value = start + Fraction(int(found["again"]), 10**places * (10**repeated - 1))
    value *= Fraction(10) ** exponent
    return -value if "-" in (found["sign"] or "") else value


def unit_of(rest, money="", unknown=1):
    """Returns the unit after a number as names from UNITS, or None if the rest is not a unit.

    At most `unknown` words may be missing in UNITS.
    """
    money = UNITS.get(re.sub(r"US|[\\.\s]", "", money or ""), "")
    rest = re.sub(r"\^?\s*\{?\\circ\}?", "°", rest.replace("per cent", "percent"))
    rest = re.sub(r"(?:°|\bdegrees?)\s*(?=[CF])", " ", rest)
    rest = re.sub(r"(?:\bsq(?:uare)?\.?\s+|平方)([^\W\d]+)", r"\1^2", rest)
    rest = re.sub(r"(?:\bcu(?:bic)?\.?\s+|立方)([^\W\d]+)", r"\1^3", rest)
    rest = re.sub(r"\\(?=[%$])|[{}()]", "", rest)
    if re.match(r"[A-Za-z](?![A-Za-z/])", rest):        # 5m may be a product
        return None
    names = []
    for piece in re.split(PER, rest.strip()):
        part = re.fullmatch(r"([^\W\d_]+(?:-[^\W\d_]+)*|[ap]\.m|[%°$¢€£¥₹])\.?\s*(\^-?\d)?|()", piece)
        if not part:
            return None
        word = MEASURE_WORD.sub("", part[1] or "")
        spellings = (word, word.casefold() if len(word) > 1 else word, singular(word))
        name = next((UNITS[one] for one in spellings if one in UNITS), None)
        if part[3] is None and name is None:
            unknown -= 1
            name = singular(word)
            attached = not names and part[1].isascii() and not rest[0].isspace()
            if (attached or unknown < 0 or len(part[1]) == 1 and part[1].isascii()
                    or NO_UNIT.search(part[1])):
                return None
        names.append((name or "") + (part[2] or ""))
    if money and names[0] != money:
        names[0] = money
    return "/".join(names)


def singular(word):
    return word if len(word) < 3 else re.sub("(?<=[xzh])es$|(?<!s)s$", "", word.casefold())


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
    return "expression" if is_mathematics(words) else "words"


def is_mathematics(text):
    items = re.split(r"\s*(?:[,;]|\b(?:and|or)\b)\s*", text)
    if len(items) > 1 and all(NUMBER.fullmatch(in_one_line(item)) for item in items):
        return True
    return bool(MATHEMATICS.search(text)) and not PROSE.search(COMMAND.sub(" ", text))


def key(text):
    """Returns what is compared of a text: no blanks, and no case unless it is mathematics."""
    as_is = len(text) == 1 or is_mathematics(text)
    text = re.sub(r"(?<=\b[A-Za-z])\.", "", text)       # a.m.
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = re.sub(r"\{(\w)\}", r"\1", text)
    return text if as_is else text.casefold()


def same_answer(given, gold):
    """Returns True, False, or a pair of expressions that math-verify has to compare."""
    gold = gold_text(gold)
    number, unit, words = read(gold)
    given_number, given_unit, given_words = read(given)
    (label, _), (given_label, _) = labelled(gold), labelled(given)
    if unit and given_unit and unit != given_unit:
        return False
    whole, given_whole = unwrapped(plain(gold)), unwrapped(plain(given))
    if "=" in whole and "=" in given_whole and key(label) != key(given_label):      # y = 3, x = 3
        number = given_number = None
        words, given_words = whole, given_whole
    elif re.search("[-+*/]", label) and not given_label:                # the line x + y = 5
        return False
    if number is not None and given_number is not None:
        return number == given_number
    if key(words) == key(given_words):
        return True
    if number is not None or not is_mathematics(words):
        return False
    if given_number is not None:
        given_words = "\\frac{%s}{%s}" % given_number.as_integer_ratio()
    elif not is_mathematics(given_words):
        return False
    return comparable(words, given_words)


def comparable(gold, given):
    """Returns the pair for math-verify, or False where it would equate too much."""
    for one, other, label in ((gold, given, r"[^\d=+*/^-]*="), (given, gold, r"(?!-)[^\d=]*=")):
        if "=" in one and "=" not in other:     # math-verify would read only what follows =
            if not all(re.match(label, item) for item in re.split(",|;|and|or", one) if "=" in item):
                return False
    sides = [gold, given]
    pair, other = sorted(sides)     # "(" sorts first
    if pair[:1] == "(" and other[:1] == "\\" and other.endswith("\\}"):
        return False                # math-verify equates the pair (1, 2) with the set {1, 2}
    if pair[:1] == "(" and "," in other and other[0] not in "([\\":
        sides[sides.index(other)] = f"({other})"        # it also ignores the order of 1, 3
    return tuple(sides)
