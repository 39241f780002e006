"""The follower's settings, as the DAG has them; see ``domain.follower_config`` for what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from tracelake.domain import follower_config
from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerConfig:
    """``start_block`` None: the chain's head when the follower first looks. ``finality`` None: what the endpoints
    call finalized; a number: so many blocks below the tip."""

    chain_id: int
    start_block: int | None
    verify: Verify
    finality: int | None
    poll_seconds: float
    max_blocks_per_commit: int
    catch_up: Literal["auto", "spark", "process"]
    shorter_after_seconds: float

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> FollowerConfig:
        unknown = sorted(set(config) - follower_config.KEYS)
        wrong = [f"{key}: block_follower has no such setting" for key in unknown]
        wrong += [f"{key}: {message}" for key, message in follower_config.problems(config)]
        if wrong:
            raise Invalid("InvalidConfig", "; ".join(wrong))
        given = {**follower_config.DEFAULTS, **config}
        start, finality = given["start_block"], given["finality"]
        return cls(
            chain_id=given["chain_id"],
            start_block=None if start == follower_config.LATEST else start,
            verify=Verify(given["verify"]),
            finality=None if finality == follower_config.FINALIZED else finality,
            poll_seconds=float(given["poll_seconds"]),
            max_blocks_per_commit=given["max_blocks_per_commit"],
            catch_up=cast(Literal["auto", "spark", "process"], given["catch_up"]),
            shorter_after_seconds=float(given["shorter_after_seconds"]),
        )
