"""``python -m scripts.reference [FOLDER]``: write the generated pages, and print which have changed."""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.reference import PAGES


def main(folder: Path) -> None:
    for name, make in PAGES.items():
        path, page = folder / name, make()
        changed = not path.exists() or path.read_text(encoding="utf-8") != page
        path.write_text(page, encoding="utf-8")
        sys.stdout.write(f"{path}: {'written' if changed else 'as it was'}\n")


if __name__ == "__main__":
    main(Path(*sys.argv[1:2] or ["docs"]))
