"""The state database's schema: the numbered files in ``migrations/``."""

from __future__ import annotations

from tracelake.migrations import Migration, Schema

__all__ = ["Migration", "migrate", "migrations"]

_STATE = Schema("state", "tracelake.store.migrations")

migrate = _STATE.migrate
migrations = _STATE.migrations
