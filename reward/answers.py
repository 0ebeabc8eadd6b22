"""Extracts the final answers from completions and from gold answers, and compares them.

    extract_answer(reply)       returns the text of the reply's answer, or "" if there is none
    read(text)                  returns the number and its unit, or the words, in a text
    same_answer(given, gold)    returns True, False, or two expressions for math-verify to compare

docs/own_task.md gives the rule. A number that must be computed first, such as `2^5`, is none.
"""
import functools
import re
import unicodedata
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
IN_BRACES = r"[^{}]*"
for _ in range(8):      # nested braces, but no box inside a box
    IN_BRACES = rf"(?:(?!\\f?box)[^{{}}]|\{{{IN_BRACES}\}})*+"
BOX = re.compile(rf"\\f?box(?:ed)?\s*\{{({IN_BRACES})\}}|\\boxed\s*([^\s{{}}$]*[^\s{{}}$.,])")
BESIDE = re.compile(r"(?:[\s$,;&]|\\q?quad|\\[()]|\\text\{\s*and\s*\}|and)*")     # between boxes
LONGEST = 4000          # characters of an answer; longer ones are only compared as text

# The spellings of each unit without a plural s, its name first.
UNITS = {spelling: names.split()[0] for names in """mm millimeter millimetre 毫米; yd yard; day 天
    cm centimeter centimetre 厘米; m meter metre 米; km kilometer kilometre 千米 公里; mi mile 英里
    in inch inches 英寸; ft foot feet 英尺; mg milligram 毫克; g gram 克; kg kgs kilogram 千克 公斤
    lb lbs pound 磅; oz ounce; ml mL milliliter millilitre 毫升; l L liter litre 升; s sec second 秒
    min minute 分钟; h hr hrs hour 小时 时; week 周; month 月; yr yrs year 年; am; pm; km/h kph kmh
    mi/h mph; % percent percentage pct; ° deg degree 度; C celsius; °C 摄氏度; F fahrenheit; unit
    $ dollar usd 美元; ¢ cent; £ gbp; € euro eur 欧元; ₹ Rs rupee; person people 人; square sq 平方
    cubic cu 立方; / per 每; ¥ 元 块 块钱 圆 人民币 yuan rmb cny""".replace("\n", ";").split(";")
         for spelling in names.split()}
WORD = re.compile(r"平方|立方|每|[^\W\d_]+?(?=每)|[^\W\d_]+(?:-[^\W\d_]+)*|[%°$¢€£¥₹/]")
# Words that change the value of the number before them, and words that don't name a unit.
CHANGES = r"""hal(?:f|ve)|third|quarter|(?:four|fif|six|seven|eigh|nin|ten|hundred)th|hundred
    |(?:thousand|million|billion|trillion)(?:th)?|dozen|score|gross|crore|lakh|[mb]n|squared|cubed
    |factorial|minus|plus|below|above"""
NO_UNIT = re.compile(rf"""(?ix) \b (?: {CHANGES} |and|or|not|to|of|is|times|over|st|nd|rd|th|pi|sqrt
    |mod|wrong|incorrect|false|binary|hex|bc ) s? \b
    | [万亿千百十半多余几不非是或和到至与加减乘除错负成折打下第] | 分之 | 以上""")

# What counts as a number in a text that in_one_line has rewritten.
DIGITS = r"(?: \d{1,3} (?:,\d{3})+ | \d{1,3} (?:\ \d{3})+ | \d{1,2} (?:,\d\d)+ ,\d{3} ) (?!\d)"
DECIMAL = rf"(?: (?: {DIGITS} | \d+ ) (?:\.\d*)? | \.\d+ )"
MONEY = r"(?: (?:US)? \$ | [€£¥₹] | Rs\.? )"
NUMERAL = rf"""(?P<open> \( \s? )? (?: (?P<money> {MONEY}) \s* )? (?P<sign> [-+]\s?)?
    (?P<money2> {MONEY} )? (?: (?P<whole> \d+) \s+ (?=\d+\s?/) )?
    (?P<over> {DECIMAL} (?: [eE][-+]?\d{{1,3}}(?!\d) )? ) (?: \s?/\s? (?P<under> -?{DECIMAL}) )?
    (?(open) \s? \) )"""
