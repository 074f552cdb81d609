"""Late values: a pretrained model whose parameters are read from its files one by one, when they are sharded.

So rank 0, which sends the others their shards, holds a block of the model at a time and never the whole. The
model is made of its config; each parameter knows where its values lie. What a task does to such a model may
not look at values or change them: if it does, or a value is not in the files as it is, rank 0 builds the
model whole.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.weight_files import stored_tensors
from isobatch.engine.model_setup.hollow_model import hollow_out, pretrained_made_by
from isobatch.models import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from isobatch.engine.checkpointing.weight_files import StoredTensor

READER = "read_values"
"""The attribute of a parameter without values: a function that reads them."""
KNOWN_ARGUMENTS = {"revision", "_from_auto", "adapter_kwargs", *hub.remote_code_kwargs(False)}
"""Arguments of `from_pretrained` that change no value; the last where the folder holds no adapter."""
ADAPTER = "adapter_config.json"


def build_late(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, with late values where it is pretrained; None where it must be whole."""
    untouched = _Untouched()
    try:
        with untouched, pretrained_made_by(partial(_from_files, untouched)):
            model = build()
    except Exception:  # the build that follows says what is wrong, if anything is
        return None
    return model if hollow_out(model, keep=lambda p: hasattr(p, READER)) else None


def read_late(tensors: Iterable[Tensor]) -> None:
    """Give those parameters their values that have none yet."""
    for p in tensors:
        if (read := vars(p).pop(READER, None)) is not None:
            p.data = read().to(p.dtype)


class _Untouched(TorchDispatchMode):
    """Refuses every operation on a parameter without values: in place it would do nothing, unseen."""

    loading = False

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))  # noqa: SLF001  as torch's own modes do
        if not self.loading and any(isinstance(one, torch.Tensor) and one.is_meta for one in given):
            raise RuntimeError(f"{function} of a parameter without values")
        return function(*args, **(kwargs or {}))


def _from_files(
    untouched: _Untouched, original: Callable[..., Any], kind: Any, *args: Any, **named: Any
) -> Any:
    """`kind.from_pretrained` with late values, or `original` where that cannot be."""
    untouched.loading = True
    try:
        return _late(kind, *args, **named) or original(kind, *args, **named)
    finally:
        untouched.loading = False


def _late(kind: Any, place: Any, *args: Any, config: Any = None, dtype: Any = None, **further: Any) -> Any:
    """The model of a config with readers of its values in the files of a folder; None if one is not there."""
    from accelerate import init_empty_weights

    unknown = bool(args) or bool(set(further) - KNOWN_ARGUMENTS) or not isinstance(dtype, torch.dtype)
    if (
        unknown
        or config is None
        or hasattr(config, "quantization_config")
        or (Path(place) / ADAPTER).exists()
    ):
        return None
    try:
        stored = stored_tensors(Path(place))
    except UserError:  # of the hub, or no safetensors
        return None
    noise = torch.get_rng_state()
    with init_empty_weights(include_buffers=False):
        model = kind._from_config(config, dtype=dtype)  # noqa: SLF001  what AutoModel.from_config calls
    torch.set_rng_state(noise)  # from_pretrained draws nothing either
    model.tie_weights()  # accelerate has made two of each shared parameter
    find = partial(_find, stored, f"{kind.base_model_prefix}.")
    for name, p in model.named_parameters():
        found = find(name)
        if found is None or found.shape != tuple(p.shape):
            return None
        setattr(p, READER, partial(_read, found, p.dtype))
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved and (found := find(name)) is not None:
            buffer.copy_(found.read())
    return model.eval()


def _find(stored: Mapping[str, StoredTensor], prefix: str, name: str) -> StoredTensor | None:
    """The tensor of a name, which may stand there without the prefix of the model below the head."""
    names = (name, name.removeprefix(prefix), prefix + name)
    return next((stored[one] for one in names if one in stored), None)


def _read(found: StoredTensor, dtype: torch.dtype) -> Tensor:
    """The values in memory of their own: a view would keep the file's pages."""
    return torch.empty(found.shape, dtype=dtype).copy_(found.read())
