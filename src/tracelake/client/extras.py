"""Optional libraries of the client: the calls that need one check for it, and say how to install it."""

from __future__ import annotations

from importlib import import_module


def need(module: str) -> None:
    """Raise ``ModuleNotFoundError`` with the command that installs the module."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        # A module that is installed may itself fail to import another one: that error is shown as it is.
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{module} isn't installed, which this needs: pip install 'tracelake[client]'", name=module
        ) from None
