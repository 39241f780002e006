"""Chain tables as they are stored: read where they lie, and checked against themselves."""
