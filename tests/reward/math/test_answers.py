import threading
import time
from fractions import Fraction

import pytest
from effort import within

from quatrain.reward.math.answers import Number, _verdict, is_correct, whole_number


def tagged(answer):
    return f"<think>Some 999 thoughts.</think>\n<answer>{answer}</answer>"


# (completion, gold, verdict)
VERDICTS = [
    # plain, in tags, with words
    (tagged("72"), "72", True),
    (tagged("73"), "72", False),
    (tagged(" 72 "), "72", True),
    (tagged("72."), "72", True),
    (tagged("The answer is 72 clips."), "72", True),
    (tagged("48 in April and 24 in May, so 72"), "72", True),
    (tagged("72 in all, 24 of them in May"), "72", False),
    (tagged("3+4=7"), "7", True),
    (tagged("7 = 3+4"), "7", False),
    (tagged("3+4"), "7", False),
    (tagged("10-3"), "-3", False),
    (tagged(""), "72", False),
    (tagged("seventy-two"), "72", False),
    (tagged("007"), "7", True),
    # where the answer stands
    ("<answer>1</answer><answer>72</answer>", "72", True),
    ("<answer>72</answer><answer>1</answer>", "72", False),
    ("<answer>72</answer> or maybe 5", "72", True),
    ("<think>72</think>\n<answer>5</answer>", "72", False),
    ("<answer>72", "72", True),
    ("72</answer>", "72", True),
    ("I think it is 5. No: 72", "72", True),
    ("I think it is 72. No: 5", "72", False),
    (r"So \boxed{72}, out of 100.", "72", True),
    (r"So \boxed{100} but \boxed{72}.", "72", True),
    ("#### 72", "72", True),
    # braces within braces
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", True),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{2}}{2}", False),
    (r"\boxed{\frac{\sqrt{\frac{3}{4}}}{2}}", r"\frac{\sqrt{\frac{3}{4}}}{2}", True),
    (r"\boxed{\dfrac{1+\sqrt{5}}{2}}", r"\frac{1+\sqrt{5}}{2}", True),
    (r"It is \boxed{2^{\frac{4}{2}}}, not 5.", "4", True),
    (r"\boxed{\{1, \sqrt{2}\}} but then \boxed{ {72} }", "72", True),
    (r"\boxed {\left\{1, 2\right\}}", r"\left\{1, 2\right\}", True),
    (r"\boxed{72} and then \boxed{5", "5", True),
    (tagged(r"\boxed{72}, out of 100."), "72", True),
    (tagged(r"so $\boxed{\frac{\sqrt{3}}{2}}$ of 3"), r"\frac{\sqrt{3}}{2}", True),
    (tagged(r"\boxed{72} of 100") + r" \boxed{5}", "72", True),
    # variables are no words
    (r"\boxed{5}", "5xy", False),
    (r"\boxed{5}", "5 xy", False),
    (r"\boxed{5yx}", "5xy", True),
    (r"\boxed{5xy}", "5", False),
    (r"\boxed{5x}", "5", False),
    (r"\boxed{2xy+3}", "2ab+3", False),
    (r"\boxed{3+2ba}", "2ab+3", True),
    (r"\boxed{3}", "2ab+3", False),
    (r"\boxed{c}", "ab + c", False),
    (r"\boxed{2}", r"2\pi hr", False),
    (r"\boxed{2\pi rh}", r"2\pi hr", True),
    (r"\boxed{2x}", "2xor", False),
    (r"\boxed{2orx}", "2xor", True),
    (r"\boxed{2}", "2pi", False),
    (r"\boxed{2\pi}", "2pi", True),
    (r"\boxed{2}", "sqrt(2)", False),
    (r"\boxed{\sqrt{2}}", "sqrt(2)", True),
    (r"\boxed{x}", "sin x", False),
    (r"\boxed{x}", "sin(x)", False),
    (r"\boxed{15}", "3 or 5", False),
    (r"\boxed{15}", r"3\text{ or }5", False),
    (r"\boxed{5\text{ or }3}", r"3\text{ or }5", True),
    (r"\boxed{5\text{ or }2}", r"3\text{ or }5", False),
    (r"\boxed{silent}", "listen", False),
    (r"\boxed{2}", r"2\mathrm{e}", False),
    (tagged("The answer is x+1."), "1+x", True),
    (tagged("So it is -x."), "-x", True),
    (tagged("x+1 dollars"), "1+x", True),
    # units and their exponents
    ("324", r"18\text{ cm}^2", False),
    ("18", r"18\text{ cm}^2", True),
    (r"\boxed{18\text{ cm}^2}", r"18\text{ cm}^2", True),
    (r"\boxed{18\,\mathrm{cm}^{2}}", "18", True),
    (r"\boxed{324}", "18 cm^2", False),
    (r"\boxed{18 cm²}", "18 cm^2", True),
    (r"\boxed{9\pi}", r"9\pi\text{ cm}^2", True),
    (r"\boxed{81\pi}", r"9\pi\text{ cm}^2", False),
    (r"\boxed{2\sqrt{3} cm}", r"\sqrt{12}\text{ cm}", True),
    ("The volume is 2^3 cm^3", "8", True),
    (tagged("5pm"), "5", True),
    (tagged("the 7th"), "7", True),
    ("", "72", False),
    # the gold answer
    (tagged("72"), "48/2 = <<48/2=24>>24\n#### 72", True),
    (tagged("24"), "48/2 = <<48/2=24>>24\n#### 72", False),
    (tagged("1234"), "#### 1,234", True),
    (tagged("72"), 72, True),
    (tagged("72"), 72.0, True),
    (tagged("72"), "72 clips", True),
    (tagged("72"), r"$\boxed{72}$", True),
    (tagged("5"), "#### -5", False),
    # signs
    (tagged("-5"), "-5", True),
    (tagged("5"), "-5", False),
    (tagged("-5"), "5", False),
    (tagged("+5"), "5", True),
    (tagged("−5"), "-5", True),
    (tagged("- 5"), "-5", True),
    (tagged("x = - 5"), "-5", True),
    (tagged("-$5"), "-5", True),
    (tagged("$-5$"), "-5", True),
    (tagged("between 3-5"), "5", False),
    (tagged("10 - 5"), "5", False),
    (tagged("apples:\n- 5"), "5", True),
    # thousands, currency, units
    (tagged("1,234"), "1234", True),
    (tagged("1,234"), "234", False),
    (tagged("$1,234,567.50"), "1234567.5", True),
    (tagged(r"1{,}234"), "1234", True),
    (tagged("1, 234"), "234", False),
    (tagged(r"\$18"), "18", True),
    (tagged("€18"), "18", True),
    (tagged("18 dollars"), "18", True),
    (tagged("5cm"), "5", True),
    (tagged("5 cm^2"), "5", True),
    (tagged("5 m²"), "5", True),
    (tagged(r"90^\circ"), "90", True),
    (tagged("5 g of H2O"), "5", True),
    (tagged("**72**"), "72", True),
    # decimals and exponents
    (tagged("3.50"), "3.5", True),
    (tagged("3.0"), "3", True),
    (tagged(".5"), "0.5", True),
    (tagged("3.51"), "3.5", False),
    (tagged("1.5e3"), "1500", True),
    (tagged("2E-2"), "0.02", True),
    (tagged("12345678901234567891"), "12345678901234567890", False),
    # fractions
    (tagged("3/4"), "0.75", True),
    (tagged("6/8"), "3/4", True),
    (tagged("-3/4"), "-0.75", True),
    (tagged("4/3"), "3/4", False),
    (tagged(r"\frac{3}{4}"), "0.75", True),
    (tagged(r"$-\dfrac{3}{4}$"), "-3/4", True),
    (tagged(r"\frac12"), "0.5", True),
    (tagged("1 1/2"), "1.5", True),
    (tagged(r"1\frac{1}{2}"), "3/2", True),
    (tagged("2½"), "2.5", True),
    (tagged("0.333333"), "1/3", True),
    (tagged("0.33"), "1/3", False),
    (tagged("0"), "1/3000000", False),
    (tagged("5/0"), "5", False),
    # the last number is read as a whole
    (tagged("12,345,6"), "6", False),
    (tagged("3/4/2020"), "2020", False),
    (tagged("1,234.5 or -2%"), "-2", False),
    (tagged("1,234.5, so it is -2%"), "-2", True),
    (tagged("9" * 301), "9" * 300, False),
    # percents
    (tagged("50%"), "50", True),
    (tagged("50%"), "0.5", True),
    (tagged("50"), "50%", True),
    (tagged("0.5"), "50%", True),
    (tagged(r"50\%"), "50%", True),
    (tagged("0.5%"), "50%", False),
    (tagged("50 percent"), "0.5", True),
    # more than a number: math-verify
    (tagged(r"\sqrt{16}"), "4", True),
    (tagged(r"\sqrt{16}"), "16", False),
    (tagged("2^3"), "8", True),
    (tagged("2^3"), "2", False),
    (tagged("2^3"), "3", False),
    (tagged("2**3"), "8", True),
    (tagged("2³"), "8", True),
    (tagged("2^3 = 8"), "8", True),
    (tagged(r"5 \times 10^3"), "5000", True),
    (tagged(r"The side is $\sqrt{16}$ cm."), "4", True),
    (tagged(r"2\sqrt{3}"), r"\sqrt{12}", True),
    (tagged("2√3"), r"\sqrt{12}", True),
    (tagged(r"\frac{\sqrt{2}}{2}"), r"\frac{1}{\sqrt{2}}", True),
    (tagged("1+x"), "x+1", True),
    (tagged("1+y"), "x+1", False),
    (tagged("1"), "x+1", False),
    (tagged("(1, 2)"), "(1,2)", True),
    (tagged("(2, 1)"), "(1,2)", False),
    (tagged("3π"), r"3\pi", True),
    (tagged("Paris"), "paris", True),
    (tagged("London"), "Paris", False),
]


