"""Math: finding the box, comparing answers, hostile ones, the workers, and every form in which problems come."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import DATA, ROOT, check_linear_time, python, until, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import answers, workers
from rewards import math as task

needs_real = pytest.mark.skipif(not (DATA / "math").is_dir(), reason=f"the real problems are not at {DATA}/math")


def right(answer, *golds):
    return task.score(rf"So it is \boxed{{{answer}}}.", list(golds))["correct"]


BOXES = {
    r"so \boxed{5}": "5", r"\boxed{\frac{1}{\sqrt{2}}} it is": r"\frac{1}{\sqrt{2}}", r"\boxed{1} then \boxed{2}": "2",
    r"\boxed{1} then \boxed{2": "1", r"\boxed{1} then \boxed{\frac{2}{3}": "1", r"\boxed {7}": "7", r"\boxed 7": None,
    "no box": None, r"\boxed{": None, r"\fbox{5}": None, r"\boxedx{5}": None, r"\\\boxed{5}": "5",
    r"x \\boxed{5}": None,  # a line break and the word
    r"\boxed{1} \boxed{}": "", r"\boxed{\{1, 2\}}": r"\{1, 2\}", r"\boxed{[0, 1\}}": r"[0, 1\}",
    r"} } \boxed{3} }": "3", "\\boxed{\n1\n}": "\n1\n", r"\boxed{x = \boxed{4}}": "4",
    r"\boxed{never closed \boxed{4}": "4", r"\boxed{a\\}": "a\\\\",
}  # fmt: skip


def test_last_complete_box():
    assert {text: task.last_box(text) for text in BOXES} == BOXES


def test_cleaning_takes_linear_time():
    check_linear_time(task.clean, lambda size: "1" + " " * (40 * size) + "2")


def test_what_score_returns():
    for text, correct, in_box in ((r"\boxed{5}", True, True), (r"\boxed{6}", False, True), (r"\boxed{5", False, False)):
        found = {"reward": float(correct), "correct": correct, "format": in_box, "timed_out": False}
        assert task.score(text, ["5"]) == found
    for quoted in (r"Put the answer in \boxed{}.", r"\boxed{ }", r"\boxed{$$}"):  # as a prompt asks for it
        found = task.score(quoted, [""])
        assert not found["format"] and not found["correct"]


# Of each kind what is right, and what is wrong: gold → answer.
KINDS = {
    "forms": r"""5 → 5 | 5 → $5$ | 5 → 5. | 25 → 025 | 025 → 25 | 142 → 142.0 | -5 → −5 | -5 → - 5 | 5 → \$5
        \$32,\!348 → 32348 | 1234 → 1,234 | 1234 → 1{,}234 | 11,\! 111,\! 100 → 11111100 | 10^4 → 10\,000
        5 → 5~\text{cm} | \boldsymbol{x+1} → x+1 | \frac{1}{2} → 0.5 | \frac{1}{2} → 1/2 | \frac12 → \dfrac{2}{4}
        0.5 → 50\% | 0.333333 → \frac{1}{3} | \frac{\sqrt{2}}{2} → \frac{1}{\sqrt 2} | x^2+2x+1 → (x+1)^2 | x=5 → 5
        5 → x=5 | 90^\circ → 90 | \text{Evelyn} → Evelyn | \text{(A)} → A | $69$,$84$ → 84, 69
        (2,4) → \left( 2, 4 \right) | 10\text{ cm} → 10 | 6-5i → -5i+6 | 2,4 → 2 \text{ and } 4 | 9 → \(9\)
        \begin{pmatrix}1\\2\end{pmatrix} → \begin{bmatrix} 1 \\ 2 \end{bmatrix} | 5 → $\displaystyle 5$
        (-\infty, 0] → (-\infty,0]
        WRONG: 5 → 6 | 12 → 1 2 | 12 → 1,2 | 5 → -5 | \frac{1}{2} → 0.51 | 0.33 → \frac{1}{3} | x → y
        (2,4) → (4,2) | (2,4) → [2,4] | x=5 → y=5 | \infty → -\infty | 9 → 9 or 8 | 9 → \frac{0}{0} | 9 → x>9
        9 → 9! | 9 → \pm 9 | 9 → 9\}8 | 9 → 9 \fbox{5} | 1000001 → 1000000 | 1000000001.5 → 1000000002.5 \text{ m}""",
    "words and names": r"""East → east | Evelyn → \textbf{evelyn} | x-axis → \text{x-axis} | \text{(C)} → C
        B → (B) | II → \text{II} | LRLR → L R L R | \text{W and Z} → Z, W | 2xy → 2yx | 3abc → 3 b a c
        IR → I \cdot R | \angle ABC → \angle CBA | \pi(R^2-r^2) → \pi R^2 - \pi r^2 | e → \mathrm e | 6m → m \cdot 6
        WRONG: CAB → ABC | LRLR → RLRL | east → seat | 2BA → 2AB | A1 → 1A | no → on | VI → IV | abc → cab
        \text{CAB} → ABC | Aa → AA | \text{not odd} → odd | True → False | \angle ABC → \angle BCA
        \pi(R^2-r^2) → 0 | 6m → 6 | x2 → 2x | 1A2B → 2B1A""",
    "code and prose": r"""2*pi → 2\pi | ln(2) → \ln 2 | sin(x) → \sin x | x**2+1 → x^2+1 | -1 + exp(16) → e^{16}-1
        x^(1/3) → \sqrt[3]{x} | sqrt(2*(3+1)) → 2\sqrt2 | (1+sqrt(5))/2 → \frac{1+\sqrt5}{2} | oo → \infty
        sin(x)**2 → \sin^2 x | atan(2) → \arctan 2 | abs(x) → \left|x\right| | k>=2 → k \geqslant 2 | E → e
        12 pens → 12 | 2 (two) → 2 | The answer is $\boxed{2}$. → 2 | \text{12 pens} → 12 | 17^{\text{th}} → 17
        So $\boxed{\frac12}$ pens are left. → 0.5 | 2nd → 2 | 2 dozen → 24 | 5.4 million → 5400000
        WRONG: 2*pi → 3\pi | x**2+1 → x^2-1 | 12 pens → 21 | 2 (two) → 3 | The answer is $\boxed{2}$. → 3
        9 → 9 is not it | 9 → 9 \text{ or } 8 | 9 → not 9 | 5.4 → 5.4 million | exp(2) → 2e""",
    "percentages": r"""17.5% → 17.5 | 62.5 → 62.5\% | 62.5\% → 62.5\text{ percent} | 17.5% → \frac{7}{40}
        0.05\% → 0.0005 | 1,200\% → 1200\% | 25\%, 75\% → 75\%, 25\% | 20\% → x = 20\% | 0.25 → 25\%
        33\frac {1}{3}\% → \frac{100}{3}\% | 12.5\% → 12.5\text{ percentage points} | 8% → 8 per cent
        WRONG: 17.5% → 17.4 | 17.5% → 175 | 0.0001\% → 0.00014\% | 1e-9 → 2e-9\% | 0.17 → 17.5\% | 8\% → 0.8
        33\frac {1}{3}\% → 33\%""",
    "units": r"""10\text{ AM} → 10 a.m. | 5\text{ Hours} → 5 h | 5\text{ KM} → 5 kilometres | \$5 → 5 dollars
        €5 → 5 euros | 5\text{¢} → 5 | 60 mph → 60 miles per hour | 9.8\text{ m/s}^2 → 9.8 m/s² | 24 km → 24km
        5 → 5\text{ cm} | 20^\circ C → 20\text{ degrees Celsius} | 6.43 \times 10^{16} \text{ cm}^{-3} → 6.43e16
        5\text{ cm} → 5 | 3.7 \times 10^{14} Hz → 3.7 \times 10^{14} | \$3 \text{ million} → \$3000000
        2.5^{\prime \prime} → 2.5 | 5\text{ pens} → 5\text{ red pens} | 5\text{ cm}^2 → 5\text{ square cm}
        5\text{ inches} → 5\text{ in.} | 5\text{ m/s} → 5\text{ meters per second}
        5\text{ m/s} → 5\,\text{m}/\text{s} | 50^\circ → 50\text{ degrees} | x\text{ m} → x | 2n → 2n
        WRONG: 10\text{ AM} → 10\text{ PM} | 5\text{ Hours} → 5\text{ Minutes} | 5\text{ KM} → 5\text{ CM}
        \$5 → €5 | \$5 → 5\text{ cents} | 7\text{ m.} → 7\text{ cm.} | 5\text{ mW} → 5\text{ MW}
        3\text{ M/S} → 3\text{ KM/H} | 20^\circ C → 20^\circ F | 5\% → \$5 | 142 m → 142 km
        5\text{ m} → 5\text{ m}^2 | 5\text{ cm}^2 → 5\text{ cm}^3 | 5\text{ square feet} → 5\text{ feet}
        5\,\mathrm{m} → 5\,\mathrm{cm} | 5^\circ → 5\text{ rad} | 5\text{ m} → 5\% | 5\text{ m} → 5~\text{km}
        \frac{1}{2}\text{ m} → 0.5\text{ cm} | \sqrt{2}\text{ inches} → \sqrt{2}\text{ cm}""",
    "clock times": r"""6:00 → 06:00 | 6:00 → 6:00\text{ p.m.} | 3:30 PM → 15:30 | 3:30 PM → 3:30 | 12:30 AM → 0:30
        8\!:\!34 \text{ p.m.} → 20:34 | 9:05 → 9:05\ \text{A.M.} | 10:00 → 10 o'clock | 7:05:00 → 7:05
        12:00\text{ noon} → 12:00 PM | 8:22 → t = 8:22 | 7:38 → \frac{7}{38} | 1:2 → \frac12 | 1:2:3 → 2:4:6
        \sqrt{5} : 2\sqrt{2} : 3 → \sqrt5:2\sqrt2:3 | \sqrt{2}: 1 → \sqrt2
        WRONG: 4:50 → 2:25 | 15:20 → 0.75 | 6:00 → 18:00 | 6:00 → 6 | 3:30 PM → 3:30 AM | 12:30 → 0.4
        6:00 → 6:00:30 | 10:15 → \frac23 | 12:00 AM → 12:00 PM | 1:2 → 2:1 | 1:2:3 → \frac16 | 1:2:3 → 3:2:1""",
    "Unicode": r"""60^\circ → 60° | 2\sqrt{3} → 2√3 | x^2 → x² | \frac72 → 3½ | \infty → ∞ | -5 → –5 | -5 → ‑5
        12 → １２ | (1,2) → （1，2） | 1,2 → 1、2 | 3 → 3{zero} | José → Jose{acute} | 12\% → 12％
        1234 → 1{thin}234 | 2\pi → 2π | \sqrt{x+\sqrt3} → √(x+√3) | \sqrt[3]{2} → ∛2 | 10^{8} → 10⁸ | x^{-1} → x⁻¹
        x_1 → x₁ | 12 → 3×4 | \pm 3 → ±3 | x+1 → 𝑥+𝟏 | (-\infty, 3) → (−∞，3) | \frac78 → 7⁄8 | x \le 5 → x≤5
        \theta=30^\circ → θ = 30°
        WRONG: x^2 → x2 | x2 → x² | 3.5 → 31/2 | \frac12 → ⅓ | 108 → 10⁸ | 2\sqrt{3} → 3√2 | 12 → 1² | 5 → –5""",
    "float noise": r"""0.30000000000000004 → 0.3 | 0.10000000149011612 → 0.1 | 434.99999999999994 → 435
        -0.7999999999999999 → -0.8 | 0.30000000000000004 → \frac{3}{10} | 30.000000000000004\% → 30\%
        0.3333333333333333 → \frac13
        WRONG: 0.30000000000000004 → 0.31 | 0.1234567 → 0.123457 | 5.0000001 → 5
        100000000000000001 → 100000000000000000""",
    "notation": r"""71/6 → 11 5/6 | -5/2 → -2 1/2 | 73 → **73** | \sqrt[3]2 → 2^{1/3} | \frac13 → 0.\overline{3}
        0.1\overline{23} → \frac{61}{495} | \frac13 → 0.333\ldots | \frac13 → 0.\dot{3} | 42 → \color{red}{42}
        42 → \underline{42} | 42 → 42\\ | 42 → \textcolor{red}{\mathbf{42}} | 42 → {\bf 42} | 90 → 90\degree
        WRONG: 0.3 → 0.3\ldots | 0.3 → 0.3... | 1,2,9 → 1,2,\ldots,9 | 115/6 → 11 5/6 | 0.\overline{3} → 0.3
        11\frac56 → 11 - \frac56 | 42 → \color{red}{43}""",
    "lists, tuples and sets": r"""100, 200, 300 → 100,200,300 | 150, 120 → 120,150 | 1000000 → 1,000,000
        1,1,2 → 2,1,1 | (1,2) → 1,2 | 3 \pm \sqrt{2} → 3-\sqrt2, 3+\sqrt2 | x=\pm 2 → 2, -2
        \{1\pm\sqrt{5},-2\} → \{1+\sqrt5, 1-\sqrt5, -2\} | 4 \text{ or } 0 → x=0, x=4
        a < 0 \text{ or } a = 1 → a=1 \text{ or } a<0 | 0.09 \text{ OR } \frac{9}{100} → 0.09
        (45^{\circ}, 60^{\circ}) → (45°, 60°) | \{1,2\} → \{2, 1, 1\} | 1,2 → \{1,2\} | \{1,2\} → 2,1
        (1,2),(3,4) → \{(1,2),(3,4)\} | 5 → \{5\}
        WRONG: 2 → 2,2 | 2,2 → 2 | 1,1,2 → 1,2 | 1,1,2 → 1,2,2 | (1,1,2) → (1,2) | (1,2),(3,4) → (1,2)
        x=1 → x=1,x=1 | 120150 → 120, 150 | 4 \text{ or } 0 → 4 | 5 → 5 \pm 1
        \{1\pm\sqrt{5},-2\} → \{1+\sqrt5, -2\} | (1,2) → \{1,2\} | (1,2) → \left\{1,2\right\} | [1,2] → \{1,2\}
        (1,1) → \{1,1\} | \{1,2\} → (1,2) | (2,1) → \lbrace 2,1\rbrace | \{1,2\} → [1,2]""",
    "chains": r"""142 → x=142 | 5 → 2+3=5 | 5 → x=2+3=5 | 3 → x = y = 3 | 3 → \sqrt{9}=3 | 6 → 2(3) = 6 | x=3 → x=3
        0.333 → \frac{1}{3} = 0.333 | 75 → \frac{3}{4} = 75\% | 90 → \frac{\pi}{2} = 90^\circ | 11 → 1011_2 = 11
        10 → \binom{5}{2} = 10 | 2,3 → x=2, x=3
        WRONG: 142 → 99 = 142 | 142 → x=99=142 | 142 → x = 142 = 141 = 142 | 3 → 1+1=3
        \frac{1}{2} → \frac{1}{3} = \frac{1}{2} | 3 → \sqrt{4} = 3""",
    "numbers side by side": r"""3.5 → 3\frac{1}{2} | 3.5 → 3\,\tfrac{1}{2} | -3.5 → -3\frac{1}{2}
        3\frac{1}{2} → \frac{7}{2} | 6 → 2(3) | 6 → (2)(3) | 6 → 2\binom{3}{1} | 6 → 3\sqrt{4} | 2\pi → \pi 2
        6x → 2 x 3 | 2^{33} → 2^{33} | 3 → \log_2 8 | 1.5 → \frac{1}{2}3 | 1.5\pi → 3\frac{\pi}{2}
        \frac{1}{2} → \frac 1 2
        WRONG: 142 → 14\binom{9}{4}2 | 142 → 14\,128 | 142 → 14 128 | 12 → 1\,2 | 3 → 2 1 | 3 → 2{1}
        3 → 2\left(1\right) | 5 → (2)(3) | 5 → \binom{3}{1}2 | 142 → 1 142 | 142 → 14\quad 2 | (1,1) → (1,0 1)
        6 → 1+2 3""",
    "powers of ten": r"""870000000 → 8.7 \times 10^8 | 8.7 \times 10^{8} → 870,000,000 | 8.7 \cdot 10^8 → 8.7e8
        1.6e-19 → 16 × 10^{-20} | 8.7 \times 10^8 → 870000000 \text{ m} | 870000000 → 8.7 \times 10^8 \text{ m}
        1.6e-19 → \frac{16}{10^{20}}
        WRONG: 870000000 → 4.7 \times 10^8 | 8.7 \cdot 10^8 → 8.7e4 | 1.6e-19 → 17 × 10^{-20} | 1.6e-19 → 0
        1e-8 → 0 | 1.6e-19 → \frac{17}{10^{20}} | 1.6e-19 → 6.6e-34 | 1e-8 → \frac{0}{5}
        1.6 \times 10^{-19} \text{ C} → 6.6 \times 10^{-34}""",
    "a nine is not dug out of what can't be read": r"""9 → 9
        WRONG: 9 → ≠9 | 9 → 8 ≠ 9 | 9 → \neq 9 | 9 → \ne 9 | 9 → \not= 9 | 9 → x \neq 9 | 9 → \leq 9 | 9 → \gt 9
        9 → \approx 9 | 9 → \neg 9 | 9 → 8 \to 9 | 9 → \text{not } 9 | 9 → \text{not }$9$ | 9 → is not $9$
        9 → not \(9\) | 9 → the answer is 9 | 9 → {null}9""",
    "number bases": r"""2516_8 → 2516 | 2516_8 → 2516_{8} | 3 → 3_{10} | x_1 → x_{1}
        WRONG: 3 → 3_2 | 3 → 3_x | 2516 → 2516_8 | 2516_8 → 2516_7 | 3 → x=3_2 | 3 → 3_{\text{two}} | 3 → 3_{12}""",
    "names in lists": r"""3 boys and 2 girls → 3 boys and 2 girls | 3 boys and 2 girls → 2 girls and 3 boys
        3 boys and 2 girls → 3\text{ boys and }2\text{ girls} | 3 boys and 2 girls → \text{3 boys and 2 girls}
        1 boy and 2 girls → 2 girls and 1 boy | 3 boys and 2 girls → 3, 2
        2 red balls and 3 blue balls → 3 blue balls and 2 red balls | 12 pens and 5 pencils → 5 pencils, 12 pens
        15 hens and 20 cows → 20 cows and 15 hens | 3 boys and 2 girls → boys = 3, girls = 2 | x=2, y=3 → y=3, x=2
        x=2, y=3 → 2, 3 | 2, 3 → a=3, b=2 | 12 pens and 5 pencils → 5 green pencils and 12 red pens
        3 cm and 2 cm → 2, 3 | Ann: 5, Bob: 3 → Bob: 3, Ann: 5 | 3 cats, 4 dogs → cats: 3, dogs: 4
        Tom: 12, Jerry: 8 → Jerry: 8, Tom: 12 | Tom 12, Jerry 8 → Jerry 8, Tom 12
        5 quarters and 2 dimes → 2 dimes and 5 quarters | a=1, b=2, c=3 → c=3, a=1, b=2 | x=1, y=2 → (1,2)
        1 box, 2 boxes of pens → 1 box, 2 boxes of pens | x=5,x=-5 → -5, 5
        WRONG: 3 boys and 2 girls → 2 boys and 3 girls | 3 boys and 2 girls → 3 girls and 2 boys
        3 boys and 2 girls → 2\text{ boys and }3\text{ girls}
        3\text{ boys}, 2\text{ girls} → 2\text{ boys}, 3\text{ girls} | 3 boys and 2 girls → 3 boys
        3 boys and 2 girls → 5 | 2 red balls and 3 blue balls → 3 red balls and 2 blue balls
        12 pens and 5 pencils → 5 pens and 12 pencils | 15 hens and 20 cows → 20 hens and 15 cows
        Ann 5, Bob 3 → Ann 3, Bob 5 | x=2, y=3 → x=3, y=2 | x=2, y=3 → y=2, x=3
        3 boys and 2 girls → 2 men and 3 women | 3 boys and 2 girls → boys = 2, girls = 3 | 3 km and 2 h → km=2, h=3
        3\text{ x}, 2\text{ y} → 2\text{ x}, 3\text{ y} | 3 dimes and 2 cents → 2 dimes and 3 cents
        3 cm 2 m → 2 cm 3 m | 3 cats, 4 dogs → cats: 4, dogs: 3 | 3 cats, 4 dogs → 3 dogs, 4 cats
        3 cats and 3 dogs → 3 cats and 3 cats | 3 cats and 3 dogs → 3 cats | Tom: 12, Jerry: 8 → Tom: 8, Jerry: 12
        Tom 12, Jerry 8 → Tom 8, Jerry 12 | 5 quarters and 2 dimes → 2 quarters and 5 dimes
        4 \text{ adults}, 6 \text{ children} → 6 \text{ adults}, 4 \text{ children} | a=1, b=2, c=3 → 3,2,1
        m=2, n=-1 → m=-1, n=2""",
    "shares and percentages": r"""0.5\% → 0.005 | 0.005 → 0.5\% | 0.5\% → 0.5\text{ percent} | 1/20 → 5\%
        50\% → \frac{1}{2} | 62.5 → 62.5\% | 150\% → 1.5 | 150\% → 150 | \frac{1}{20}\% → 0.05\% | 1 → 100\%
        5 → 5\% | 2% → 0.02 | 200% → 2 | 0.2% → 1/500 | \frac{1}{3}\% → \frac{1}{300} | 12.5% → 1/8
        WRONG: 0.5 → 0.5\% | 0.5\% → 0.5 | \frac{1}{20} → \frac{1}{20}\% | 1/20 → 1/20 % | 1/20 % → 1/20
        1/20 % → 0.05 | 0.05 → \frac{1}{20}\% | \frac12\% → \frac12 | 0.5\text{ percent} → 0.5
        \frac{\sqrt2}{2} → \frac{\sqrt2}{2}\% | -0.25 → -0.25\% | 0.5, 0.25 → 0.5\%, 0.25\% | 1 → 1\% | 1\% → 1
        0.5 → x = 0.5\% | 0.999 → 0.999 percent | 0.75 → 75 | 0.2% → 0.2 | \frac{1}{3}\% → \frac{1}{3}
        -0.5\% → -0.5""",
    "ratios in other terms": r"""7:38 → 14:76 | 14:76 → 7:38 | 7:38 → 14 to 76 | 7:38 → 21:114 | 3:4 → 6:8
        3:5 → 6:10 | 1:2 → 0.5:1 | 3:4 → \frac34:1 | 1:2:3 → a:b:c = 1:2:3 | 1:20:30 → 2:40:60 | 7:38 → 7\colon 38
        3:4 → 3\!:\!4 | 12:100 → 3:25 | 3:25 → 12:100 | 7/38 → 14/76 | 7\text{ to }38 → 14:76 | 9:12:15 → 3:4:5
        1.5:2 → 3:4 | 100:1 → 200:2 | 3 to 5 → 6 to 10 | 25:75 → 1:3 | 1:3 → 25:75 | 6:30 → 6:30
        WRONG: 7:38 → 38:7 | 7:38 → 14:77 | 7:38 → 76:14 | 3:4 → 4:3 | 3:4 → 6:9 | 4:50 → 2:25 | 6:00 → 18:00
        1:2:3 → 1:2:4 | 1:2:3 → 1:2 | 3:5 → 3:50 | 7:38 → 7.38 | 7:38 → 738 | 6:20 → 3:10 | 2:3 → a:b = 3:2
        10:15 → \frac23 | 7:38 → 8:38 | 3:5 → 5:3 | 3:5 → 9:10 | 3 to 5 → 5 to 3 | 9:12:15 → 3:5:4 | 4:6 → 6:4
        3:30 PM → 7:60""",
    "compound units and money": r"""3 days and 4 hours → 3 days 4 hours
        3 days and 4 hours → 3\text{ days and }4\text{ hours} | 3 days and 4 hours → 4 hours and 3 days
        3 days and 4 hours → 76 hours | 3 days 4 hours → \text{3 days 4 hours} | 5 ft 6 in → 5 feet 6 inches
        5 ft 6 in → 5\text{ feet and }6\text{ inches} | 5 ft 6 in → 5 ft. 6 in. | 5 ft 6 in → 5.5 feet
        5 ft 6 in → 5'6" | 2 hours 30 minutes → 2.5 hours | 2 hours 30 minutes → 2\frac12 hours
        2 hours 30 minutes → 2 h 30 min | 2 hours 30 minutes → 2h 30m
        1 hour, 30 minutes and 5 seconds → 1 h 30 min 5 s | 2 hours → 120 minutes | 3 m 25 cm → 3.25 m
        3 m 25 cm → 325\text{ cm} | 1 year and 6 months → 18 months | 2 weeks and 1 day → 15 days
        5 sq. ft. → 5 square feet | 5 sq. ft. → 5 sq ft | 5\text{ sq ft} → 5 | 5 → 5 sq. ft.
        5 sq cm → 5\text{ cm}^2 | 12 sq. in. → 12 square inches | 5 sqft → 5 square feet | 3 kg 200 g → 3.2 kg
        30^\circ 15' → 30.25^\circ | 25 cents → \$0.25 | \$0.25 → 25\text{ cents} | \$0.25 → 25¢
        \$3.25 → 3 dollars and 25 cents | \$3.25 → \$3 and 25 cents | \$0.25 → \$.25 | 5\text{ cents} → \$0.05
        \frac{1}{2}\text{ hour} → 30\text{ minutes} | 1\frac{1}{2} feet → 18 inches
        1\text{ hour }20\text{ minutes} → 80\text{ min} | 5\,\text{ft}\ 6\,\text{in} → 5\,\text{ft}\,6\,\text{in}
        6'2'' → 6 ft 2 in | 6^{\prime}2^{\prime\prime} → 6 feet 2 inches | 1.5 km → 1500 m
        1500\text{ m} → 1.5\text{ km} | 3\text{ years and }2\text{ months} → 38\text{ months}
        2 min 5 s → 125 seconds | 10 dollars and 50 cents → \$10.50 | 10 dollars and 50 cents → 10.5 dollars
        99\text{ cents} → \$0.99 | 99 cents → 99 | 75¢ → \$0.75 | 60 square feet → 60 sq. ft | 8 sq. units → 8
        8\text{ square units} → 8\text{ sq. units} | 15 sq. m → 15 m² | 15\text{ sq. miles} → 15 square miles
        WRONG: 3 days and 4 hours → 4 days and 3 hours | 3 days and 4 hours → 3 days and 5 hours
        3 days and 4 hours → 4, 3 | 3 days and 4 hours → 7 | 3 days and 4 hours → 34 hours | 5 ft 6 in → 6 ft 5 in
        5 ft 6 in → 5 ft | 5 ft 6 in → 5.6 ft | 5 ft 6 in → 56 | 5 ft 6 in → 30 | 5 ft 6 in → 66 ft | 5'6" → 5'7"
        2 hours 30 minutes → 230 minutes | 2 hours 30 minutes → 30 minutes | 2 hours → 2 minutes
        2 hours → 200 minutes | 5 sq. ft. → 5 cu. ft. | 5 sq. ft. → 6 sq. ft. | 5 sq. ft. → 25 ft
        3 m 25 cm → 3 m 52 cm | 4 lb 8 oz → 4.8 pounds | 1 m^2 → 100\text{ cm}^2 | 25 cents → \$2.50
        \$0.25 → 0.25 cents | \$0.25 → €0.25 | 25 cents → 25\% | \$3.25 → 3 dollars and 52 cents
        2 m and 3 s → 3 m and 2 s | 1 hour 20 minutes → 120 minutes | 1 hour 20 minutes → 20 hours 1 minute
        1.5 km → 15 m | 0.5\text{ m}^2 → 50\text{ cm}^2 | 99\text{ cents} → \$99 | 75¢ → \$7.5 | 60 sq. ft → 60 ft
        8\text{ sq. units} → 64 | 5 oz → 5 lb | \$10.50 → 10 dollars and 5 cents""",
    "the empty set": r"""\varnothing → \emptyset | \emptyset → \varnothing | \varnothing → ∅ | \varnothing → \{\}
        \varnothing → \{ \} | \emptyset → \left\{\right\} | \varnothing → \text{empty set}
        \varnothing → the empty set | \varnothing → x \in \varnothing | \varnothing → \varnothing | \varnothing → Ø
        \{\} → \emptyset | \left\{ \right\} → \varnothing | \text{The empty set} → \varnothing
        \emptyset, \{1\} → \{1\}, \varnothing
        WRONG: \varnothing → 0 | \varnothing → \{0\} | \varnothing → \{\varnothing\} | \varnothing → \mathbb{R}
        0 → \varnothing | \{1\} → \varnothing | \varnothing → \phi | \varnothing → (0, 1) | \varnothing → no
        \{1\} → \{\} | \{0\} → \emptyset | \emptyset → \{\{\}\} | \emptyset → \text{none of these} | 0 → \emptyset
        \emptyset → x""",
    "roots in plain text": r"""\sqrt{2} → sqrt2 | sqrt2 → \sqrt{2} | 2\sqrt{3} → 2sqrt3 | 2\sqrt{3} → 2 sqrt 3
        \sqrt{2} → sqrt{2} | \sqrt{23} → sqrt23 | \sqrt{x} → sqrt x | 1+\sqrt5 → 1+sqrt5
        \sqrt{2}+\sqrt{3} → sqrt2 + sqrt3 | \sqrt{2}, -\sqrt{2} → sqrt2, -sqrt2 | 4\sqrt[3]{2} → 4 sqrt[3]{2}
        \sqrt2\text{ cm} → sqrt2 cm | -sqrt7 → -\sqrt 7 | sqrt3/3 → \frac{1}{\sqrt{3}}
        (sqrt5-1)/2 → \frac{\sqrt{5}-1}{2} | sqrt 2 → \sqrt2 | sqrt10 → \sqrt{10}
        WRONG: \sqrt{2} → sqrt3 | 2\sqrt{3} → sqrt23 | 2\sqrt{3} → sqrt2 3 | \sqrt{2}3 → sqrt23 | 2 → sqrt2
        \sqrt{2} → 2 | \sqrt2 → sqrt22 | \sqrt[3]{2} → sqrt2 | \sqrt{2} → sqrt | 3\sqrt2 → 2sqrt3 | \sqrt{2x} → sqrt2
        3sqrt5 → 5sqrt3 | sqrt10 → sqrt1 0 | sqrt10 → 10 | sqrt10 → sqrt5 | sqrt10 → 5sqrt2 | 2^sqrt2 → 2sqrt2
        sqrt3/3 → sqrt(3/3)""",
    "golds that are sentences": r"""The answer is 2 → 2 | The answer is 2. → 2 | The answer is \frac{1}{2} → 0.5
        The answer is: 2 → 2 | The final answer is 2 → 2 | The answer is 2 → x = 2
        The answer is 12 cm → 12\text{ cm} | The answer is 12 cm → 12 | Therefore, the answer is \sqrt{2}. → sqrt(2)
        Thus the answer is 2 → 2 | The answer is Evelyn. → Evelyn
        The answer is 3 boys and 2 girls → 2 girls and 3 boys | \text{The answer is 2.} → 2 | The area is 12 → 12
        The value of x is 5 → 5 | There are 12 pens. → 12 | The answer is 2 or 3 → 2, 3 | the answer is 1,000 → 1000
        The sum of 3 and 4 is 7. → 7 | Its length is 5 ft 6 in. → 66 in | It takes 5 hours. → 5 hours
        The answer is \boxed{2}. → 2 | The answer is 25\% → 25\% | The answer is 25% → 0.25
        The correct answer is B → B | The correct answer is (B). → B | Answer is 5 → 5
        The answer is: \(\frac12\) → 0.5 | The solutions are 2 and 3. → 3, 2 | The maximum value is 10. → 10
        He has 5 apples. → 5 | \text{The answer is }\frac{1}{2}\text{.} → \frac12 | The answer is $(2,3)$ → (2,3)
        The answer is the empty set → \emptyset | The answer is yes → Yes | Final answer: 12. → 12
        The ratio is 7:38 → 14:76
        WRONG: The answer is 2 → 3 | The answer is 2. → -2 | The answer is 12 cm → 12 m | The answer is 2 or 3 → 2
        The value of x is 5 and y is 3 → 5 | The sum of 3 and 4 is 7. → 4 | The answer is Evelyn. → Ann
        The answer is at least 2 → 2 | The answer is between 2 and 3 → 2, 3 | The answer is \frac{1}{2} → 2
        The answer is 3 boys and 2 girls → 2 boys and 3 girls | The answer is 5 because 5 is prime → 5 because
        x is 5 or y is 3 → 3 | There are no solutions → solutions | The correct answer is B → A
        The answer is yes → no | The answer isn't 5 → 5 | The solutions are 2 and 3. → 2 | The answer is unknown → 5
        5 is not the answer → 5 | He has 5 apples and 3 pears. → 3 | If x is 2, the answer is 3 → 2
        The answer is 2 → The answer is not 2 | The answer is 5 times 3 → 5 | The answer is about x → x
        3 → The answer is 3""",
}


SIGNS = {"{null}": "\x00", "{zero}": "\u200b", "{acute}": "\u0301", "{thin}": "\u202f"}  # nobody sees them


@pytest.mark.parametrize("kind", KINDS)
def test_answers_by_kind(kind):
    for rows, wanted in zip(KINDS[kind].split("WRONG: "), (True, False), strict=True):
        for name, sign in SIGNS.items():
            rows = rows.replace(name, sign)
        pairs = [row.strip().split(" → ") for line in rows.strip().splitlines() for row in line.split(" | ")]
        results = task.score_all([rf"\boxed{{{answer}}}" for _, answer in pairs], [[gold] for gold, _ in pairs])
        assert [pair for pair, result in zip(pairs, results) if result["correct"] is not wanted] == []


BITS = [*"120.,;:-+%$€({[]})*\\^_|/<>=!'\"~`abxyA ½²√°π–１，…\u0301\ud800", r"\frac", r"\text{", r"\ldots", r"\pm"]
BITS += [r"\boxed{", r"\,", r"\overline{", "sqrt(", "**", " and ", " AM", " km", "pi", "0.3", r"\begin{pmatrix}"]


@settings(max_examples=1000, deadline=2000, derandomize=True, database=None)  # milliseconds
@given(st.lists(st.sampled_from(BITS), max_size=14).map("".join) | st.sampled_from(BITS).map(lambda bit: 100 * bit))
def test_reading_random_texts_never_raises_and_takes_little_time(text):
    text = task.clean(text)
    for read in (answers.quantity, answers.clock, answers.elements, answers.values, answers.ratio, answers.bare):
        read(text)


def test_any_gold_of_a_list_will_do():
    golds = [r"\arcsin{\frac{1}{1.3}}", r"\frac{3}{4}", "Ann"]
    assert right("0.75", *golds) and right("Ann", *golds) and right(r"\arcsin{\frac{10}{13}}", *golds)
    assert not right("0.5", *golds)
    assert task.score(r"\boxed{0.5}", r"\frac12")["correct"]  # a text alone is a list of one


TOWER = r"9^{9^{9^9}}"
ODD = [
    "x+" * 25_000, "9" * 50_000, "9" * 290, "\ud800", "+".join(f"x^{{{n}}}" for n in range(40)), "五" * 200,
    "(" * 140 + "5" + ")" * 140, "{" * 20_000 + "5" + "}" * 20_000, "{" * 140 + "5" + "}" * 140,
    r"\sqrt{" * 40 + "5" + "}" * 40, "".join(map(chr, range(32))),
]  # fmt: skip


def test_odd_answers_are_wrong_and_leave_others_alone():
    boxes = [rf"\boxed{{{answer}}}" for answer in [*ODD, r"\frac{2}{4}"]]
    results = task.score_all(boxes, [["0.25"]] * len(ODD) + [["0.5"]])
    assert [result["correct"] for result in results] == [False] * len(ODD) + [True]
    assert all(result["format"] for result in results)


def test_hostile_answers_cost_their_own_time_only():
    right("0.5", r"\frac12")
    hostile = [TOWER, r"(10^{10^{10}})!"]
    responses = [rf"\boxed{{{text}}}" for h in hostile for text in (h, h, r"\frac{2}{4}", r"\frac{3}{4}")]
    results = task.score_all(responses, [[r"\frac12"]] * len(responses))
    assert [result["correct"] for result in results] == [False, False, True, False] * 2
    assert [result["timed_out"] for result in results] == [True, True, False, False] * 2
    assert all(result["format"] for result in results) and right("0.5", r"\frac12")


def test_a_worker_that_hangs_is_killed_and_replaced(monkeypatch):
    """The clock's limit, for what the processor's doesn't catch: here the worker is stopped."""
    monkeypatch.setattr(workers, "WALL_LIMIT", 1)
    worker = workers.Worker()
    assert worker.ask(["1/2", ["0.5"]]) is True
    first = worker.process
    os.kill(first.pid, signal.SIGSTOP)
    assert worker.ask(["1/2", ["0.5"]]) is None
    assert first.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert worker.ask(["1/2", ["0.5"]]) is True and worker.ask(["1/3", ["0.5"]]) is False
    assert worker.process.pid != first.pid
    worker.process.kill()  # by someone else, between two answers
    worker.process.wait()
    assert worker.ask(["1/2", ["0.5"]]) is True
    worker.process.communicate()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid):
    """Whether there is such a process, and it is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_answer_costs_no_start_of_a_worker():
    worker = workers.Worker()
    assert worker.ask(["1/2", ["0.5"]]) is True and worker.seconds < workers.TIME_LIMIT
    first, (copy,) = worker.process.pid, children(worker.process.pid)
    assert os.getpgid(first) == os.getpgid(copy) == first  # Ctrl-C goes to the trainer's group, and not to this one
    for _ in range(2):
        assert worker.ask([TOWER, ["0.5"]]) is None and worker.seconds == workers.TIME_LIMIT
        assert worker.ask(["1/2", ["0.5"]]) is True and worker.ask(["1/3", ["0.5"]]) is False
        assert worker.process.pid == first and children(first) != [copy]
    (copy,) = children(first)
    os.kill(copy, signal.SIGKILL)  # by the system between two answers, for example: it loses no answer
    until(lambda: not lives(copy))
    assert worker.ask(["1/2", ["0.5"]]) is True and worker.ask(["1/3", ["0.5"]]) is False
    worker.kill()


@pytest.mark.slow
def test_a_batch_has_a_bound_after_which_answers_count_as_timed_out(monkeypatch):
    hostile = [[f"{n}^{{9^{{9^9}}}}", ["0.5"]] for n in range(12, 16)]
    honest = ["1/2", ["0.5"]]
    assert workers.ask([honest, *hostile, honest]) == [True, *[None] * len(hostile), True]
    monkeypatch.setattr(workers, "BATCH_LIMIT", 1)
    monkeypatch.setattr(workers, "BATCH_LIMIT_PER_ANSWER", 0)
    assert workers.ask([honest, *hostile, honest]) == [True, *[None] * len(hostile), None]
    assert workers.ask([honest] * 40) == [True] * 40  # each call has its own


@pytest.fixture(scope="module")
def worker_folder():
    """The folder in /proc of a worker that has answered; the trainer's environment has a secret."""
    worker = workers.Worker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "of the trainer")
        assert worker.ask(["1/2", ["0.5"]]) is True
    yield Path("/proc", str(worker.process.pid))
    worker.process.communicate(timeout=60)  # its input ends, and so does it
    assert worker.process.returncode == 0


