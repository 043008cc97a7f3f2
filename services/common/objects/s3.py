"""Objects in a bucket: `s3://bucket/prefix`, through boto3 in threads.

Conditional writes are single-part and sent once. If the answer is lost or reports a conflict, the
document is read back; if it contains our own bytes, which carry a random write id, the write
succeeded. Entity tags are opaque, and the start probe finds out whether a server expects them
quoted. Every upload carries its MD5, the one checksum that most servers verify. If the probe finds
that a server does not verify it, the MD5 in the server's answer is compared. Content is checked by
SHA-256 wherever it is used.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from loraplex_services.common.objects.s3_client import code_of, connect_s3, explained, status_of
from loraplex_services.common.objects.store import (
    BLOBS,
    After,
    BlobWriter,
    ObjectInfo,
    ObjectMissing,
    ObjectStoreError,
    PreconditionFailed,
    Segment,
    StoredObject,
    WriteUncertain,
    read_chunks,
)

PART_BYTES = 16 << 20
"""Size of the parts of a multipart upload; 10,000 of them hold 160 GB."""

_THREADS = 16
_ATTEMPTS = 5
_MISSING = frozenset({"NoSuchKey", "404", "NotFound"})
_REFUSED = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})

logger = logging.getLogger(__name__)

T = TypeVar("T")


class S3Store:
    """An ObjectStore in an existing bucket; endpoint and credentials come from AWS_* variables."""

    lists_etags = True

    def __init__(self, bucket: str, prefix: str) -> None:
        self.quote_etags = True
        self._compare_md5 = False
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="s3")
        self._client = connect_s3(_ATTEMPTS, 2 * _THREADS)
        self._once = connect_s3(1, 2 * _THREADS)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    async def get(self, key: str) -> StoredObject:
        return await self._run(self._get, key)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return list(await asyncio.gather(*(self._run(self._get_or_none, key) for key in keys)))

    async def get_folder(self, prefix: str) -> list[tuple[str, bytes]]:
        keys = [info.key async for info in self.list_objects(prefix)]
        found = zip(keys, await self.get_many(keys), strict=True)
        return [(key, data) for key, data in found if data is not None]

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        return await self._run(self._get_range, key, offset, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._run(self._head, key)

    async def put(self, key: str, data: bytes, *, after: After = None) -> None:
        if after is not None:
            await asyncio.shield(after)
        await self._run(self._put, key, data)

    async def put_if_absent(
        self, key: str, data: bytes, *, durable: bool = True, after: After = None
    ) -> str:
        if after is not None:
            await asyncio.shield(after)
        return await self._run(self._put_conditional, key, data, {"IfNoneMatch": "*"})

    async def make_durable(self, key: str) -> bool:
        return await self.head(key) is not None

    async def put_if_match(
        self, key: str, data: bytes, etag: str, *, durable: bool = True, after: After = None
    ) -> str:
        if after is not None:
            await asyncio.shield(after)
        return await self._run(self._put_conditional, key, data, self._if_match(etag))

    def writer(self) -> BlobWriter:
        return _SpooledWriter(self)

    async def compose(self, key: str, segments: Sequence[Segment]) -> None:
        if len(segments) == 1 and segments[0].whole:
            await self._run(self._copy, segments[0].key, key)
            return
        writer = self.writer()
        try:
            for segment in segments:
                async for data in read_chunks(self, segment.key, segment.offset, segment.length):
                    await writer.write(data)
            await writer.commit(key)
        finally:
            await writer.abort()

    async def list_objects(self, prefix: str, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        query: dict[str, str] = {"StartAfter": self._prefix + start_after} if start_after else {}
        while True:
            infos, query = await self._run(self._list_page, prefix, query)
            for info in infos:
                yield info
            if not query:
                return

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._run(self._delete, key)

    async def delete_if_older(self, key: str, modified_s: float) -> bool:
        """Look, then delete at once; a retry looks again. What is written in between is lost.

        A conditional delete would close that gap on few servers only: by etag it cannot tell
        equal bytes that were written again, and most do not know the condition on time.
        """
        return await self._run(self._delete_if_older, key, modified_s)

    async def clock_s(self) -> float:
        return await self._run(self._clock_s)

    async def find_upload_check(self, key: str) -> bool:
        """See `ChecksUploads`: uploads are checked by the server, or by the MD5 that it returns."""
        return await self._run(self._find_upload_check, key)

    async def close(self) -> None:
        self._client.close()
        self._once.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *args: object) -> T:
        """Callers of servers read the errors, so the address is only logged."""

        def guarded() -> T:
            try:
                return work(*args)
            except (ClientError, BotoCoreError, OSError) as error:
                facts = {"store": self.url, "problem": explained(error)}
                logger.warning("object store failed", extra=facts)
                is_answer = isinstance(error, ClientError)
                why = explained(error) if is_answer else "its server does not answer; try again"
                raise ObjectStoreError(f"object store failed: {why}") from error

        return await asyncio.get_running_loop().run_in_executor(self._pool, guarded)

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _get(self, key: str) -> StoredObject:
        answer = self._fetch(key, {})
        return StoredObject(answer["Body"].read(), answer["ETag"].strip('"'))

    def _get_or_none(self, key: str) -> bytes | None:
        try:
            return self._get(key).data
        except ObjectMissing:
            return None

    def _get_range(self, key: str, offset: int, length: int) -> bytes:
        if length <= 0:
            return b""
        try:
            answer = self._fetch(key, {"Range": f"bytes={offset}-{offset + length - 1}"})
        except ClientError as error:
            if code_of(error) in ("InvalidRange", "416"):
                return b""
            raise
        data: bytes = answer["Body"].read()
        return data

    def _fetch(self, key: str, options: dict[str, Any]) -> Any:
        try:
            return self._client.get_object(**self._at(key), **options)
        except ClientError as error:
            if code_of(error) in _MISSING:
                raise ObjectMissing(key) from None
            raise

    def _head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self._client.head_object(**self._at(key))
        except ClientError as error:
            if code_of(error) in _MISSING:
                return None
            raise
        return ObjectInfo(key, answer["ContentLength"], answer["LastModified"].timestamp())

    def _put(self, key: str, data: bytes) -> None:
        answer = self._client.put_object(**self._at(key), Body=data, ContentMD5=_md5(data))
        if not self._is_stored(data, answer["ETag"]):
            self._delete(key)
            raise self._damaged(key)

    def _find_upload_check(self, key: str) -> bool:
        try:
            answer = self._once.put_object(**self._at(key), Body=b"sent", ContentMD5=_md5(b"meant"))
        except ClientError as error:
            if status_of(error) >= 500:
                raise
            return True
        self._compare_md5 = answer["ETag"].strip('"') == hashlib.md5(b"sent").hexdigest()
        return self._compare_md5

    def _is_stored(self, data: bytes, etag: str) -> bool:
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return not self._compare_md5 or etag.strip('"') == digest

    def _damaged(self, key: str) -> ObjectStoreError:
        return ObjectStoreError(f"{key!r} was damaged on its way to the server")

    def _if_match(self, etag: str) -> dict[str, Any]:
        return {"IfMatch": f'"{etag}"' if self.quote_etags else etag}

    def _put_conditional(self, key: str, data: bytes, condition: dict[str, Any]) -> str:
        """Write under a condition. An object that was damaged in transit is written again, unless
        somebody else has replaced it since. If it was to be created, nobody may find it after an
        error."""
        etag = self._put_once(key, data, condition)
        error: Exception = self._damaged(key)
        for _ in range(1, _ATTEMPTS):
            if self._is_stored(data, etag):
                break
            try:
                etag = self._put_once(key, data, self._if_match(etag))
            except (BotoCoreError, ClientError, WriteUncertain) as failure:
                error = failure
        if self._is_stored(data, etag):
            return etag
        if "IfNoneMatch" in condition:
            self._delete(key)
        raise error

    def _put_once(self, key: str, data: bytes, condition: dict[str, Any]) -> str:
        try:
            answer = self._once.put_object(
                **self._at(key), Body=data, ContentMD5=_md5(data), **condition
            )
        except ClientError as error:
            if code_of(error) in _REFUSED | _MISSING:
                return self._read_back(key, data, PreconditionFailed(key))
            if status_of(error) >= 500:
                return self._read_back(key, data, WriteUncertain(f"{self.url}: {error}"))
            raise
        except BotoCoreError as error:
            return self._read_back(key, data, error)
        return answer["ETag"].strip('"')

    def _read_back(self, key: str, data: bytes, error: Exception) -> str:
        """After an answer that may hide a success: our own bytes mean that the write happened. Not
        those of a blob, which are the same whoever wrote them, and may be about to be collected."""
        if key.startswith(BLOBS):
            raise error
        try:
            stored = self._get(key)
        except ObjectMissing:
            stored = None
        if stored is not None and stored.data == data:
            return stored.etag
        raise error

    def _copy(self, source: str, key: str) -> None:
        try:
            self._client.copy_object(**self._at(key), CopySource=self._at(source))  # type: ignore[arg-type]
        except ClientError as error:
            if code_of(error) in _MISSING:
                raise ObjectMissing(source) from None
            raise

    def _upload(self, key: str, file: IO[bytes]) -> None:
        """Send a spooled file: in one request if it is small, otherwise in parts."""
        file.seek(0)
        first = file.read(PART_BYTES)
        if len(first) < PART_BYTES:
            return self._put(key, first)
        upload_id = self._client.create_multipart_upload(**self._at(key))["UploadId"]
        try:
            parts: list[dict[str, Any]] = []
            data = first
            while data:
                answer = self._client.upload_part(
                    **self._at(key),
                    UploadId=upload_id,
                    PartNumber=len(parts) + 1,
                    Body=data,
                    ContentMD5=_md5(data),
                )
                if not self._is_stored(data, answer["ETag"]):
                    raise self._damaged(key)
                parts.append({"PartNumber": len(parts) + 1, "ETag": answer["ETag"]})
                data = file.read(PART_BYTES)
            self._client.complete_multipart_upload(
                **self._at(key),
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
            )
        except BaseException:
            self._client.abort_multipart_upload(**self._at(key), UploadId=upload_id)
            raise

    def _list_page(
        self, prefix: str, query: dict[str, str]
    ) -> tuple[list[ObjectInfo], dict[str, str]]:
        answer = self._client.list_objects_v2(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            **query,  # type: ignore[arg-type]
        )
        cut = len(self._prefix)
        infos = [
            ObjectInfo(
                entry["Key"][cut:],
                entry["Size"],
                entry["LastModified"].timestamp(),
                entry.get("ETag", "").strip('"'),
            )
            for entry in answer.get("Contents", [])
        ]
        token = answer.get("NextContinuationToken", "")
        return infos, {"ContinuationToken": token} if token else {}

    def _delete(self, key: str) -> None:
        self._client.delete_object(**self._at(key))

    def _delete_if_older(self, key: str, modified_s: float) -> bool:
        """Most servers report times in whole seconds, so they are compared as such."""
        for left in reversed(range(_ATTEMPTS)):
            info = self._head(key)
            if info is not None and int(info.modified_s) > int(modified_s):
                return False
            try:
                self._once.delete_object(**self._at(key))
                break
            except (BotoCoreError, ClientError):
                if not left:
                    raise
        return True

    def _clock_s(self) -> float:
        answer: Any = self._client.head_bucket(Bucket=self._bucket)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date:
            return parsedate_to_datetime(date).timestamp()
        key = f"probe/clock-{secrets.token_hex(8)}"
        self._put(key, b"")
        info = self._head(key)
        self._delete(key)
        return info.modified_s if info else datetime.now(UTC).timestamp()


class _SpooledWriter:
    """Collects a blob in a temporary file, since S3 needs the size beforehand."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._file = tempfile.TemporaryFile()

    async def write(self, *data: bytes) -> None:
        await self._store._run(self._file.writelines, data)

    async def commit(self, key: str) -> None:
        await self._store._run(self._store._upload, key, self._file)
        self._file.close()

    async def abort(self) -> None:
        self._file.close()


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
