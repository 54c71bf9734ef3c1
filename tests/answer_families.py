r"""Answers as models write them beside gold answers, by family.

``= answer | gold`` is equal, ``! answer | gold`` is not. The grading page of the docs gives the rule of each family.
Count right and wrong verdicts with ``python benchmarks/grading_agreement.py tests/answer_families.py``.
"""

FAMILIES: dict[str, str] = {
    "angles in degrees and radians": r"""
        = \frac{\pi}{6} | 30^\circ
        = 30^\circ | \frac{\pi}{6}
        = 180^\circ | \pi
        = \pi | 180^{\circ}
        = 45° | \frac{\pi}{4}
        = \pi/3 \text{ radians} | 60^\circ
        = 60 degrees | \frac{\pi}{3}
        = 60\text{ degrees} | \frac{\pi}{3}\text{ rad}
        = 1 \text{ rad} | 1
        = 22.5^\circ | \frac{\pi}{8}
        = -\frac{5\pi}{6} | -150^\circ
        = 2\pi | 360°
        = (2, 60^\circ) | \left(2, \frac{\pi}{3}\right)
        = 30^\circ, 150^\circ | \frac{\pi}{6}, \frac{5\pi}{6}
        = \arctan 1 | 45^\circ
        = 30^\circ | 30
        ! 60 | \frac{\pi}{3}
        ! \frac{\pi}{2} | 90
        ! 30 | \frac{\pi}{6}
        ! 30^\circ | \frac{\pi}{3}
        ! 45^\circ | \frac{\pi}{6}
        ! 30 \text{ radians} | 30^\circ
        ! \pi^\circ | 180
        ! 3.14 | 180^\circ
        ! 57^\circ | 1
    """,
    "values of named angles": r"""
        = \angle ABC = 60^\circ | 60
        = m\angle ABC = 60^\circ | 60^\circ
        = m \angle A = 35 | 35^\circ
        = \measuredangle BAC = 40^\circ | 40
        = \angle BAC = \frac{\pi}{3} | 60^\circ
        = \angle 1 = 30^\circ | 30^\circ
        = m(\angle B) = 50^\circ | 50
        = \widehat{ABC} = 75^\circ | 75
        = \text{Angle } A = 70^\circ | 70
        = \sin 30^\circ | \frac{1}{2}
        = \sin 30° | 0.5
        = \cos(60^{\circ}) | \frac12
        = \tan 45^\circ | 1
        = \tan\frac{\pi}{4} | 1
        = 2\cos 30^\circ | \sqrt{3}
        = \sin(45 \text{ degrees}) | \frac{\sqrt2}{2}
        = \theta = 30^\circ | \frac{\pi}{6}
        ! \angle ABC = 60^\circ | 61
        ! \angle ABC = 60^\circ | \angle BAC = 60^\circ
        ! \sin 30 | \frac12
        ! \sin 30^\circ | \frac{\sqrt{3}}{2}
        ! \cos 60^\circ | 60
        ! m\angle A + m\angle B = 90^\circ | 45
    """,
    "lengths, areas, masses and money": r"""
        = 5cm | 50mm
        = 50 \text{ mm} | 5 \text{ cm}
        = 5\,\mathrm{cm} | 0.05\text{ m}
        = 1.5 \text{ km} | 1500\text{ m}
        = 1 \text{ foot} | 12 \text{ inches}
        = 2 yards | 6 feet
        = 1\text{ m}^2 | 10000\text{ cm}^2
        = 1 \text{ square foot} | 144 \text{ square inches}
        = 3\text{ m}^3 | 3000\text{ liters}
        = 2.5 \text{ kg} | 2500 \text{ grams}
        = 500 \text{ mL} | 0.5 \text{ L}
        = 1\text{ pound} | 16 \text{ ounces}
        = \$1.50 | 150\text{ cents}
        = 75 \text{ cents} | \$0.75
        = 72 \text{ km/h} | 20 \text{ m/s}
        = 2.54\text{ cm} | 1\text{ inch}
        = 10\text{ m/s}^2 | 10\ \mathrm{m\,s^{-2}}
        = 6 \text{ N} | 6
        = 12\text{ cm}\cdot\text{s}^{-1} | 12\text{ cm/s}
        = 5 \mathrm{~cm} | 5
        = 48\text{ sq. ft.} | 48 \text{ ft}^2
        = 3 \text{ dollars} | \$3
        = €20 | 20
        = 5 \text{ ft } 6 \text{ in} | 66 \text{ inches}
        = 5\text{ feet and }6\text{ inches} | 5.5 \text{ feet}
        ! 5cm | 5mm
        ! 5 \text{ cm} | 50 \text{ cm}
        ! 5 \text{ cm} | 5 \text{ cm}^2
        ! 50 | 5\text{ cm}
        ! 100 \text{ cm}^2 | 1 \text{ m}^2
        ! 5\text{ kg} | 5\text{ m}
        ! 12 \text{ inches} | 12 \text{ feet}
        ! \$150 | 150 \text{ cents}
        ! 20 \text{ km/h} | 20 \text{ m/s}
        ! 1\text{ mW} | 1\text{ MW}
        ! 5 \text{ ft } 6 \text{ in} | 5
        ! 5 \text{ ft } 6 \text{ in} | 11
    """,
    "times and durations": r"""
        = 10{:}30 | 10:30
        = 10:30 | 10{:}30
        = 10\!:\!30 | 10:30
        = 10:30 \text{ a.m.} | 10:30
        = 10{:}30\text{ AM} | 10:30 \text{ a.m.}
        = 10:30 \text{ PM} | 22:30
        = 22:30 | 10:30\text{ p.m.}
        = 4:00 PM | 4{:}00 \text{ p.m.}
        = 9 | 9\text{ a.m.}
        = 4 \text{ p.m.} | 4:00 \text{ p.m.}
        = 4:00\text{ pm} | 16{:}00
        = 12:15 \text{ a.m.} | 0:15
        = 2 \text{ hours} | 120 \text{ minutes}
        = 2.5\text{ hours} | 2 \text{ hours } 30 \text{ minutes}
        = 1 hour and 30 minutes | 90 minutes
        = 90 \text{ min} | 1.5 \text{ h}
        = 1 \text{ day} | 24 \text{ hours}
        = 2 \text{ weeks} | 14 days
        = 150 \text{ seconds} | 2 \text{ minutes } 30 \text{ seconds}
        ! 10:30 | 10:03
        ! 10:30 \text{ a.m.} | 10:30 \text{ p.m.}
        ! 10:30 \text{ PM} | 10:30 \text{ AM}
        ! 22:30 | 10:30 \text{ a.m.}
        ! 10.30 | 10:30
        ! 10:30 | 1:3
        ! 1/3 | 10:30
        ! 2 | 10:05
        ! 2 \text{ hours} | 2 \text{ minutes}
        ! 2 \text{ hours } 30 \text{ minutes} | 2.3 \text{ hours}
        ! 2 \text{ hours } 30 \text{ minutes} | 2
        ! 1030 | 10:30
        ! 9 | 9:00\text{ a.m.}
    """,
    "scientific notation with units": r"""
        = 1.6 \cdot 10^{-19}\text{ C} | 1.6 \times 10^{-19}
        = 1.6 \times 10^{-19} \text{ C} | 1.6 \cdot 10^{-19}\text{ C}
        = 1.6e-19 | 1.6 \cdot 10^{-19}\text{ C}
        = 3 \times 10^8 \text{ m/s} | 3 \cdot 10^{8}\ \mathrm{m/s}
        = 3\times10^{8} | 3\times10^8\,\mathrm{m\,s^{-1}}
        = 3 \times 10^5 \text{ km/s} | 3 \times 10^8 \text{ m/s}
        = 6.02 \times 10^{23} \text{ molecules} | 6.02 \times 10^{23}
        = 9.11 \times 10^{-31} \, \mathrm{kg} | 9.11\cdot10^{-31}
        = 2.5 \times 10^{3}\text{ m} | 2.5\text{ km}
        = 4\times 10^{-7}\ \text{m} | 400\text{ nm}
        = 5.0 \times 10^{2} \text{ J} | 500
        = 1.5×10⁸ km | 1.5 \times 10^8 \text{ km}
        = 1.5*10^8 km | 1.5 \times 10^{11} \text{ m}
        = 1.2 \times 10^6 \text{ Hz} | 1.2 \text{ MHz}
        ! 1.6 \cdot 10^{-19}\text{ C} | 1.6 \cdot 10^{-18}\text{ C}
        ! 1.6 \cdot 10^{19}\text{ C} | 1.6 \cdot 10^{-19}
        ! 3 \times 10^8 \text{ km/s} | 3 \times 10^8 \text{ m/s}
        ! 3 \times 10^8 \text{ m} | 3 \times 10^8 \text{ m/s}
        ! 6.02 \times 10^{22} | 6.02 \times 10^{23} \text{ molecules}
        ! 1.6 \cdot 10^{-19}\text{ C} | 0
    """,
    "numerals in other bases": r"""
        = 1101_{\text{two}} | 1101_2
        = 1101_2 | 1101_{\text{two}}
        = 1101 | 1101_{\text{two}}
        = 1101_{two} | 1101_{2}
        = 1101_{(2)} | 1101_2
        = (1101)_2 | 1101_{2}
        = {1101}_{2} | 1101_2
        = 1101 \text{ base } 2 | 1101_2
        = 1101 (base 2) | 1101_2
        = 1101\text{ (base two)} | 1101_2
        = \text{1101}_{\text{two}} | 1101_2
        = 243_{\text{five}} | 243_5
        = 1A_{\text{sixteen}} | 1A_{16}
        = 1a_{16} | 1A_{16}
        = 01101_2 | 1101_2
        = 110\,1101_2 | 1101101_2
        = 21_{\text{ten}} | 21
        ! 1101_{\text{two}} | 1101_{\text{three}}
        ! 1101_{\text{two}} | 1100_2
        ! 13 | 1101_{\text{two}}
        ! 1101_{\text{two}} | 13_{8}
        ! 1101 \text{ base } 3 | 1101_2
        ! 243_{\text{five}} | 342_5
        ! 0x1F | 11111_2
    """,
    "ratios and fractions": r"""
        = 3:2 | \frac{3}{2}
        = \frac{3}{2} | 3:2
        = 3/2 | 3:2
        = 1.5 | 3:2
        = 6:4 | 3:2
        = 3 : 2 | 3{:}2
        = 3 \text{ to } 2 | 3:2
        = 3:2 | 3 \text{ to } 2
        = 3 to 2 | \frac{3}{2}
        = 3∶2 | 3:2
        = \frac{3}{10} | 3:10
        = 3:10 | \frac{3}{10}
        = 1:\sqrt{2} | \frac{\sqrt2}{2}
        = \frac{1}{2}:\frac{1}{3} | 3:2
        = 2:4:6 | 1:2:3
        = AB:BC = 3:2 | \frac{AB}{BC} = \frac{3}{2}
        = \frac{AB}{BC} = \frac{3}{2} | 3:2
        ! 2:3 | \frac{3}{2}
        ! \frac{2}{3} | 3:2
        ! 3 \text{ to } 2 | 2:3
        ! 3 | 3:2
        ! 2 | 3:2
        ! 32 | 3:2
        ! 1:2:3 | 3:2:1
        ! 1 to 100 | 100
        ! 3, 2 | 3:2
        ! (3, 2) | 3:2
    """,
    "no solution, no value, the empty set": r"""
        = \text{no solutions} | \emptyset
        = no solution | \text{no solutions}
        = \text{No solution} | \varnothing
        = ∅ | \text{no solutions}
        = \{\} | \text{no solution}
        = \text{There are no solutions} | \text{no solution}
        = \text{no real solutions} | \text{no solution}
        = \text{the empty set} | \emptyset
        = \text{has no solution} | \emptyset
        = x \in \emptyset | \emptyset
        = \text{none} | \text{None}
        = \text{DNE} | \text{does not exist}
        = DNE | DNE
        = \text{Does not exist} | \mathrm{DNE}
        = \text{D.N.E.} | \text{DNE}
        = \text{The limit does not exist} | DNE
        = \text{undefined} | \text{Undefined}
        = \text{undefined} | \text{DNE}
        = 无解 | \text{no solution}
        ! 0 | \text{no solutions}
        ! \text{no solutions} | 0
        ! \{0\} | \emptyset
        ! \{\emptyset\} | \emptyset
        ! \infty | \text{DNE}
        ! \text{DNE} | 0
        ! \text{DNE} | 5
        ! \text{one solution} | \text{no solutions}
        ! \text{infinitely many solutions} | \text{no solutions}
        ! \text{no integer solutions} | \text{no solutions}
        ! \text{exists} | \text{does not exist}
        ! \text{defined} | \text{undefined}
        ! D N E | E
    """,
    "sentences around an answer": r"""
        = \text{The answer is } 42 | 42
        = \text{The answer is }42\text{.} | 42
        = The answer is 42. | 42
        = The final answer is $42$ | 42
        = \text{The answer is 42} | 42
        = Answer: 42 | 42
        = \text{Answer: } 42 | 42
        = \textbf{Answer: } \frac{1}{2} | 0.5
        = \text{The area is } 12\text{ cm}^2 | 12
        = \text{Therefore, the answer is } \frac{3}{4} | \frac34
        = So the answer is (1, 2) | (1,2)
        = \text{Thus } x = 5 | 5
        = 42 \text{ is the answer} | 42
        = The probability is 1/6 | \frac{1}{6}
        = \text{The solutions are } 1 \text{ and } 2 | 1,2
        = \text{The answer is (C)} | \text{(C)}
        = \text{The answer is } \boxed{42} | 42
        = \text{The value of } x \text{ is } 7 | 7
        = \text{The number of ways equals } 24 | 24
        = 答案是42 | 42
        = 答案：42 | 42
        ! \text{The answer is } 42 | 43
        ! \text{The answer is not } 42 | 42
        ! \text{The answer is at least } 42 | 42
        ! \text{The answer is 41 or } 42 | 42
        ! The answer is 4 or 2 | 42
        ! \text{Half the answer is } 42 | 42
        ! \text{Twice the answer is } 42 | 42
        ! \text{The negative of the answer is } 42 | 42
        ! \text{The answer is not 41, it is } 42 | 42
        ! \text{The answer is unknown} | 42
        ! \text{The answer is more than 41} | 42
        ! The answer is 7 * 6, not 42 | 42
        ! \text{The answer is} | 42
    """,
    "Chinese units and words": r"""
        = 12厘米 | 12
        = 12 \text{厘米} | 12\text{ cm}
        = 12 平方厘米 | 12 \text{ cm}^2
        = 5\text{ 米} | 500\text{ cm}
        = 3小时 | 3
        = 3 小时 | 180分钟
        = 20元 | 20
        = 15 \text{个} | 15
        = 24种 | 24
        = 8 人 | 8
        = \frac{1}{2}\text{千克} | 500\text{克}
        = 5万 | 50000
        = 30度 | 30^\circ
        = 60 \text{公里/小时} | 60\text{ km/h}
        = 不存在 | \text{DNE}
        ! 12厘米 | 12米
        ! 5万 | 5
        ! 3亿 | 3
        ! 12 厘米 | 12 \text{ cm}^2
        ! 5倍 | 5万
        ! 3小时 | 3分钟
        ! 5以上 | 5
        ! 约5 | 6
    """,
    "sets with repeated elements": r"""
        = \{1,1,2\} | \{1,2\}
        = \{1,2\} | \{1,1,2\}
        = \{2,1,2\} | \{1,1,2\}
        = \{3,3\} | \{3\}
        = \{3,3\} | 3
        = \{\frac12, 0.5, 1\} | \{1, \frac{1}{2}\}
        = \{1, 2, 2\} | 1, 2
        ! \{1,1,2\} | \{1,3\}
        ! \{1,1\} | \{1,2\}
        ! \{1,2\} | \{1,1\}
        ! (1,1,2) | (1,2)
        ! (1,2) | (1,1,2)
        ! 1,2 | 1,1,2
        ! 1 | 1,1
        ! \{1,1,2\} | \{1,2,3\}
    """,
    "plain TeX fractions and binomials": r"""
        = {1 \over 2} | \frac{1}{2}
        = 1 \over 2 | 0.5
        = {1\over2} | \frac12
        = {{1} \over {2}} | \frac{1}{2}
        = -{3 \over 4} | -\frac{3}{4}
        = {x+1 \over x-1} | \frac{x+1}{x-1}
        = x + {1 \over 2} | x+\frac12
        = {\sqrt{3} \over 2} | \frac{\sqrt{3}}{2}
        = \left({1 \over 2}, {3 \over 4}\right) | \left(\frac12, \frac34\right)
        = {{1 \over 2} \over 3} | \frac16
        = {5 \choose 2} | 10
        = 5 \choose 2 | \binom{5}{2}
        = {n \choose k} | \binom{n}{k}
        = 2{5 \choose 2} | 20
        = {10 \choose 3} \over 4 | 30
        = 2{1 \over 2} | 2\frac12
        ! {1 \over 2} | 2
        ! {1 \over 2} | \frac{2}{1}
        ! 1 + 2 \over 3 | 1 + \frac{2}{3}
        ! {5 \choose 2} | \frac{5}{2}
        ! {2 \choose 5} | 10
        ! {1 \over 2 \over 3} | \frac{1}{6}
        ! 1 \over 0 | 0
    """,
    "Unicode look-alikes": r"""
        = 30º | 30^\circ
        = 30˚ | 30^\circ
        = 30∘ | 30
        = 30^o | 30^\circ
        = 30^{o} | 30
        = 25℃ | 25
        = 𝟒𝟐 | 42
        = ٤٢ | 42
        = ４２．５ | 42.5
        = ④ | 4
        = x² + 1 | x^2+1
        = 2¹⁰ | 1024
        = 10⁻³ | 0.001
        = xⁿ | x^n
        = a₁ | a_1
        = ½ | 0.5
        = 2½ | \frac{5}{2}
        = ¹⁄₂ | \frac12
        = ⅝ | \frac{5}{8}
        = x ≦ 3 | x \le 3
        = x ⩾ 3 | x \geq 3
        = x ＝ 3 | 3
        = 𝑥 = 3 | x=3
        = x ﹤ 3 | x < 3
        = −5 | -5
        = ‐5 | -5
        = —5 | -5
        = ﹣5 | -5
        = 3 ✕ 10^2 | 300
        = 2 ∙ 3 | 6
        = 2 ∗ 3 | 6
        = √2 | \sqrt{2}
        = 5​ | 5
        = 1 000 | 1000
        = (1，2) | (1,2)
        = 3／4 | \frac34
        = 5㎝ | 50mm
        = ∠ABC = 60° | 60
        = △ABC | \triangle ABC
        = ϕ | \phi
        ! x² | x
        ! 2¹⁰ | 210
        ! 2½ | 1
        ! 10⁻³ | 10^3
        ! x₂ | x^2
        ! x ≦ 3 | x < 3
        ! x ≧ 3 | x \le 3
        ! 3º | 30
        ! ٤٢ | 24
        ! x ≠ 3 | 3
        ! ½ | 12
    """,
    "repeating decimals": r"""
        = 0.\overline{3} | \frac13
        = 0.\overline3 | \frac{1}{3}
        = 0.\overline 3 | \frac{1}{3}
        = 0.\bar{3} | \frac13
        = 0.\bar3 | \frac13
        = 0.\dot{3} | \frac13
        = 0.\dot3 | \frac13
        = 0.\dot{1}4285\dot{7} | \frac17
        = 0.1\dot{2}\dot{3} | \frac{122}{990}
        = 0.(3) | \frac13
        = 0.1(6) | \frac16
        = 0.333... | \frac13
        = 0.333\ldots | \frac{1}{3}
        = 0.333\dots | \frac{1}{3}
        = 0.333… | \frac{1}{3}
        = 0.1666\cdots | \frac16
        = 0.121212... | \frac{4}{33}
        = 0.3̅ | \frac13
        = 0.3̄ | \frac13
        = 0.3̇ | \frac13
        = 1.\overline{27} | \frac{14}{11}
        = -0.\overline{6} | -\frac23
        = .\overline{45} | \frac{5}{11}
        = 0.\overline{9} | 1
        = 0.\overline{3} | 0.\overline{33}
        = 0.\overline{12} | 0.1\overline{21}
        = 33.\overline{3}\% | 33\frac13\%
        = 2\cdot 0.\overline{3} | \frac23
        = 0.\overline{3} \text{ cm} | \frac13
        ! 0.3 | 0.\overline{3}
        ! 0.33 | 0.\overline{3}
        ! 0.\overline{3} | 0.\overline{34}
        ! 0.1\overline{6} | 0.\overline{16}
        ! 0.\dot{1}2\dot{3} | 0.1\dot{2}\dot{3}
        ! 0.(3) | 0
        ! 0.1(6) | 0.6
        ! 0.123... | \frac{41}{333}
        ! 3.14159... | \pi
        ! 0.\overline{3} | 3
        ! 0.5... | 0.5
    """,
    "an equation with its variable on the right": r"""
        = 5 = x | 5
        = 5 = x | x = 5
        = x = 5 | 5 = x
        = 5 | 5 = x
        = 2x+3 = y | y = 2x+3
        = 2x+3 = y | 2x+3
        = \frac12 = n | \frac{1}{2}
        = 7 = f(2) | 7
        = 3, -3 = x | 3, -3
        = 30^\circ = \angle ABC | 30
        = 12 = \text{Area} | 12
        = 7 = a + b | 7
        ! 5 = x | 6
        ! 5 = x | y = 5
        ! 5 = 2x | 5
        ! 5 = x^2 | 5
        ! 5 = 6 | 6
        ! 5 = 6 | 5
        ! 5 < x | 5
        ! 7 | 7 = x + y
    """,
    "an equation and its right side": r"""
        = x = 7 | 7
        = a + b = 7 | 7
        = f(2) = 7 | 7
        = \sin A = \frac{3}{5} | \frac{3}{5}
        = |z| = 5 | 5
        = P(X = 2) = \frac14 | \frac14
        = 3 + 4 = 7 | 7
        ! 2x = 10 | 10
        ! 2x = 10 | 5
        ! -x = 5 | 5
        ! x^2 = 9 | 9
        ! x^n = 9 | 9
        ! \sqrt{x} = 3 | 3
        ! n! = 120 | 120
        ! \frac{1}{x} = 4 | 4
        ! e^x = 4 | 4
        ! ax + by = c | c
        ! x + y = z | z
        ! x^2 + y^2 = r^2 | r^2
        ! y^2 = 4x | 4x
        ! 10 | 2x = 10
        ! 7 | x + y = 7
        ! c | ax + by = c
        ! 9 | x^2 = 9
        ! 0 | x^2 - 4 = 0
        ! 5 | -x = 5
        ! 120 | n! = 120
        ! 3 | \sqrt{x} = 3
        ! x \ne 7 | 7
        ! \text{Twice the area} = 12 | 12
    """,
    "plus and minus": r"""
        = \{\pm 3\} | \{3, -3\}
        = \{3,-3\} | \{\pm 3\}
        = \{0, \pm 1\} | \{-1, 0, 1\}
        = \{-1,0,1\} | \{0, \pm 1\}
        = 0, \pm 1 | -1, 0, 1
        = \{\pm 1, \pm 2\} | \{-2,-1,1,2\}
        = \{1 \pm \sqrt{2}\} | \{1+\sqrt2, 1-\sqrt2\}
        = x \in \{\pm 2\} | \{2,-2\}
        = x = \pm 2 | x = 2, x = -2
        = x = 1 \pm \sqrt{2} | x = 1+\sqrt{2} \text{ or } x = 1 - \sqrt{2}
        = (\pm 3, 0) | (3,0), (-3,0)
        = (0, \pm 4) | (0,4),(0,-4)
        = (\pm 1, \mp 2) | (1,-2), (-1,2)
        = ±3 | -3, 3
        = +3, -3 | \pm 3
        = +/- 3 | \pm 3
        = \pm i | i, -i
        ! \{\pm 3\} | \{3\}
        ! \{3\} | \{\pm 3\}
        ! \{0, \pm 1\} | \{0, 1\}
        ! \{\pm 1, \pm 2\} | \{1, -2\}
        ! (\pm 3, 0) | (3, 0)
        ! (\pm 3, 0) | (0,3), (0,-3)
        ! (\pm 1, \mp 2) | (1,2), (-1,-2)
        ! \pm 3 | \pm 4
        ! \{\pm 3\} | \{3,-3,0\}
        ! 1 \pm 2 | 3
    """,
    "words of place value and of fractions": r"""
        = \text{hundreds} | \text{Hundreds}
        = 5 \text{ hundreds} | 500
        = 5 \text{ hundredths} | 0.05
        = 3 \text{ tenths} | 0.3
        = 3 \text{ tenths} | \frac{3}{10}
        = 7 \text{ thousandths} | 0.007
        = 4 \text{ tens} | 40
        = 2 \text{ thirds} | \frac23
        = two thirds | \frac{2}{3}
        = \text{three quarters} | \frac34
        = one half | \frac12
        ! \text{hundreds} | \text{hundredths}
        ! \text{tens} | \text{tenths}
        ! \text{thousands} | \text{thousandths}
        ! 5 \text{ hundredths} | 5
        ! 5 \text{ hundreds} | 5
        ! 5 \text{ hundredths} | 500
        ! 5 \text{ hundreds} | 0.05
        ! 5 \text{ tens} | 5
        ! 5 \text{ tenths} | 5
        ! 5 \text{ thousandths} | 5
        ! 5 \text{ ten-thousandths} | 5
        ! 5 \text{ millionths} | 5
        ! 5 \text{ twelfths} | 5
        ! 5 \text{ sixteenths} | 5
        ! 5 \text{ halves} | 5
        ! 5 \text{ quarters} | 5
        ! 5 hundredths | 5
        ! 7 \text{ pairs} | 14
    """,
    "suffixes of magnitude": r"""
        = 5 \text{ thousand} | 5000
        = 2.5 \text{ million} | 2{,}500{,}000
        = \$3 \text{ billion} | 3000000000
        = \$5\text{k} | 5000
        = \$2.5\text{M} | 2500000
        = 5 \text{ bn} | 5 \text{ billion}
        = 3 \text{ lakh} | 300000
        ! 5k | 5
        ! 5K | 5
        ! 5M | 5
        ! 5\text{k} | 5
        ! 5\text{K} | 5
        ! 5 \text{ M} | 5
        ! 5\text{M} | 5
        ! 5\text{B} | 5
        ! \$5k | 5
        ! \$5M | 5
        ! \$5\text{k} | 5
        ! 5 \text{ mn} | 5
        ! 5 \text{ mil} | 5
        ! 5 \text{ mln} | 5
        ! 5 \text{ bn} | 5
        ! 5bn | 5
        ! 5 \text{ lakh} | 5
        ! 5 \text{ crore} | 5
        ! 5 \text{ grand} | 5
        ! 5 | 5k
        ! 5 | 5\text{M}
        ! 5\text{k} | 5\text{M}
        ! 5k | 5M
        ! 5 million | 5 billion
    """,
}
