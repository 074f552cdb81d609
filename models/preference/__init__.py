"""Preference training of language models: DPO and ORPO on pairs of answers, KTO on judged ones."""

from isobatch.models.workloads import Workload

DPO = "train a causal language model on preferred and rejected answers, held to a reference"
WORKLOADS = (
    Workload("dpo", "task:DPO", DPO, place=20),
    Workload("orpo", "task:ORPO", "the same in one stage with fine-tuning, without a reference", place=21),
    Workload("kto", "kto:KTO", "the same on single answers that are judged good or bad", place=22),
    Workload("reward", "reward:RewardModel", "train a model that scores answers, on pairs of them", place=23),
)
