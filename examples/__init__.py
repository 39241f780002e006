"""Examples: DAGs, operators and functions to start from, and the demo."""
