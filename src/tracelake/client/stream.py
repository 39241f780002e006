"""``QueryStream``: reads an Arrow answer, one batch in memory at a time; the connection is the only buffer.

An answer that breaks off is an error (``Unavailable``) and never a shorter result: an Arrow stream has an end
mark, and the number of rows came in a header, before the first one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from uuid import UUID

import httpx
import pyarrow as pa

from tracelake.contracts.headers import QUERY_ID_HEADER, ROW_COUNT_HEADER, TRUNCATED_HEADER
from tracelake.domain.errors import Unavailable


class QueryStream:
    """``row_count`` and ``truncated`` are known from the start; the batches can be iterated once."""

    def __init__(self, answer: httpx.Response) -> None:
        headers = answer.headers
        try:
            self.row_count = int(headers[ROW_COUNT_HEADER])
            self.truncated = headers[TRUNCATED_HEADER] == "true"
            self.query_id = UUID(headers[QUERY_ID_HEADER])
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
    """A file object over the pieces that a connection delivers."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Exactly ``size`` bytes, fewer only at the end: Arrow takes a short read for the end of the file."""
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
