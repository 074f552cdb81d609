"""The workloads pruning and qat (quantization-aware training)."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="pruning",
        task="models.compression.pruning:Pruning",
        data="data.labelled.dataset:Labelled",
        summary="take heads and neurons out of a classifier for good",
        place=40,
    ),
    Workload(
        name="qat",
        task="models.compression.qat:QAT",
        data="data.labelled.dataset:Labelled",
        summary="train a classifier to run in 4-bit weights and 8-bit activations",
        place=41,
    ),
)
CHAINS = {"compress": ("classifier", "pruning", "qat")}
