"""A slot's process that has said it is ready, with the service's ends of its socket and of its pipe."""

from __future__ import annotations

import asyncio
import hmac
import io
import os
import socket
from contextlib import suppress

import msgspec

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.channel import Channel, Garbled
from tracelake.query.engine.messages import PROOF_BYTES, Ready, Said
from tracelake.query.engine.slot_output import SlotOutput
from tracelake.query.engine.slot_process import Confinement, SlotProcess
from tracelake.query.engine.warm_up_rows import sealed_file

_START_SECONDS = 60.0


class Template:
    def __init__(self, process: SlotProcess, channel: Channel, proofs: io.FileIO) -> None:
        self.process = process
        self.channel = channel
        self._proofs = proofs

    def is_ready(self, said: Said | bytearray) -> bool:
        """Whether it is the new process for the next query that says so. Asked once of each. Nothing is waited for:
        the template writes to the pipe before there is somebody who could say it."""
        proof = self._proofs.read(PROOF_BYTES) if isinstance(said, Ready) else None
        return isinstance(said, Ready) and proof is not None and hmac.compare_digest(proof, said.proof)

    async def end(self) -> None:
        """Nothing of it is left afterwards."""
        self.process.kill()
        await asyncio.shield(self.process.ended)
        self.close()

    def close(self) -> None:
        self.channel.close()
        self._proofs.close()


async def start_template(confinement: Confinement, output: SlotOutput) -> Template:
    process = await confinement.start(output.write_fd)
    template = Template(process, Channel(process.channel), _hand_over(process.channel))
    try:
        async with asyncio.timeout(_START_SECONDS):
            if template.is_ready(await template.channel.hear()):
                return template
        raise Garbled("not ready")
    except (TimeoutError, EOFError, OSError, Garbled, msgspec.MsgspecError) as error:
        await template.end()
        said = output.take() or type(error).__name__
        raise Unavailable("QuerySlotFailed", f"a process for queries could not be started: {said}") from error
    except BaseException:
        await template.end()
        raise


def _hand_over(channel: socket.socket) -> io.FileIO:
    """Our end of the pipe; the other goes to the process, which may not be there yet to take it, and with it the
    file to warm up with."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(ours, False)
    rows = sealed_file()
    try:
        # One that has ended already is found out when it is listened to.
        with suppress(BrokenPipeError):
            socket.send_fds(channel, [b"p"], [theirs, rows])
    finally:
        os.close(theirs)
        os.close(rows)
    return io.FileIO(ours, "rb")
