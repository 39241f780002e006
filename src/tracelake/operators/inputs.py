"""An input of a task: what was committed within its scope, and nothing beside it.

Readers work on the list of committed files that the platform gives them, never on a folder's contents, or on the
rows that were committed to a hot table, in one snapshot for all inputs of an attempt. Both ``arrow`` and
``dataframe`` cut the rows to the scope and apply the edge's ``where``; ``files`` doesn't, and a file may reach
beyond the scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import InputFile, PayloadInput, PayloadInvalidation
from tracelake.contracts.operator_protocol import ListFiles
from tracelake.domain.errors import Invalid
from tracelake.operators.data_database import DataDatabase
from tracelake.operators.link import Link
from tracelake.operators.scope import Scope, scope_of_input

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from tracelake.domain.where import Predicate

BLOCK_COLUMN = "block_number"


class Input:
    def __init__(self, payload: PayloadInput, link: Link, data: DataDatabase | None = None) -> None:
        self._payload = payload
        self._link = link
        self.data = data or DataDatabase()
        """For the platform: how its rows are reached where they are in Postgres."""
        self.scope: Scope | None = scope_of_input(payload)
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
        """How often something of the dataset had been taken back when the task was claimed."""
        return self._payload.revision

    @property
    def hot(self) -> UUID | None:
        """The hot rows that belong to this dataset of files, where both are to be read as one."""
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
        """What was taken back since this was read last, if that is why the task runs."""
        return self._payload.invalidation

    @property
    def finalized(self) -> int | None:
        return self._payload.finalized if isinstance(self._payload.finalized, int) else None

    @property
    def predicate(self) -> Predicate | None:
        """``where`` as a tree."""
        if self._payload.where_tree is None:
            return None
        from tracelake.domain.where import Predicate

        tree: Predicate = msgspec.convert(self._payload.where_tree, Predicate)
        return tree

    def narrowed(self, condition: Predicate) -> Input:
        """The same input with one more condition on its rows, which is applied where they are."""
        from tracelake.domain.where import all_of

        own = self.predicate
        tree = condition if own is None else all_of([own, condition])
        payload = msgspec.structs.replace(self._payload, where_tree=msgspec.to_builtins(tree))
        return Input(payload, self._link, self.data)

    def files(self) -> list[InputFile]:
        if self.storage != "parquet":
            raise Invalid("InputWithoutFiles", f"input {self.name!r} has storage {self.storage} and no files")
        answer = self._link.call(ListFiles(self.index))
        listed: Any = answer["files"] if isinstance(answer, dict) else answer
        return msgspec.convert(listed, list[InputFile])

    def arrow(self) -> pa.Table:
        """All rows of the scope in this process' memory."""
        if self.storage == "postgres":
            from tracelake.operators.postgres_input import read_postgres_arrow

            return read_postgres_arrow(self)
        if self.hot is not None:
            from tracelake.operators.hot_and_cold import read_both_arrow

            return read_both_arrow(self, self.hot)
        from tracelake.operators.arrow_input import read_arrow

        return read_arrow(self)

    def dataframe(self) -> DataFrame:
        """The rows of the scope as Spark reads them, when it does."""
        if self.storage == "postgres":
            from tracelake.operators.spark_postgres_input import read_postgres_dataframe

            return read_postgres_dataframe(self, self._link.spark())
        if self.hot is not None:
            from tracelake.operators.spark_hot_and_cold import read_both_dataframe

            return read_both_dataframe(self, self.hot, self._link.spark())
        from tracelake.operators.spark_input import read_dataframe

        return read_dataframe(self, self._link.spark())


def check_cut(files: list[InputFile], scope: Scope | None, name: str) -> None:
    """Rows that don't say their block can't be cut: then every file must lie within the scope."""
    for file in files:
        if scope is not None and not (scope.start <= file.start and file.end <= scope.end):
            raise Invalid(
                "InputNotCut",
                f"input {name!r} has no column {BLOCK_COLUMN}, and a partition {file.start}-{file.end} "
                f"that reaches beyond {scope.start}-{scope.end}",
            )
