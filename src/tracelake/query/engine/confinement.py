"""How a slot's process is held: in the sandbox for untrusted code, or as a plain process where there is none.

Both start it with no environment and no descriptors but its socket, and both end it with the service, however that
ends. ``Slots.confinement`` says which one it is.
"""

from __future__ import annotations

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.limits import SlotLimits
from tracelake.query.engine.plain_slots import PlainSlots
from tracelake.query.engine.sandboxed_slots import SandboxedSlots
from tracelake.query.engine.slot_process import Confinement
from tracelake.worker.sandbox import Sandbox


async def best_confinement(limits: SlotLimits) -> Confinement:
    try:
        sandbox = await Sandbox.open()
    except Unavailable as error:
        return PlainSlots(limits, error.message)
    return SandboxedSlots(sandbox, limits)
