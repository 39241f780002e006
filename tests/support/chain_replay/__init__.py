"""A chain recorded into one file, and a server that answers from it faster than any client asks."""
