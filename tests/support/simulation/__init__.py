"""A seeded simulation of several dispatchers and workers against a real state database.

One process, one event loop, one statement in flight: the order of actors, the faults and the time come from one
seed, so a run is a function of its seed and a failing one can be repeated. The steps are the real ones; their
surroundings (processes, queue, chain, data plane, people) are a model. Afterwards an audit that knows only the
answers to callers compares them with what a reader sees.
"""
