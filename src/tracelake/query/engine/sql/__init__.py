"""Statements for the engine; names and values are put in quoted, never as they came."""
