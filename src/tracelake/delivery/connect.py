"""Connecting to a receiver: to one judged address after the other, and none takes the time of those behind it.

A host may have an address that answers nothing: one of IPv6 where there is no way out, a machine that is down. Its
share of the time that is left is bounded, and the one that was reached behind it is the first one next time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tracelake.delivery.addresses import ReceiverAddresses, ReceiverEndpoint

CONNECT_SECONDS = 4.0
"""For an address behind which there are others."""
T = TypeVar("T")


class NotSent(Exception):
    """Nothing reached the receiver."""


async def connect(
    addresses: ReceiverAddresses,
    endpoint: ReceiverEndpoint,
    deadline: float | None,
    opened: Callable[[str], Awaitable[T]],
) -> T:
    """What ``opened`` makes of an address, TLS included. Raises ``Blocked`` or ``NotSent``; ``deadline`` is the
    caller's, by the loop's clock, which it applies itself."""
    loop = asyncio.get_running_loop()
    try:
        found = await addresses.of(endpoint)
    except OSError as error:
        raise NotSent(str(error)) from None
    why = "the host has no address"
    for place, address in enumerate(found):
        others = len(found) - place - 1
        limit: float | None = None
        if others:
            share = CONNECT_SECONDS if deadline is None else (deadline - loop.time()) / (others + 1)
            limit = min(CONNECT_SECONDS, share)
        try:
            async with asyncio.timeout(limit):
                connection = await opened(address)
        except ssl.SSLError as error:
            why = tls_failed(error)
        except TimeoutError:
            why = "can't connect: no answer"
        except OSError as error:
            why = f"can't connect: {error.strerror or type(error).__name__}"
        else:
            if place:
                addresses.prefer(endpoint, address)
            return connection
    raise NotSent(why)


def tls_failed(error: ssl.SSLError) -> str:
    return f"TLS failed: {error.reason or type(error).__name__}"
