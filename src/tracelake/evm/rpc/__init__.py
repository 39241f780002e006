"""A pool of JSON-RPC endpoints that answers correctly, late or not at all, but never wrongly or in part."""