@pytest.mark.parametrize(("completion", "gold", "verdict"), VERDICTS)
def test_verdicts(completion, gold, verdict):
    assert is_correct(completion, gold) is verdict


@pytest.mark.parametrize("gold", [None, "", "  ", "72 ####"])
def test_a_gold_answer_without_text_is_an_error(gold):
    with pytest.raises(ValueError, match="gold answer must have text"):
        is_correct("72", gold)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-2%", Number(Fraction(-2), True)),
        ("1,234.5", Number(Fraction(2469, 2), False)),
        ("5 apples", Number(Fraction(5), False)),
        ("5cm", Number(Fraction(5), False)),
        (r"18\text{ cm}^2", Number(Fraction(18), False)),
        (r"18\,\mathrm{~cm}^{2}", Number(Fraction(18), False)),
        (r"9.8\text{ m}/\text{s}^2", Number(Fraction(49, 5), False)),
        (r"\text{18 square inches}", Number(Fraction(18), False)),
        ("18 cm^2", Number(Fraction(18), False)),
        ("18 square feet", Number(Fraction(18), False)),
        ("60 km/h", Number(Fraction(60), False)),
        ("500 mg", Number(Fraction(500), False)),
        ("none", None),
        ("5/0", None),
        ("9" * 301, None),
    ],
)
def test_whole_numbers(text, number):
    assert whole_number(text) == number


