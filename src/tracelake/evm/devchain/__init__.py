"""A deterministic EVM chain in Python alone, and the JSON-RPC server that presents it as a node."""
