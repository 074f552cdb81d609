"""Training on a Ray cluster."""

PLACE = ("ray", "ray.driver", "Ray", "ray.driver", "the same on a Ray cluster", 30)
"""See `launch.clusters.cluster.Place`."""