# Letters that are variables, whatever they spell.
PRODUCTS = ["5xy", "5 xy", "5abc", "5 abc", "2am+3", "2mg", r"2\mathrm{e}", r"5\mathrm{xy}", "5sin"]


@pytest.mark.parametrize("text", ["x+1", "3, 4", "2^3", r"\sqrt{2}", "5x", "(1,2)", "", "five", *PRODUCTS])
def test_what_is_no_whole_number(text):
    assert whole_number(text) is None


HOSTILE = [
    "10**10**10",
    "10^10^10",
    "10^{10^{10}}",
    "((((9^9)^9)^9)^9)^9",
    "9^{99999}",
    "2^999999999",
    "99^{99}^{99}",
    "((99^{99})^{99})^{99}",
    "999999999!",
    "9" * 1_000_000,
    "1," * 300_000,
    "1/" * 300_000,
    "1 " * 300_000,
    "-" * 600_000,
    "\\frac{" * 100_000,
    "\\boxed{" * 100_000,
    "\\boxed" + "{" * 100_000,
    "\\text{" * 100_000,
    "\\text{a}^" * 100_000,
    "8cm" * 100_000,
    "8 square " * 100_000,
    "the " * 100_000,
    "<answer>" * 100_000,
    "</answer>" * 100_000,
    "\\boxed{1}," * 100_000,
    "\\approx 1" * 100_000,
    "1 and " * 100_000,
    "x=1," * 100_000,
    "\\pm 1," * 100_000,
    "\\begin{pmatrix}1" * 100_000,
    "**" * 100_000,
    "(a) " * 100_000,
    "<<1" * 100_000,
    "_{1}" * 100_000,
    "1/a" * 100_000,
    "a, " * 100_000,
    "99!" * 100_000,
    "99!^{99}",
    "\\binom{99}{49}^{99}",
    "$" * 100_000,
    "(" * 100_000,
    "8 m " * 100_000,
    "12 " + "m/" * 100_000,
    "12 " + "kg m " * 100_000,
    "_a_ " * 100_000,
    "\n> " * 100_000,
    "\\boxed\\a{b}{c}" * 50_000,
    "x²" * 100_000,
    "αβ" * 100_000,
    "answer is option " * 50_000,
    "[A] " * 100_000,
    "\\mathbf{" * 100_000,
    "12\\text{m}\\cdot" * 50_000,
    "word 5! " * 50_000,
    "aaaas/" * 50_000,
    "\\sqrt{" * 30 + "2" + "}" * 30,
    "^" * 1000,
    "1e999",
    "__import__('os').getcwd()",
    "x" * 100 + "1",
    "\x00\ud800 7 \u202f",
    # Patterns that read a text in 2^40 ways:
    "答案是 5 " + "是" * 40 + "+",
    "5 " + "\t" * 40 + "+",
    "été  " * 40 + "@ 5",
    r"\boxed{\text{" + "word " * 10 + "is 5}}",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20].encode("ascii", "replace").decode())
@pytest.mark.parametrize("gold", ["7", r"\sqrt{2}+x"])
def test_hostile_text_costs_little(text, gold):
    is_correct(tagged(r"\sqrt{4}"), gold)  # so that the clock leaves the import out

    def verdicts():
        _verdict.cache_clear()
        return [is_correct(form, gold) for form in (text, tagged(text), tagged(f"${text}$"))]

    assert within(2, verdicts, time.thread_time) == ["7" in text and gold == "7"] * 3


def test_verdicts_hold_in_other_threads():
    wrong = []

    def check():
        wrong.extend(v for v in VERDICTS[-20:] if is_correct(v[0], v[1]) is not v[2])

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_table_is_large_enough():
    assert len({(completion, str(gold)) for completion, gold, _ in VERDICTS}) >= 100
