"""Hollow models: all of a model but its values, for ranks that get their shards from rank 0's model.

So a host does not hold a whole model for each of its processes. A hollow parameter has its shape, type
and place among the modules, and the memory of a single element.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Outline = list[tuple[str, tuple[int, ...], str, bool]]
"""(name, shape, type, whether it trains) of a model's parameters and buffers, a shared one by every name."""


def build_hollow(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, hollow; None where it cannot be built without values."""
    try:
        with torch.device("meta"), pretrained_made_by(_from_config):
            model = build()
    except Exception:  # whatever a task computes from values: such a model is built whole
        return None
    return model if hollow_out(model) else None


def hollow_out(model: nn.Module, keep: Callable[[nn.Parameter], bool] = lambda _: True) -> bool:
    """Make what lies on the meta device hollow; whether that is all, and nothing that `keep` refuses."""
    if not all(keep(p) for p in model.parameters() if _is_meta(p)):
        return False
    _replace_meta_tensors(model)
    return not any(_is_meta(v) for m in model.modules() for v in vars(m).values())


def outline(model: nn.Module) -> Outline:
    """What two models must have in common for the values of one to fit the other."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]


def _replace_meta_tensors(model: nn.Module) -> None:
    """Replace each meta parameter by a hollow one on the host, a shared one by one, and each meta buffer."""
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if _is_meta(p):
                if id(p) not in replaced:
                    values = torch.zeros((), dtype=p.dtype).expand(p.shape)
                    replaced[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                    replaced[id(p)].__dict__.update(vars(p))
                module.register_parameter(name, replaced[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            if _is_meta(buffer):
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")  # noqa: SLF001  keeps persistence


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _from_config(_original: Any, kind: Any, *_: Any, config: Any, dtype: Any = None, **__: Any) -> Any:
    """The model of a config alone: transformers' `from_pretrained` refuses the meta device."""
    kept = None if dtype == "auto" else dtype  # a file's own types are known only from its values
    return kind._from_config(config, dtype=kept)  # noqa: SLF001  what AutoModel.from_config calls


@contextlib.contextmanager
def pretrained_made_by(make: Callable[..., Any]) -> Iterator[None]:
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
