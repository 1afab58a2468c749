"""Queries of a store in SQL, the same for every database."""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from slime.buffer.store.base import CompletedGroup, Group, State, Step, Store

# Version 5 has the tables of version 4, and names of payloads that older versions would take for lost files.
VERSION = 5
# In the types of SQLite; another database translates them. A group changes its state five times or more, and a database
# writes a row anew for each change: the prompt and the summaries, which change once, have tables of their own.
GROUPS = """
CREATE TABLE groups (
    group_index INTEGER PRIMARY KEY, dataset TEXT NOT NULL, state TEXT NOT NULL,
    first_sample INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    payload TEXT, sizes TEXT NOT NULL, checksums TEXT NOT NULL, payload_bytes INTEGER NOT NULL,
    worker TEXT, token TEXT, expires_at REAL, attempt INTEGER NOT NULL,
    ended_token TEXT, ended_by TEXT, step INTEGER, reject_reason TEXT, weight_version INTEGER
);
"""
INDEXES = """
CREATE INDEX groups_of_state ON groups (state, group_index);
CREATE INDEX groups_of_step ON groups (step) WHERE step IS NOT NULL;
CREATE INDEX groups_of_expiry ON groups (expires_at) WHERE expires_at IS NOT NULL;
CREATE UNIQUE INDEX groups_of_token ON groups (token) WHERE token IS NOT NULL;
CREATE UNIQUE INDEX groups_of_ended_token ON groups (ended_token) WHERE ended_token IS NOT NULL;
"""
CONTENTS = """
CREATE TABLE group_templates (group_index INTEGER PRIMARY KEY, template BLOB NOT NULL);
CREATE TABLE group_summaries (group_index INTEGER PRIMARY KEY, summaries BLOB NOT NULL);
"""
SCHEMA = f"""
{GROUPS} {INDEXES} {CONTENTS}
CREATE TABLE steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, group_indexes TEXT NOT NULL, plan TEXT);
CREATE TABLE prompt_batches (
    key TEXT PRIMARY KEY, added INTEGER NOT NULL, first INTEGER NOT NULL, digest TEXT
);
CREATE TABLE evaluation_prompts (
    dataset TEXT NOT NULL, position INTEGER NOT NULL, template BLOB NOT NULL, PRIMARY KEY (dataset, position)
);
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# From version 3, whose groups have these columns in their own table, to the tables of CONTENTS.
FILL_CONTENTS = """
INSERT INTO group_templates SELECT group_index, template FROM {groups};
INSERT INTO group_summaries SELECT group_index, summaries FROM {groups} WHERE summaries IS NOT NULL;
"""
# Added after version 1; older readers do not depend on them.
ADDED = (
    "CREATE TABLE IF NOT EXISTS seal_records (step INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    # Most groups of a long run have no payload any more.
    "CREATE INDEX IF NOT EXISTS groups_of_payload ON groups (payload, payload_bytes) WHERE payload IS NOT NULL",
    # A long run may reject more groups than it trains on, and each step asks for those since the last one.
    "CREATE INDEX IF NOT EXISTS groups_rejected_in_no_step ON groups (state, step) "
    "WHERE state = 'rejected' AND step IS NULL",
)
CONTENT_TABLES = ("group_templates", "group_summaries")
TABLES = ("groups", *CONTENT_TABLES, "steps", "prompt_batches", "evaluation_prompts", "state", "seal_records")
# Without the summaries of one group, the positions of a step would be those of other samples.
LACKS_CONTENTS = """
SELECT (SELECT count(*) FROM groups) > (SELECT count(*) FROM group_templates) OR EXISTS (
    SELECT 1 FROM groups WHERE state IN ('completed', 'sealed', 'acknowledged') AND payload IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM group_summaries s WHERE s.group_index = groups.group_index)
)
"""
LISTS = ("sizes", "checksums")
_scan = json.JSONDecoder().raw_decode
GROUP_COLUMNS = tuple(field.name for field in fields(Group))
SELECT_GROUPS = f"SELECT {', '.join(GROUP_COLUMNS)} FROM groups LEFT JOIN group_templates USING (group_index) "
# The first of many: SQLite would sort all rows of a join before it takes them.
TEMPLATE = "(SELECT template FROM group_templates c WHERE c.group_index = groups.group_index)"
SELECT_FIRST_GROUPS = f"SELECT {', '.join(GROUP_COLUMNS).replace('template', TEMPLATE)} FROM groups "
SELECT_COMPLETED = (
    f"SELECT {', '.join(CompletedGroup._fields)} FROM groups LEFT JOIN group_summaries USING (group_index) "
)
OWN_COLUMNS = tuple(name for name in GROUP_COLUMNS if name != "template")
INSERT_GROUP = f"INSERT INTO groups ({', '.join(OWN_COLUMNS)}, payload_bytes) VALUES ({'?, ' * len(OWN_COLUMNS)}?)"


class SqlStore(Store):
    """A store whose database takes the queries below, with `?` for a value."""

    # Condition that matches a list of indexes, passed as one value: databases limit the number of values.
    in_list: str

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Cached, because every call reads values and few write them; emptied when a transaction fails.
        self._values: dict[str, Any] = {}

    @abstractmethod
    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Executes a query; returns its rows, none for one that writes."""

    @abstractmethod
    def _many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Executes a query that writes once for each row of values."""

    @abstractmethod
    def _list(self, indexes: Iterable[int]) -> Any:
        """Returns the value for `in_list`."""

    def get(self, name: str, default: Any = None) -> Any:
        with self.lock:
            if name not in self._values:
                rows = self._rows("SELECT value FROM state WHERE name = ?", name)
                self._values[name] = json.loads(rows[0][0]) if rows else None
            value = self._values[name]
        return default if value is None else value

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._rows(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            name,
            json.dumps(value),
        )

    def insert_groups(self, groups: Sequence[Group]) -> None:
        self._many(
            INSERT_GROUP,
            [(*(_column(name, getattr(group, name)) for name in OWN_COLUMNS), sum(group.sizes)) for group in groups],
        )
        self._many(
            "INSERT INTO group_templates VALUES (?, ?)", [(group.group_index, group.template) for group in groups]
        )

    def update_groups(self, indexes: Iterable[int], **columns: Any) -> None:
        indexes = list(indexes)
        if "summaries" in columns:
            self._put_summaries(indexes, columns.pop("summaries"))
        if not columns:
            return
        if "sizes" in columns:
            columns["payload_bytes"] = sum(columns["sizes"])
        values = [_column(name, value) for name, value in columns.items()]
        assignments = ", ".join(f"{name} = ?" for name in columns)
        if len(indexes) == 1:
            self._rows(f"UPDATE groups SET {assignments} WHERE group_index = ?", *values, indexes[0])
        elif indexes:
            self._rows(f"UPDATE groups SET {assignments} WHERE {self.in_list}", *values, self._list(indexes))

    def _put_summaries(self, indexes: Sequence[int], summaries: bytes | None) -> None:
        if summaries is None:
            self._rows(f"DELETE FROM group_summaries WHERE {self.in_list}", self._list(indexes))
            return
        self._many(
            "INSERT INTO group_summaries VALUES (?, ?) "
            "ON CONFLICT (group_index) DO UPDATE SET summaries = excluded.summaries",
            [(index, summaries) for index in indexes],
        )

    def groups(
        self,
        *,
        states: Sequence[State] = (),
        indexes: Sequence[int] | None = None,
        after: int | None = None,
        limit: int = -1,
        in_no_step: bool = False,
    ) -> list[Group]:
        conditions: list[str] = ["TRUE"]
        values: list[Any] = []
        if states:
            conditions.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if indexes is not None:
            conditions.append(self.in_list)
            values.append(self._list(indexes))
        if after is not None:
            conditions.append("group_index > ?")
            values.append(after)
        if in_no_step:
            conditions.append("step IS NULL")
        query = f"{SELECT_GROUPS if limit < 0 else SELECT_FIRST_GROUPS} WHERE {' AND '.join(conditions)} "
        query += "ORDER BY group_index"
        if limit >= 0:
            query += " LIMIT ?"
            values.append(limit)
        return [_group(row) for row in self._rows(query, *values)]

    def completed_groups(self, *, indexes: Sequence[int] | None = None, limit: int = -1) -> list[CompletedGroup]:
        condition = "state = ?" if indexes is None else self.in_list
        values: list[Any] = [State.COMPLETED if indexes is None else self._list(indexes)]
        query = f"{SELECT_COMPLETED} WHERE {condition} ORDER BY group_index"
        if limit >= 0:
            query += " LIMIT ?"
            values.append(limit)
        return list(map(CompletedGroup._make, self._rows(query, *values)))

    def sample_counts(self, indexes: Sequence[int]) -> list[tuple[int, int]]:
        # The sizes are a JSON list of numbers.
        count = "CASE sizes WHEN '[]' THEN 0 ELSE 1 + length(sizes) - length(replace(sizes, ',', '')) END"
        query = f"SELECT group_index, {count} FROM groups WHERE {self.in_list} ORDER BY group_index"
        return self._rows(query, self._list(indexes))  # type: ignore[return-value]

    def group_of_token(self, token: str) -> Group | None:
        return next(map(_group, self._rows(SELECT_GROUPS + "WHERE token = ?", token)), None)

    def groups_of_request(self, request: str) -> list[Group]:
        # A range, which the index serves: "/" is the character after ".".
        rows = self._rows(
            SELECT_GROUPS + "WHERE token >= ? AND token < ? ORDER BY group_index", f"{request}.", f"{request}/"
        )
        return list(map(_group, rows))

    def group_of_ended_token(self, token: str) -> Group | None:
        return next(map(_group, self._rows(SELECT_GROUPS + "WHERE ended_token = ?", token)), None)

    def due_leases(self, now: float) -> list[int]:
        # Sorted here: with ORDER BY, SQLite would scan the table in that order and not use the index of expiries.
        return sorted(i for (i,) in self._rows("SELECT group_index FROM groups WHERE expires_at <= ?", now))

    def next_expiry(self) -> float | None:
        return self._rows("SELECT min(expires_at) FROM groups WHERE expires_at IS NOT NULL")[0][0]

    def weight_versions(self, states: Sequence[State]) -> list[tuple[int, State, int | None]]:
        query = f"WHERE state IN ({', '.join('?' * len(states))}) ORDER BY group_index"
        rows = self._rows(f"SELECT group_index, state, weight_version FROM groups {query}", *states)
        return [(index, State(state), version) for index, state, version in rows]

    def count(self, state: State) -> int:
        return self._rows("SELECT count(*) FROM groups WHERE state = ?", state)[0][0]

    def counts(self) -> dict[str, int]:
        return dict(self._rows("SELECT state, count(*) FROM groups GROUP BY state"))

    def reject_counts(self) -> dict[str, int]:
        return dict(self._rows("SELECT reject_reason, count(*) FROM groups WHERE state = 'rejected' GROUP BY 1"))

    def rejected_in_no_step(self) -> list[tuple[int, str]]:
        # Written out: a database uses a partial index only if it sees its condition, not a parameter.
        query = "SELECT group_index, coalesce(reject_reason, '') FROM groups WHERE state = 'rejected' AND step IS NULL"
        return sorted(self._rows(query))  # type: ignore[arg-type]

    def payload_bytes(self) -> int:
        return self._rows(
            "SELECT CAST(coalesce(sum(payload_bytes), 0) AS BIGINT) FROM groups WHERE payload IS NOT NULL"
        )[0][0]

    def payload_names(self) -> set[str]:
        return {name for (name,) in self._rows("SELECT payload FROM groups WHERE payload IS NOT NULL")}

    def step(self, step: int) -> Step | None:
        return next(map(_step, self._rows("SELECT * FROM steps WHERE step = ?", step)), None)

    def steps(self, *, after: int | None = None, upto: int | None = None) -> list[Step]:
        bounds = {"step > ?": after, "step <= ?": upto}
        bounds = {condition: bound for condition, bound in bounds.items() if bound is not None}
        query = f"SELECT * FROM steps WHERE {' AND '.join(['TRUE', *bounds])} ORDER BY step"
        return [_step(row) for row in self._rows(query, *bounds.values())]

    def insert_step(self, step: Step) -> None:
        self._rows(
            "INSERT INTO steps VALUES (?, ?, ?, ?)", step.step, step.state, json.dumps(step.group_indexes), step.plan
        )

    def update_step(self, step: int, **columns: Any) -> None:
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self._rows(f"UPDATE steps SET {assignments} WHERE step = ?", *columns.values(), step)

    def seal_record(self, step: int) -> dict[str, Any]:
        rows = self._rows("SELECT record FROM seal_records WHERE step = ?", step)
        return json.loads(rows[0][0]) if rows else {}

    def insert_seal_record(self, step: int, record: dict[str, Any]) -> None:
        self._rows(
            "INSERT INTO seal_records VALUES (?, ?) ON CONFLICT (step) DO UPDATE SET record = excluded.record",
            step,
            json.dumps(record),
        )

    def delete_step(self, step: int) -> None:
        self._rows("DELETE FROM steps WHERE step = ?", step)

    def prompt_batch(self, key: str) -> tuple[int, str | None] | None:
        return next(iter(self._rows("SELECT first, digest FROM prompt_batches WHERE key = ?", key)), None)  # type: ignore[arg-type]

    def prompt_batches(self) -> list[tuple[str, int, int, str | None]]:
        return self._rows("SELECT key, added, first, digest FROM prompt_batches ORDER BY first, key")  # type: ignore[return-value]

    def insert_prompt_batch(self, key: str, added: int, first: int, digest: str | None) -> None:
        self._rows("INSERT INTO prompt_batches VALUES (?, ?, ?, ?)", key, added, first, digest)

    def evaluation_prompts(self, dataset: str) -> list[bytes]:
        query = "SELECT template FROM evaluation_prompts WHERE dataset = ? ORDER BY position"
        return [template for (template,) in self._rows(query, dataset)]

    def insert_evaluation_prompts(self, dataset: str, templates: Sequence[bytes]) -> int:
        first = len(self.evaluation_prompts(dataset))
        self._many(
            "INSERT INTO evaluation_prompts VALUES (?, ?, ?)",
            [(dataset, position, template) for position, template in enumerate(templates, first)],
        )
        return first

    def evaluation_datasets(self) -> list[str]:
        return [name for (name,) in self._rows("SELECT DISTINCT dataset FROM evaluation_prompts ORDER BY 1")]


def _column(name: str, value: Any) -> Any:
    # Whole numbers: JSON as well, and made several times faster than by `json`.
    return f"[{', '.join(map(str, value))}]" if name in LISTS else value


def _group(row: tuple[Any, ...]) -> Group:
    group = Group(*row)
    group.state = State(group.state)
    group.sizes, group.checksums = _numbers(group.sizes), _numbers(group.checksums)  # type: ignore[arg-type]
    return group


def _numbers(text: str) -> tuple[int, ...]:
    # A group that was never completed or returned has none. `json.loads` takes twice as long for short lists.
    return () if text == "[]" else tuple(_scan(text)[0])


def _step(row: tuple[Any, ...]) -> Step:
    return Step(row[0], State(row[1]), tuple(json.loads(row[2])), row[3])
