"""Why the hub did not give what was asked for, in words that say what to do."""

from __future__ import annotations


def explain_hub_error(error: Exception, revision: str | None) -> str:
    """The end of a sentence that begins with the name of the repository."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "is gated: accept its terms on its page of the hub, then log in (hf auth login, or HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no branch, tag or commit {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not on the hub, or private: check the name, or log in (hf auth login, or HF_TOKEN)"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"cannot be had from the hub: {lines[0]}"
