"""The workload recommender."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="recommender",
        task="models.recommendation.task:Recommender",
        data="data.interactions.dataset:Interactions",
        summary="recommend items from ids and texts, with LoRA in the text encoder",
        place=50,
    ),
)
