"""The workload recommender."""