def status(folder, name):
    return re.search(rf"\n{name}:(.*)\n", (folder / "status").read_text())[1].strip()


def test_a_worker_has_a_bound_on_memory_and_knows_neither_torch_nor_our_environment(worker_folder):
    limit = re.search(r"Max address space\s+(\d+)\s+(\d+)", (worker_folder / "limits").read_text())
    assert limit.groups() == (str(workers.MEMORY_LIMIT),) * 2
    maps = (worker_folder / "maps").read_text()
    assert "python" in maps and "libtorch" not in maps  # vLLM preloads a library of torch's folder in all children
    assert status(worker_folder, "Threads") == "1"  # it forks
    names = {line.split("=")[0] for line in (worker_folder / "environ").read_text().split("\0")}
    assert names <= {"PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", ""}


def test_a_worker_has_no_network_where_the_system_allows_that(worker_folder):
    alone = ["unshare", "--net", "true"] if os.geteuid() == 0 else ["unshare", "--user", "--net", "true"]
    if not shutil.which("unshare") or subprocess.run(alone, capture_output=True).returncode:
        pytest.skip("this system does not allow it")
    for process in (worker_folder.name, *children(worker_folder.name)):
        assert os.readlink(f"/proc/{process}/ns/net") != os.readlink("/proc/self/ns/net")
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
        assert [line.split(":")[0].strip() for line in lines[2:]] in ([], ["lo"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop root")
def test_a_worker_drops_root(worker_folder):
    ours = int(status(Path("/proc/self"), "CapPrm"), 16)
    for process in (worker_folder.name, *children(worker_folder.name)):
        folder = Path("/proc", str(process))
        assert int(status(folder, "CapPrm"), 16) & ~workers.READ_ANY_FILE == 0
        if ours & workers.READ_ANY_FILE:  # without it, root's own rights are needed to read packages in root's folder
            for name in ("Uid", "Gid"):
                assert status(folder, name).split() == [str(workers.NOBODY)] * 4
            assert status(folder, "Groups") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights away")
def test_a_worker_of_a_root_without_rights_still_works():
    """As in a container: it may neither leave the network nor read the files of a root that it isn't."""
    code = "from rewards import math as task; print(task.score(r'\\boxed{1/2}', ['0.5'])['correct'])"
    few = ["setpriv", "--bounding-set", "-all,+setuid,+setgid,+kill", "--inh-caps", "-all"]
    if not shutil.which("setpriv"):
        pytest.skip("there is no setpriv here")
    done = subprocess.run([*few, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("answer", ["1/2", TOWER])
@pytest.mark.slow
def test_workers_end_with_their_parent(answer):
    code = (
        "import sys; from rewards import workers; worker = workers.Worker(); worker.start()\n"
        "print(worker.process.pid, flush=True); worker.ask([sys.argv[1], ['0.5']]); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, "-c", code, answer], cwd=ROOT, **pipes)
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    assert lives(pid)
    parent.kill()
    parent.communicate()
    until(lambda: not lives(pid), seconds=60)


def test_workers_that_cannot_start_say_why(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such library here')")
    code = "from rewards import math as task; task.score(r'\\boxed{1/2}', ['0.5'])"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = python("-c", code, cwd=tmp_path, env=env)
    assert re.search("RuntimeError: .* did not start: .*no such library here", done.stderr)


INSTRUCTION = task.INSTRUCTION


def chat(text):
    return [{"role": "user", "content": text}]


def in_parts(text):
    """A turn's content as models with pictures have it."""
    return [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:], "image_url": None}]


def verl(text, gold):
    model = {"ground_truth": gold, "style": "rule"}
    return {"prompt": chat(f"{text} {INSTRUCTION}"), "reward_model": model, "answer": "no"}


def conversation(text, gold):
    return [{"from": "human", "value": text}, {"from": "assistant", "ground_truth": {"value": gold}}]


SCHEMAS = [
    conversation,  # the only one that has no columns, and so no Parquet
    verl,
    lambda text, gold: dict(zip("01", conversation(text, gold))),
    lambda text, gold: {"prompt": [{"from": "user", "value": text}], "final_answer": gold},
    lambda text, gold: {"problem": text, "answer": gold, "solution": "?"},
    lambda text, gold: {"question": in_parts(text), "answer": gold},
    lambda text, gold: {"question": text, "final_answer": gold, "difficulty": 5.0},  # DeepMath
    lambda text, gold: verl("", gold) | {"prompt": json.dumps(chat(text))},  # a chat in a string
    lambda text, gold: {"problem": repr(chat(text)), "answer": gold},
    lambda text, gold: verl("", gold) | {"prompt": chat(in_parts(text))},
]
GOLDS = [  # as a file has them, and as they are loaded
    (["5", "x^2", "07"], [["5"], ["x^2"], ["07"]]),
    ([142.0, 0.5, -3.0], [["142"], ["0.5"], ["-3"]]),
    ([["1", "2"], ["3\n"], ["4"]], [["1", "2"], ["3"], ["4"]]),
    ([1, 2, 3], [["1"], ["2"], ["3"]]),
]


@pytest.mark.parametrize("row_of", SCHEMAS)
@pytest.mark.parametrize("golds, expected", GOLDS)
def test_every_schema(tmp_path, row_of, golds, expected):
    rows = [row_of(f"What is {i}?", gold) for i, gold in enumerate(golds)]
    path = write_rows(tmp_path / f"some_set.{'json' if row_of is conversation else 'parquet'}", rows)
    common = {"prefix": "", "category": "some_set"}
    assert task.load(str(path), "train") == [
        common | {"messages": chat(f"What is {i}? {INSTRUCTION}"), "answer": gold} for i, gold in enumerate(expected)
    ]


def test_earlier_turns_are_kept(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    (item,) = task.load(write_rows(tmp_path / "a.json", [verl("A?", "1") | {"prompt": [system, *chat("A?")]}]), "test")
    assert item["messages"] == [system, *chat(f"A? {INSTRUCTION}")]


SOURCES = {"org/Easy hard": "Easy hard", "org/Easy org/Easy": "both both", "- a b": "both a b"}


def test_files_with_several_sources_are_told_apart(tmp_path):
    for sources, categories in SOURCES.items():
        rows = [verl("A?", "1") | ({"data_source": name} if name != "-" else {}) for name in sources.split()]
        items = task.load(write_rows(tmp_path / "both.json", rows), "test")
        assert [item["category"] for item in items] == categories.split()


GSM8K = {
    "She has 5 + 7 = <<5+7=12>>12.\n#### 12": "12", "#### 1,000": "1,000", "5\r\n#### -3\r\n": "-3", "a ####0.5": "0.5",
    "#### 3\n#### 4": "4", "####\n7": "7", "12 ####": "12 ####", "x #1": "x #1",
}  # fmt: skip


def test_the_answer_of_gsm8k_is_behind_its_last_mark():
    assert {text: task.golds_of(text) for text in GSM8K} == {text: [gold] for text, gold in GSM8K.items()}
    assert task.golds_of(["a\n#### 1", "2"]) == ["1", "2"]


UNREADABLE = ["E_1, E_2", r"t(0,4]", "x = 5 because y = 3"]


def test_golds_that_cannot_be_read_are_left_out_and_counted(tmp_path, capsys):
    golds = ["5", *UNREADABLE, ["?!", r"\frac12"], "", ["", "  "], TOWER]
    path = write_rows(tmp_path / "a.json", [{"problem": f"{i}", "answer": gold} for i, gold in enumerate(golds)])
    items = task.load(str(path), "train")
    kept = [(item["messages"][0]["content"][0], item["answer"]) for item in items]
    assert kept in ([("0", ["5"]), ("4", [r"\frac12"])], [("0", ["5"]), ("4", [r"\frac12"]), ("7", [TOWER])])
    printed = capsys.readouterr().out
    assert f"a.json: {8 - len(kept)} of 8 problems left out" in printed and repr(UNREADABLE) in printed
    with pytest.raises(ValueError, match=r"b\.json has no problem with an answer that can be read"):
        task.load(str(write_rows(tmp_path / "b.json", [{"problem": "?", "answer": "E_1, E_2"}])), "train")
    task.load(str(write_rows(tmp_path / "b.json", [{"problem": "?", "answer": "x+1"}])), "train")
    assert "left out" not in capsys.readouterr().out.split("E_1, E_2")[-1]


GOOD = {"problem": "?", "answer": "1"}

PROBLEMS = [["What?", "Why?"], "[{'role': 'user', 'content': '?'} {'role': 'user'}]"]
PROBLEMS += [" ", None, [], "\ud800?", [*chat("?"), "!"], [{"role": "assistant", "content": "?"}], [{"type": "video"}]]
BROKEN = [None, {"problem": "?"}, conversation("?", "1")[:1], {"prompt": chat("?"), "reward_model": None}]
BROKEN += [GOOD | {"problem": problem} for problem in [*PROBLEMS, chat([7]), [{"role": 7, "content": "?"}]]]
MEDIA = ["images", "image", "image_path", "audio", "Videos", "video_url", "multi_modal_data"]
MEDIA += ["image_1", "decoded_image", "query_img", "photo"]


@pytest.mark.parametrize("key", MEDIA)
def test_rows_with_pictures_sounds_or_films_are_refused(key, tmp_path):
    for suffix in ("jsonl", "parquet"):
        rows = [GOOD | {key: None}, GOOD | {key: [] if suffix == "jsonl" else None}]
        assert len(task.load(str(write_rows(tmp_path / f"a.{suffix}", rows)), "train")) == 2
        path = write_rows(tmp_path / f"b.{suffix}", [*rows, GOOD | {key: ["a.png"]}])
        with pytest.raises(ValueError, match=rf"b\.{suffix}, row 3 has {key}: models get text alone"):
            task.load(str(path), "train")


COLUMNS = [
    {"problem": ["A?", "B?"], "answer": ["1", "2"]},
    {"problem": {"0": "A?", "1": "B?"}, "answer": {"0": "1", "1": "2"}},
    {"train": [GOOD, GOOD]},
]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_of_columns_is_refused(columns, indent, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(columns, indent=indent))
    with pytest.raises(ValueError, match=rf"a\.json holds the columns {', '.join(columns)}: expected a list of rows"):
        task.load(str(tmp_path / "a.json"), "train")


def test_the_configuration_of_a_hub_data_set_is_behind_its_name(tmp_path):
    """The library reads a folder as it reads a data set of the hub: by the configurations in its README."""
    folder = tmp_path / "gsm8k"
    configs = ""
    for name in ("main", "socratic"):
        write_rows(folder / name / "train.parquet", [{"question": f"{name}?", "answer": "so\n#### 5"}])
        configs += f"- config_name: {name}\n  data_files: {name}/train.parquet\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    name, found = task.read_hub(f"{folder}:socratic", "train")
    assert name.endswith("gsm8k:socratic") and found[0]["question"] == "socratic?"
    for wrong in (folder, f"{folder}:mian"):
        with pytest.raises(ValueError, match=r"gsm8k needs one of its configurations .*: main, socratic$"):
            task.read_hub(str(wrong), "train")


ASKED = {  # the end of a question: a response with 5 → whether it is right, if the known answer is 5
    'output the final answer after "####".': {
        "so\n#### 5": True, r"\boxed{5}": True, "#### 4\n#### 5": True, "#### 5\n#### 4": False, "5": False,
        r"\boxed{5} #### 4": False, r"#### 4 or \boxed{5}": True, "Answer: 5": False, r"\boxed{5} ####": True,
    },
    "The last line should be of the form Answer: $Answer (without quotes)": {
        "Answer: 5": True, "**Answer:** 5": True, "**Answer: 5**": True, "Answer:\n5": True, "answer: $5$.": True,
        r"Answer: \boxed{5}": True, "Answer: $Answer": False, "#### 5": False, "Answer: 5\nAnswer: 6": False,
        "Final Answer: 5\nThat is all.": True, "Answer:": False, r"\boxed{5}": True,
    },
    "Put it in <answer> </answer> tags.": {"<answer> 5 </answer>": True, "<answer>5": False, r"\boxed{5}": True},
    "Reply in the following format:\nAnswer: <number>": {"Answer: 5": True},
    "Both stand within <think> </think> and <answer> </answer> tags.": {"<answer>5</answer>": True},
    "Give the result following ####.": {"#### 5": True},
    "What is it?": {"#### 5": False, "Answer: 5": False, "<answer>5</answer>": False, r"\boxed{5}": True},
    "He is with us.\n\n#### Problem": {"#### 5": False},  # a heading
    "How many?\nAnswer:": {"Answer: 5": False},
}  # fmt: skip


def test_the_marker_that_a_question_asks_for_marks_the_answer_too(tmp_path):
    rows = [{"problem": f"What is 2 + 3? {asks}", "answer": "5"} for asks in ASKED]
    items = task.load(str(write_rows(tmp_path / "a.jsonl", rows)), "train")
    for item, (asks, responses) in zip(items, ASKED.items(), strict=True):
        scores = task.score_all(list(responses), [item["answer"]] * len(responses))
        assert {text: score["correct"] for text, score in zip(responses, scores)} == responses, asks
    few_shot = [*chat("2?"), {"role": "assistant", "content": 'I answer after "####".'}, *chat("3?")]
    [item] = task.load(str(write_rows(tmp_path / "b.jsonl", [{"prompt": few_shot, "final_answer": "5"}])), "train")
    assert item["answer"] == ["5"]


BROKEN += [GOOD | {"answer": answer} for answer in (None, True, [], float("nan"), [["1"]], "\udfff")]


@pytest.mark.parametrize("row", BROKEN)
def test_broken_rows_are_named(tmp_path, row):
    path = write_rows(tmp_path / "a.jsonl", [GOOD, row, GOOD])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, row 2: (no problem and answer|a text holds)"):
        task.load(str(path), "train")


FILES = [f"math/{name}.parquet" for name in "aime amc math500 olympiad_bench dsr_uniform_train minerva".split()]


@needs_real
@pytest.mark.parametrize("file", [*FILES[:-1], pytest.param(FILES[-1], marks=pytest.mark.slow), "orz/aime2024.json"])
def test_real_files(file, tmp_path):
    """Of about 50 problems all answers are right for their own, and none for the next."""
    path, n_rows = DATA / file, 30
    if file in FILES:
        rows = pq.read_table(path).to_pylist()
        rows = rows[:: max(1, len(rows) // 50)]
        path, n_rows = write_rows(tmp_path / path.name, rows), len(rows)
    items = task.load(str(path), "test")
    # A few golds can't be read: Minerva's energies with indices, an equation with a derivative, Olympiad Bench's prose.
    assert n_rows - 3 <= len(items) <= n_rows and {item["category"] for item in items} == {path.stem}
    for item in items:
        (message,) = item["messages"]
        assert message["role"] == "user" and message["content"].endswith(f" {INSTRUCTION}")
        assert message["content"].count("Let's think step") == 1 and all(item["answer"])
    golds = [item["answer"] for item in items]
    for which in (0, -1):
        responses = [rf"Hence \boxed{{0}}? No: $\boxed{{{gold[which]}}}$. Done." for gold in golds]
        assert all(result["correct"] for result in task.score_all(responses, golds))
    pairs = [(mine[0], theirs) for mine, theirs in zip(golds[-1:] + golds, golds) if mine[0] not in theirs]
    results = task.score_all([rf"It is \boxed{{{answer}}}" for answer, _ in pairs], [gold for _, gold in pairs])
    assert [pair for pair, result in zip(pairs, results) if result["correct"]] == [] and len(pairs) > 0.9 * len(golds)
    assert sum(result["timed_out"] for result in results) <= 5  # a few take almost as long as the limit
