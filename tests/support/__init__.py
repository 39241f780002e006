"""Support for tests, soaks and benchmarks; no part of the wheel. Fakes stand only at an edge of the system.

Postgres and processes
    postgres, databases        one server per run, one cloned database per test; pytest plugins
    proxies, interleave        connections that fail at a chosen message; two steps in a chosen order
    processes, site            Dispatchers, workers and sinks that a test may kill; installations with replicas
    dev_stack                  a real ``tracelake dev`` and its command line
    spark                      one embedded Spark Connect server per process
    sandbox_driver, unprivileged, slot_programs
                               programs in sandboxes, as another user, and in a query's slot

Steps of the Dispatcher
    conversation               the real steps, called as a test reads
    surfaces                   both HTTP ports with clients of each credential
    load                       load over HTTP, and an audit of everything that was acknowledged
    simulation/                seeded simulation of dispatchers and workers (``make simulate``)

Scenes: a few real parts with the rest played by the test
    worker_scene, worker_tasks, operator_scene, operator_process, functions
    hot_scene, follow_scene, sink_scene, buffer_scene, query_scene, query_port, alert_scene

Chains
    anvil, evm_contracts       a real EVM node, random chains on it, and contracts in assembly
    evm_blocks, evm_encoding, abi_encoding
                               random blocks and logs, encoded by independent libraries (rlp, eth-abi)
    faulty_rpc                 an endpoint that misbehaves on demand
    chain_replay/              recorded chains and a fast server for them
    chain_soak/                a whole stack that follows a node while both are disturbed (``make soak``)

Hostile input
    attack/                    attacks on a running stack (``make attack``)
    query_attacks, query_grammar, spark_texts
                               hostile and random SQL
"""
