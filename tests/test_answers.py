"""Which answers are equal, where an answer stands, and which rows can be judged: a table of each kind of fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlt_lightning.judging.answers import find_answer, find_letter, read_reference, reference_answer
from rlt_lightning.judging.compare import same_answer
from rlt_lightning.judging.judge import Judge
from rlt_lightning.judging.normalise import normalise
from rlt_lightning.types import BadRowError, BadRowReason

# What one notation makes of many. A text may be a case twice: with and without markup around it.
NORMALISED = {
    "7": ["７", "٧", "७", "𝟕", "**7**", "__7__", "`7`", "*7*", "<b>7</b>", "$7$", r"\(7\)", r"\[7\]", "$$7$$", "\u200b7\u202e"],
    r"\frac{1}{2}": [r"\dfrac{1}{2}", r"\tfrac12", r"\frac1{2}", r"\frac{1}2", "½", r"\displaystyle\frac{1}{2}", r"\\frac{1}{2}"],
    "-5": ["−5", "–5", "—5", "－5", "‐5", "﹣5"],
    r"x^{2}": ["x²", "x^2", "x**2", "x<sup>2</sup>", "x^{2}", "x^(2)"],
    r"x_{1}": ["x₁", "x_1", "x<sub>1</sub>"],
    "45 degree": ["45°", r"45^\circ", r"45^{\circ}", r"45\degree", "45º", r"45^ \circ"],
    "1250": [r"1\,250", "1 250", "1{,}250", "1\u00a0250", "1\u202f250", "1'250", "1’250", r"1\ 250", "1~250"],
    "1234567": ["1 234 567", r"1\,234\,567", "1{,}234{,}567"],
    "(3,4)": ["（3，4）", r"\left(3,4\right)", r"\bigl(3,4\bigr)", r"\Big(3,4\Big)"],
    r"\sqrt{3}": ["√3", "sqrt(3)", r"\sqrt3", r"\sqrt 3"],
    r"1.5\times 10^{-7}": ["1.5e-07", "1.5E-7", "1.5 x 10^-7", "1.5*10^{-7}", "1.5×10⁻⁷", r"1.5 \cdot 10^{-7}"],
    "even": [r"\text{even}", r"\textbf{even}", r"\mathrm{even}", r"\textit{even}", r"\textsf{even}", r"\mbox{even}", "“even”", '"even"'],
    r"\pi": ["π", "pi"],
    "15%": [r"15\%", "１５％"],
    "7x": [r"\color{red}{7x}", r"\textcolor{blue}{7x}", r"{\color{red}7x}", r"\colorbox{yellow}{7x}", r"\mathbf{7x}", r"\boldsymbol{7x}"],
}


@pytest.mark.parametrize("wanted", NORMALISED)
def test_texts_are_written_in_one_notation(wanted: str) -> None:
    assert {text: normalise(text) for text in NORMALISED[wanted]} == dict.fromkeys(NORMALISED[wanted], wanted)


# Of each kind: a reference, equal answers, others.
COMPARED: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "pairs": [
        ("(3,4)", ["(3, 4)", r"\left(3,4\right)", "（3，4）", "(3.0, 4)", r"(3,\,4)", "(x,y)=(3,4)"], ["(4,3)", "34", "[3,4]", r"\{3,4\}", "7", "3"]),
        ("(10,200)", ["(10, 200)", r"\left(10,\ 200\right)"], ["10200", "(200,10)", "10.2", "(10,20)"]),
        ("(2,150,300)", ["(2, 150, 300)"], ["(2,300,150)", "2150300", "(2150,300)"]),
        ("(0,750)", ["(0, 750)", "0<x<750"], ["0.75", "750", "(0,750]", "(750,0)"]),
        ("(-7,-2)", ["(-7, -2)", "(−7, −2)"], ["(-2,-7)", "-72", "(7,2)"]),
        ("(6,6)", ["(6, 6)"], ["6", "(6)", r"\{6\}"]),
        (r"\left(\frac{1}{2},\frac{3}{4}\right)", ["(0.5, 0.75)", "(1/2, 3/4)"], ["(0.75, 0.5)"]),
        ("(1,5),(2,6)", ["(2,6),(1,5)", "(1, 5), (2, 6)", r"(1,5) \text{ and } (2,6)"], ["(5,1),(6,2)", "(1,5)", "(1,2),(5,6)"]),
        (r"\langle 1,2\rangle", [r"\langle 1, 2 \rangle"], [r"\langle 2,1\rangle"]),
    ],
    "intervals": [
        ("[2,7)", ["[2, 7)", r"2\le x<7", "7 > x >= 2", r"x \in [2,7)", "2 ≤ x < 7"], ["(2,7)", "[2,7]", "2<x<7", "(7,2]"]),
        (r"(-\infty,4]\cup[9,+\infty)", [r"[9,\infty)\cup(-\infty,4]", r"x\leq 4 \text{ or } x\geq 9", "(-∞,4]∪[9,∞)"], [r"(-\infty,4)\cup[9,\infty)", r"(-\infty,4]"]),
        ("x > 3", [r"(3,\infty)", "3 < x", r"x \in (3, +\infty)"], [r"[3,\infty)", "x<3", "3", r"x \ge 3"]),
        (r"\mathbb{R}", [r"(-\infty,\infty)", "ℝ"], ["R^2", r"(0,\infty)"]),
        (r"t \le -\frac{1}{2}", [r"(-\infty,-0.5]"], [r"(-\infty,-0.5)", r"[-0.5,\infty)"]),
    ],
    "sets and lists": [
        (r"\{1,2,3\}", ["1,2,3", "3, 2, 1", r"\{3,1,2\}", r"\left\{1,2,3\right\}", "{1, 2, 3}", "1, 2, and 3"], [r"\{1,2\}", "(1,2,3)", "123", "1,2,3,4"]),
        ("4, -9", ["-9, 4", r"4 \text{ and } -9", "4 or -9", "x=4, x=-9", r"x=4 \text{ or } x=-9", "x = 4; x = -9"], ["4", "-9", "4, 9", "x=4, y=9"]),
        (r"\pm 3", ["3, -3", r"x=\pm3", "±3", "-3 and 3"], ["3", "-3", r"\pm 9"]),
        (r"1\pm\sqrt{2}", [r"1+\sqrt{2}, 1-\sqrt{2}"], [r"1+\sqrt{2}", r"\pm\sqrt{2}"]),
        (r"\emptyset", [r"\varnothing", r"\{\}", "∅", r"\{ \}"], ["0", r"\{0\}"]),
        ("n=5,6,7", ["5,6,7", "n=5, 6, 7"], ["n=4,5,6", "5,6"]),
        ("x=1,y=2", ["y=2, x=1", "x = 1, y = 2"], ["x=2,y=1", "x=1"]),
        (r"2,4,\ldots,2n", [r"2,4,\dots,2n", "2, 4, ..., 2n"], [r"1,3,\ldots,2n-1", "2,4"]),
        ("12, 30, \\text{ and } 51", ["12, 30, 51"], ["13, 29, and 51"]),
    ],
    "thousands": [
        ("1250", ["1,250", r"1\,250", "1 250", "1{,}250", "1,250.00", r"\$1,250", "1'250"], ["251", "1.25", "1, 250", "(1,250)", "125"]),
        ("1234567", ["1,234,567", r"1\,234\,567", "1 234 567"], ["1234", "1,234,568"]),
        ("3\\,600", ["3600", "3,600"], ["3,600,000", "603", "36"]),
        ("1,2", ["2,1", "1 and 2"], ["1.2", "12"]),
        ("12", ["12.", "12.0"], ["1 2", "1,2"]),
        ("4", [], ["1 3", "2 2", "1 1 2"]),
    ],
    "mixed numbers": [
        (r"\frac{7}{3}", ["2 1/3", r"2\frac{1}{3}", r"2 \frac13", "2⅓", "7/3", "7÷3"], ["2/3", "21/3", r"\frac{5}{3}", r"2\cdot\frac{1}{3}"]),
        (r"3\frac{3}{4}", ["3.75", "15/4", "3 3/4"], [r"\frac{9}{4}", "33/4"]),
        (r"-1\frac{1}{2}", ["-1.5", "-3/2"], ["-1/2", "1.5"]),
        (r"\frac{5}{6}", [r"0.8\overline{3}", "0.8(3)", "0.833333"], ["0.83", "0.8"]),
    ],
    "units": [
        ("30 minutes", ["30", "30 min", "30 mins", r"30\text{ minutes}", "30 minute"], ["30 hours", "30 seconds", "30 h", "300 minutes"]),
        ("5 km", ["5 kilometers", "5km", "5", r"5\ \mathrm{km}"], ["5 m", "5 miles", "5 kg"]),
        ("12", ["12 cm", "12 cm^2", "12 square units", "12 apples", "12 km/h", r"12\text{ m}", "12 m/s", "12 miles per hour"], ["12x", "12a", "12ab", "12 million"]),
        ("12\\text{ cm}^2", ["12", "12 cm²", "12 square centimeters", "12 sq cm"], ["12 cm", "12 cm^3", "12 m^2"]),
        ("7 days", ["7", "7 day"], ["7 weeks", "7 months"]),
        ("8 apples", ["8", "8 apples in total"], ["8 oranges", "9 apples"]),
        (r"2\sqrt{3}\text{ cm}", [r"2\sqrt{3}", "2√3 cm"], [r"2\sqrt{3}\text{ m}", "2 cm"]),
        ("20 °C", ["20", "20°C"], ["20 °F"]),
        ("5 million", ["5000000", "5,000,000"], ["5", "5 thousand"]),
        ("9元", ["9", "9 元"], ["-9元", "9米"]),
        ("6", ["6厘米", "6個", "6명", "6 см", r"6\text{个}"], ["-6厘米", "6万"]),
    ],
    "money": [
        ("18", ["$18", r"\$18", "$18$", "€18", "18€", "£18", "18 dollars", "18 USD", "¥18", "18.00"], ["$180", "$1.8"]),
        ("€12", ["12", "12 €", "12 euros", "€12.00"], ["$12", "£12", "€21"]),
        (r"\$4.50", ["4.5", "$4.50", "4.50 dollars"], ["4.05", "€4.50", "450"]),
        ("-\\$3", ["-3", r"\$-3"], ["3"]),
    ],
    "percent": [
        ("15", ["15%", r"15\%", "15 percent", "15 per cent"], ["0.15", "1.5%"]),
        (r"12\%", ["12", "0.12", r"\frac{3}{25}", "12 %"], ["1.2", "0.012", "120%"]),
        ("0.4", [r"40\%", "40%"], ["4%", "40"]),
        ("50%", ["1/2", "50"], ["0.5%", "5"]),
    ],
    "degrees": [
        ("60", ["60°", r"60^\circ", r"60^{\circ}", "60 degrees", r"60\degree"], ["30°"]),
        (r"60^\circ", ["60", "60 degrees", "60°"], ["-60°", "61"]),
    ],
    "scientific": [
        ("0.00001", ["1e-05", r"10^{-5}", r"1\times10^{-5}", "1E-5"], ["e-5", "1e-6", "0"]),
        ("1e-05", ["0.00001"], ["e - 5", "2e-05"]),
        ("3e8", [r"3\times 10^8", "300000000", "3E+8", "3 x 10^8"], ["3e7", "38"]),
        ("e-2", [r"-2+e"], ["1e-2", "0.01"]),
        ("4.5\\times 10^3", ["4500", "4.5e3", "4,500"], ["450", "45000"]),
    ],
    "small and close numbers": [
        ("1e-7", ["0.0000001"], ["2e-7", "0", "4e-7", "1.1e-7"]),
        ("0.0000003", ["3e-7"], ["0", "0.0000004"]),
        ("6.626\\times 10^{-34}", ["6.626e-34"], ["1.38\\times 10^{-23}", "0"]),
        (r"\frac{\pi}{10^{9}}", [r"\pi\times 10^{-9}"], [r"\frac{e}{10^{9}}", "0"]),
        (r"\frac{1}{2^{80}}", [r"2^{-80}"], [r"\frac{1}{2^{81}}"]),
        (r"\frac{1}{200!}", [], [r"\frac{1}{201!}"]),
        ("1000000.1", ["1000000.10"], ["1000000.2", "1000000"]),
        ("123456789012345678901", [], ["123456789012345678902"]),
        (r"2^{200}", [], [r"2^{200}+1"]),
        (r"\sqrt{7}", ["2.6457513", "2.645751"], ["2.65", "2.6457", "2.6457514"]),
        (r"\frac{2}{3}", ["0.666667", "0.6666666667"], ["0.67", "0.6667"]),
        ("0.3333333333333333", [r"\frac{1}{3}"], [r"\frac{1}{4}"]),
        (r"10^{10^{10}}", [], [r"10^{10^{11}}", "10", "0"]),
    ],
    "words": [
        ("silent", ["Silent", r"\text{silent}", "SILENT"], ["listen", "tinsel", "silen"]),
        (r"\text{odd}", ["odd", "Odd"], ["even", "ddo"]),
        ("No solution", [r"\text{no solution}", "no solution."], ["solution", "no solutions exist", "0"]),
        ("Evelyn", [r"\text{Evelyn}"], ["Evelny", "Eve"]),
        ("CAB", ["CAB"], ["ABC", "BAC"]),
        ("June 20", ["june 20", r"\text{June 20}"], ["June 21", "July 20"]),
        ("True", ["true"], ["False", "1"]),
        ("红", ["红"], ["绿", "红色的"]),
        (r"\text{east}", ["east"], [r"\text{seat}", "teas"]),
        ("x", ["$x$"], ["y", "2x"]),
    ],
    "products": [
        ("2ab", ["2ba", r"2a\cdot b", "2 a b"], ["2", "2ac", "2a", "ab"]),
        ("7k", ["7 k", r"7\cdot k"], ["7", "7m"]),
        ("3mn", ["3nm"], ["3", "3m"]),
        ("2st", [], ["2", "2s"]),
        ("5c", [], ["5"]),
        ("4xyz", ["4zyx"], ["4", "4xy"]),
        ("2m+1", ["1+2m"], ["3", "2+1"]),
        ("5ab^2", ["5b^2a"], ["5", "5ab"]),
        ("6h", [], ["6"]),
    ],
    "roots and functions": [
        ("2√3", [r"2\sqrt{3}", r"\sqrt{12}", "2*sqrt(3)", "2 sqrt 3", r"2\sqrt3"], ["2", "3", r"\sqrt{6}"]),
        ("√(5)+1", [r"1+\sqrt{5}"], ["6"]),
        ("6", [], [r"6\sqrt(3)", "6√3"]),
        ("∛8", ["2", r"\sqrt[3]{8}"], [r"\sqrt{8}"]),
        (r"e^{4}+1", ["exp(4)+1", r"\exp(4) + 1"], ["e^5", "5"]),
        (r"\frac{\pi}{6}", ["pi/6", "π/6", r"\tfrac16\pi"], ["30", r"\frac{\pi}{3}"]),
        ("3+4i", ["4i+3", "3.0 + 4.0i"], ["3-4i", "7"]),
        (r"2i", [r"(1+i)^2"], ["-2i", "2"]),
        (r"\log_3 5", [r"\frac{\ln 5}{\ln 3}"], [r"\log_5 3"]),
        (r"|x|", [r"\sqrt{x^2}"], ["x", "-x"]),
        (r"5!", ["120"], ["5"]),
        (r"\cos \theta_1", [r"\cos\theta _1", r"\cos(\theta_{1})"], [r"\cos\theta_2", r"\sin\theta_1"]),
    ],
    "equations": [
        ("x=5", ["5", "x = 5", "5=x", "x=5.0"], ["y=5", "6", "x=-5"]),
        ("5", ["x=5", "2+3=5", "x = 2+3 = 5", "m+n=5"], ["x+5=0", "2x=5", "x=4"]),
        ("f(x)=3x-1", ["3x-1", "f(x) = -1+3x"], ["3x+1", "g(x)=x"]),
        ("a_{n}=3n-2", ["3n-2", "a_n = 3n - 2"], ["3n+2"]),
        ("2x-y=4", ["y=2x-4", "4x-2y-8=0", "y - 2x = -4"], ["2x+y=4", "4", "0"]),
        ("x^2+y^2=16", ["y^2 = 16-x^2"], ["x^2-y^2=16", "16", "x^2+y^2=4"]),
        (r"x \ne 2", ["x≠2", r"x \neq 2"], ["x=2", "2"]),
        ("2x+3y>6", ["6<3y+2x", "-2x-3y<-6"], ["2x+3y<6", r"2x+3y\ge 6"]),
    ],
    "algebra": [
        ("x^2-9", ["(x-3)(x+3)", "(x+3)(x−3)"], ["(x-3)^2", "x^2+9"]),
        (r"\frac{y+5}{3}", [r"\frac{y}{3}+\frac{5}{3}", "(y+5)/3"], ["y+5", r"y+\frac{5}{3}"]),
        (r"\sin^2 x", [r"1-\cos^2 x"], [r"\cos^2 x"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"], [r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"]),
        ("n(n+1)/2", [r"\frac{n^2+n}{2}", r"\binom{n+1}{2}"], ["n(n-1)/2"]),
        ("0.5x", [r"\frac{x}{2}", "x/2"], ["5x"]),
        ("0", [r"\sqrt{8}-2\sqrt{2}", "0.0", "-0"], ["0.0001", r"\sqrt{8}-2"]),
    ],
    "ratios, times and bases": [
        ("2:5", ["2 : 5", "2:5"], ["5:2", "25", "2:3"]),
        ("10:45", ["10:45"], ["4:45", "10:54"]),
        ("1101_2", ["1101_{2}", r"1101_{\text{2}}"], ["1011_2", "1101", "1101_3"]),
    ],
    "no answers": [
        ("7", [], ["?", "???", "nan", "", r"\frac{7}{", "{", r"\frac{", "\ud800", "\x00", "(" * 300, r"\left(", "None"]),
    ],
}
PAIRS = [
    (reference, answer, is_right)
    for cases in COMPARED.values()
    for reference, right, wrong in cases
    for is_right, answers in ((True, right), (False, wrong))
    for answer in answers
]


@pytest.mark.parametrize("kind", COMPARED)
def test_answers_are_compared_by_what_they_mean(kind: str) -> None:
    faults = []
    for reference, right, wrong in COMPARED[kind]:
        faults += [(reference, answer) for answer in [reference, *right] if not same_answer(reference, answer)]
        faults += [(reference, "not", answer) for answer in wrong if same_answer(reference, answer)]
    assert faults == []


# Where an answer stands: a solution, and the answer in it.
FOUND: dict[str, list[tuple[str, str | None]]] = {
    "boxes": [
        (r"It is $\boxed{7}$.", "7"),
        (r"It is \boxed 7.", "7"),
        (r"It is $\boxed 17$ apples", "17"),
        (r"\boxed-5", "-5"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"First \boxed{7}; after a check \boxed 5.", "5"),
        (r"\boxed{8}, in the form \boxed{}.", "8"),
        (r"\boxed{8} \boxed{ }", "8"),
        (r"\fbox{9}", "9"),
        (r"\boxed {9}", "9"),
        (r"\\boxed{9}", "9"),
        (r"\boxed{9", None),
        (r"\boxed{\frac{9}$.", None),
        (r"\boxed{4} and then \boxed{6", "4"),
        (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3, 5"),
        (r"\boxed{3} and \boxed{5}", "3, 5"),
        (r"\boxed{2}, \boxed{4}, \boxed{6}", "2, 4, 6"),
        (r"\boxed{3} is wrong, and it is \boxed{5}", "5"),
        (r"Not $\boxed 5$, it is $\boxed{7}$.", "7"),
        (r"\boxed{7}" + "\n\nSo \\boxed{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"The answer is 8. \boxed{7}", "7"),
        (r"\boxed{7} The answer is 8.", "7"),
    ],
    "hashes and headings": [
        ("#### 72", "72"),
        ("####72", "72"),
        ("3 + 4 = 7\n#### 7\n", "7"),
        ("#### -7", "-7"),
        ("#### 1,250", "1,250"),
        (r"#### \frac{3}{4}", r"\frac{3}{4}"),
        ("#### 72 apples", "72 apples"),
        ("#### $72", "$72"),
        ("#### Result\nThe answer is 8.", "8"),
        ("#### Final Answer\n\n8", "8"),
        ("#### 2. Add them\nThe sum is 8.", "8"),
        ("#### Step 3\nThis gives 8.", "8"),
        ("#### 2024 Results\nIt is 8.", "8"),
        ("#### 结果\n答案是8。", "8"),
        ("##### Result\n\nThe final answer is $8$.", "8"),
        ("#### 42\n" + "and this agrees with the check. " * 80, "42"),
    ],
    "tags": [
        ("<answer>7</answer>", "7"),
        ("<answer> 7 </answer> and not 8", "7"),
        ("<answer>London</answer>", "London"),
    ],
    "announced": [
        ("The answer is 42.", "42"),
        ("The answer is: **42**.", "42"),
        ("**Answer:** 42", "42"),
        ("Answer: $x = 42$", "x = 42"),
        (r"The final answer is \(42\).", "42"),
        ("The answer is 1/2.", "1/2"),
        ("The answer is .5", ".5"),
        ("The answer is −7.", "−7"),
        ("The answer is 7 km/h, since 14/2 = 7.", "7 km/h"),
        ("The answer is therefore 9 because 3 * 3 = 9 and 2 + 2 = 4.", "9"),
        ("The answer is 3. We checked 4 cases.", "3"),
        ("The answer is Paris.", "Paris"),
        ("The answer is (3, 4).", "(3, 4)"),
        ("So the answer to the question is 12.", "12"),
        ("The answer is not 3. It is 4.", "4"),
        ("答案是42。", "42"),
        ("答案：42", "42"),
        ("답은 42입니다.", "42"),
        ("정답: 42", "42"),
        ("答えは42です。", "42"),
        ("La respuesta es 42.", "42"),
        ("La réponse est 42.", "42"),
        ("Die Antwort ist 42.", "42"),
        ("Ответ: 42", "42"),
    ],
    "last of a text": [
        ("So the total is 42.", "42"),
        ("2 + 3 = 5", "5"),
        ("so it is 1,200.", "1,200"),
        ("It takes 30 minutes.", "30 minutes"),
        ("It costs $5 and then $7.", "$7"),
        (r"Hence $\frac{3}{4}$.", r"\frac{3}{4}"),
        ("所以一共有42个苹果。", "42"),
        ("it went from 10 to -3.", "-3"),
        ("I do not know.", None),
        ("", None),
        ("x+1", "x+1"),
        ("Paris", "Paris"),
    ],
}


@pytest.mark.parametrize("kind", FOUND)
def test_an_answer_is_found_where_it_stands(kind: str) -> None:
    found = {solution: find_answer(solution) for solution, _ in FOUND[kind]}
    same = {
        solution: answer if answer is not None and found[solution] and normalise(found[solution]) == normalise(answer) else found[solution]
        for solution, answer in FOUND[kind]
    }
    assert same == dict(FOUND[kind])


LETTERS: dict[str | None, list[str]] = {
    "B": [
        r"\boxed{B}", r"\boxed{b}", r"\boxed{(B)}", r"\boxed{B)}", r"\boxed{B.}", r"\boxed{\text{B}}", r"\boxed{\textbf{(B) }12}", r"\boxed{B: 12}",
        r"\boxed{B \quad 12}", r"\boxed{\text{Option B}}", r"\boxed{\mathrm{(b)}}", r"\boxed{Ｂ}", r"\boxed B", r"\boxed{B}．", "\\boxed{**B**}", "<answer>B</answer>", "#### B",
        r"\boxed{B} Option A would need more heat.", r"\boxed{B}, not \boxed{}.", r"\boxed{B}. The answer is A.", r"\boxed{B} with the value \boxed{\frac{1}{2}}",
        r"The value is \boxed{\frac{1}{2}}. Answer: B", r"\boxed{x^2+1}" + "\n\nThe correct answer is (B).", r"\boxed{12} so the answer is B",
        "Answer: B", "Answer: (b)", "**Answer: B**", "**Answer:** B", "The answer is B, not C.", "The answer is B. Option C is too big.", "The answer is B. Option A is wrong.",
        "The answer is therefore B.", "The best answer would be B", "The correct answer is option B.", r"The answer is $\textbf{B}$", r"The answer is \textbf{(B)}", "Answer: **B**",
        "The correct option is B.", "Option B is correct; option A is not.", "B is the correct answer.", "I choose B.", "So it must be option B.", "答案：B", "答案是B。", "故选：B", "故选B", "正解はBです",
        "정답은 B입니다", "La respuesta correcta es B.", "La réponse est B", "Die richtige Antwort ist B.", "Ответ: B", "B", "(B)", "so\n(B) 12", "so\n**B**", "B) 12", "Therefore, the answer is\n\nB",
        "Option A is wrong since it is heavy. Option C is not it either. The answer is B",
    ],
    "A": ["The answer is A.", r"\boxed{A}", "A", "(A) one", "Answer: A because it floats", "The answer is A, since it floats"],
    "D": [r"\boxed{D) 10 m/s}", "Answer: D", r"\boxed{\frac{3}{4}} Answer: D"],
    "E": [r"\boxed{E}", "Answer: (E)"],
    "I": [r"\boxed{I}"],
    "J": [r"\boxed{J}", "(J) none of them"],
    None: [
        "A triangle has three sides.", "The answer is a prime number.", "The answer: Dogs", r"\boxed{Both}", r"\boxed{K}", r"\boxed{A, B}", r"\boxed{AB}", r"\boxed{A or B}", "The answer is A or B.", "",
        "I think that it is heavy.", r"\boxed{12}", "Both are right.", "Answer: ABC", "Answer: A and C", "The answer is A triangle.", r"\boxed{A triangle}", "Bad luck", "Option C is wrong.", "The answer is not B.",
    ],
}


def test_a_choice_is_one_letter() -> None:
    found = {text: find_letter(text) for texts in LETTERS.values() for text in texts}
    assert found == {text: letter for letter, texts in LETTERS.items() for text in texts}


READ: list[tuple[dict[str, Any], str]] = [
    ({"answer": 7}, "7"),
    ({"answer": 27.0}, "27"),
    ({"answer": 0.1 + 0.2}, "0.3"),
    ({"answer": 0.00001}, "1e-05"),
    ({"answer": -0.0}, "-0"),
    ({"answer": False}, "False"),
    ({"answer": ["7"]}, "7"),
    ({"answer": ["3", 5]}, "3, 5"),
    ({"answer": " 7 "}, "7"),
    ({"answer": "1 + 1 = 2\n#### 1,080"}, "1,080"),
    ({"answer": "6 * 2 = 12 #### 12"}, "12"),
    ({"answer": r"so \boxed{3} or \boxed{4}"}, "3, 4"),
    ({"answer": "The answer is 7."}, "7"),
    ({"answer": "", "solution": r"So \boxed{2}."}, "2"),
    ({"answer": float("nan"), "solution": r"So \boxed{2}."}, "2"),
    ({"answer": None, "solution": "It is 2\n#### 2"}, "2"),
    ({"answer": "None"}, "None"),
    ({"answer": r"\infty"}, r"\infty"),
    *(({"answer": letter, "kind": "choice"}, "B") for letter in ("B", "b.", "(B)", "B)", " B ", "B. 12 apples", "(b) some", r"\boxed{B}", "Answer: B", r"\text{(B)}", "Option B", "Ｂ")),
    ({"solution": r"so \boxed{(H)}", "kind": "choice"}, "H"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "no_answer"),
    ({"answer": float("nan")}, "no_answer"),
    ({"answer": []}, "no_answer"),
    ({"solution": "So it is 2."}, "no_answer"),
    ({"answer": {"value": 7}, "solution": r"\boxed{7}"}, "bad_answer"),
    ({"answer": [{"value": 7}]}, "bad_answer"),
    ({"answer": b"7"}, "bad_answer"),
    ({"answer": "nan", "solution": r"\boxed{7}"}, "bad_answer"),
    ({"answer": "???"}, "bad_answer"),
    ({"answer": "-"}, "bad_answer"),
    ({"answer": r"\frac{"}, "bad_answer"),
    ({"answer": r"\boxed{"}, "bad_answer"),
    ({"answer": "####"}, "bad_answer"),
    ({"answer": "7" * 1001}, "bad_answer"),
    ({"answer": "12", "kind": "choice"}, "bad_answer"),
    ({"answer": "A, C", "kind": "choice"}, "bad_answer"),
    ({"answer": "K", "kind": "choice"}, "bad_answer"),
    ({"answer": "A triangle", "kind": "choice"}, "bad_answer"),
]


@pytest.mark.parametrize(("row", "answer"), READ)
def test_references_are_read_from_answers_and_solutions(row: dict[str, Any], answer: str) -> None:
    assert read_reference(row) == answer


@pytest.mark.parametrize(("row", "reason"), REFUSED)
def test_references_that_can_never_be_right_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError) as error:
        read_reference(row)
    assert error.value.reason == reason
    if reason == BadRowReason.BAD_ANSWER:
        with Judge("r1") as judge:
            assert not judge.judge(r"\boxed{7}", row).correct


def test_cases_from_the_wild_are_judged_right(shared: Path) -> None:
    cases = [json.loads(line) for line in (shared / "cases" / "judging.jsonl").read_text().splitlines()]
    with Judge("r1", num_workers=1) as judge:
        verdicts = judge.judge_all((case["response"], case["row"]) for case in cases)
    wrong = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct != case["right"]]
    assert len(wrong) <= 0.02 * len(cases), wrong
    assert not any(verdict.timed_out for verdict in verdicts)
