"""What is a right answer: the cases, values in many spellings, and replies that never end."""
import itertools
import math
import random
import re
from fractions import Fraction

import pytest

from errors import UserError
from reward import accuracy_reward, child, load_reward_funcs
from reward.answers import extract_answer, read, same_answer
from reward.child import CHILD, Child
from reward.functions import kind_of
from run.report.terminal import kinds_of_answers
from support import ROOT, jsonl

CASES = jsonl(ROOT / "tests/answers.jsonl")


@pytest.fixture(autouse=True)
def new_step():
    CHILD.late = CHILD.unanswered = 0


def paid(reply, gold):
    return accuracy_reward([""], [reply], answer=[gold])[0]


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES}))
def test_answers_of_the_table_of_cases(kind):
    cases = [case for case in CASES if case["kind"] == kind]
    rewards = accuracy_reward(None, [case["reply"] for case in cases],
                              answer=[case["gold"] for case in cases])
    for case, reward in zip(cases, rewards):
        assert reward == case["right"], case


def test_answers_of_the_table_of_the_page():
    page = (ROOT / "docs/own_task.md").read_text(encoding="utf-8")
    page = page[page.index("| gold answer |"):]
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| `(.+)` \|$", page, re.M)
    assert len(rows) == 8
    for gold, right, wrong in rows:
        for cell, expected in ((right, 1), (wrong, 0)):
            for text in cell.split("`, `"):
                assert paid(f"<answer>{text}</answer>", gold) == expected, (gold, text)


def spellings(value, rng):
    """Texts that say a number: a Fraction, here a decimal or one of a few over a small number."""
    minus = rng.choice(["-", "−", "–", "－"] if value < 0 else ["", "", "+"])
    size, texts = abs(value), []
    if (10**6 * size).denominator == 1:
        decimal = f"{float(size):.6f}".rstrip("0").rstrip(".")
        whole, _, rest = decimal.partition(".")
        rest = rest and f".{rest}"
        texts += [decimal, decimal.removeprefix("0") or "0",
                  f"{whole}{rest or '.'}{rng.choice(['', '0', '00'])}",
                  decimal.translate(str.maketrans("0123456789.", "０１２３４５６７８９．"))]
        texts += [f"{int(whole):,}".replace(",", comma) + rest
                  for comma in (",", " ", "\\,", "{,}", ",\\!", "\u202f", "，")]
        texts += [f"{size * 10**6}e-6", f"{size * 10**6} \\times 10^{{-6}}"]
    if size.denominator > 1:
        for k in (1, rng.randint(2, 5)):
            a, b = size.numerator * k, size.denominator * k
            texts += [f"{a}/{b}", f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a}}}{{{b}}}"]
            if a < 10 > b:
                texts += [f"\\frac{a}{b}", f"\\tfrac{a}{{{b}}}"]
            if a > b:
                texts += [f"{a // b} {a % b}/{b}", f"{a // b}\\frac{{{a % b}}}{{{b}}}"]
    return [minus + text for text in texts]


WRAPPERS = ["{}", "${}$", "\\({}\\)", "\\[{}\\]", "\\text{{{}}}", "\\mathbf{{{}}}", "{{{}}}",
            "**{}**", "`{}`", "{}.", "{}。", "x = {}", "= {}", "${}\\%$", "\\${}", "{} apples",
            "{} cm^2", "{}\\text{{ kg}}", "{}°", "{} 元", "  {}\n", "$x={}$.", "\\mathrm{{{}}}"]
PLACES = ["<answer>{}</answer>", "<think>\n1\n</think>\n<answer>\n{}\n</answer>",
          "So \\boxed{{{}}}.", "#### {}", "<answer>It is \\boxed{{{}}}.</answer>"]


def a_value(rng):
    most, under = rng.choice([(9, [1]), (10**7, [1]), (10**6, [10, 100, 1000]), (40, range(2, 13))])
    return Fraction(rng.randint(-most, most), rng.choice(under))


def test_a_value_is_the_same_in_every_spelling_and_no_other():
    rng = random.Random(0)
    for _ in range(500):
        value = a_value(rng)
        others = {-value, value + 1, value * 10, value + Fraction(1, 10)} - {value}
        wrong = rng.choice(spellings(rng.choice(sorted(others)), rng))
        one, same, wrapped = (rng.choice(wrappers).format(rng.choice(spellings(value, rng)))
                              for wrappers in (WRAPPERS[:13], WRAPPERS[:13], WRAPPERS))
        place = rng.choice(PLACES)
        for gold, given in itertools.permutations((one, same, wrapped), 2):
            assert read(given)[0] == value, given
            if gold is not wrapped:     # else its unit may be another
                assert same_answer(given, gold) and same_answer(gold, given), (given, gold)
                assert paid(place.format(given), gold) == 1, (place, given, gold)
        assert paid(place.format(wrong), one) == 0, (wrong, one)
        assert same_answer(wrong, one) is False


@pytest.mark.parametrize("text", [
    "1_000", "12_3", "2^5", "3-5", "2024-05-06", "12.5.3", r"2\sqrt3", "84/2", r"\frac{4}{2}",
    "1/0", "2x", "3i", r"5\pi", "2xy", "1e1000", "1e99999999", "7" * 4001, "3万", "5 million",
    "3 or more", "1,00", "1 00", "0x2A", "10²", "+-5", r"\pm 5", "x < 5", "", "-", "five"])
def test_what_is_no_number(text):
    assert read(text)[0] is None and kind_of(f"a{text}") != "number"


