"""Grade mutated answers, and check that nothing crashes or hangs and that no changed content is accepted.

    AGENTRL_DATA_DIR=DIR python benchmarks/grading_fuzz.py [--mutations 100000] [--seed 0] [--workers 2]

Answers are made from the gold answers of MATH (``math500.jsonl``, ``math35_train.jsonl``) in two ways. *Changed*: a
digit replaced, a term added, the sign turned, another answer beside it. *Damaged*: characters lost, doubled, swapped,
inserted, two answers spliced. A correct verdict is suspicious if the letters and numbers of the answer differ from the
gold answer and no known leniency explains the difference (``explained``). Suspicious verdicts are printed. The exit
code is 1 if there are any, except verdicts that were inspected and are right (``LOOKED_AT``), or if a grading process
dies. Run large numbers of mutations in parts, each with a different seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.grading.spelling import normalize_spelling
from agentrl_envs.types import Verdict

COMMANDS = (
    r"\frac \sqrt \pi \cup \text \boxed \infty \le \pm \circ \left( \right) \{ \} \begin{pmatrix} \end{pmatrix} \\\\"
)
SIGNS = "{ } ( ) [ ] ^ _ + - * / = < > , . ; : ! | & % $ # @ ~ ' \" \\"
WORDS = "0 1 5 9 x y e i oo nan None 1e9 10**9 __import__ é 数 🙂"
TOKENS = [*COMMANDS.split(), *SIGNS.split(), *WORDS.split(), " ", "\n", "\x00"]
Mutation = Callable[[str, str, random.Random], str]


def another_digit(gold: str, other: str, rng: random.Random) -> str:
    """Replace one digit."""
    places = [match.start() for match in re.finditer(r"\d", gold)]
    if not places:
        return other_beside(gold, other, rng)
    place = rng.choice(places)
    digit = rng.choice([digit for digit in "0123456789" if digit != gold[place]])
    return gold[:place] + digit + gold[place + 1 :]


def one_more(gold: str, other: str, rng: random.Random) -> str:
    """Append a term."""
    return f"{gold} + {rng.choice(['1', '2', '0.5', 'x', '10'])}"


def turned(gold: str, other: str, rng: random.Random) -> str:
    """Change the sign, double the answer, or put it into the denominator of a fraction."""
    return rng.choice(["-({})", "2 \\cdot ({})", "\\frac{{1}}{{7 + {}}}"]).format(gold)


def other_beside(gold: str, other: str, rng: random.Random) -> str:
    """Return a text that contains both answers."""
    return rng.choice(["{}, {}", "{} or {}", "{} \\text{{ or }} {}", "{}; {}", "{} {}"]).format(
        *rng.sample([gold, other + "7"], 2)
    )


def damaged(gold: str, other: str, rng: random.Random) -> str:
    """Remove, double, swap or insert one to four characters."""
    text = gold
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text = text[:place] + text[place + 1 :]
            case 1:
                text = text[:place] + text[place : place + 1] * 2 + text[place + 1 :]
            case 2:
                text = text[:place] + text[place + 1 : place + 2] + text[place : place + 1] + text[place + 2 :]
            case _:
                text = text[:place] + rng.choice(TOKENS) + text[place:]
    return text


def spliced(gold: str, other: str, rng: random.Random) -> str:
    """Join the beginning of one answer and the end of another."""
    return gold[: rng.randrange(len(gold) + 1)] + other[rng.randrange(len(other) + 1) :]


MUTATIONS: tuple[Mutation, ...] = (another_digit, one_more, turned, other_beside, damaged, damaged, damaged, spliced)


# Mutated answers that are right although their letters and numbers differ from the gold answer, with the reason.
LOOKED_AT: dict[tuple[str, str], str] = {
    (r"y^2 - 4x - 6y + 9 = 0ac{37}{50}", r"y^2 - 4x - 6y + 9 = 0"): "letters times 0",
    ("-13:1", "-13"): "the ratio is -13",
    (r"[46,5 \infty)", r"[46, \infty)"): "5 times infinity",
    (r"2,-\frac{11}{44}", r"2,-\frac{1}{4}"): "not in lowest terms",
    (r"0-\frac{3}{5}", r"-\frac{3}{5}"): "from 0",
    (r"\tfrac{1!}{6}", r"\tfrac{1}{6}"): "1! is 1",
    (r"$None0, \frac{1}{2}", r"0, \frac{1}{2}"): "letters times 0",
    (r"x0 ,1", "0,1"): "x times 0",
    (r"\left'(\frac{17}{4},0right)", r"\left(\frac{17}{4},0\right)"): "letters times 0",
    (r"\frac' 13", r"\frac 13"): "a mark between",
    (r"0ext{ min}", "0"): "letters times 0",
    (r"2 \cdot (0)", "0"): "2 times 0",
    (r"0,-0-3", "0,-3"): "-0-3 is -3",
    (r"(9-\infty,\infty)", r"(-\infty,\infty)"): "9 less infinity",
    (
        r"\begin{pmatrix} 0x & 1  &0 \\ 1 & 0 & 0 \\ 0 & 0 & 2 \end{pmatrix}",
        r"\begin{pmatrix} 0 & 1 & 0 \\ 1 & 0 & 0 \\ 0 & 0 & 2 \end{pmatrix}",
    ): "0 times x",
    (r"\frac{88}{77}", r"\frac{8}{7}"): "not in lowest terms",
    (r"3, -\frac{11}{33}", r"3, -\frac{1}{3}"): "not in lowest terms",
    (r"\frac{58}{7}1", r"\frac{58}{7}"): "times 1",
    (r"\frac{13}{51}1", r"\dfrac{13}{51}"): "times 1",
    (r"3+1\frac{\sqrt{69}}{3}", r"3+ \frac{\sqrt{69}}{3}"): "times 1",
    (r"3y +\sqrt 1", "3y + 1"): "the root of 1",
    (r"x=\sqrt1", "x=1"): "the root of 1",
    (r"1251\sqrt1", "1251"): "the root of 1",
    (r"32\sqrt{2!}", r"32\sqrt{2}"): "2! is 2",
    ("22112", "22112_6"): "the base left out",
    ("-37", "-37_8"): "the base left out",
    ("1848_9", "1848"): "a base added to the same digits",
    ("51_1", "51"): "a base added to the same digits",
    (r"\left( \frac{15}{4}, \frac{1}{2}, 0 right)", r"\left( \frac{15}{4}, \frac{1}{2}, 0 \right)"): "letters times 0",
    (r"8\sqrt{2}-4-\pi1", r"8\sqrt{2}-4-\pi"): "times 1",
    (r"-\frac{1\sqrt{3}}{2}", r"-\frac{\sqrt{3}}{2}"): "times 1",
    (r"-\frac1{2x}1", r"-\frac1{2x}"): "times 1",
    (r"(8\sqrt31, 14, 2, 4)", r"(8\sqrt3, 14, 2, 4)"): "times 1, as LaTeX sets it",
    ("x1+1", "x+1"): "times 1",
    ("-7+24i1", "-7+24i"): "times 1",
    ("0-2i", "-2i"): "from 0",
    ("-1!,0,1", "-1,0,1"): "1! is 1",
    ("1", "1:1"): "the ratio is 1",
    ("1056_6", "1056"): "a base added to the same digits",
    ("8c", r"8\text{ cm}"): "a unit",
}


def tokens(text: str) -> list[str]:
    """Return numbers without redundant zeros, and single letters, in order.

    Leaves out the names of commands that set text or fractions, units and other words after a number (math-verify's
    published leniency), and the left side of an equation.
    """
    text = re.sub(r"(?<!\d)['\"$]|['\"$](?!\d)", "", normalize_spelling(text)).replace("\\\\", "\\").replace("%", "")
    text = re.sub(r"(?<=[\da-z}])\s*\\(?:text|mbox|mathrm|textbf|textnormal)\b.*", "", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:begin|end)\{\w+\}|\\(?:text|mathrm|textbf|circ|boxed|cdot|d?frac)(?![a-zA-Z])", " ", text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text.rpartition("=")[2].replace("$", ""))
    text = re.sub(
        r"(?<=\d),(?=\d{3}(?!\d))|(?<![\d.])0+(?=\d)|(?<=\d)\.0+(?!\d)|(?<=\.)(\d*[1-9])0+(?!\d)", r"\1", text
    )
    return re.findall(r"\d+(?:\.\d+)?|[a-z%|!]", text.casefold())


def explained(answer: str, gold: str, mutation: str) -> bool:
    """Return True if the content is the same. Damage that moves a factor does not change it (``a4`` for ``4a``)."""
    if gold.partition("_")[0] == answer:  # the base left out
        return True
    left, right = tokens(answer), tokens(gold)
    return left == right or (mutation == "damaged" and sorted(left) == sorted(right))


class Deaths(logging.Handler):
    """Log handler that collects messages about processes that ended during a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ended" in record.getMessage():
            self.messages.append(record.getMessage())


