"""Answers, from records, why the newest requests got their engines, and what came of it."""

from __future__ import annotations

from itertools import islice
from typing import Final

from diptych_protocol.admin import Explanation, RequestList, RequestReport
from diptych_router.requests.records import Records
from diptych_router.requests.request_record import RequestRecord
from diptych_router.telling.explained import NameOf, line_of, report_of

MOST_FOUND: Final = 32
"""The most answers under one id that are reported."""
API_PREFIXES: Final = ("chatcmpl-", "cmpl-")
"""The prefixes of answers' ids in the API, before the id of their request."""


class Explanations:
    """Answers questions about the newest requests of one router."""

    def __init__(self, records: Records, *, policy: str, disaggregate: str) -> None:
        self.policy, self.disaggregate = policy, disaggregate
        self._records = records

    def of(
        self, request_id: str, name_of: NameOf, tenant: str | None = None
    ) -> list[RequestReport]:
        """Return the records of an id, the newest first. The id is the client's, with or without
        the API's prefix, or the router's own. name_of: from an engine's key to its name. tenant:
        whose records; None: anybody's."""
        wanted = {request_id, *(request_id.removeprefix(prefix) for prefix in API_PREFIXES)}
        found = (
            record
            for record in self._records
            if tenant in (None, record.tenant) and _is_called(record, wanted)
        )
        return [report_of(record, name_of) for record in islice(found, MOST_FOUND)]

    def explanation(
        self, request_id: str, name_of: NameOf, tenant: str | None = None
    ) -> Explanation:
        """Return the same records with the settings that governed the choice."""
        return Explanation(
            policy=self.policy,
            disaggregate=self.disaggregate,
            requests=self.of(request_id, name_of, tenant),
        )

    def newest(self, limit: int) -> RequestList:
        """Return at most this many requests."""
        return RequestList(
            requests=[line_of(record) for record in islice(self._records, limit)],
            num_remembered=len(self._records),
            most_remembered=self._records.most_requests,
        )


def _is_called(record: RequestRecord, wanted: set[str]) -> bool:
    """Several prompts of one request have its id and a number."""
    if record.shown_id in wanted or record.request_id in wanted:
        return True
    whole, _, number = record.shown_id.rpartition("-")
    return number.isdecimal() and whole in wanted
