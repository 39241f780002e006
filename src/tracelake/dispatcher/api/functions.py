"""Routes of functions: bundles on the user port; bundles' content and invokers on the internal port."""

from __future__ import annotations

from msgspec.json import Decoder

from tracelake.contracts.bundles import (
    BUNDLE_CONTENT_PATH,
    INVOKER_PATH,
    REGISTER_SECONDS,
    BundleContentQuery,
    BundleDetail,
    BundlePage,
    BundleQuery,
    InvokerRegistered,
    InvokerRegistration,
)
from tracelake.dispatcher.api.request import ApiRequest, read
from tracelake.dispatcher.steps.deploy_dag import store_bundle
from tracelake.dispatcher.steps.upkeep import register_invoker
from tracelake.domain.bundles import MAX_BUNDLE_BYTES
from tracelake.domain.errors import NotFound
from tracelake.objects.base import bundle_location
from tracelake.serving.endpoint import Operation, endpoint
from tracelake.serving.identity import Identity
from tracelake.serving.response import FileResponse, Response, json_response
from tracelake.store import functions

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
async def push_bundle(request: ApiRequest) -> Response:
    """Store a function's zip file under its hash; 200 when it is there already."""
    pieces = request.pieces(MAX_BUNDLE_BYTES)
    kept, created = await store_bundle(request.services.ctx, pieces, request.user.name)
    return json_response(kept, 201 if created else 200)


@endpoint(
    "GET", "/v1/bundles", Operation(identity=Identity.USER, query=BundleQuery, answers={200: BundlePage})
)
async def list_bundles(request: ApiRequest) -> Response:
    """Bundles, newest first."""
    return json_response(await read(request, functions.list_bundles, request.query_as(BundleQuery)))


@endpoint("GET", "/v1/bundles/{bundle}", Operation(identity=Identity.USER, answers={200: BundleDetail}))
async def show_bundle(request: ApiRequest) -> Response:
    """One bundle with the names of its files; by its reference, or its hash alone."""
    sha256 = request.path_text("bundle").removeprefix(functions.PREFIX)
    return json_response(await read(request, functions.find_bundle, sha256))


@endpoint(
    "GET",
    BUNDLE_CONTENT_PATH,
    Operation(
        identity=Identity.WORKER,
        query=BundleContentQuery,
        answers={200: ZIP},
        refusals=(404,),
        seconds=TRANSFER_SECONDS,
    ),
)
async def bundle_content(request: ApiRequest) -> Response:
    """A bundle's zip file; the invoker verifies its hash before it runs it."""
    ctx = request.services.ctx
    known = await read(request, functions.find_bundle, request.query_as(BundleContentQuery).sha256)
    location = bundle_location(ctx.objects.root, known.bundle.removeprefix(functions.PREFIX))
    if await ctx.objects.stat(location) is None:
        raise NotFound("BundleLost", f"the file of bundle {known.bundle} is gone; push it again")
    return FileResponse(ctx.objects.read_pieces(location), known.bytes, ZIP.encode())


@endpoint(
    "POST",
    INVOKER_PATH,
    Operation(identity=Identity.WORKER, body=InvokerRegistration, answers={200: InvokerRegistered}),
)
async def invoker_registration(request: ApiRequest) -> Response:
    """Register an invoker of functions; to be repeated for as long as it runs."""
    registration = await request.decode(INVOKER)
    await register_invoker(request.services.ctx, registration)
    return json_response(InvokerRegistered(registration.url, REGISTER_SECONDS))


BUNDLE_ROUTES = (push_bundle, list_bundles, show_bundle)
INVOKER_ROUTES = (bundle_content, invoker_registration)
