"""The workloads pruning and qat."""
