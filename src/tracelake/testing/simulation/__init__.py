"""A seeded simulation of several dispatchers and workers against a real state database.

One process, one event loop, one statement in flight: who goes next, what fails and what time it is come
from one seed, so a run is a function of its seed and a failing one can be looked at again. The steps are the
real ones; what surrounds them (processes, queue, chain, data plane, people) is a model. Afterwards an auditor
that knows only what callers were told compares it with what a reader sees.
"""
