"""HTTP servers: declared routes, checked credentials, strict requests, problem details.

The Dispatcher and the Query Service build their ports with it; each brings its own routes and authenticators. A
request passes ``listener`` (connections and their limits), ``surface`` (one port's application), ``endpoint`` (the
router), ``identity`` (credentials) and ``request`` (decoding); it leaves as an ``answer`` or as a problem
(``contracts.problem``). ``small_http`` is for the servers that don't need all of this: the gateways of
sandboxes, the invoke endpoint of an invoker, and the port of each process for its monitoring (``metrics_port``).
"""
