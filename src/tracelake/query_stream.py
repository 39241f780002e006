"""An Arrow answer while it is read: one batch in memory at a time, and the connection is the only buffer.

An answer that breaks off is an error (``Unavailable``) and never a shorter result: an Arrow stream says where it
ends, and the number of rows was told before the first one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from uuid import UUID

import httpx
import pyarrow as pa

from tracelake.contracts.query_api import QUERY_ID_HEADER, ROW_COUNT_HEADER, TRUNCATED_HEADER
from tracelake.domain.errors import Unavailable


class QueryStream:
    """``row_count`` and ``truncated`` are known from the start; the batches can be gone through once."""

    def __init__(self, answer: httpx.Response) -> None:
        said = answer.headers
        try:
            self.row_count = int(said[ROW_COUNT_HEADER])
            self.truncated = said[TRUNCATED_HEADER] == "true"
            self.query_id = UUID(said[QUERY_ID_HEADER])
            self._reader = pa.ipc.open_stream(pa.PythonFile(_Pieces(answer.iter_bytes()), mode="r"))
        except (KeyError, ValueError, OSError) as error:
            raise _broken(error) from None
        self.schema: pa.Schema = self._reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows = 0
        while True:
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                break
            except (pa.ArrowInvalid, OSError) as error:
                raise _broken(error) from None
            rows += batch.num_rows
            yield batch
        if rows != self.row_count:
            raise _broken(f"{rows} rows of {self.row_count}")

    def read_all(self) -> pa.Table:
        return pa.Table.from_batches(list(self), self.schema)


class _Pieces(io.RawIOBase):
    """A file over what a connection brings."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """As many bytes as asked for, fewer only at the end: Arrow takes a short answer for it."""
        parts: list[memoryview] = []
        missing = size
        while missing:
            if not self._left:
                piece = next(self._pieces, b"")
                if not piece:
                    break
                self._left = memoryview(piece)
            taken = self._left if size < 0 else self._left[:missing]
            parts.append(taken)
            self._left = self._left[len(taken) :]
            missing -= len(taken) if size >= 0 else 0
        return b"".join(parts)


def _broken(error: object) -> Unavailable:
    return Unavailable("AnswerBroken", f"the answer broke off or isn't Arrow data ({error}); ask again")
