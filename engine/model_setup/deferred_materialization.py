"""Deferred materialization: models whose parameters get their values when they are sharded, or never whole.

A hollow model has all of a model but its values, for ranks that get their shards from rank 0's model: a host
does not hold a whole model for each of its processes. A hollow parameter has its shape, type and place among
the modules, and the memory of a single element.

Rank 0 reads a pretrained model's values from its files block by block, when that block is sharded, and never
holds the whole. Its model is made of the config; each parameter knows where its values lie. What a task does
to such a model may not look at values or change them: if it does, or a value is not in the files as it is,
rank 0 builds the model whole.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.engine.checkpointing.weight_files import stored_tensors
from isobatch.models import hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from isobatch.engine.checkpointing.weight_files import StoredTensor

Outline = list[tuple[str, tuple[int, ...], str, bool]]
"""(name, shape, type, whether it trains) of a model's parameters and buffers, a shared one by every name."""
READER = "read_values"
"""The attribute of a parameter without values: a function that reads them."""
KNOWN_ARGUMENTS = {"revision", "_from_auto", "adapter_kwargs", *hub.remote_code_kwargs(False)}
"""Arguments of `from_pretrained` that change no value; the last where the folder holds no adapter."""
ADAPTER = "adapter_config.json"


def build_hollow(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, hollow; None where it cannot be built without values."""
    try:
        with torch.device("meta"), _pretrained_made_by(_from_config):
            model = build()
    except Exception:  # whatever a task computes from values: such a model is built whole
        return None
    return model if _hollow_out(model) else None


def build_late(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, read late where it is pretrained; None where it must be whole."""
    untouched = _Untouched()
    try:
        with untouched, _pretrained_made_by(partial(_from_files, untouched)):
            model = build()
    except Exception:  # the build that follows says what is wrong, if anything is
        return None
    return model if _hollow_out(model, keep=lambda p: hasattr(p, READER)) else None


def read_late(tensors: Iterable[Tensor]) -> None:
    """Give those parameters their values that have none yet."""
    for p in tensors:
        if (read := vars(p).pop(READER, None)) is not None:
            p.data = read().to(p.dtype)


def outline(model: nn.Module) -> Outline:
    """What two models must have in common for the values of one to fit the other."""
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = (*parameters, *model.named_buffers(remove_duplicate=False))
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]


def _hollow_out(model: nn.Module, keep: Callable[[nn.Parameter], bool] = lambda _: True) -> bool:
    """Make what lies on the meta device hollow; whether that is all, and nothing that `keep` refuses.

    A shared parameter is replaced by one, with its attributes; buffers become zeros on the host.
    """
    if not all(keep(p) for p in model.parameters() if p.is_meta):
        return False
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_meta:
                if id(p) not in replaced:
                    values = torch.zeros((), dtype=p.dtype).expand(p.shape)
                    replaced[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                    replaced[id(p)].__dict__.update(vars(p))
                module.register_parameter(name, replaced[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")  # noqa: SLF001  keeps persistence
    attributes = (v for module in model.modules() for v in vars(module).values())
    return not any(isinstance(v, torch.Tensor) and v.is_meta for v in attributes)


@contextlib.contextmanager
def _pretrained_made_by(make: Callable[..., Any]) -> Iterator[None]:
    """Let `make(original, kind, *args, **named)` stand for `kind.from_pretrained` of transformers."""
    import transformers

    base: Any = transformers.PreTrainedModel
    before = vars(base)["from_pretrained"]

    def made(kind: Any, *args: Any, **named: Any) -> Any:
        return make(before.__func__, kind, *args, **named)

    base.from_pretrained = classmethod(made)
    try:
        yield
    finally:
        base.from_pretrained = before


def _from_config(_original: Any, kind: Any, *_: Any, config: Any, dtype: Any = None, **__: Any) -> Any:
    """The model of a config alone: transformers' `from_pretrained` refuses the meta device."""
    kept = None if dtype == "auto" else dtype  # a file's own types are known only from its values
    return kind._from_config(config, dtype=kept)  # noqa: SLF001  what AutoModel.from_config calls


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
    """`kind.from_pretrained` that reads late, or `original` where that cannot be."""
    untouched.loading = True
    try:
        return _late(kind, *args, **named) or original(kind, *args, **named)
    finally:
        untouched.loading = False


def _late(kind: Any, place: Any, *args: Any, config: Any = None, dtype: Any = None, **further: Any) -> Any:
    """The model of a config with readers of its values in the files of a folder; None if one is not there."""
    from accelerate import init_empty_weights

    if args or set(further) - KNOWN_ARGUMENTS or not isinstance(dtype, torch.dtype) or config is None:
        return None
    if hasattr(config, "quantization_config") or (Path(place) / ADAPTER).exists():
        return None
    if not (stored := stored_tensors(Path(place))):  # of the hub, or no safetensors
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
