"""What happens to one of the two ways to the node: it lies, hangs, lags and breaks off, a few answers at a time."""

from __future__ import annotations

import random

from tracelake.testing.faulty_rpc import Fault, FaultyRpc, Lie

_VALUES = {Fault.LAG: 3, Fault.AHEAD: 2, Fault.MAX_BATCH: 2, Fault.TOO_MANY_REQUESTS: 1}
_FOR_GOOD = {Fault.FORBIDDEN, Fault.NO_METHOD, Fault.OTHER_CHAIN, Fault.BATCH_REFUSED, Fault.RANGE_LIMIT}
"""What says something about the endpoint rather than about the moment: a pool does well to remember it."""
FAULTS = tuple(fault for fault in Fault if fault not in _FOR_GOOD)
_ONE_IN = 3
_MOST_TIMES = 4


class EndpointWeather:
    def __init__(self, endpoint: FaultyRpc, seed: int) -> None:
        self._endpoint = endpoint
        self._dice = random.Random(seed)
        self._lies: list[Lie] = []

    def next(self) -> None:
        if self._dice.randrange(_ONE_IN):
            return
        fault = self._dice.choice(FAULTS)
        times = self._dice.randint(1, _MOST_TIMES)
        self._lies.append(self._endpoint.lie(fault, times=times, value=_VALUES.get(fault)))

    def settle(self) -> None:
        self._endpoint.honest()

    @property
    def told(self) -> int:
        """How many answers were wrong."""
        return sum(lie.told for lie in self._lies)
