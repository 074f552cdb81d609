"""The workloads pruning and qat (quantization-aware training)."""
