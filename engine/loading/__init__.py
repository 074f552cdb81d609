"""Data loading: prepare data, order samples, divide global batches into micro-batches, load them ahead."""
