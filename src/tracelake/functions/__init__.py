"""Files that a function finds beside its own code: the client library, for Python and for Node, and our runtimes.

Nothing here imports the rest of the platform. Untrusted code sees these files, and they work just the same in a
function's own zip on AWS.
"""
