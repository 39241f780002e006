"""Logs into typed columns, by the ABIs of the events that they are."""
