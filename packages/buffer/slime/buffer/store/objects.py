"""Payloads as objects of a store that speaks S3's protocol, through boto3.

An object appears whole or not at all, and is durable when its upload is answered. boto3 finds credentials, the region
and endpoints other than Amazon's (AWS_ENDPOINT_URL_S3) in the environment and below ~/.aws, and repeats failed calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from slime.buffer.store.base import Payloads
from slime.buffer.store.blobs import file_of, payload_name
from slime.buffer.store.urls import ELSEWHERE, PAYLOADS
from slime.types.errors import DataLoss, InvalidFile, InvalidSetting, NotAvailable, OutOfSpace, Unavailable

log = logging.getLogger(__name__)

OPTIONS = {
    "connect_timeout": 5, "read_timeout": 30, "retries": {"mode": "standard", "max_attempts": 4},
    "max_pool_connections": 64,
    # Samples have checksums of their own, and not every store besides Amazon's supports these.
    "request_checksum_calculation": "when_required", "response_checksum_validation": "when_required",
}  # fmt: skip
GONE = ("NoSuchKey", "404", "NotFound")
SHORT = ("InvalidRange", "416")
# Another claim was first, or is being written.
CLAIMED = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
# The store has no conditional writes.
UNCONDITIONAL = ("NotImplemented", "501")
FULL_STATUS = 507
# Objects of a call that are uploaded at the same time.
UPLOADED_TOGETHER = 16


class ObjectPayloads(Payloads):
    """Payloads below `PREFIX/payloads` of a bucket. Raises ConfigError if the bucket cannot be used."""

    def __init__(self, url: str) -> None:
        self._bucket, _, prefix = url.partition("://")[2].partition("/")
        prefix = prefix.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self.name = f"{url.rstrip('/')}/payloads"
        self.lost_and_found = f"{url.rstrip('/')}/lost+found"
        try:
            import boto3
            import botocore.config
            import botocore.exceptions as exceptions
        except ImportError as error:
            raise NotAvailable.not_installed(PAYLOADS, "boto3", "slime-buffer[s3]") from error
        self._failures = (exceptions.ClientError, exceptions.BotoCoreError)
        # Starts threads when they are needed.
        self._uploading = ThreadPoolExecutor(UPLOADED_TOGETHER, thread_name_prefix="upload")
        try:
            self._client: Any = boto3.session.Session().client("s3", config=botocore.config.Config(**OPTIONS))
            self._client.head_bucket(Bucket=self._bucket)
        except self._failures as error:
            expected = "a bucket that exists and credentials that may use it"
            raise InvalidSetting(
                f"{PAYLOADS} {url}: {error}; give {expected}, which come from {ELSEWHERE[PAYLOADS]}",
                field=PAYLOADS, value=url, expected=expected,
            ) from error  # fmt: skip

    def track(self, names: Iterable[str]) -> None:
        span = next((name for name in names if file_of(name) != name), None)
        if span is not None:
            raise InvalidFile(
                f"the samples of {span} share a file with others: {self.name} holds an object for each group. Give the "
                "run the directory that its samples were written to",
                field=PAYLOADS, value=self.name, expected="the place that the samples were written to",
            )  # fmt: skip

    def write(self, groups: Sequence[tuple[int, Sequence[bytes | memoryview]]]) -> list[str]:
        uploads = [self._uploading.submit(self._upload, *group) for group in groups]
        wait(uploads)
        errors = [error for upload in uploads if (error := upload.exception()) is not None]
        if errors:
            error = next((error for error in errors if isinstance(error, Unavailable)), errors[0])
            # Where the store does not answer, each deletion would wait for it, too: the next start sets objects aside.
            if not isinstance(error, Unavailable):
                for upload in uploads:
                    if upload.exception() is None:
                        self.delete(upload.result())
            raise error
        return [upload.result() for upload in uploads]

    def _upload(self, group_index: int, parts: Sequence[bytes | memoryview]) -> str:
        name = payload_name(group_index)
        with self._errors(name):
            self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=b"".join(parts))
        return name

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        first = min((offset for offset, _ in ranges), default=0)
        end = max((offset + length for offset, length in ranges), default=0)
        data = b""
        with self._errors(name):
            if end > first:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=self._key(name), Range=f"bytes={first}-{end - 1}"
                )
                data = answer["Body"].read()
        if len(data) != end - first:
            raise self._cut_short(name)
        return [data[offset - first : offset - first + length] for offset, length in ranges]

    def size(self, name: str) -> int | None:
        try:
            with self._errors(name):
                return self._client.head_object(Bucket=self._bucket, Key=self._key(name))["ContentLength"]
        except DataLoss:
            return None

    def set_aside(self, name: str) -> None:
        try:
            with self._errors(name):
                self._client.copy_object(
                    Bucket=self._bucket, Key=f"{self._prefix}lost+found/{name}",
                    CopySource={"Bucket": self._bucket, "Key": self._key(name)},
                )  # fmt: skip
                self._client.delete_object(Bucket=self._bucket, Key=self._key(name))
        except DataLoss:
            return

    def delete(self, name: str) -> None:
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(name))
        except self._failures as error:
            # Nothing names it any more, so the next start sets it aside.
            log.warning("%s/%s cannot be deleted now: %s", self.name, name, error)

    def names(self) -> set[str]:
        start = self._key("")
        with self._errors("list"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            return {item["Key"].removeprefix(start) for page in pages for item in page.get("Contents", ())}

    def exist(self) -> bool:
        with self._errors("list"):
            return bool(self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._key(""), MaxKeys=1)["KeyCount"])

    def owner(self) -> str | None:
        try:
            with self._errors("owner"):
                answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}payloads-of")
                return answer["Body"].read().decode().strip()
        except DataLoss:
            return None

    def claim(self, owner: str) -> None:
        request = {"Bucket": self._bucket, "Key": f"{self._prefix}payloads-of", "Body": f"{owner}\n".encode()}
        with self._errors("owner"):
            try:
                self._client.put_object(**request, IfNoneMatch="*")
            except self._client.exceptions.ClientError as error:
                code = error.response["Error"]["Code"]
                if code in UNCONDITIONAL:
                    self._client.put_object(**request)
                elif code not in CLAIMED:
                    raise

    def _key(self, name: str) -> str:
        return f"{self._prefix}payloads/{name}"

    def _cut_short(self, name: str) -> DataLoss:
        return DataLoss(f"payload {self.name}/{name} is cut short", field="payload", value=name)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Raises DataLoss only for an object that the store says is gone or too short."""
        try:
            yield
        except self._failures as error:
            answer = getattr(error, "response", {})
            code = str(answer.get("Error", {}).get("Code", ""))
            if code in GONE:
                raise DataLoss(f"payload {self.name}/{name} is gone", field="payload", value=name) from None
            if code in SHORT:
                raise self._cut_short(name) from None
            if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == FULL_STATUS:
                raise OutOfSpace(f"{self.name}: {error}", field=PAYLOADS, value=name, expected="free space") from error
            raise Unavailable(f"{self.name} does not answer: {error}") from error
