r"""Answers and gold answers that must, and that must not, be found equal: ``answer | gold`` a line, by kind.

Some of what the second list refuses math-verify 0.9 takes for equal: a false equation's right side, the last number or
fraction in a text it cannot read, small decimals that agree after rounding to six digits, anagrams, numerals of
different bases, whatever stands in words behind a number.
"""

EQUAL: dict[str, str] = {
    "boxes, subscripts, letters and roundings that say the same": r"""
        y > x | x < y
        x \ge c | c \le x
        \boxed{\frac12} | \frac{1}{2}
        \boxed{ 5 } | 5
        1011_2 | 1011
        1011 | 1011_2
        1011_{2} | 1011_2
        2 s | 2s
        s \cdot 2 | 2s
        5m | 5
        0.3333333 | 0.333333
        1.5 \cdot 10^{15} | 1500000000000000
        c + 5 a | 5 a + c
        \frac{1}{4 \cdot 2003!} | \frac{0.25}{2003!}
        \$\frac23 \approx \$0.7 | \$\dfrac23 \approx \$0.67
    """,
    "fractions": r"""
        \frac\pi2 | \frac{\pi}{2}
        \frac{3}4 | 0.75
        \frac4 3 | \frac{4}{3}
        \dfrac{3}{4} | \frac{3}{4}
        \tfrac34 | \frac{3}{4}
        -\frac{3}{4} | \frac{-3}{4}
        \frac{3}{-4} | -\frac{3}{4}
        3/4 | \frac{3}{4}
        0.75 | \frac{3}{4}
    """,
    "percent": r"""
        75\% | 0.75
        75\% | 75
        75% | 75\%
        75 percent | 75\%
    """,
    "degrees": r"""
        90^\circ | 90
        90 | 90^\circ
        90^{\circ} | 90^\circ
        90 degrees | 90
        90\text{ degrees} | 90^\circ
        90° | 90
    """,
    "units": r"""
        12 cm | 12
        12\text{ cm} | 12
        12\,\mathrm{cm}^2 | 12
        12 \text{ square units} | 12
        12 | 12\text{ inches}
        \$12.50 | 12.5
        \$ 12.50 | 12.50
        12 dollars | 12
        18.90 | \$18.90
    """,
    "intervals": r"""
        (1,2) | \left(1,2\right)
        (1, 2] | \left( 1,2 \right]
        [1,2] | \left[1, 2\right]
        1<x<2 | (1,2)
        (1,2) | 1<x<2
        x \in (1,2) | (1,2)
        x\ge 3 | [3,\infty)
        [3,\infty) | x \geq 3
        (-\infty, 2)\cup(3,\infty) | (-\infty,2) \cup (3, \infty)
        (-\infty, 2) U (3, \infty) | (-\infty,2) \cup (3, \infty)
        (3,\infty)\cup(-\infty, 2) | (-\infty,2) \cup (3, \infty)
        (-oo, 2) U (3, oo) | (-\infty,2) \cup (3, \infty)
    """,
    "sets": r"""
        \{1,2,3\} | \{3,2,1\}
        1,2,3 | \{1,2,3\}
        1, 2 | 2,1
        1 \text{ and } 2 | 1,2
        1 and 2 | 1,2
        \{1,2\} | 1,2
        {1, 2} | 1,2
        [1, 2] | 1,2
        \pm 3 | 3,-3
        3, -3 | \pm 3
        x=\pm 3 | 3,-3
    """,
    "matrices": r"""
        \begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{bmatrix}1&2\\3&4\end{bmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix} 1/2 \\ 3 \end{pmatrix} | \begin{pmatrix} \frac12 \\ 3 \end{pmatrix}
        Matrix([[1, 2], [3, 4]]) | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        [[1, 2], [3, 4]] | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    """,
    "mixed numbers": r"""
        2\frac{1}{2} | \frac{5}{2}
        -2\frac{1}{2} | -2.5
        -2 1/2 | -\frac{5}{2}
        2 1/2 | \frac52
        2.5 | 2\frac{1}{2}
        \frac52 | 2 \frac12
    """,
    "scientific notation": r"""
        1.5e3 | 1500
        1.5 \times 10^3 | 1500
        1.5 \cdot 10^{3} | 1500
        1500 | 1.5 \times 10^3
        1e-05 | 10^{-5}
        1.5e+3 | 1500
    """,
    "words": r"""
        \text{Evelyn} | Evelyn
        Evelyn | \text{Evelyn}
        \textbf{Evelyn} | \text{Evelyn}
        \mathrm{east} | \text{east}
        East | \text{east}
        (C) | \text{(C)}
        C | \text{(C)}
        \text{C} | C
        \textbf{(C)} | C
        \text{even} | even
        'even' | \text{even}
    """,
    "thousands": r"""
        32,\! 349 | 32349
        11,\!111,\!100 | 11{,}111{,}100
        \frac{1}{29,\!322} | \frac{1}{29322}
        10,000 | 10000
        10{,}000 | 10000
        10,\!000 | 10000
        10 000 | 10000
        10\,000 | 10,000
        10000 | 10,\!000
        1,234.5 | 1234.5
    """,
    "more assignments": r"""
        \approx 8.24 \text{ mph} | 8.24
        = 5 | 5
        3x+y=7 | 7 - y = 3x
    """,
    "assignments": r"""
        x=5 | 5
        x = 5 | 5
        5 | x=5
        n = \frac12 | \frac{1}{2}
        y = 2x+3 | 2x+3
        2x+3 | y=2x+3
        y=3+2x | y = 2x + 3
        y-2x=3 | y = 2x+3
        f(x)=2x+3 | 2x+3
        2x+3 | f(x)=2x+3
    """,
    "expressions": r"""
        \sqrt{8} | 2\sqrt{2}
        \sqrt8 | 2\sqrt2
        2*sqrt(2) | 2\sqrt{2}
        \frac{1}{\sqrt2} | \frac{\sqrt{2}}{2}
        (x+1)(x-1) | x^2-1
        (x - 1)*(x + 1) | x^2-1
        x^2+2x+1 | (x+1)^2
        \frac{\pi}{2} | \pi/2
        0.5\pi | \frac{\pi}{2}
        1.5707963 | \frac{\pi}{2}
        e^{2} | \exp(2)
        \sin^2 t | (\sin t)^2
        \log_2 8 | 3
        3! | 6
        \binom{5}{2} | 10
        2^{10} | 1024
        3+4i | 4i+3
        3 + 4*I | 3+4i
        3+4j | 3+4i
    """,
    "spelling": r"""
        1010_2 | 1010_{2}
        A_{16} | A_{16}
        011 | 11
        .5 | 0.5
        0.5 | .5
        5. | 5
        -5 | −5
        $5$ | 5
        $\frac12$ | 0.5
        \(\frac12\) | \frac12
        \boxed{5} | 5
        5\text{.} | 5
        5\\ | 5
        \ 5 | 5
        5! | 120
        \frac{9}{14} | 9/14
        \frac 59 | \frac{5}{9}
        \frac{5}{9} | \frac 59
        1:2 | 1:2
        \left(3, \frac{\pi}{2}\right) | (3, pi/2)
        (3, pi/2) | \left( 3, \frac{\pi}{2} \right)
        p - q | -q+p
        6 - 5i | -5i+6
        \text{June 20} | June 20
        11:45 | 11:45
        0.3333333 | \frac13
        \emptyset | \{\}
        \infty | \infty
        8\text{ hours} | 8
        70 \sqrt{2} | \sqrt{9800}
        \sqrt[3]{27} | 3
        27^{1/3} | 3
        |x| | |x|
        \lfloor 3.5 \rfloor | 3
        -\infty < x \le 2 | (-\infty,2]
        True | \text{True}
        yes | \text{Yes}
    """,
    "other numbers and expressions": r"""
        6 - 5 i | 6 - 5i
        6-5\,i | 6 - 5i
        2 i | 2i
        -2 i | -2i
        \sin\pi | 0
        2\cdot3-6 | 0
        \sqrt2-\sqrt2 | 0
        \sin^2x+\cos^2x-1 | 0
        6.02e+23 | 6.02 \times 10^{23}
        6.02e23 | 6.02 \times 10^{23}
        1e-05 | 0.00001
        3*R**2 | 3R^2
        33\frac13\% | \frac{100}{3}\%
        33\frac13\% | \frac13
        0.\overline{3} | \frac13
        0.1\overline{6} | \frac16
        f(x)=2x+3 | y=2x+3
        y=2x+3 | f(x)=2x+3
        2\pi | 2pi
        2pi | 2\pi
        \frac{1}{2}h(a+b) | \frac{h(a+b)}{2}
        x^2 + 2 x y + y^2 | (x+y)^2
        \frac{x+1}{x-1} | 1+\frac{2}{x-1}
        5\% | 5
        3 : 4 | 3:4
        \log 100 | 2
        \ln e | 1
        (x-2)^2+(y+3)^2=16 | (x-2)^2 + (y+3)^2 = 4^2
        x = 1, y = 2 | x=1, y=2
        \arctan 2 | \tan^{-1} 2
        2\arcsin\frac{1}{3} | 2\sin^{-1}\left(\frac13\right)
        \frac{-1+i\sqrt{3}}{2} | -\frac12 + \frac{\sqrt3}{2}i
        1:00 | 1:00
        \tfrac{1}{2} | .5
        150^{\circ} | 150
    """,
    "two signs": r"""
        \frac{1\pm\sqrt5}{2} | \frac{1\pm\sqrt{5}}{2}
        \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2} | \frac{1\pm\sqrt{5}}{2}
        \frac{1\pm\sqrt5}{2} | \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
        \frac{a \pm b}{c} | \frac{a+b}{c},\frac{a-b}{c}
    """,
    "colours, boxes, Markdown and other characters": r"""
        \color{red}{204} | 204
        \textcolor{red}{204} | 204
        {\color{red} 204} | 204
        \color{red}204 | 204
        ２０４ | 204
        （１，２） | (1,2)
        **C** | C
        **C** | \text{(C)}
        *C* | C
        x₂ | x_2
        ∛8 | 2
        1⁄2 | \frac12
        \boxed{\boxed{5}} | 5
        \boxed 5 | 5
        \fbox{5} | 5
    """,
    "vectors, and sums and multiples of matrices": r"""
        \langle3,-1\rangle | \langle 3, -1 \rangle
        \langle3,-1\rangle | (3,-1)
        (3,-1) | \begin{pmatrix} 3 \\ -1 \end{pmatrix}
        \langle3,-1\rangle | \begin{pmatrix} 3 \\ -1 \end{pmatrix}
        2\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 4 \end{pmatrix}
        \frac{1}{2}\begin{pmatrix} 2 & 4 \\ 6 & 8 \end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} + \begin{pmatrix}3\\4\end{pmatrix} | \begin{pmatrix}4\\6\end{pmatrix}
    """,
    "units and words": r"""
        x<2\text{ or }x>5 | (-\infty,2)\cup(5,\infty)
        (-\infty,2)\cup(5,\infty) | x<2\text{ or }x>5
        \text{five} | 5
        five | 5
        5 | \text{five}
        5\text{ million} | 5000000
        10\text{ cm} | 10
        10\text{ cm}^2 | 10
        10 \, \mathrm{cm^2} | 10
        12 apples | 12
        \$5 | 5
        \dfrac{3}{4}\text{ hours} | \frac34
        4:30 | 4:30\text{ p.m.}
        \text{Monday} | Monday
        5\sqrt{2}\text{ units} | 5\sqrt2
        x=3 \text{ and } y=4 | x=3,y=4
    """,
    "sets of numbers": r"""
        x < 2 or x > 5 | (-\infty,2)\cup(5,\infty)
        \mathbb{R} \setminus \{2\} | (-\infty,2)\cup(2,\infty)
        x \ne 2 | (-\infty,2)\cup(2,\infty)
        A \cup B | A\cup B
        [2,5) | 2\le x<5
        2 \le x < 5 | [2,5)
        \{1, 2, 3\} | 1,2,3
    """,
    "calculated before it grows": r"""
        2^{2023} \bmod 7 | 2
        \sum_{k=1}^{2023} k | 2047276
        \prod_{k=1}^{5} k | 120
        \binom{2023}{2} | 2045253
        \int_0^1 x\,dx | \frac12
        \lim_{x\to 0} \frac{\sin x}{x} | 1
        \sum_{k=1}^{\infty} \frac{1}{2^k} | 1
    """,
    "what respellings of real answers found": r"""
        1 \cdot (2^{n - 1}) | 2^{n - 1}
        -36 \le x \le 104 | [-36,104]
        a+b \le x \le b | [a+b, b]
        \textcolor{blue}{\frac{3 \sqrt{2} - 3}{2}} | \frac{3 \sqrt{2} - 3}{2}
        $\$ 1.06$ | \$ 1.06
        $125$ miles | 125\textnormal{ miles}
        30,951 \mathrm{ miles per hour} | 30,951
        2340 | \mathbf{2340}
        -\dfrac{11}{12} apples | -\dfrac{11}{12}
        -\frac 32 apples | -\frac 32
        1.41421356e+00 | \sqrt2
        \frac{5}{3} | 1\frac{2}{3}
    """,
}

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
        180^\circ | \pi
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


def pairs(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """``(kind, answer, gold)`` of every line."""
    rows = []
    for kind, lines in table.items():
        for line in lines.strip().splitlines():
            answer, _, gold = line.strip().rpartition(" | ")
            rows.append((kind, answer.strip(), gold.strip()))
    return rows
