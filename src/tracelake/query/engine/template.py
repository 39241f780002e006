"""A slot's process that has said it is ready, with the service's end of its socket."""

from __future__ import annotations

import asyncio

import msgspec

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.channel import Channel, Garbled
from tracelake.query.engine.messages import Ready
from tracelake.query.engine.slot_output import SlotOutput
from tracelake.query.engine.slot_process import Confinement, SlotProcess

_START_SECONDS = 60.0


class Template:
    def __init__(self, process: SlotProcess, channel: Channel) -> None:
        self.process = process
        self.channel = channel

    async def end(self) -> None:
        """Nothing of it is left afterwards."""
        self.process.kill()
        await asyncio.shield(self.process.ended)
        self.channel.close()


async def start_template(confinement: Confinement, output: SlotOutput) -> Template:
    process = await confinement.start(output.write_fd)
    template = Template(process, Channel(process.channel))
    try:
        async with asyncio.timeout(_START_SECONDS):
            if isinstance(await template.channel.hear(), Ready):
                return template
        raise Garbled("not ready")
    except (TimeoutError, EOFError, OSError, Garbled, msgspec.MsgspecError) as error:
        await template.end()
        said = output.take() or type(error).__name__
        raise Unavailable("QuerySlotFailed", f"a process for queries could not be started: {said}") from error
    except BaseException:
        await template.end()
        raise
