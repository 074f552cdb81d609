"""Variational autoencoders over sequences, and a monitor that sees their posterior collapse."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        "sequence-vae",
        "task:SequenceVAE",
        "a variational autoencoder over sequences, watched for posterior collapse",
        place=60,
    ),
)