NUMBER = re.compile(NUMERAL, re.VERBOSE)
KNOWN = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
KNOWN = rf"(?: (?:{KNOWN}) s? | \^?\{{?\\circ\}}? ) (?![A-Za-z]) (?: \s*(?:/|per\s)\s*\w+ )?"
# A number within a bare reply.
IN_A_TEXT = re.compile(rf"(?<![\d.,]) (?![-+]\s) {NUMERAL} (?: \s? {KNOWN} )?", re.VERBOSE)
# A number is part of something larger if one of these is next to it. Chinese text has no blanks.
NOT_AFTER = re.compile(rf"""(?: [^\W\u3400-\u9fff] | [)\]}}] | [\w\\][(\[]          # x2, )2, f(2
    | [-_^/*+×÷·<>≤≥≠±|] [\ {{]* | \\(?!text|math)[a-zA-Z]+ [\ {{]*           # 5 - 2, \sqrt{{2
    | \d \s* [^\W\d]* \s* (?: [,;:x~、到至和与或] | \b(?:or|and|to)\b ) \s*     # 1, 2 or 1 cm to 2
    | \d \s* {KNOWN} \s* | (?: \b(?:not|than) | n['’]t ) \s*                # 5 feet 3, not 3
    | 第 | 分之 | 零下 | 或者? | 也可能是? | [大小]于 | 超过 | [不非][是为等于]*
    | [(\[] [^()\[\]A-Za-z]* [^()\[\]A-Za-z\s] [^()\[\]A-Za-z]* )$""", re.VERBOSE)      # (1, 2
SIGN_NOT_AFTER = re.compile(r"(?:\d|[)}\]]|(?<![\w'’])[b-zB-HJ-Z])\s*$")      # 5 -2, x -2
NOT_BEFORE = re.compile(rf"""[^\W\u3400-\u9fff] | [(\[] | [.,:] \d | ! | 个半 | 分之 | 以[上下]
    | [万亿千百十半多余几成折不] | [\ }}]* (?:[_^/*+×÷·=<>≤≥≠±|] | \\(?!text|math) | -\s*[\w(\\])
    | \s* (?: (?:{CHANGES}) s? | (?:is\s+)? (?:not|wrong|incorrect) ) \b""", re.VERBOSE)

BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
TEXT = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
GROUP = re.compile(rf"^(?:\\(?:text|math|bold)[a-z]*\s*)?\{{({IN_BRACES})\}}$")
LABEL = re.compile(r"^(?!-|not\b|.*\\sqrt)((?:[^\d=<>]|_\d)*)(?:=|\\in(?![a-z]))([^=]*)$", re.S)
LAST_UNIT = re.compile(rf"""(?<=\S) \s* (?: {TEXT.pattern} | [°%]
    | (?<!\\)\b (?![A-Za-z]\b) {KNOWN} ) (?: \^\{{?\d\}}? )? $""", re.VERBOSE)
MATHEMATICS = re.compile(r"""\\[a-zA-Z{] | [\^<>≤≥≠±√π∞∅=!|(\[{] | (?<![A-Za-z]) [A-Za-z]\s*[-+*/×·÷]
    | [-+*/×·÷]\s*[A-Za-z](?![A-Za-z]) | (?<![A-Za-z]) (?:\d+[A-Za-z]{1,2}(?![A-Za-z]) | pi\b)""",
                         re.VERBOSE)


