"""A deterministic EVM chain in Python alone, and the JSON-RPC server that shows it as a node would."""
