"""Training on a Kubernetes cluster."""

PLACE = ("k8s", "kubernetes.job", "Kubernetes", "kubernetes.job", "the same as a Kubernetes job", 20)
"""See `launch.clusters.cluster.Place`."""