async def run(mutations: int, seed: int, workers: int, data_dir: Path) -> int:
    """Grade all answers, print the table and return the number of suspicious verdicts."""
    golds = sorted({answer for name in ("math500", "math35_train") for answer in answers(data_dir / f"{name}.jsonl")})
    rng = random.Random(seed)
    grader = Grader(GraderSettings(workers=workers, deadline=5.0))
    verdicts: Counter[tuple[str, Verdict]] = Counter()
    suspicious: list[tuple[str, str, str]] = []
    slots = asyncio.Semaphore(64)
    begun = time.monotonic()

    async def one() -> None:
        gold, mutation = rng.choice(golds), rng.choice(MUTATIONS)
        answer = mutation(gold, rng.choice(golds), rng)
        try:
            verdict = await grader.grade(answer, gold)
        finally:
            slots.release()
        verdicts[mutation.__name__, verdict] += 1
        if verdict is Verdict.ANSWER_TIMEOUT:
            print(f"slow: {answer!r} for {gold!r}")
        known = explained(answer, gold, mutation.__name__) or (answer, gold) in LOOKED_AT
        if verdict is Verdict.CORRECT and not known:
            suspicious.append((mutation.__name__, answer, gold))

    deaths = Deaths()
    logging.getLogger("agentrl_envs.grading").addHandler(deaths)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(mutations):
            await slots.acquire()
            tasks.create_task(one())
    await grader.close()
    for (name, verdict), count in sorted(verdicts.items()):
        print(f"{name:14} {verdict.value:18} {count}")
    for name, answer, gold in suspicious:
        print(f"suspicious: {name} {answer!r} for {gold!r}")
    for message in deaths.messages:
        print(f"died: {message}")
    seconds = time.monotonic() - begun
    print(f"{mutations} answers to {len(golds)} gold answers, {seconds:.0f} s, {len(suspicious)} suspicious")
    return len(suspicious) + len(deaths.messages)


def answers(path: Path) -> list[str]:
    return [answer for line in path.read_text(encoding="utf-8").splitlines() if (answer := json.loads(line)["answer"])]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    data_dir = Path(os.environ["AGENTRL_DATA_DIR"])
    sys.exit(asyncio.run(run(arguments.mutations, arguments.seed, arguments.workers, data_dir)) > 0)


if __name__ == "__main__":
    main()
