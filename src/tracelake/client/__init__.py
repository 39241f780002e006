"""The client of the user API for Python: ``tracelake.Client``."""

from tracelake.client.client import Client

__all__ = ["Client"]
