"""Extracts the answers of completions and compares them with gold answers (docs/own_task.md)."""
import functools
import re
import unicodedata
from fractions import Fraction

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
IN_BRACES = r"[^{}]*"
for _ in range(8):      # nested braces, but no box inside a box
    IN_BRACES = rf"(?:(?!\\f?box)[^{{}}]|\{{{IN_BRACES}\}})*+"
BOX = re.compile(rf"\\f?box(?:ed)?\s*\{{({IN_BRACES})\}}|\\boxed\s*([^\s{{}}$]*[^\s{{}}$.,])")
BESIDE = re.compile(r"(?:[\s$,;&]|\\q?quad|\\[()]|\\text\{\s*(?:and|or)\s*\}|and|or)*")    # of two
LONGEST = 4000          # characters of an answer; longer ones are only compared as text
# The spellings of each unit without a plural s, its name first.
UNITS = {one: names.split()[0] for names in """
    mm millimeter millimetre 毫米; cm centimeter centimetre 厘米; m meter metre 米; yd yard; mi mile
    英里; km kilometer kilometre 千米 公里; in inch inches 英寸; ft foot feet 英尺; square sq 平方;
    cubic cu 立方; ml mL milliliter millilitre 毫升; l L liter litre 升; mg; g gram 克; oz ounce;
    kg kgs kilogram 千克 公斤; lb lbs pound 磅; s sec second 秒; min minute 分钟; day 天; week 周;
    h hr hrs hour 小时 时; month 月; yr yrs year 年; am; pm; / per 每; km/h kph kmh; mi/h mph; unit;
    % percent percentage pct; ° deg degree 度; C celsius; °C 摄氏度; F fahrenheit; person people 人;
    $ dollar usd 美元; ¢ cent; £ gbp; € euro eur 欧元; ₹ Rs rupee; ¥ 元 块 块钱 人民币 yuan rmb
    """.split(";") for one in names.split()}
WORD = re.compile(r"平方|立方|每|[^\W\d_]+?(?=每)|[^\W\d_]+(?:-[^\W\d_]+)*|[%°$¢€£¥₹/]")
# Words that change the value of the number before them, and words that don't name a unit.
CHANGES = r"""hal(?:f|ve)|third|quarter|(?:four|fif|six|seven|eigh|nin|ten)th|hundred(?:th)?|dozen
    |(?:thousand|million|billion|trillion)(?:th)?|crore|lakh|squared|cubed|minus|plus|below|above"""
NO_UNIT = re.compile(rf"""(?ix) \b (?: {CHANGES}|gross|score|factorial|times|over|and|or|not|to|of
    |is|st|nd|rd|th|pi|sqrt|mod|wrong|false|binary|bc|doubled|tripled|halved ) s? \b
    | 分之 | 以上 | [万亿千百十半多余几不非是或和到至与加减乘除错负成折打下第]""")
# What counts as a number in a text that in_one_line has rewritten.
PART = r"\s*(?:\{([^{}]*)\}|(\d))"        # of a fraction
TIMES_10 = re.compile(r"(?<=\d)\s*(?:\\times|\\cdot|[×·⋅x*])\s*10\s*\^\s*(\{)?([-+]?\d+)(?(1)\})")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
DIGITS = r"(?: \d{1,3} (?:,\d{3})+ | \d{1,3} (?:\ \d{3})+ | \d{1,2} (?:,\d\d)+ ,\d{3} ) (?!\d)"
DECIMAL = rf"(?: (?: {DIGITS} | \d+ ) (?:\.\d*)? | \.\d+ )"
MONEY = r"(?: (?:US)? \$ | [€£¥₹] | Rs\.? )"
NUMERAL = rf"""(?P<open> \( \s? )? (?: (?P<money> {MONEY}) \s* )? (?P<sign> [-+]\s?)?
    (?P<money2> {MONEY} )? (?: (?P<whole> \d+) \s+ (?=\d+\s?/) )? (?P<over> {DECIMAL}
    (?: [eE][-+]?\d{{1,3}}(?!\d) )? ) (?: \s?/\s? (?P<under> -?{DECIMAL}) )? (?(open) \s? \) )"""
