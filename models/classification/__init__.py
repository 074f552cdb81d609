"""The workload classifier, and knowledge distillation. From counts: models/encoder/class_metrics.py."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload("classifier", "task:Classifier", "fine-tune an encoder to classify texts or pairs", place=30),
)
