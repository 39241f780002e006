"""What a DAG may rely on in the installation it is deployed to.

The parser is pure: whoever calls it says which runtimes are registered, which kinds of sources are
served and which dataset names are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tracelake.domain.bundle_zip import BundleListing
from tracelake.domain.dag.model import SourceKind


class RuntimeTraits(msgspec.Struct, frozen=True):
    """``untrusted_ok``: may run UDFs. ``in_process``: runs inside the Dispatcher, platform operators only.
    ``invoked``: runs functions, from bundles that were pushed here."""

    untrusted_ok: bool
    in_process: bool = False
    invoked: bool = False


class Installation(msgspec.Struct, frozen=True):
    """``published_elsewhere`` maps each published dataset name to the DAG that publishes it.

    Entries of the DAG being parsed are ignored: its new version says itself what it publishes. ``bundles`` are
    those of the file's references that are here.
    """

    runtimes: Mapping[str, RuntimeTraits]
    source_kinds: frozenset[SourceKind] = frozenset({SourceKind.ALWAYS_ON, SourceKind.MANUAL})
    published_elsewhere: Mapping[str, str] = MappingProxyType({})
    bundles: Mapping[str, BundleListing] = MappingProxyType({})
