"""The Dispatcher's HTTP surfaces: two applications over the same steps, one port each."""
