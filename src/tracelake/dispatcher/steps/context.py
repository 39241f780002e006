"""What every step is given: the state database and the few things that stand beside it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from uuid import UUID

from prometheus_client import CollectorRegistry

from tracelake.dispatcher.metrics import StepMetrics
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.emission_caps import Emissions
from tracelake.domain.entropy import Entropy
from tracelake.objects.base import ObjectStore
from tracelake.store.buffers import KnownBuffer
from tracelake.store.db import Database
from tracelake.store.jobs import JobCards
from tracelake.tokens.signing import Signer


@dataclass(frozen=True, slots=True)
class StepContext:
    db: Database
    entropy: Entropy
    cards: JobCards
    objects: ObjectStore
    signer: Signer
    runtimes: RuntimeRegistry
    org_id: UUID
    issuer: str = "tracelake"
    audience: str = "tracelake-task"
    missing_work: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a deploy or a resume may have left something for the reconciler to ask for."""
    buffers: dict[UUID | str, KnownBuffer] = field(default_factory=dict)
    """Buffered datasets by uuid and by name, as they were last seen here; looked at again before they count."""
    emissions: Emissions = field(default_factory=Emissions)
    """What attempts have emitted, as far as this process has seen it."""
    metrics: StepMetrics = field(default_factory=lambda: StepMetrics(CollectorRegistry()))
