"""States of a sample, by their names in Python and their numbers on the wire."""

from __future__ import annotations

from enum import Enum


class SampleStatus(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    # Stopped before its end; its tokens are valid and may be continued.
    ABORTED = "aborted"
    # A tool, an API or a parser failed; a retry may succeed.
    FAILED = "failed"


# The numbers of slime.v1.SampleStatus.
STATUS_NUMBERS: dict[SampleStatus, int] = {status: number for number, status in enumerate(SampleStatus, start=1)}
STATUS_BY_NUMBER: dict[int, SampleStatus] = {number: status for status, number in STATUS_NUMBERS.items()}
