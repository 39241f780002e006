"""Bundles: pushed and shown on the user surface, fetched by the invokers that run them, who say where they are."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.bundles import (
    REGISTER_SECONDS,
    BundleContentQuery,
    BundleDetail,
    BundlePage,
    BundleQuery,
    InvokerRegistered,
    InvokerRegistration,
)
from tracelake.dispatcher.api.read import read
from tracelake.dispatcher.api.request import ApiRequest
from tracelake.dispatcher.steps.keep_bundle import keep_bundle
from tracelake.dispatcher.steps.register_invoker import register_invoker
from tracelake.domain.bundle_zip import MAX_BUNDLE_BYTES
from tracelake.domain.errors import NotFound
from tracelake.objects.layout import bundle_location
from tracelake.serving.answer import Answer, FileAnswer, json_answer
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.store import bundles

ZIP = "application/zip"
TRANSFER_SECONDS = 600.0
INVOKER = Decoder(InvokerRegistration)


@endpoint(
    "POST",
    "/v1/bundles",
    Operation(
        identity=Identity.USER,
        body=ZIP,
        answers={200: BundleDetail, 201: BundleDetail},
        seconds=TRANSFER_SECONDS,
    ),
)
async def push_bundle(request: ApiRequest) -> Answer:
    """Keep a function's zip file under its hash; 200 when it is here already."""
    pieces = request.pieces(MAX_BUNDLE_BYTES)
    kept, created = await keep_bundle(request.services.ctx, pieces, request.user.name)
    return json_answer(kept, 201 if created else 200)


@endpoint(
    "GET", "/v1/bundles", Operation(identity=Identity.USER, query=BundleQuery, answers={200: BundlePage})
)
async def list_bundles(request: ApiRequest) -> Answer:
    """Bundles, newest first."""
    return json_answer(await read(request, bundles.page, request.query_as(BundleQuery)))


@endpoint("GET", "/v1/bundles/{bundle:str}", Operation(identity=Identity.USER, answers={200: BundleDetail}))
async def show_bundle(request: ApiRequest) -> Answer:
    """One bundle with the names of its files; by its reference, or its hash alone."""
    sha256 = request.path_text("bundle").removeprefix(bundles.PREFIX)
    return json_answer(await read(request, bundles.find, sha256))


@endpoint(
    "GET",
    "/internal/bundle",
    Operation(
        identity=Identity.WORKER,
        query=BundleContentQuery,
        answers={200: ZIP},
        refusals=(404,),
        seconds=TRANSFER_SECONDS,
    ),
)
async def bundle_content(request: ApiRequest) -> Answer:
    """A bundle's zip file; whoever runs it verifies its hash first."""
    ctx = request.services.ctx
    known = await read(request, bundles.find, request.query_as(BundleContentQuery).sha256)
    location = bundle_location(ctx.objects.root, known.bundle.removeprefix(bundles.PREFIX))
    if await ctx.objects.stat(location) is None:
        raise NotFound("BundleLost", f"the file of bundle {known.bundle} is gone; push it again")
    return FileAnswer(ctx.objects.read_pieces(location), known.bytes, ZIP.encode())


@endpoint(
    "POST",
    "/internal/invoker",
    Operation(identity=Identity.WORKER, body=InvokerRegistration, answers={200: InvokerRegistered}),
)
async def invoker_registration(request: ApiRequest) -> Answer:
    """Say where functions are run; to be said again and again while they are."""
    said = await request.decode(INVOKER)
    await register_invoker(request.services.ctx, said)
    return json_answer(InvokerRegistered(said.url, REGISTER_SECONDS))


BUNDLE_ROUTES = (push_bundle, list_bundles, show_bundle)
INVOKER_ROUTES = (bundle_content, invoker_registration)
