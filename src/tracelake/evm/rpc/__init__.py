"""A pool of JSON-RPC endpoints that answers right, late or not at all, but never wrong or in part."""
