"""Variational autoencoders over sequences, and a monitor that sees their posterior collapse."""

from isobatch.models.workloads import Workload

SUMMARY = "a variational autoencoder over sequences, watched for posterior collapse"
WORKLOADS = (Workload("sequence-vae", "task:SequenceVAE", SUMMARY, place=60),)
