"""The soak: a whole stack follows a real node while both are disturbed, and in the end every table is right.

The node mines, reorganises its chain, loses blocks and grows again; one of the two ways to it lies, hangs and
lags. Meanwhile the Spark server, the workers, the data database and the Dispatcher are killed, a worker is
stopped until another one has taken over and then commits its rows, and a follower is killed when its rows are
committed and their event is pending. The stored rows are of one chain at every moment; and once the chain is
left alone, everything that is stored, hot, cold and derived, equals the node's chain row by row.
"""
