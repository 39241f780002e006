"""The capability token of an attempt: what its own code may touch, and nothing else."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from tracelake.contracts.dispatcher_api import TaskPayload
from tracelake.contracts.token_claims import TokenDataset, TokenPrefixes
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.dag.model import Storage
from tracelake.tokens import capability


async def issue_token(ctx: StepContext, org_id: UUID, payload: TaskPayload, now: datetime) -> str:
    """Inputs to read by version; the attempt's own staging places to write.

    Read prefixes stay empty until something mints credentials from them: data is read by query or by the
    trusted operator's engine.
    """
    issued = await capability.issue(
        ctx.signer,
        issuer=ctx.issuer,
        audience=ctx.audience,
        org_id=org_id,
        task_id=payload.task_id,
        attempt=payload.attempt,
        timeout_seconds=payload.timeout_seconds,
        now=now,
        datasets=[
            TokenDataset(dataset_uuid=i.dataset_uuid, dataset_version=i.dataset_version, name=i.dataset)
            for i in payload.inputs
        ],
        s3=TokenPrefixes(
            write=tuple(
                output.staging
                for output in payload.outputs
                if output.staging is not None and output.storage == Storage.PARQUET.value
            )
        ),
        jti=ctx.entropy.uuid(),
    )
    return issued.token
