"""The workload classifier, and knowledge distillation. From counts: models/encoder/class_metrics.py."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="classifier",
        task="models.classification.adapted:AdaptedClassifier",
        data="data.labelled.dataset:Labelled",
        summary="fine-tune an encoder to classify texts or pairs",
        place=30,
    ),
)
