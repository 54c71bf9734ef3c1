"""An agent that reads a question and an SQLite schema, may query the database, and answers in plain text."""

from __future__ import annotations

import sqlite3
from contextlib import closing


class Warehouse:
    """A database that is opened read-only, and a question about it."""

    def reset(self, db: str, answer: str) -> str:
        """Store the database file and the reference answer. Return the schema, which is appended to the prompt."""
        self._db = db
        self._gold = answer
        self._right = False
        return "\n".join(sql for (sql,) in self._rows("SELECT sql FROM sqlite_master"))

    def query(self, sql: str) -> list[tuple[str | int | float | None, ...]]:
        """Runs a query and returns its rows.

        Args:
            sql: one SELECT statement
        """
        return self._rows(sql)

    def step(self, text: str) -> None:
        """Read the answer, which is a turn without a call."""
        self._right = text.strip().lower() == self._gold.lower()

    def get_reward(self) -> float:
        """Return 1 for the right answer."""
        return float(self._right)

    def _rows(self, sql: str) -> list[tuple[str | int | float | None, ...]]:
        with closing(sqlite3.connect(f"file:{self._db}?mode=ro", uri=True)) as database:
            return database.execute(sql).fetchmany(20)
