r"""Answers and gold answers that must be found equal: ``answer | gold`` a line, by kind."""

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
        [2, 1] | 1,2
        3,1,2 | [1,2,3]
        (3,4),(1,2) | [(1,2),(3,4)]
        \text{no}, \text{yes} | [\text{yes}, \text{no}]
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
