"""``Input``: the committed rows of one input of a task, within its scope; and ``OperatorLink``.

Readers work on the list of committed files that the platform gives them, never on a folder's contents, or on the
rows that were committed to a hot table, in one snapshot for all inputs of an attempt. ``arrow`` and ``dataframe``
cut the rows to the scope and apply the edge's ``where``; ``files`` doesn't, and a file may reach beyond the scope.

``OperatorLink`` is all that a context needs of the process it runs in. Operators don't import the worker: it
implements this protocol, and so does a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import InputFile, PayloadInput, PayloadInvalidation
from tracelake.contracts.operator_protocol import Action, ListFiles
from tracelake.domain.errors import Invalid
from tracelake.domain.where import Predicate, all_of
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.scope import BLOCK_COLUMN, ReadRequest, ReadScope, scope_of_input

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class Input:
    def __init__(self, payload: PayloadInput, link: OperatorLink, data: DataDatabase | None = None) -> None:
        self._payload = payload
        self._link = link
        self.data = data or DataDatabase()
        """For the platform: the connections by which rows in Postgres are read."""
        self.scope: ReadScope | None = scope_of_input(payload)
        """The blocks to read, or the positions of a buffered dataset; ``None`` means everything."""

    @property
    def index(self) -> int:
        return self._payload.input_index

    @property
    def name(self) -> str:
        """The dataset's published name, otherwise ``input_0`` and so on."""
        return self._payload.dataset or f"input_{self.index}"

    @property
    def dataset(self) -> str | None:
        return self._payload.dataset

    @property
    def dataset_uuid(self) -> UUID:
        return self._payload.dataset_uuid

    @property
    def revision(self) -> int:
        """Number of invalidations of the dataset when the task was claimed."""
        return self._payload.revision

    @property
    def hot(self) -> UUID | None:
        """The version of the hot rows of this dataset of files, if both are to be read as one."""
        return self._payload.hot.dataset_version if self._payload.hot is not None else None

    @property
    def cut_by(self) -> str:
        """The column that the scope is a range of. A buffered dataset is read by the order in which it was written,
        so a row that was replaced or retracted comes again, as it is now."""
        return self._payload.cursor_column or BLOCK_COLUMN

    @property
    def dataset_version(self) -> UUID:
        return self._payload.dataset_version

    @property
    def storage(self) -> str:
        return self._payload.storage

    @property
    def trigger(self) -> bool:
        return self._payload.trigger

    @property
    def where(self) -> str | None:
        return self._payload.where

    @property
    def invalidation(self) -> PayloadInvalidation | None:
        """The range that was invalidated since this input was read last, if that is why the task runs."""
        return self._payload.invalidation

    @property
    def finalized(self) -> int | None:
        return self._payload.finalized if isinstance(self._payload.finalized, int) else None

    @property
    def predicate(self) -> Predicate | None:
        """``where`` as a tree."""
        if self._payload.where_tree is None:
            return None
        tree: Predicate = msgspec.convert(self._payload.where_tree, Predicate)
        return tree

    def narrowed(self, condition: Predicate) -> Input:
        """The same input with one more condition on its rows, pushed down to where they are stored."""
        own = self.predicate
        tree = condition if own is None else all_of([own, condition])
        payload = msgspec.structs.replace(self._payload, where_tree=msgspec.to_builtins(tree))
        return Input(payload, self._link, self.data)

    def files(self, *, margin: int = 0) -> list[InputFile]:
        """With a ``margin`` of 1 also those that hold the blocks right before and right after the scope."""
        if self.storage != "parquet":
            raise Invalid("InputWithoutFiles", f"input {self.name!r} has storage {self.storage} and no files")
        answer = self._link.call(ListFiles(self.index, margin))
        listed: Any = answer["files"] if isinstance(answer, dict) else answer
        return msgspec.convert(listed, list[InputFile])

    def request(self) -> ReadRequest:
        """For the platform: the request by which the readers of tables read this input."""
        return ReadRequest(
            name=self.name,
            dataset_version=self.dataset_version,
            scope=self.scope,
            predicate=self.predicate,
            cut_by=self.cut_by,
            data=self.data,
            files=self.files,
        )

    def arrow(self) -> pa.Table:
        """All rows of the scope, in the memory of this process."""
        if self.storage == "postgres":
            from tracelake.tables.hot_and_cold import read_postgres_arrow

            return read_postgres_arrow(self.request())
        if self.hot is not None:
            from tracelake.tables.hot_and_cold import read_both_arrow

            return read_both_arrow(self.request(), self.hot)
        from tracelake.tables.arrow import read_arrow

        return read_arrow(self.request())

    def dataframe(self) -> DataFrame:
        """The rows of the scope, read by Spark when it runs."""
        if self.storage == "postgres":
            from tracelake.tables.hot_and_cold import read_postgres_dataframe

            return read_postgres_dataframe(self.request(), self._link.spark())
        if self.hot is not None:
            from tracelake.tables.spark_input import read_both_dataframe

            return read_both_dataframe(self.request(), self.hot, self._link.spark())
        from tracelake.tables.spark_input import read_dataframe

        return read_dataframe(self.request(), self._link.spark())


class OperatorLink(Protocol):
    @property
    def canceled(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    def call(self, action: Action) -> Any:
        """The wrapper's answer, or its problem raised as the platform's error."""
        ...

    def report(self, fields: dict[str, Any]) -> None:
        """Send progress, without waiting for an answer."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until ``canceled`` or ``paused`` changes, at most this long."""
        ...

    def spark(self) -> SparkSession:
        """The attempt's own session; ``Invalid`` where the runtime has no Spark."""
        ...