def extract_answer(reply):
    """Returns the first of these that exists after the thinking, or "" if none does:

    the last box in the last answer block, or else this block; without a block, the last box, the
    line after the last ####, or the last number. A box is \\boxed{}, \\fbox{}, or \\boxed 2.
    """
    block, rest = answer_block(reply), after_thinking(reply)
    in_box = boxed(rest if block is None else block, block)
    if in_box is not None or "answer>" in rest:
        return in_box or ""
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
    *_, found = [None, *IN_A_TEXT.finditer(text)]
    before = text[max(0, found.start() - 200):found.start()] if found else ""
    if (not found or NOT_AFTER.search(before) or NOT_BEFORE.match(text, found.end())
            or found["sign"] and SIGN_NOT_AFTER.search(before)):
        return ""
    return found[0]


@functools.lru_cache(4096)      # all completions of a group have the same gold answer
def read(text):
    """Returns (number, unit, words, label): a Fraction or None, the unit, and what else to compare.

    The label of `x = 5` is "x". Mathematics has no unit, and text has no blanks or case.
    """
    if len(text) > LONGEST:
        return None, "", text.strip(), ""
    label, before, text = "", None, plain(text)
    while text != before:
        before, text = text, re.sub(r"(?<!\.\.)[.。]$", "", text.strip("` \n\t"))
        text = GROUP.sub(r"\1", text)
        if found := LABEL.search(text):
            label, text = found[1].strip(), found[2]
    line = " ".join(in_one_line(TEXT.sub(r" \1 ", text)).split())
    found = NUMBER.match(re.sub(r"^\( ?([^()]*)\)$", r"\1", line))
    unit = unit_of(found.string[found.end():], found["money"] or found["money2"]) if found else None
    number = None if unit is None else value_of(found)
    if number is None:
        end = LAST_UNIT.search(text)
        if end and is_mathematics(text[:end.start()]):
            unit = unit_of(TEXT.sub(r" \1 ", end[0]), most_unknown=0)
            text = text[:end.start()] if unit else text
        line = " ".join(TEXT.sub(r"\1", text).split())
        line = re.sub(r"^\(?([A-Za-z])(?:\)[.:]?)?$", r"\1", line)      # a choice
        if is_mathematics(line):
            return None, unit or "", line, label
    words = BLANKS.sub("", re.sub(r"(?<=\b[A-Za-z])\.", "", line))      # a.m. is am
    return number, unit or "", words if len(words) == 1 else words.casefold(), label


def plain(text):
    """Writes digits and signs in ASCII and LaTeX, and removes math and Markdown delimiters."""
    text = re.sub("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)", r"^{\1}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)            # NFKC would turn 2½ into 21/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").replace("{,}", ",")
    text = re.sub(r"[\u2010-\u2015\u2212负]|(?i:\b(?:minus|negative)\s+(?=[\d.]))", "-", text)
    text = re.sub(r"\{?([^\s{}]{1,30})\s?\\over\b\s?([^\s{}]{1,30})\}?", r"\\frac{\1}{\2}", text)
    text = re.sub(r"</?(?:br|p|b|i|em|strong|span|div)\s*/?>|\\(?:left|right)(?![a-z])", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]|\\!\s*", "", re.sub(r"_\{(\w)\}", r"_\1", text))
    text = re.sub(r"(?<!\\)\\[,;: ]|~", " ", text)
    text = re.sub(r"(?<!\\)(\$\$?)([^$]*)(?<!\\)\1", r"\2", text).replace("\\%", "%")
    text = re.sub(r"(?<![\w)*])(\*{1,3}|__?)(?=\S)([^*_]+)(?<=\S)\1(?![\w(*])", r"\2", text)
    return text.replace("\\$", "$")


