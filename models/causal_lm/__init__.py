"""The workload causal-lm."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload("causal-lm", "task:CausalLM", "fine-tune or train a causal language model on text", place=10),
)
