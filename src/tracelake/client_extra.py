"""What only some calls of the client need: asked for by them, with how to install it when it is missing."""

from __future__ import annotations

from importlib import import_module


def need(module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{module} isn't installed, which this needs: pip install 'tracelake[client]'", name=module
        ) from None
