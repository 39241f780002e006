"""Tracelake: events in, leased tasks out, every output committed once."""

__version__ = "0.1.0"
