"""What an operator's context needs of the process that it runs in.

The operators don't know the worker: they speak to it through this, and a test can stand in for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tracelake.contracts.operator_protocol import Action

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Link(Protocol):
    @property
    def canceled(self) -> bool: ...

    @property
    def paused(self) -> bool: ...

    def call(self, action: Action) -> Any:
        """The wrapper's answer, or its problem raised as the platform's error."""
        ...

    def report(self, fields: dict[str, Any]) -> None:
        """Progress; isn't answered."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something about ``canceled`` or ``paused`` changes, and at most so long."""
        ...

    def spark(self) -> SparkSession:
        """The attempt's own session; ``Invalid`` where the runtime has no Spark."""
        ...
