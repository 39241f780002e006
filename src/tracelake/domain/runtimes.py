"""The runtimes that every installation has: their names, and what each may run.

DAG files, payloads, wake-up queues and worker commands name them. An installation may register further runtimes,
each with a queue, whose workers may be written in any language; what these can run is known to them alone.

Standard library only: the command line loads it with every command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DISPATCHER = "dispatcher"
"""Inside the Dispatcher's own process."""
LAMBDA = "lambda"
ECS_PYTHON = "ecs_python"
ECS_SPARK = "ecs_spark"
SINK = "sink"
DELIVERY = "delivery"
"""These two are for the platform's own jobs; a DAG can't name them."""


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """``untrusted_ok``: may run UDFs. ``in_process``: runs inside the Dispatcher, platform operators only.
    ``invoked``: runs functions from bundles that were pushed to this installation."""

    untrusted_ok: bool = False
    in_process: bool = False
    invoked: bool = False


BUILT_IN: Mapping[str, RuntimeTraits] = MappingProxyType(
    {
        DISPATCHER: RuntimeTraits(in_process=True),
        LAMBDA: RuntimeTraits(untrusted_ok=True, invoked=True),
        ECS_PYTHON: RuntimeTraits(),
        ECS_SPARK: RuntimeTraits(),
    }
)
"""Those that a DAG may name."""
WORKERS = (ECS_PYTHON, ECS_SPARK, LAMBDA)
"""Those that `tracelake worker` serves, in the order in which a stack starts them."""
