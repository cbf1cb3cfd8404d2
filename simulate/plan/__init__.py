"""``baton_plan``: the cheapest cluster that serves a workload within its objectives, by simulation."""