NUMBER = re.compile(NUMERAL, re.X)
KNOWN = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
KNOWN = rf"(?: (?:{KNOWN}) s? | \^?\{{?\\circ\}}? ) (?![A-Za-z]) (?: \s*(?:/|per\s)\s*\w+ )?"
IN_A_TEXT = re.compile(rf"(?<![\d.,]) (?![-+]\s) {NUMERAL} (?: \s? {KNOWN} )?", re.X)
# A number is part of something larger if one of these is next to it. Chinese text has no blanks.
NOT_AFTER = re.compile(rf"""(?: [^\W\u3400-\u9fff] | [)\]}}] | [\w\\][(\[]          # x2, )2, f(2
    | [-_^/*+×÷·<>≤≥≠±|] [\ {{]* | \\(?!text|math)[a-zA-Z]+ [\ {{]*           # 5 - 2, \sqrt{{2
    | \d \s* [^\W\d]* \s* (?: [,;:x~、到至和与或] | \b(?:or|and|to)\b ) \s*     # 1, 2 or 1 cm to 2
    | \d \s* {KNOWN} \s* | (?: \b(?i:not|than|maybe) | n['’]t ) \s*       # 5 feet 3, not 3
    | 第 | 分之 | 零下 | 或者? | 也可能是? | [大小]于 | 超过 | [不非][是为等于]*
    | [(\[] [^()\[\]A-Za-z]* [^()\[\]A-Za-z\s] [^()\[\]A-Za-z]* )$""", re.X)      # (1, 2
SIGN_NOT_AFTER = re.compile(r"(?:\d|[)}\]]|(?<![\w'’])[b-zB-HJ-Z])\s*$")      # 5 -2, x -2
NOT_BEFORE = re.compile(rf"""[^\W\u3400-\u9fff] | [(\[] | [.,:] \d | ! | 个半 | 分之 | 以[上下]
    | [万亿千百十半多余几成折不] | [\ }}]* (?:[_^/*+×÷·=<>≤≥≠±|] | \\(?!text|math) | -\s*[\w(\\])
    | \s* (?: (?:{CHANGES}) s? | (?:is\s+)? (?:not|wrong|incorrect) ) \b""", re.X)
BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
TEXT = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
GROUP = re.compile(rf"^(?:\\(?:text|math|bold)[a-z]*\s*)?\{{({IN_BRACES})\}}$")
LABEL = re.compile(r"^(?!-|not\b|.*\\sqrt)((?:[^\d=<>]|_\d)*)(?:=|\\in(?![a-z]))([^=]*)$", re.S)
LAST_UNIT = re.compile(rf"""(?<=\S) \s* (?: {TEXT.pattern} | [°%] | (?<!\\)\b(?![A-Za-z]\b) {KNOWN})
    (?: \^\{{?\d\}}? )? $""", re.X)
MATHEMATICS = re.compile(r"""\\[a-zA-Z{] | [\^<>≤≥≠±√π∞∅=!|(\[{] | [-+*/×·÷]\s*[A-Za-z](?![A-Za-z])
    | (?<![A-Za-z\d]) (?: [A-Za-z]\s*[-+*/×·÷] | (?:\d+[A-Za-z]{1,2} | pi) (?![A-Za-z]) )""", re.X)


def extract_answer(reply):
    """Returns the last box in the last answer block, or else the block; without a block, the last
    box, the line after the last ####, or the last number. Returns "" if there is none of these.
    """
    block, rest = answer_block(reply), after_thinking(reply)
    in_box = boxed(rest if block is None else block, block)
    if in_box is not None or "answer>" in rest:
        return in_box or ""
    _, hashes, line = rest.rpartition("####")
    return line.strip().partition("\n")[0] if hashes else last_number(rest[-LONGEST:])


def answer_block(reply):
    """Returns the text of the last <answer> block after the thinking, or None if there is none."""
    parts = after_thinking(reply).split("</answer>")[:-1]
    blocks = [part.partition("<answer>")[2].strip() for part in parts if "<answer>" in part]
    return blocks[-1] if blocks else None


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
    larger = (not found or NOT_AFTER.search(before) or NOT_BEFORE.match(text, found.end())
              or found["sign"] and SIGN_NOT_AFTER.search(before))
    return "" if larger else found[0]


@functools.lru_cache(4096)      # all completions of a group have the same gold answer
def read(text):
    """Returns (Fraction or None, unit, words in LaTeX or text without blanks, label before `=`)."""
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
    text = re.sub("[\u2010-\u2015\u2212负]", "-", text)
    text = re.sub(r"(?i)(?:\\text\{ ?)?\b(?:minus|negative)[\s}]+(?=[\d.])", "-", text)
    text = re.sub(r"\{?([^\s{}]{1,30})\s?\\over\b\s?([^\s{}]{1,30})\}?", r"\\frac{\1}{\2}", text)
    text = re.sub(r"</?(?:br|p|b|i|em|strong|span|div)\s*/?>|\\(?:left|right)(?![a-z])", " ", text)
    text = re.sub(r"(?<!\\)\\[()\[\]]|\\!\s*", "", re.sub(r"_\{(\w)\}", r"_\1", text))
    text = re.sub(r"(?<!\\)\\[,;: ]|~", " ", text)
    text = re.sub(r"\\([%$])", r"\1", re.sub(r"(?<!\\)(\$\$?)([^$]*)(?<!\\)\1", r"\2", text))
    return re.sub(r"(?<![\w)*])(\*{1,3}|__?)(?=\S)([^*_]+)(?<=\S)\1(?![\w(*])", r"\2", text)


