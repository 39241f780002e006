"""From a committed row to its receiver: how soon, and how many a second."""
