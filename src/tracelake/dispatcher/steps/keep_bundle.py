"""Push: a bundle is received, checked and kept under its hash.

The hash is computed here, while the bytes come in; nobody's word for it is taken. The file is durable before its
row, so a crash between the two leaves an object that the next push of the same bundle finds in its place. The same
bundle twice is one bundle.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import structlog

from tracelake.contracts.bundles import BundleDetail
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.bundle_zip import check_zip
from tracelake.objects.base import Upload
from tracelake.objects.layout import bundle_location
from tracelake.store import bundles, dags
from tracelake.store.db import DeployLock, Transaction

log = structlog.get_logger(__name__)

_PIECE = 1024 * 1024


async def keep_bundle(
    ctx: StepContext, pieces: AsyncIterator[bytes], actor: str
) -> tuple[BundleDetail, bool]:
    """The bundle as it is known now, and whether it is new."""
    upload = await ctx.objects.begin_upload()
    try:
        sha256, size = await _receive(upload, pieces)
        listing = await asyncio.to_thread(check_zip, upload.file)
        await upload.keep(bundle_location(ctx.objects.root, sha256))
    finally:
        await upload.discard()

    async def work(tx: Transaction) -> tuple[BundleDetail, bool]:
        added = await bundles.add(tx, ctx.org_id, sha256, size, listing, actor)
        if added:
            await dags.audit(tx, ctx.org_id, actor, "push bundle", {"sha256": sha256})
        return await bundles.find(tx, sha256), added

    kept, created = await ctx.db.run(work, lock=DeployLock.NONE)
    log.info("bundle pushed", bundle=kept.bundle, bytes=size, created=created, actor=actor)
    return kept, created


async def _receive(upload: Upload, pieces: AsyncIterator[bytes]) -> tuple[str, int]:
    """Hash and size; written in large pieces, since each one goes to a thread."""
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
    await asyncio.to_thread(digest.update, piece)
    await upload.write(piece)
    return len(piece)
