"""Preference training of language models: DPO and ORPO on pairs of answers."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="dpo",
        task="models.preference.task:DPO",
        data="data.preferences.dataset:Preferences",
        summary="train a causal language model on preferred and rejected answers, held to a reference",
        place=20,
    ),
    Workload(
        name="orpo",
        task="models.preference.task:ORPO",
        data="data.preferences.dataset:Preferences",
        summary="the same in one stage with fine-tuning, without a reference",
        place=21,
    ),
)
