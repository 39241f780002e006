"""EVM chains: reading blocks over JSON-RPC, proving them, and decoding them to tables."""
