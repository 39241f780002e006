"""Queues: a contract, and drivers that keep it."""
