"""Write databases, questions and demonstrations into ``data/``: ``python make_data.py``. Deterministic."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The topic of a database: one table with a column of names and two of numbers."""

    table: str
    name: str
    numbers: tuple[str, str]
    words: str

    @property
    def schema(self) -> str:
        first, second = self.numbers
        return f"CREATE TABLE {self.table} ({self.name} TEXT, {first} INTEGER, {second} INTEGER)"


KINDS = (
    Kind(
        table="stock",
        name="item",
        numbers=("price", "amount"),
        words="apple bolt brush cable candle clock cup door fork glove hammer jar",
    ),
    Kind(
        table="zoo",
        name="animal",
        numbers=("age", "weight"),
        words="bear camel crane deer eagle fox goat koala otter panda seal tiger",
    ),
    Kind(
        table="forest",
        name="tree",
        numbers=("height", "width"),
        words="alder beech birch cedar cherry elm fir larch lime maple oak willow",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Database:
    """A database file and its contents."""

    path: str
    kind: Kind
    names: tuple[str, ...]


def write_database(folder: Path, number: int, random: Random) -> Database:
    """Write a database with eight rows. The numbers in a column are distinct, so the largest is unique."""
    kind = KINDS[number % len(KINDS)]
    names = tuple(random.sample(kind.words.split(), 8))
    columns = [random.sample(range(10, 100), len(names)) for _ in kind.numbers]
    path = folder / f"{kind.table}_{number:03}.sqlite"
    with closing(sqlite3.connect(":memory:")) as database:
        with database:
            database.execute(kind.schema)
            database.executemany(f"INSERT INTO {kind.table} VALUES (?, ?, ?)", zip(names, *columns, strict=True))
        path.write_bytes(database.serialize())
    return Database(path=str(path), kind=kind, names=names)


def question(database: Database, random: Random) -> tuple[str, str]:
    """Return a question and the SQL that answers it."""
    kind, column, name = database.kind, random.choice(database.kind.numbers), random.choice(database.names)
    most, order = random.choice((("highest", "DESC"), ("lowest", "ASC")))
    return random.choice(
        (
            (f"What is the {column} of '{name}'?", f"SELECT {column} FROM {kind.table} WHERE {kind.name} = '{name}'"),
            (
                f"Which {kind.name} has the {most} {column}?",
                f"SELECT {kind.name} FROM {kind.table} ORDER BY {column} {order} LIMIT 1",
            ),
            (f"What is the total {column}?", f"SELECT SUM({column}) FROM {kind.table}"),
        )
    )


def problem(databases: Sequence[Database], random: Random) -> tuple[Row, str]:
    """Return a data row and the SQL that answers it. The model reads ``problem``; the rest is passed to ``reset``."""
    database = random.choice(databases)
    asked, sql = question(database, random)
    with closing(sqlite3.connect(database.path)) as connection:
        ((answer,),) = connection.execute(sql).fetchall()
    return {"problem": asked, "answer": str(answer), "db": database.path}, sql


def demonstration(databases: Sequence[Database], random: Random) -> Row:
    """Return a row with the model's turns. The environment produces the observations when it plays the turns."""
    row, sql = problem(databases, random)
    call = json.dumps({"name": "query", "arguments": {"sql": sql}})
    return {**row, "turns": [{"model": f"<tool_call>\n{call}\n</tool_call>"}, {"model": row["answer"]}]}


def write(path: Path, count: int, make: Callable[[], Row]) -> None:
    """Write one row per line, each with an id."""
    lines = [json.dumps({"id": f"{path.stem}-{number}", **make()}) for number in range(count)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{path}: {count} rows")


def main() -> None:
    """Write all files. Training and demonstrations use the same databases; the held-out questions use others."""
    random, folder = Random(0), Path("data")
    folder.mkdir(exist_ok=True)
    databases = [write_database(folder, number, random) for number in range(120)]
    seen, unseen = databases[:90], databases[90:]
    write(folder / "train.jsonl", 3000, lambda: problem(seen, random)[0])
    write(folder / "heldout.jsonl", 200, lambda: problem(unseen, random)[0])
    write(folder / "demonstrations.jsonl", 6000, lambda: demonstration(seen, random))


if __name__ == "__main__":
    main()
