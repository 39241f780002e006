"""How a slot's process is held: in the sandbox for untrusted code, or as a plain process where there is none.

Both start it with no environment and no descriptors but its socket, and both end it with the service, however that
ends. ``Slots.confinement`` says which one it is. A plain process can be kept from files by the kernel's Landlock;
where there is neither, no query is run unless the operator says so.
"""

from __future__ import annotations

from tracelake.domain.errors import Unavailable
from tracelake.query.engine import restrict
from tracelake.query.engine.limits import SlotLimits
from tracelake.query.engine.plain_slots import PlainSlots
from tracelake.query.engine.sandboxed_slots import SandboxedSlots
from tracelake.query.engine.slot_process import Confinement
from tracelake.worker.sandbox import Sandbox

UNCONFINED = "TRACELAKE_QUERY_UNCONFINED"


async def best_confinement(limits: SlotLimits, *, unconfined: bool = False) -> Confinement:
    """Raises Unavailable ``NotConfined`` where nothing keeps a query from the machine's files, unless that is
    ``unconfined`` and so accepted."""
    try:
        sandbox = await Sandbox.open()
    except Unavailable as error:
        why = " ".join(error.message.split())
        if not restrict.landlock_version() and not unconfined:
            raise _not_confined(why) from None
        return PlainSlots(limits, why)
    return SandboxedSlots(sandbox, limits)


def _not_confined(why: str) -> Unavailable:
    return Unavailable(
        "NotConfined",
        f"queries can't be kept from this machine's files: there is no sandbox ({why}) and the kernel has no "
        "Landlock. Install bubblewrap, or use a kernel with Landlock (Linux 5.13 or later); "
        f"{UNCONFINED}=1 runs queries without either",
    )
