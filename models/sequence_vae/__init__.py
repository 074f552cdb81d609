"""Variational autoencoders over sequences, and a monitor that sees their posterior collapse."""

from isobatch.models.workloads import Workload

WORKLOADS = (
    Workload(
        name="sequence-vae",
        task="models.sequence_vae.task:SequenceVAE",
        data="data.sequences:Sequences",
        summary="a variational autoencoder over sequences, watched for posterior collapse",
        place=60,
    ),
)
