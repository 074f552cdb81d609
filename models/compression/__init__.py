"""The workloads pruning and qat (quantization-aware training)."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload("pruning", "pruning:Pruning", "take heads and neurons out of a classifier for good", place=40),
    Workload("qat", "qat:QAT", "train a classifier to run in 4-bit weights and 8-bit activations", place=41),
)
CHAINS = {"compress": ("classifier", "pruning", "qat")}
