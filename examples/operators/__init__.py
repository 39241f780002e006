"""Custom operators, each with its test."""
