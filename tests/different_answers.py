r"""Answers and gold answers that must not be found equal: ``answer | gold`` a line, by kind.

Some of what is refused here math-verify 0.9 takes for equal: a false equation's right side, the last number or
fraction in a text it cannot read, small decimals that agree after rounding to six digits, anagrams, numerals of
different bases, whatever stands in words behind a number.
"""

DIFFERENT: dict[str, str] = {
    "signs between digits, which math-verify drops": r"""
        1'74 | 174
        126"0 | 1260
        1$74 | 174
        0\$$$675 | \$675
        \frac{36}{1"1} | \frac{36}{11}
        10\%1 | 10\%
        32 \%1 | 32 \%
    """,
    "unknown commands, which are no blanks": r"""
        x+\cir6 | x+6
        205^\ci1 | 205^\circ
        -\sqrt{2}\p | -\sqrt{2}
        3\sqrt{2\cu} | 3\sqrt{2}
        \p\pi | \pi
        \frac{67}{\l89} | \frac{67}{89}
    """,
    "terms that math-verify drops as units": r"""
        0.25\,\text{ cm}7 \dfrac{1}{4} | \frac{1}{4}
        5\text{ cm} + \frac{1}{2} | 5
        5\text{ or }\frac{1}{2} | 5
        252\pi b + c | 252\pi
        5 | 5 a + c
    """,
    "inequalities of complex numbers": r"""
        41e>9-4i | 41 + 9 - 4i
        x > 3i | x > 3
        [6i, 7) | [6, 7)
        (-4,27i);(2, 15) | (-4,27);(2, 15)
    """,
    "something beside a box": r"""
        9\boxed991 | 991
        \boxed{5}7 | 5
        5\fbox{7} | 7
    """,
    "letters that are variables, not units": r"""
        2 | 2s
        70o | 70
        15 | 15t
        3c | 3
    """,
    "other subscripts of numerals": r"""
        2215_15_6 | 2215_6
        42"_77 | 42_7
        1_i_6 | 1_6
        22_6.1 | 22_6
        28_9\!956.63 | 28_9
        25_6 | 25^\circ
        1323_{4\circ44} | 1323_{4}
        -7 - 9i1_2 | -7 - 9i
    """,
    "small and large numbers with decimals": r"""
        .0000671 | .0000672
        2^{4181} + 0.5 | 2^{4181}
        2^{100} - 2 + 0.5 | 2^{100} - 2
        52 + 303oo6 \sqrt{7} | 52 + 3036 \sqrt{7}
        3 + \infty | 3
        \infty4 | 384
        \infty1094 | 104.99
        \infty - 4 | 384
        -\infty | \infty
        \frac{1}{2064!} | \frac{1}{2004!}
        \frac23 \approx 3.67 | \frac23 \approx 0.67
    """,
    "several answers in one box": r"""
        5 or 6 | 5
        5, 6 | 5
        5 | 5, 6
        5 6 | 6
        5 and 6 | 6
        6; 5 | 5
        I think 3 or maybe 5 | 5
        the answer is 5 or 4 | 4
        4 5 | 45
        17 0 | 0
        x=4, x=5 | 5
        x=5 or x=4 | 4
        x=4 \text{ or } x=5 | 5
    """,
    "false equations": r"""
        4=5 | 5
        0=5 | 5
        3+4=5 | 5
        0.5 = 6\% | 6\%
    """,
    "words that change a number": r"""
        5 \text{ million} | 5
        5\text{ thousand} | 5
        2 \text{ thirds} | 2
        5 \text{ or more} | 5
        5 \text{ squared} | 5
    """,
    "unreadable": r"""
        1-x7 \left( \frac{9}{34}, \frac{15}{34} \right) | \left( \frac{9}{34}, \frac{15}{34} \right)
        (0, 12)7 \text{ or } \frac{25}{84} | \frac{25}{84}
        (1,2)7; \frac{1}{3} | \frac{1}{3}
        \left( \frac12, 2 \right) + 2 | \left( \frac12, 2 \right)
        a 5 b 6 c | 6
        {5 | 5
        5} | 5
        \frac{ 5 | 5
        answer: 5 not 6 | 6
    """,
    "shapes": r"""
        (1,2] | (1,2)
        [1,2) | (1,2)
        (1,2) | (2,1)
        (2,1) | (1,2)
        \{1,2\} | \{1,2,3\}
        1,2,3 | 1,2
        \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
    """,
    "near numbers": r"""
        0.33 | \frac13
        0.3 | \frac13
        3.14 | \pi
        3.1416 | \pi
        1.41 | \sqrt2
        0.0000001 | 0
        0 | 10^{-8}
        0.00000012 | 0.0000001
        1000000.4 | 1000000
        \sqrt{2} | 2
        2 | \sqrt{4.0001}
        -5 | 5
        5\% | 0.5
        5\% | 500
    """,
    "names": r"""
        x+1 | y+1
        x | y
        x=5 | y=5
        \text{Tuesday} | \text{Monday}
        Evelyn | \text{Carla}
        A | B
        (A) | (B)
        east | seat
        \text{east} | \text{seat}
        \text{odd} | \text{even}
    """,
    "other values": r"""
        12 cm | 12.5
        12:30 | 11:30
        1/2 | 2/1
        2/3 | 3/2
        1:2 | 2:1
        90 | \frac{\pi}{2}
        10_2 | 10_3
        3120_431 | 3120_4
        16 | 1_6
        1e3 | 100
        1.5e3 | 15
        2^3 | 23
        2 3 | 6
    """,
    "hostile": r"""
        10**10**10 | 5
        nan | 5
        inf | 5
        oo | 5
        None | 5
        __import__('os').system('touch PWNED') | 5
        exec("x=1") | 5
        5#6 | 5
        5 # 6 | 6
        6 % 5 | 5
    """,
    "hedges": r"""
        ? | 5
        ... | 5
        \frac12 \frac13 | \frac13
        \frac12, \frac13 | \frac13
        \frac12 or \frac13 | \frac13
        \text{5 or 6} | 6
        \text{maybe } 5 | 5
        1 to 100 | 100
        1-100 | 100
        1\text{ to }100 | 100
    """,
    "relations": r"""
        0\le x\le 1000 | 1000
        x>0 | 0
        x > 5 | 5
        x \ne 5 | 5
        x \geq 5 | 5
        x<3 | x \le 3
        x<3 | x>3
        5,000 | 5
        5.000 | 5000
        5, 000 | 0
        1, 234 | 1
        \mathbb{R} | \emptyset
        \pm 3 | 3
        3 | \pm 3
        3! | 3
        |3 | 3
    """,
    "other brackets": r"""
        (-2,7) | [-2,7]
        [-2,7) | [-2,7]
        [-2,7] | (-2,7)
        (-2, 7] | [-2,7)
        \{-2,7\} | [-2,7]
        -2,7 | [-2,7]
        x=-2 \text{ or } x=7 | [-2,7]
        \pm 1 | [-1,1]
        1,2 | x \in [1,2]
        -1,1 | -1 \le x \le 1
        2,1 | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
        [3,4],[1,2] | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \{1,2\} | (1,2)
        \{2,\infty\} | (2,\infty)
        \{1,2,3\} | (1,2,3)
        (1,2),(3,4) | (1,2),(4,3)
        (2,\infty] | (2,\infty)
        [2,\infty) | (2,\infty)
        x>2 | x\ge 2
        \{x\} | [x]
    """,
    "letters": r"""
        R-2r | r-2R
        1 | R/r
        1 | \frac{R}{r}
        a | A
        HHT | THH
        THH | HHT
        \angle ABC | \angle BAC
        AB | BA
        \triangle ABC | \triangle ACB
        \vec{a} | a
        \bar{x} | x
        \overline{AB} | AB
        x_1 | x_2
        x_1 | x
        n | n!
        \begin{pmatrix} 1 & 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
        1.0e-1 | 1
        |x| | x
    """,
    "equations by their right side, and other relations": r"""
        0 | x+y+z=0
        7 | x+y=7
        3 | x^2+y=3
        x=3 | y=3
        x=3, y=4 | x=4, y=3
        f(x)=2x+3 | g(x)=2x+3
        2x+3 | f(x)=2x+4
    """,
    "words and marks that change a number": r"""
        x' | x
        x | x'
        1,2,\ldots,10 | 1,2,10
        1,2,10 | 1,2,\ldots,10
        1+2+\cdots+10 | 1+2+10
        5\text{ factorial} | 5
        5\text{ is wrong, it is 6} | 5
        3\text{ pi} | 3
        3\text{ pi} | 5
        3 pi | 3
        2e+1 | 20
        5\text{ hundred} | 5
        5\text{ percent of 6} | 5
        5\text{ plus } 1 | 5
        5\text{ and a half} | 5
        5\text{ dozen} | 5
        5\text{ times } 3 | 5
        5\text{ or } 6 | 6
        5 \text{ mod } 7 | 5
        \text{not } 5 | 5
        5' | 5
        5'' | 5
        12\text{ cm} | 12\text{ inches}
        4:30\text{ a.m.} | 4:30\text{ p.m.}
        5\text{ m} | 5\text{ km}
    """,
    "more shapes and values": r"""
        A^T | A
        A | A^T
        10_2 | 10_{16}
        12:30 | 4:10
        30 | 0:30
        \sqrt{x^2} | x
        \pm 3 | -3
        100 | 1
        1\% | 100
    """,
    "what fuzz and neighbours of real answers found": r"""
        (2^{2005}) + \pi | 2^{2005}
        2^{10^{10}} + 1 | 2^{10^{10}}
        (-23.5) + 10^{-9} | -23.5
        (42.1875) + 10^{-9} | 42.1875
        -1.0000 | -\frac{2010012}{2010013}
        2^{-10^{12}} | 0
        2, -1None | 2, -1
        31nan | 31
        \frac{98}5infty | \frac{98}5
        1.8~ii | 1.8
        1\frac{5}{3} | 1\frac{2}{3}
        \$\dfrac23 \approx \$0.68 | \$\dfrac23 \approx \$0.67
        \$\dfrac23 \approx \$0.66 | \$\dfrac23 \approx \$0.67
        441e90222030 | 4022030
        (-36104) | (-36,104)
    """,
}