def in_one_line(text):
    """Rewrites \\frac{1}{2} as 1/2, 2\\frac12 as 2 1/2, and 1 \\times 10^6 as 1e6."""
    text = re.sub(r"(?<=\d)(?=\\[dtc]?frac)", " ", text)
    text = TIMES_10.sub(r"e\2", re.sub(rf"\\[dtc]?frac{PART}{PART}", r"\1\2/\3\4 ", text))
    for start, places, again in REPEATING.findall(text):        # 0.1\overline{6} is (16 - 1)/90
        over = int(start + places + again) - int(start + places or 0)
        text = REPEATING.sub(f"{over}/{'9' * len(again)}{'0' * len(places)}", text, count=1)
    return text.strip()


def value_of(found):
    """Returns the value of a NUMBER match, or None for a division to compute, such as `84/2`."""
    over, under = (Fraction(re.sub("[, ]", "", found[name] or "1")) for name in ("over", "under"))
    whole, value = int(found["whole"] or 0), over / (under or 1)
    if found["under"] and (under == 0 or value.denominator == 1 or whole and not 0 < value < 1):
        return None
    return -whole - value if "-" in (found["sign"] or "") else whole + value


def unit_of(text, money="", most_unknown=1):
    """Returns the name of a unit that follows a number, or None if the text isn't a unit."""
    text = f" {money or ''}{text}" if re.match(r"\s*(?:/|per\b|$)", text) else text
    text = re.sub(r"\^?\s*\{?\\circ\}?", "°", text.replace("per cent", "%"))
    for power, name in ("2", "square"), ("3", "cubic"):         # cm^2 is square cm
        text = re.sub(rf"([^\W\d_]+)\s*\^\{{?{power}\}}?", rf"{name} \1", text)
    names, unknown = "", []
    for word in WORD.findall(text):
        word = re.sub("^[个名只头本张件支枝条位棵颗辆艘座匹朵]", "", word)      # 个苹果: an apple
        lower = word if len(word) == 1 else word.casefold()             # KM is km, but F is not f
        singular = re.sub("(?<=[xzh])es$|(?<!s)s$", "", lower) if len(word) > 2 else word
        names += UNITS.get(word) or UNITS.get(lower) or UNITS.get(singular, singular)
        if word and not {word, lower, singular} & UNITS.keys():
            unknown.append(word)
    letter = "(?![\u3400-\u9fff])[^\\W\\d_]"        # a Chinese unit follows without a blank
    wrong = (WORD.sub("", text).strip(" .(){}") or len(unknown) > most_unknown
             or NO_UNIT.search(" ".join(unknown)) or re.fullmatch(letter, "".join(unknown))
             or re.match(rf"{letter}(?![A-Za-z/])", text) or unknown and re.match(letter, text))
    return None if wrong else names


def is_mathematics(text):
    items = re.split(r"\s*(?:[,;]|\b(?:and|or)\b)\s*", text[:LONGEST])       # a list of numbers
    all_numbers = all(NUMBER.fullmatch(in_one_line(item)) for item in items)
    return len(items) > 1 and all_numbers or bool(MATHEMATICS.search(text[:LONGEST]))


def same_answer(given, gold):
    """Returns True, False, or a pair of expressions that math-verify has to compare."""
    number, unit, words, label = read(gold)
    given_number, given_unit, given_words, given_label = read(given)
    if unit and given_unit and unit != given_unit or re.search("[-+*/]", label) and not given_label:
        return False            # other units; x + y = 5 is a line, and no number
    both_are_equations = (label or "=" in words) and (given_label or "=" in given_words) and (
        label or given_label)
    if both_are_equations and label.split() != given_label.split():     # the lines y = 3 and x = 3
        return f"{label} = {words}".strip("= "), f"{given_label} = {given_words}".strip("= ")
    if None in (number, given_number) and BLANKS.sub("", words) == BLANKS.sub("", given_words):
        return True
    if number is not None or not is_mathematics(words):
        return number is not None and number == given_number
    if given_number is not None:
        given_words = "\\frac{%s}{%s}" % given_number.as_integer_ratio()
    return is_mathematics(given_words) and (words, given_words)
