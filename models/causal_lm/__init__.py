"""The workload causal-lm."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="causal-lm",
        task="models.causal_lm.task:CausalLM",
        data="data.text.dataset:Text",
        streamed="data.streaming.text:StreamedText",
        summary="fine-tune or train a causal language model on text",
        place=10,
    ),
)
