"""The first module of a slot's process: hides pandas, then loads and runs ``child``.

pyarrow imports pandas, where it can, with the first value that it converts, to recognize its types. No query has a
use for it: it would take half of the process's start and 30 MiB.
"""

from __future__ import annotations

import sys
from importlib import import_module


class _WithoutPandas:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError("queries have no pandas", name=name)


def main() -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    import_module("tracelake.query.engine.child").main()
