"""The fields that say how a job is run, alike in ``defaults`` and in a job."""

from __future__ import annotations

from tracelake.domain.dag.fields import Fields
from tracelake.domain.dag.model import BackpressureMode, JobSettings, Priority

SETTINGS_FIELDS = frozenset(
    {
        "max_attempts",
        "timeout_seconds",
        "heartbeat_timeout_seconds",
        "priority",
        "scaling",
        "max_queue_depth",
        "max_queue_age",
        "backpressure",
        "retry",
        "idle_timeout",
    }
)


def read_settings(fields: Fields, base: JobSettings) -> JobSettings:
    """``base`` with whatever the fields say instead."""
    scaling = fields.nested("scaling", {"max_concurrency"})
    retry = fields.nested("retry", {"base", "max"})
    settings = JobSettings(
        max_attempts=fields.integer("max_attempts", base.max_attempts, low=1, high=1000),
        timeout_seconds=fields.seconds("timeout_seconds", base.timeout_seconds),
        heartbeat_timeout_seconds=fields.seconds("heartbeat_timeout_seconds", base.heartbeat_timeout_seconds),
        priority=fields.choice("priority", Priority) or base.priority,
        max_concurrency=(
            scaling.integer("max_concurrency", base.max_concurrency, low=1)
            if scaling
            else base.max_concurrency
        ),
        max_queue_depth=fields.integer("max_queue_depth", base.max_queue_depth, low=1),
        max_queue_age_seconds=fields.seconds("max_queue_age", base.max_queue_age_seconds),
        backpressure=fields.choice("backpressure", BackpressureMode) or base.backpressure,
        retry_base_seconds=(
            retry.seconds("base", base.retry_base_seconds, low=0) if retry else base.retry_base_seconds
        ),
        retry_max_seconds=(
            retry.seconds("max", base.retry_max_seconds, low=0) if retry else base.retry_max_seconds
        ),
        idle_timeout_seconds=fields.seconds("idle_timeout", base.idle_timeout_seconds),
    )
    if settings.retry_max_seconds < settings.retry_base_seconds:
        fields.wrong(
            "retry", f"max ({settings.retry_max_seconds}s) is below base ({settings.retry_base_seconds}s)"
        )
    return settings
