"""Write the corpus, questions and demonstrations into ``data/``: ``python make_data.py``. Deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

FIRST = "Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jan Kim Leo Mia Ned Ola Pia Rex Sam Tom Una"
WORKS = ("baker", "carpenter", "doctor", "farmer", "gardener", "judge", "miner", "painter", "sailor", "teacher")
LANDS = ("Arland", "Borland", "Corland", "Dorland", "Farland", "Garland", "Harland", "Morland")
RIVERS = ("Ain", "Bode", "Cher", "Drin", "Elbe", "Glan", "Isar", "Lahn", "Main", "Ruhr", "Saar", "Tyne")
STARTS = "bar cor del fen gar hol kam lin mor nor pel ros sol tar vel wen"
ENDS = "bert dan felt ham kin low mond ner sen ton wald zer"

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Town:
    """A town and the document about it."""

    name: str
    land: str
    river: str

    @property
    def document(self) -> str:
        return f"{self.name} lies in {self.land} on the {self.river}."


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person and the document about them."""

    name: str
    work: str
    town: Town

    @property
    def document(self) -> str:
        return f"{self.name} works as {self.work} and was born in the town {self.town.name}."


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, the queries in order, and the reply, whose last word is the answer."""

    text: str
    searches: tuple[str, ...]
    reply: str

    @property
    def answer(self) -> str:
        return self.reply.split()[-1]


def make_world(random: Random) -> tuple[list[Town], list[Person]]:
    """Return towns and people with unique names."""
    names = [(start + end).capitalize() for start in STARTS.split() for end in ENDS.split()]
    random.shuffle(names)
    of_towns, of_families = names[:30], names[30:80]
    towns = [Town(name=name, land=random.choice(LANDS), river=random.choice(RIVERS)) for name in of_towns]
    called = random.sample([f"{first} {family}" for first in FIRST.split() for family in of_families], 1000)
    return towns, [Person(name=name, work=random.choice(WORKS), town=random.choice(towns)) for name in called]


def questions(people: Sequence[Person], random: Random) -> list[Question]:
    """Return four questions per person in random order. Two need one document; two also need the town's document."""
    found: list[Question] = []
    for person in people:
        name, town = person.name, person.town
        for text, reply in (
            (f"What is the work of {name}?", f"{name} works as {person.work}"),
            (f"In which town was {name} born?", f"{name} was born in the town {town.name}"),
            (f"In which land was {name} born?", f"{town.name} lies in {town.land}"),
            (f"On which river was {name} born?", f"{town.name} lies on the {town.river}"),
        ):
            further = () if reply.startswith(name) else (f"where lies the town {town.name}",)
            found.append(Question(text=text, searches=(text, *further), reply=reply))
    return random.sample(found, len(found))


def problem(asked: Question) -> Row:
    """Return a data row: the model reads ``problem``, and ``answer`` is passed to ``reset``."""
    return {"problem": asked.text, "answer": asked.answer}


def demonstration(asked: Question) -> Row:
    """Return a row with the model's turns. The environment produces the observations when it plays the turns."""
    turns = [*map(call, asked.searches), asked.reply]
    return {**problem(asked), "turns": [{"model": turn} for turn in turns]}


def call(query: str) -> str:
    """Return a tool call in the format for models without a chat template."""
    return "<tool_call>\n" + json.dumps({"name": "search", "arguments": {"query": query}}) + "\n</tool_call>"


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write one row per line, each with an id."""
    lines = [json.dumps({"id": f"{path.stem}-{number}", **row}) for number, row in enumerate(rows)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines)} rows")


def main() -> None:
    """Write all files. Training and demonstrations ask about the same people; held-out questions are about others."""
    random, folder = Random(0), Path("data")
    folder.mkdir(exist_ok=True)
    towns, people = make_world(random)
    seen, unseen = questions(people[:900], random), questions(people[900:], random)
    write(folder / "corpus.jsonl", [{"text": item.document} for item in (*towns, *people)])
    write(folder / "train.jsonl", map(problem, seen))
    write(folder / "heldout.jsonl", map(problem, unseen))
    write(folder / "demonstrations.jsonl", map(demonstration, seen))


if __name__ == "__main__":
    main()
