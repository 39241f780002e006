"""Is a claim better decided in one SQL function? Measures both ways on one database.

    python -m bench.claim_function

The function does the least a claim must do (lock, status, lease, epoch, history) and leaves the inputs to
a second statement, as a lower bound of what a full one would cost. Both sides run serially on one connection
with synchronous_commit off, so that the difference is the work and not the disk, and then in batches of 20.
"""
