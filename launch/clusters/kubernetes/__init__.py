"""Training on a Kubernetes cluster."""
