"""EVM chains: reading them over JSON-RPC, proving what was read, and turning it into tables."""
