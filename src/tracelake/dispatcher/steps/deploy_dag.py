"""Deploys, each in one transaction during which nothing is routed, and pushes of bundles.

The plan is made from specs alone (``domain.dag.plan``); this module executes it, job by job, upstream first, and
``plan_dag`` shows the same objects without executing them. A job that is deployed again exactly as it once was
reuses its old generation with all its data, which makes a rollback immediate.

A pushed bundle is checked and stored under its hash, which is computed here while the bytes arrive. The file is
durable before its row, so a crash between the two leaves an object that the next push of the same bundle finds in
its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID

import structlog

from tracelake.contracts.bundles import BundleDetail
from tracelake.contracts.user_api import DeployedBuffer
from tracelake.dispatcher.steps.buffered_datasets import SINK_FINGERPRINT, sink_spec
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deliveries import deploy_deliveries
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.domain.bundles import BundleListing, check_zip
from tracelake.domain.dag.checks import Installation
from tracelake.domain.dag.graph import DagGraph, JobKey, OutputRef
from tracelake.domain.dag.model import (
    BufferedDataset,
    DagSpec,
    ExecutionStrategy,
    JobSpec,
    PublishedOutput,
    SourceKind,
    is_requested,
)
from tracelake.domain.dag.parse import locator, parse_dag
from tracelake.domain.dag.plan import ChangeKind, DeployPlan, JobChange, plan_deploy
from tracelake.domain.webhooks import new_secret
from tracelake.objects.base import Upload, bundle_location
from tracelake.store import buffers, dags, functions, outbox, sources, tasks
from tracelake.store.dags import ActiveDag, DeployedOutputRow
from tracelake.store.db import DeployLock, Transaction

_BUNDLES = re.compile(r"sha256:[0-9a-f]{64}(?![0-9a-f])")
"""A reference to a bundle anywhere in the file: bundles are looked up before the file is parsed."""
_PIECE = 1024 * 1024


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Deployed:
    """``created`` is false when this YAML was known already."""

    dag_name: str
    dag_version: int
    created: bool
    plan: DeployPlan
    jobs: dict[str, list[DeployedOutputRow]]
    buffers: list[DeployedBuffer]


async def plan_dag(ctx: StepContext, yaml: str) -> DeployPlan:
    """The changes that a deploy of this file would make; makes none."""
    spec, active = await _read(ctx, yaml)
    kept = await ctx.db.run(lambda tx: buffers.schemas_of_dag(tx, spec.name), lock=DeployLock.NONE)
    return plan_deploy(spec, active, lambda path: locator(yaml)(path), kept)


async def deploy_dag(ctx: StepContext, yaml: str, actor: str) -> Deployed:
    spec, _ = await _read(ctx, yaml)
    sha256 = hashlib.sha256(yaml.encode()).digest()

    async def work(tx: Transaction) -> Deployed:
        # Read again: another deploy may have come since the
        # file was parsed, and the lock keeps out the next one.
        active = await dags.active(tx)
        specs = {name: dag.spec for name, dag in active.items()}
        kept = await buffers.schemas_of_dag(tx, spec.name)
        plan = plan_deploy(spec, specs, lambda path: locator(yaml)(path), kept)
        known = await dags.version_of_yaml(tx, spec.name, sha256)
        version = known or await dags.add_version(tx, ctx.org_id, spec, yaml, sha256, actor)
        if not (spec.name in active and active[spec.name].version == version):
            await dags.activate_version(tx, ctx.org_id, spec.name, version)
            await _Executor(ctx, tx, spec, active).execute(plan)
            subject = {"dag": spec.name, "version": version}
            await dags.audit(tx, ctx.org_id, actor, "deploy", subject)
        # Also where nothing else changes: it's how a person starts a schedule that waits for a wrong time.
        await sources.forget_future_deploys(tx, spec.name)
        jobs: dict[str, list[DeployedOutputRow]] = {job.name: [] for job in spec.jobs}
        for output in await dags.outputs_of_dag(tx, spec.name):
            jobs[output.job].append(output)
        return Deployed(spec.name, version, known is None, plan, jobs, await _buffers(tx, spec.name))

    deployed = await ctx.db.run(work, lock=DeployLock.EXCLUSIVE)
    log.info("deployed", dag=spec.name, version=deployed.dag_version, created=deployed.created, actor=actor)
    # After the commit: the loops would otherwise look before there is anything to find.
    ctx.missing_work.set()
    ctx.queues.look_soon()
    ctx.waiting_requests.set()
    return deployed


async def _buffers(tx: Transaction, dag: str) -> list[DeployedBuffer]:
    return [DeployedBuffer(**row) for row in await buffers.of_dag(tx, dag)]


async def _read(ctx: StepContext, yaml: str) -> tuple[DagSpec, dict[str, DagSpec]]:
    """Parse outside of the deploy lock and of the event loop (a large file takes seconds); the names that other
    DAGs publish are checked again under the lock."""

    async def work(tx: Transaction) -> tuple[dict[str, DagSpec], dict[str, BundleListing]]:
        known = await functions.bundle_listings(tx, set(_BUNDLES.findall(yaml)))
        return {name: dag.spec for name, dag in (await dags.active(tx)).items()}, known

    active, known = await ctx.db.run(work, lock=DeployLock.NONE)
    published = {entry.name: name for name, spec in active.items() for entry in spec.publish}
    installation = Installation(runtimes=ctx.runtimes.traits(), published_elsewhere=published, bundles=known)
    return await asyncio.to_thread(parse_dag, yaml, installation), active


class _Executor:
    """Executes a plan. Each change is one of the plan's objects; nothing is decided here."""

    def __init__(
        self, ctx: StepContext, tx: Transaction, spec: DagSpec, active: dict[str, ActiveDag]
    ) -> None:
        self._ctx = ctx
        self._tx = tx
        self._spec = spec
        self._world = DagGraph({**{name: dag.spec for name, dag in active.items()}, spec.name: spec})

    async def execute(self, plan: DeployPlan) -> None:
        leaving = [c for c in plan.jobs if c.kind in (ChangeKind.REPLACED, ChangeKind.REMOVED)]
        # Retired before anything is installed: an old and a
        # new generation of a job are never active together.
        await self._retire(leaving)
        # All names of the DAG are freed first, so that two outputs may swap theirs in one deploy.
        await dags.unpublish(self._tx, self._spec.name)
        await self._buffered()
        for change in plan.jobs:
            match change.kind:
                case ChangeKind.ADDED | ChangeKind.REPLACED:
                    await self._install(change)
                case ChangeKind.RETUNED:
                    await self._tune(change)
                case ChangeKind.UNCHANGED | ChangeKind.REMOVED:
                    pass
        await self._publish()
        await deploy_deliveries(self._ctx, self._tx, self._spec.name, self._spec.deliver, self._retire_jobs)
        requested = [job.name for job in self._spec.jobs if is_requested(job)]
        await sources.retire_others(self._tx, self._spec.name, requested)
        webhooks = [job.name for job in self._spec.jobs if job.source_kind is SourceKind.WEBHOOK]
        await sources.forget_secrets(self._tx, self._spec.name, webhooks)

    async def _retire(self, leaving: list[JobChange]) -> None:
        """Queued tasks are canceled; running ones finish into their old version. A source would run forever, so it
        is canceled too."""
        await self._retire_jobs([(change.dag, change.job) for change in leaving])

    async def _retire_jobs(self, leaving: list[JobKey]) -> None:
        retired = [await dags.retire_job(self._tx, dag, job) for dag, job in leaving]
        job_ids = [job_id for job_id in retired if job_id is not None]
        await dags.retire_versions(self._tx, job_ids)
        live = await tasks.live_of_jobs(self._tx, job_ids)
        always_on = [row["task_id"] for row in live if row["kind"] == "source"]
        waiting = [row["task_id"] for row in live if row["status"] == "Queued" and row["kind"] != "source"]
        await tasks.cancel(self._tx, always_on, "replaced by a deploy")
        await tasks.shelve(self._tx, waiting, "replaced by a deploy")
        await sources.reopen(self._tx, waiting)

    async def _install(self, change: JobChange) -> None:
        job = self._job(change)
        found = await dags.find_generation(self._tx, change.dag, change.job, change.fingerprint)
        if found is not None:
            await dags.tune_job(self._tx, found, job)
            await dags.revive_versions(self._tx, found)
            await outbox.wake(self._tx, await tasks.unshelve(self._tx, found))
            if job.execution_strategy is ExecutionStrategy.PER_UPDATE:
                await outbox.wake(self._tx, await create_updates(self._ctx, self._tx, [found]))
        job_id = found or await self._create(change, job)
        await dags.outrank(self._tx, job_id)
        await self._keep_source(change.dag, job)
        if is_requested(job):
            await sources.take_over_kept(self._tx, job_id, runs_code=job.runs_code)
        if job.source_kind is SourceKind.ALWAYS_ON:
            task_id = self._ctx.entropy.uuid()
            created = await tasks.create_source_task(self._tx, task_id, job_id, {"kind": "deploy"})
            await outbox.wake(self._tx, created)

    async def _create(self, change: JobChange, job: JobSpec) -> UUID:
        ctx, tx = self._ctx, self._tx
        job_id = ctx.entropy.uuid()
        await dags.add_job(tx, job_id, ctx.org_id, change.dag, job, change.fingerprint)
        for output in job.outputs:
            await dags.add_output(
                tx, ctx.entropy.uuid(), ctx.entropy.uuid(), ctx.org_id, change.dag, job, job_id, output.index
            )
        for index, edge in enumerate(job.inputs):
            producer = self._world.producer(change.dag, edge)
            assert producer is not None
            if isinstance(producer, OutputRef):
                ref = await dags.version_of_output(tx, producer.dag, producer.job, producer.output)
            else:
                ref = await dags.version_of_name(tx, ctx.org_id, producer.dataset.name)
            per_update = job.execution_strategy is ExecutionStrategy.PER_UPDATE
            await dags.add_input(tx, job_id, index, ref, edge, per_update=per_update)
        return job_id

    async def _tune(self, change: JobChange) -> None:
        """A job may have moved to another runtime: its queued tasks must be woken there."""
        job_id = await dags.find_generation(self._tx, change.dag, change.job, change.fingerprint)
        assert job_id is not None
        await dags.tune_job(self._tx, job_id, self._job(change))
        await self._keep_source(change.dag, self._job(change))
        await outbox.wake(self._tx, await tasks.wake_queued_of_jobs(self._tx, [job_id]))

    async def _keep_source(self, dag: str, job: JobSpec) -> None:
        if not is_requested(job):
            return
        await sources.keep(self._tx, self._ctx.org_id, dag, job.name, job.source)
        if job.source_kind is SourceKind.WEBHOOK and not await sources.has_secret(self._tx, dag, job.name):
            await sources.add_secret(self._tx, dag, job.name, new_secret(), shown=False)

    async def _buffered(self) -> None:
        """A dataset that the file no longer names keeps its rows, without a sink; one named again gets its sink
        back."""
        entries = [entry for entry in self._spec.publish if isinstance(entry, BufferedDataset)]
        gone = await buffers.retire(self._tx, self._spec.name, [entry.name for entry in entries])
        await self._retire_jobs([(self._spec.name, job) for job in gone])
        for entry in entries:
            await self._sink(entry)

    async def _sink(self, entry: BufferedDataset) -> None:
        ctx, tx, dag = self._ctx, self._tx, self._spec.name
        dataset_uuid = await buffers.ensure(tx, ctx.org_id, dag, entry, ctx.entropy.uuid())
        job = sink_spec(entry)
        found = await dags.find_generation(tx, dag, job.name, SINK_FINGERPRINT)
        job_id = found or ctx.entropy.uuid()
        if found is None:
            await dags.add_job(tx, job_id, ctx.org_id, dag, job, SINK_FINGERPRINT)
            await dags.add_version_of(tx, dataset_uuid, ctx.entropy.uuid(), job_id, entry.name)
        else:
            await dags.tune_job(tx, job_id, job)
            await dags.revive_versions(tx, job_id)
        created = await tasks.create_source_task(tx, ctx.entropy.uuid(), job_id, {"kind": "deploy"})
        await outbox.wake(tx, created)

    async def _publish(self) -> None:
        for entry in self._spec.publish:
            if isinstance(entry, PublishedOutput):
                await dags.publish_output(self._tx, self._spec.name, entry)

    def _job(self, change: JobChange) -> JobSpec:
        job = self._world.job((change.dag, change.job))
        assert job is not None
        return job


