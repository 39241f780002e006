"""A job's configuration as the operator gets it: refused whole, with everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from tracelake.domain.errors import Invalid
from tracelake.domain.setting_checks import unknown_settings


def refuse_wrong(
    operator: str, config: Mapping[str, Any], known: Set[str], problems: Iterable[tuple[str, str]]
) -> None:
    """A deploy refuses the same; but a job may have been deployed by an older version."""
    wrong = [*unknown_settings(operator, config, known), *problems]
    if wrong:
        raise Invalid("InvalidConfig", "; ".join(f"config: {key}: {message}" for key, message in wrong))
