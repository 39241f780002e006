"""The queue between outbox and workers, with everything that a queue may do to a message."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID


@dataclass(slots=True)
class MessageQueue:
    """``lossy`` loses messages; a queue that isn't still delays, repeats and reorders them."""

    rng: random.Random
    lossy: bool
    repeats: float
    _messages: list[tuple[datetime, UUID]] = field(default_factory=list)

    def publish(self, task_id: UUID, now: datetime) -> None:
        if self.lossy and self.rng.random() < 0.15:
            return
        for _ in range(2 if self.rng.random() < self.repeats else 1):
            delay = self.rng.uniform(0, 30) if self.rng.random() < 0.1 else 0.0
            self._messages.append((now + timedelta(seconds=delay), task_id))

    def receive(self, now: datetime) -> UUID | None:
        """Some message that is visible; gone from the queue until it is given back."""
        visible = [index for index, (at, _) in enumerate(self._messages) if at <= now]
        if not visible:
            return None
        return self._messages.pop(self.rng.choice(visible))[1]

    def give_back(self, task_id: UUID, now: datetime) -> None:
        self._messages.append((now, task_id))

    def drain(self) -> list[UUID]:
        """Everything at once, visible or not."""
        taken = [task_id for _, task_id in self._messages]
        self._messages.clear()
        return taken