async def store_bundle(
    ctx: StepContext, pieces: AsyncIterator[bytes], actor: str
) -> tuple[BundleDetail, bool]:
    """Store a bundle; returns it and whether it is new."""
    upload = await ctx.objects.begin_upload()
    try:
        sha256, size = await _receive(upload, pieces)
        # Checked before it is kept: a zip that is refused never lies under a bundle's name.
        listing = await asyncio.to_thread(check_zip, upload.file)
        await upload.keep(bundle_location(ctx.objects.root, sha256))
    finally:
        await upload.discard()

    async def work(tx: Transaction) -> tuple[BundleDetail, bool]:
        added = await functions.add_bundle(tx, ctx.org_id, sha256, size, listing, actor)
        if added:
            await dags.audit(tx, ctx.org_id, actor, "push bundle", {"sha256": sha256})
        return await functions.find_bundle(tx, sha256), added

    kept, created = await ctx.db.run(work, lock=DeployLock.NONE)
    log.info("bundle pushed", bundle=kept.bundle, bytes=size, created=created, actor=actor)
    return kept, created


async def _receive(upload: Upload, pieces: AsyncIterator[bytes]) -> tuple[str, int]:
    """Returns hash and size. Writes large pieces, since each one goes to a thread."""
    digest, size = hashlib.sha256(), 0
    gathered = bytearray()
    async for piece in pieces:
        gathered += piece
        if len(gathered) >= _PIECE:
            size += await _write(upload, digest, bytes(gathered))
            gathered.clear()
    size += await _write(upload, digest, bytes(gathered))
    return digest.hexdigest(), size


async def _write(upload: Upload, digest: hashlib._Hash, piece: bytes) -> int:
    # hashlib releases the GIL for large pieces, so other requests go on.
    await asyncio.to_thread(digest.update, piece)
    await upload.write(piece)
    return len(piece)
