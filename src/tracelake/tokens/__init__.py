"""Credentials of the three surfaces: capability tokens, worker tokens, user tokens."""
