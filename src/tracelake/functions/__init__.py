"""What a function finds beside its own code: the client library, for Python and for Node, and our runtimes.

Nothing here imports the rest of the platform. These files are shown to code that nobody trusts, and they run
just the same in a function's own zip on AWS.
"""
