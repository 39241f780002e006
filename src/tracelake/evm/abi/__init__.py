"""Decoding of logs to typed columns, by the ABIs of their events."""