@pytest.mark.parametrize("reply, answer", [
    ("It is 42", "42"), ("答案是42，对吗", "42"), ("共有42只鸡。", "42"),
    ("Total: $1,234$ dollars", "1,234 dollars"),
    ("it is -3", "-3"), ("So x = 1/2", "1/2"), ("adds up to 42", "42"), ("**Answer:** 42", "42"),
    ("42\n- done", "42"), ("The share: 12.5%", "12.5%"),
    (r"\boxed{1} and \boxed{2}", "1, 2"), (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
    (r"\boxed{41}, no: \boxed{42}", "42"), (r"\boxed{4}. \boxed{4}", "4"), (r"\boxed{}", ""),
    *((text, "") for text in (
        "共有42万人", "It is 5!", "7 or 8", "x > 42", "as in x_{1}", "It is not 42", "x - 3",
        "x -3", "2^{5}", "5 million", "[3, 4]", "3, 4", "第3步", r"It is \boxed{42", "a 3-5"))])
def test_the_answer_of_a_bare_reply(reply, answer):
    assert extract_answer(reply) == answer


def test_an_empty_gold_answer_is_a_mistake_in_the_data():
    for gold in ("", " ", "####", r"\boxed{}"):
        with pytest.raises(UserError, match="the column answer is empty"):
            paid("42", gold)
    assert accuracy_reward([""], ["42"], answer=[None]) == [None]


def test_a_run_says_how_its_gold_answers_are_compared():
    golds = ["42", ["1/2", "a"], "Paris", "2024-05-06", r"\sqrt{2}", None, r"so \boxed{7}"]
    text = kinds_of_answers([{"answer": gold} for gold in golds])
    assert text == "3 numbers, 2 words, 1 expressions, 1 missing"
    assert kinds_of_answers([{}] * 3000) == "2,000 missing, in the first rows"


@pytest.mark.parametrize("gold, given, expected", [
    (r"\frac{1}{2}+x", "0.5+x", 1), ("x^2+2x+1", "(x+1)^2", 1), ("x>4", r"(4,\infty)", 1),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)", 1), (r"\frac{1}{2}+x", r"\frac{", 0),
    ("1/2004!", "1/2006!", 0), ("(1,2)", r"\{1,2\}", 0), (r"\{1,2\}", "(1,2)", 0),
    ("7 = 11a+c", "11a+c", 0), ("10^{-8}", "10^{-9}", 0), ("(3,1)", "1, 3", 0),
    ("(3,4)", r"\boxed{3} and \boxed{4}", 1), ("(3,4)", r"\boxed{4} and \boxed{3}", 0),
    (r"\sqrt{2}", "\ud800", 0)])           # half a character
def test_expressions_are_compared_as_mathematics(gold, given, expected):
    assert paid(f"<answer>{given}</answer>", f"so $\\boxed{{{gold}}}$") == expected
    assert CHILD.late == 0


HANGS = ["9^{9^{9}}", "10^{10^{10}}", "2^{3^{4^{5^{6}}}}", "99999999!", "(10^8)!", "((9!)!)!",
         r"\binom{10^9}{5\cdot 10^8}", r"\sum_{n=1}^{10^9} \frac{1}{n^n}", r"\prod_{n=1}^{10^8} n",
         "(" * 900 + "1" + ")" * 900, "{" * 900 + "x" + "}" * 900, "7" * 200_000, "x^{" * 400,
         "1.1^{10^{12}}", r"\sqrt{" * 300 + "2" + "}" * 300, "(x+y+z)^{10^6}", "9^9^9^9",
         r"\int_0^{1} e^{x^{9^9}} dx", "2^{10^9} - 2^{10^9 - 1}", "3^{(9^9)} + x"]


def test_replies_that_never_end_are_wrong_in_time_and_after_some_nobody_is_asked(monkeypatch):
    monkeypatch.setattr("reward.child.MOST_LATE", 2)
    monkeypatch.setattr("reward.load.MOST_LATE", 2)
    monkeypatch.setattr(child, "SECONDS", 0.5)
    judge, = load_reward_funcs(["accuracy"])
    replies = [f"<answer>{text}</answer>" for text in HANGS] + ["<answer>5</answer>"]
    with pytest.warns(UserWarning, match="skipped .* checks in a step, because 2 others "):
        rewards = judge(prompts=[""] * 21, completions=replies, answer=[r"\sqrt{2}"] * 20 + ["5"])
    assert len(HANGS) == 20 and rewards[-1] == 1 and CHILD.late == 2
    assert {x for x in rewards[:-1] if not math.isnan(x)} == {0.0}
    assert sum(map(math.isnan, rewards)) == CHILD.unanswered > 0
    assert judge.failed == {"late": 1}
    monkeypatch.setattr(child, "SECONDS", 9)            # the next call begins anew
    assert paid(r"<answer>\sqrt{12}</answer>", r"2\sqrt{3}") == 1


def test_a_child_ends_when_its_parent_has():
    for question, code in [("", 0), ('[0.5, "math_verify", "x+1", "9^{9^{9}}"]\n', 1)]:
        one = Child()
        assert one.ask([("math_verify", "x", "x")]) == [True]
        one.process.stdin.write(question)
        one.process.stdin.close()
        assert one.process.wait(9) == code


def test_what_a_signal_gives_up_stays_open_and_a_missing_package_is_named(tmp_path, monkeypatch):
    one = Child()
    assert one.ask([("math_verify", "x", "x")]) == [True]
    one.give_up()
    assert one.ask([("math_verify", "x", "x")] * 3) == [None] * 3 and one.unanswered == 3
    one.given_up = False            # in the next run of this process another child is asked
    assert one.ask([("math_verify", "x", "x")] * 3) == [True] * 3 and one.late == 0
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = Child()
    with pytest.raises(ModuleNotFoundError, match="math-verify could not be imported; pip ins"):
        other.ask([("math_verify", "x", "x")])
    other.give_up()
