"""The platform's job behind a buffered dataset: a source that never ends, whose one output is the dataset.

Its fingerprint is constant, so the dataset has one version for its whole life, whatever becomes of its schema; and
so the schema is no part of the job's own configuration: each claim finds the one that is deployed then.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tracelake.contracts.buffers import SINK_RUNTIME, SinkConfig
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.dag.model import (
    Activation,
    BufferedDataset,
    JobSettings,
    JobSpec,
    OutputSpec,
    SourceKind,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.operator_catalog import BUFFER_SINK
from tracelake.store import buffers
from tracelake.store.db import Transaction
from tracelake.store.jobs import JobCard

SINK_FINGERPRINT = "buffer_sink"

# A sink that died is missed soon, and another one goes on soon: rows wait for it meanwhile.
_SETTINGS = JobSettings(heartbeat_timeout_seconds=30, retry_base_seconds=1, retry_max_seconds=60)


def sink_spec(dataset: BufferedDataset) -> JobSpec:
    return JobSpec(
        name=buffers.sink_job(dataset.name),
        activation=Activation.SOURCE,
        runtime=SINK_RUNTIME,
        operator=BUFFER_SINK,
        source_kind=SourceKind.ALWAYS_ON,
        outputs=(OutputSpec(0, dataset.name, Storage.POSTGRES),),
        update_strategy=UpdateStrategy.APPEND,
        unique_key=dataset.unique,
        settings=_SETTINGS,
    )


async def sink_config(ctx: StepContext, tx: Transaction, card: JobCard) -> dict[str, Any] | None:
    """What a sink's payload says of its dataset; None for every other job."""
    if card.operator != BUFFER_SINK:
        return None
    buffer = await buffers.of_sink(tx, card.job_id)
    assert buffer is not None
    name = buffer.name or card.outputs[0].name
    config = SinkConfig(name, str(ctx.org_id), buffer.schema_hash, buffer.schema)
    built: dict[str, Any] = msgspec.to_builtins(config)
    return built
