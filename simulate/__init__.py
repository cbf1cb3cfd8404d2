"""Simulation of whole clusters: the real schedulers, router policies and transfer protocol on a virtual clock.

``simulate.world.cluster.simulate`` replays a workload against a described cluster. ``simulate.predict`` estimates the
same figures by closed forms, in microseconds and without torch. Both read the same measured costs
(``simulate.costs``). Nothing below this package imports it.
"""
