"""The workload recommender."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        "recommender",
        "task:Recommender",
        "recommend items from ids and texts, with LoRA in the text encoder",
        place=50,
    ),
)
