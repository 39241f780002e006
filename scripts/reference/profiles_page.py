"""``docs/profiles.md``: the chain profiles, and what each can prove, made of their definitions."""

from __future__ import annotations

from tracelake.evm.profiles.profile import ChainProfile
from tracelake.evm.profiles.registry import PROFILES

_INTRODUCTION = """\
# Chain profiles

Made from `tracelake.evm.profiles`; `python -m scripts.reference` makes it anew. How a profile is chosen, and what
happens without the right one: [chains](chains.md#other-chains).

| `chain` | differences | `verify: full` proves | chosen for the chain ids |
|---|---|---|---|
"""
_TYPES = """
## Transaction types

Besides Ethereum's 0x0 to 0x4. None of them has a signature in Ethereum's form: `v`, `r` and `s` are null. A block
with a type that isn't proven is refused by `full`, and taken by `bloom`.

| type | profiles | | `full` |
|---|---|---|---|
"""


def profiles_page() -> str:
    rows = [_row(profile) for profile in PROFILES.values()]
    return "\n".join([_INTRODUCTION.rstrip(), *rows, _TYPES.rstrip(), *_types(), ""])


def _row(profile: ChainProfile) -> str:
    proves = profile.proves or f"nothing: {profile.unprovable}. Use `bloom`"
    ids = ", ".join(map(str, sorted(profile.chain_ids)))
    return f"| `{profile.name}` | {profile.about} | {proves} | {ids} |"


def _types() -> list[str]:
    owners: dict[str, list[ChainProfile]] = {}
    for profile in PROFILES.values():
        for kind in profile.types:
            owners.setdefault(kind, []).append(profile)
    lines = []
    for kind in sorted(owners, key=lambda text: int(text, 16)):
        own = owners[kind][0].types[kind]
        names = ", ".join(f"`{each.name}`" for each in owners[kind])
        lines.append(
            f"| {kind} | {names} | {own.name} | {'not proven' if own.encode is None else 'proven'} |"
        )
    return lines
