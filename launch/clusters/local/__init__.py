"""Training on this machine, as a cluster of one."""

PLACE = ("local", "local.here", "Local", "local.here", "the same on this machine, as `auto`", 40)
"""See `launch.clusters.cluster.Place`."""
