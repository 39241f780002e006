"""Starts a function environment: verifies and unpacks the bundle, then runs the runtime in a sandbox.

This package has no other way to start a function, so none ever runs outside of a sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from tracelake.contracts.bundles import NOOP_FUNCTION
from tracelake.contracts.headers import CAPABILITY_HEADER
from tracelake.domain.bundles import BundleKind, find_entrypoint
from tracelake.domain.errors import Conflict, Forbidden, Unauthenticated
from tracelake.sandbox.bubblewrap import SandboxedProcess
from tracelake.sandbox.gateway import Gateway
from tracelake.sandbox.layout import SandboxLimits, SandboxSpec
from tracelake.sandbox.sandbox import Sandbox
from tracelake.serving.small_http import ServedRequest
from tracelake.trees import remove_if_possible
from tracelake.worker.lambda_.bundle_cache import BundleCache, VerifiedBundle
from tracelake.worker.lambda_.environment import Environment, EnvironmentParts, FunctionOutput
from tracelake.worker.lambda_.function_program import (
    API_PORT,
    FunctionIdentity,
    add_builtin,
    add_node_client,
    program_for,
)
from tracelake.worker.lambda_.runtime_api import RuntimeApi

_CPUS = 1.0
"""The share of the machine that one function may use, however large the machine is."""


class EnvironmentStarter:
    """``layer`` is the folder that ``build_layer`` has filled; environments live in folders below ``folder``."""

    def __init__(
        self,
        sandbox: Sandbox,
        bundles: BundleCache,
        *,
        layer: Path,
        folder: Path,
        internal_url: str,
        query_url: str | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._bundles = bundles
        self._layer = layer
        self._folder = folder
        self._internal_url = internal_url
        self._query_url = query_url
        # Names in it are never reused, so leftovers that can't be removed do no harm.
        remove_if_possible(folder)
        folder.mkdir(mode=0o700, exist_ok=True)

    async def start(self, function: FunctionIdentity, log_fd: int) -> Environment:
        folder = self._folder / uuid4().hex
        output = FunctionOutput()
        output.attach(log_fd)
        try:
            folder.mkdir(mode=0o700)
            kind = await self._prepare(function, folder / "task")
            return await self._launch(function, kind, folder, output)
        except BaseException:
            await output.detach()
            await output.close()
            await asyncio.to_thread(remove_if_possible, folder)
            raise

    async def still_good(self, function: FunctionIdentity) -> bool:
        return function.bundle == NOOP_FUNCTION or not await self._bundles.touched(function.bundle)

    async def _prepare(self, function: FunctionIdentity, code: Path) -> BundleKind:
        if function.bundle == NOOP_FUNCTION:
            add_builtin(NOOP_FUNCTION, code)
            return "python"
        bundle = await self._bundles.open(function.bundle)
        try:
            return await asyncio.to_thread(_unpack, bundle, function.entrypoint, code)
        finally:
            bundle.close()

    async def _launch(
        self, function: FunctionIdentity, kind: BundleKind, folder: Path, output: FunctionOutput
    ) -> Environment:
        program = await asyncio.to_thread(program_for, function, kind, self._layer, folder.name)
        spec = SandboxSpec(
            argv=program.argv,
            env=program.env,
            code=folder / "task",
            runtime=program.runtime,
            listen=[API_PORT],
            limits=SandboxLimits(memory_bytes=function.memory_bytes, cpu_share=_CPUS),
            stdout=output.write_fd,
            stderr=output.write_fd,
        )
        process = await self._sandbox.start(spec)
        output.started()
        try:
            return await self._connect(function, folder, output, process)
        except BaseException:
            await process.kill()
            raise

    async def _connect(
        self, function: FunctionIdentity, folder: Path, output: FunctionOutput, process: SandboxedProcess
    ) -> Environment:
        api = RuntimeApi()
        called: set[str] = set()
        gateway = Gateway(
            dispatcher_url=self._internal_url,
            query_url=self._query_url,
            runtime=api.handle,
            admit=admission(api, called),
        )
        try:
            await gateway.listen(process.listeners[0])
        except BaseException:
            await gateway.close()
            raise
        return Environment(function, EnvironmentParts(folder, process, api, output, gateway.close, called))


def admission(api: RuntimeApi, called: set[str]) -> Callable[[ServedRequest], None]:
    """Checks requests to an environment's gateway: only the function that has an event may call, with the token
    of that attempt and no other. Its calls are recorded in ``called``."""

    def admit(request: ServedRequest) -> None:
        if not api.busy:
            raise Conflict("NoInvocation", "no invocation is under way")
        presented = request.headers.get(CAPABILITY_HEADER.lower(), "")
        if not presented:
            raise Unauthenticated("CapabilityMissing", f"{CAPABILITY_HEADER} is missing")
        if api.token is None or not api.token.is_own(presented):
            raise Forbidden("NotYourTask", "the token isn't that of the attempt that runs here")
        called.add(request.path.rpartition("/")[2])

    return admit


def _unpack(bundle: VerifiedBundle, entrypoint: str, code: Path) -> BundleKind:
    found = find_entrypoint(bundle.listing, entrypoint)
    bundle.unpack(code)
    if found.kind == "node":
        add_node_client(code)
    return found.kind
