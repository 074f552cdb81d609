"""Libraries that not every run needs, and the extra of this package that brings each."""

from __future__ import annotations

import importlib.util

from isobatch.core.errors import UserError

EXTRAS = {
    "deepspeed": "zero",
    "bitsandbytes": "4bit",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "matplotlib": "plots",
    "datasets": "data",
    "gguf": "gguf",
    "sklearn": "baselines",
    "usearch": "index",
    "tensorboard": "trackers",
    "ray": "ray",
    "starlette": "serve",
    "uvicorn": "serve",
    "lm_eval": "lm-eval",
    "s3fs": "s3",
    "gcsfs": "gs",
}
"""Library -> the extra of pyproject.toml with it."""


def has(library: str) -> bool:
    """Whether a library can be imported; it is not imported."""
    return importlib.util.find_spec(library) is not None


def need(library: str, what: str) -> None:
    """Raise UserError that names the extra where a library is missing; `what` is the flag that needs it."""
    if not has(library):
        extra = EXTRAS.get(library)
        package = f"'isobatch[{extra}]'" if extra else library
        raise UserError(f"{what} needs {library}: pip install {package}")
