"""An input of a task: what was committed within its scope, and nothing beside it.

Readers work on the list of committed files that the platform gives them, never on a folder's contents. Both
``arrow`` and ``dataframe`` cut the rows to the scope and apply the edge's ``where``; ``files`` doesn't, and a
file may reach beyond the scope.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tracelake.contracts.dispatcher_api import InputFile, PayloadInput, PayloadInvalidation
from tracelake.contracts.operator_protocol import ListFiles
from tracelake.domain.errors import Invalid
from tracelake.operators.link import Link
from tracelake.operators.scope import Scope, scope_of_input

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from tracelake.domain.where import Predicate

BLOCK_COLUMN = "block_number"


class Input:
    def __init__(self, payload: PayloadInput, link: Link) -> None:
        self._payload = payload
        self._link = link
        self.scope: Scope | None = scope_of_input(payload)
        """The blocks to read; ``None`` means everything."""

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

    def files(self) -> list[InputFile]:
        if self.storage != "parquet":
            raise Invalid("InputWithoutFiles", f"input {self.name!r} has storage {self.storage} and no files")
        answer = self._link.call(ListFiles(self.index))
        listed: Any = answer["files"] if isinstance(answer, dict) else answer
        return msgspec.convert(listed, list[InputFile])

    def arrow(self) -> pa.Table:
        """All rows of the scope in this process' memory."""
        from tracelake.operators.arrow_input import read_arrow

        return read_arrow(self)

    def dataframe(self) -> DataFrame:
        """The rows of the scope as Spark reads them, when it does."""
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