def in_one_line(text):
    """Rewrites \\frac{1}{2} as 1/2, 2\\frac12 as 2 1/2, and 1 \\times 10^6 as 1e6."""
    text = re.sub(r"(?<=\d)(?=\\[dtc]?frac)", " ", text)
    part = r"\s*(?:\{([^{}]*)\}|(\d))"
    text = re.sub(rf"\\[dtc]?frac{part}{part}", r"\1\2/\3\4 ", text)
    power = r"10\s*\^\s*(\{)?([-+]?\d+)(?(1)\})"
    text = re.sub(rf"(?<=[\d.])\s*(?:\\times|\\cdot|[×·⋅x*])\s*{power}", r"e\2", text)
    repeated = r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?"
    for start, places, again in re.findall(repeated, text):     # 0.1\overline{6} is (16 - 1)/90
        over = int(start + places + again) - int(start + places or 0)
        text = re.sub(repeated, f"{over}/{'9' * len(again)}{'0' * len(places)}", text, count=1)
    return text.strip()


def value_of(found):
    """Returns the value of a NUMBER match, or None for a division to compute, such as `84/2`."""
    over, under = (Fraction(re.sub(r"[, ]", "", found[name] or "1")) for name in ("over", "under"))
    if found["under"] and (under == 0 or (over / under).denominator == 1
                           or found["whole"] and not 0 < over < under):
        return None
    value = int(found["whole"] or 0) + over / under
    return -value if "-" in (found["sign"] or "") else value


def unit_of(text, money="", most_unknown=1):
    """Returns the name of a unit that follows a number, or None if the text isn't a unit."""
    if re.match(r"\s*(?:/|per\b|$)", text):
        text = f" {money or ''}{text}"
    text = re.sub(r"\^?\s*\{?\\circ\}?", "°", text.replace("per cent", "%"))
    text = re.sub(r"([^\W\d_]+)\s*\^\{?2\}?", r"square \1", text)
    text = re.sub(r"([^\W\d_]+)\s*\^\{?3\}?", r"cubic \1", text)
    names, unknown = "", []
    for word in WORD.findall(text):
        word = re.sub("^[个名只头本张件支枝条位棵颗辆艘座匹朵]", "", word)      # 个苹果: an apple
        lower = word if len(word) == 1 else word.casefold()             # KM is km, but F is not f
        singular = re.sub("(?<=[xzh])es$|(?<!s)s$", "", lower) if len(word) > 2 else word
        name = next((UNITS[one] for one in (word, lower, singular) if one in UNITS), None)
        if word and name is None:
            unknown.append(word)
        names += name or singular
    letter = "(?![\u3400-\u9fff])[^\\W\\d_]"        # a Chinese unit follows without a blank
    if (WORD.sub("", text).strip(" .(){}") or len(unknown) > most_unknown
            or NO_UNIT.search(" ".join(unknown)) or re.fullmatch(letter, "".join(unknown))
            or re.match(rf"{letter}(?![A-Za-z/])", text) or unknown and re.match(letter, text)):
        return None
    return names


def is_mathematics(text):
    items = re.split(r"\s*(?:[,;]|\b(?:and|or)\b)\s*", text[:LONGEST])
    is_list = len(items) > 1 and all(NUMBER.fullmatch(in_one_line(item)) for item in items)
    return len(text) <= LONGEST and (is_list or bool(MATHEMATICS.search(text)))


def same_answer(given, gold):
    """Returns True, False, or a pair of expressions that math-verify has to compare."""
    (number, unit, words, label), (given_number, given_unit, given_words, given_label) = (
        read(gold), read(given))
    if unit and given_unit and unit != given_unit:
        return False
    both = label and given_label or label and "=" in given_words or given_label and "=" in words
    if both and label.split() != given_label.split():       # the lines y = 3 and x = 3
        return f"{label} = {words}".strip("= "), f"{given_label} = {given_words}".strip("= ")
    if re.search("[-+*/]", label) and not given_label:      # the line x + y = 5
        return False
    if None in (number, given_number) and BLANKS.sub("", words) == BLANKS.sub("", given_words):
        return True
    if number is not None or not is_mathematics(words):
        return number is not None and number == given_number
    if given_number is not None:
        given_words = "\\frac{%s}{%s}" % given_number.as_integer_ratio()
    return is_mathematics(given_words) and (words, given_words)
