"""LoRA and DoRA by peft (Hu et al. 2021; Liu et al. 2024): an adapter is added, saved and opened."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError, explain_errors

if TYPE_CHECKING:
    from torch import nn

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
TAKEN_FOR_EXPERTS = frozenset(
    {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate"}
)
"""Matrices that peft takes for parts of the experts in a mixture, be they of a shared expert; and its gate,
which sees tokens without their places in a row, by which noise is drawn."""
PEFT_PREFIX = "base_model.model."
"""What peft's wrapper model puts before the names of a model's parameters."""


START = "start"
"""The name of what an adapter began with, which is taken off again: a second adapter that does not train."""


def begin_with_principal_parts(model: Any, config: Any) -> None:
    """Set every adapter to the largest r singular values of its matrix W, and take them off W: PiSSA (Meng et
    al. 2024, equations 2 to 4).

    W stays as it is: a second adapter takes off what the first began with. Its factors are buffers, which
    checkpoints hold: a resumed run reads them, where another machine's SVD would differ. Of several processes
    the first computes them; from it the others get all weights before they learn, and have zeros until then.
    """
    import torch
    import torch.distributed as dist

    computes = not dist.is_initialized() or dist.get_rank() == 0
    plain = copy.copy(config)
    plain.lora_dropout, plain.init_lora_weights = 0.0, True
    for layer in [m for m in model.modules() if "default" in getattr(m, "lora_A", {})]:
        layer.update_layer(START, config.r, lora_alpha=config.lora_alpha, config=plain)
        scale = layer.scaling["default"]
        layer.scaling[START] = -scale
        parts = principal_parts(layer.get_base_layer(), config.r, scale) if computes else {}
        for name in ("lora_A", "lora_B"):
            factors = getattr(layer, name)
            began = torch.zeros_like(factors["default"].weight, dtype=torch.float32)
            if name in parts:
                rows, columns = parts[name].shape  # W may be narrower than r
                began[:rows, :columns] = parts[name]
            factors["default"].weight.data = began.clone()
            del factors[START].weight
            factors[START].register_buffer("weight", began)
        layer.set_adapter(["default", START])


def principal_parts(layer: Any, rank: int, scale: float) -> dict[str, Any]:
    """The factors of the largest singular values of a linear layer's matrix, held in 8 or 4 bits as well."""
    import torch
    from peft.utils.integrations import dequantize_module_weight

    weight = dequantize_module_weight(layer).detach().float()
    weight = weight.T if type(layer).__name__.endswith("Conv1D") else weight
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[:rank] / scale).sqrt()
    return {"lora_A": roots[:, None] * right[:rank], "lora_B": left[:, :rank] * roots}


def modules_named(model: Any, tables: Sequence[str]) -> list[str]:
    """Names of the modules that are these tables (`embeddings`, `head`); of one tied table both."""
    known = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    weights = {id(known[table].weight) for table in tables}
    both = list(known.values())
    return [name for name, m in model.named_modules() if m in both and id(m.weight) in weights]


def check_targets(matrices: Iterable[str], wanted: str) -> None:
    """Raise UserError unless each name of --lora-targets is one of `matrices`, those of the blocks.

    Embeddings and head are refused: they may be one tied table.
    """
    for name in () if wanted == "auto" else wanted_names(wanted, "") or ():
        if not any(is_target(matrix, [name]) for matrix in matrices):
            known = ", ".join(sorted({matrix.rpartition(".")[2] for matrix in matrices}))
            raise UserError(f"--lora-targets {wanted}: {name} is no matrix of the blocks; there are {known}")


def block_matrices(model: Any, head: Sequence[str] = ()) -> dict[str, Any]:
    """Name -> module of all matrices in the transformer blocks: neither embeddings nor the head.

    `head`: names of its modules, where it is more than the output embeddings.
    """
    outputs = model.get_output_embeddings()
    matrices = {n: m for n, m in model.named_modules() if _is_matrix(m) and m is not outputs}
    if expert_weights(model):
        matrices = {n: m for n, m in matrices.items() if n.rpartition(".")[2] not in TAKEN_FOR_EXPERTS}
    return {n: m for n, m in matrices.items() if not any(f"{n}.".startswith(f"{h}.") for h in head)}


def expert_weights(model: nn.Module) -> int:
    """Weights of a mixture's experts, and of what peft takes for them; 0 without a mixture."""
    routed = sum(p.numel() for p in expert_tensors(model).values())
    named = ((name.rpartition(".")[2], m) for name, m in model.named_modules() if _is_matrix(m))
    return routed and routed + sum(m.weight.numel() for name, m in named if name in TAKEN_FOR_EXPERTS)


def _is_matrix(module: nn.Module) -> bool:
    """Whether an adapter fits: a router and the experts of a mixture are no linear layers to peft."""
    from torch.nn import Linear

    return isinstance(module, Linear) or type(module).__name__.endswith("Conv1D")


def target_modules(model: Any, wanted: str, layers: str | None = None, head: Sequence[str] = ()) -> Any:
    """Names of the modules that get an adapter; `auto` takes those that peft knows for the model type.

    `layers`: see --lora-layers.
    """
    names = wanted_names(wanted, model.config.model_type)
    if names and layers is None:
        return names
    matrices = in_layers(block_matrices(model, head), layers)
    return sorted(name for name in matrices if is_target(name, names))


def wanted_names(wanted: str, model_type: str) -> list[str] | None:
    """The names that --lora-targets means in models of this type; None are all, as where peft knows none."""
    if wanted != "auto":
        return None if wanted == "all-linear" else [name.strip() for name in wanted.split(",")]
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN_TARGETS

    return list(KNOWN_TARGETS.get(model_type) or ()) or None


def is_target(matrix: str, names: Sequence[str] | None) -> bool:
    """Whether a matrix of the blocks has one of these names, or ends with one; None are all."""
    return names is None or f".{matrix}".endswith(tuple(f".{name}" for name in names))


def in_layers(names: Iterable[str], wanted: str | None) -> list[str]:
    """Those of the names, as of modules or parameters, in the layers of --lora-layers. Raises UserError."""
    found = {name: int(match[1]) for name in names if (match := re.search(r"\.(\d+)\.", name))}
    if wanted is None:
        return list(names)
    numbers: set[int] = set()
    for part in wanted.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UserError(f"--lora-layers {wanted}: give numbers or ascending ranges, as in 8-15 or 0,4-7")
        numbers.update(range(first, last + 1))
    if beyond := sorted(numbers - set(found.values())):
        there = f"0 to {max(found.values())}" if found else "none with numbers"
        raise UserError(f"--lora-layers {wanted}: there is no layer {beyond[0]}; the model has {there}")
    return [name for name, number in found.items() if number in numbers]


def expert_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> tensor of all experts of a layer (a depthwise convolution is none)."""
    return {name: p for name, p in model.named_parameters() if p.ndim == 3 and p.shape[1] > 1}


def adapted_experts(tensors: Iterable[str], options: Any) -> list[str]:
    """Those of the experts' tensors that get an adapter. Raises UserError where there are none."""
    if not options.lora_experts:
        return []
    if not (found := in_layers(tensors, options.lora_layers)):
        raise UserError("--lora-experts: the model is no mixture whose experts are one tensor: leave it out")
    return found


def save_adapter(model: Any, folder: Path, head: Sequence[str] = ()) -> None:
    """Save the adapter, and modules of `head`, as peft does: PeftModel.from_pretrained opens the folder."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # The default would ask the hub for the base model's number of embeddings.
    found = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    config = copy.copy(model.peft_config["default"])
    _add_start(model, found, config)
    for name in head:
        found |= {f"{name}.{part}": p for part, p in model.get_submodule(name).state_dict().items()}
    # Cloned, because the file's format has no tied tables.
    weights = {PEFT_PREFIX + name: value.detach().cpu().contiguous().clone() for name, value in found.items()}
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config.inference_mode = True
    config.modules_to_save = list(head) or None
    config.ensure_weight_tying = len(found) > len({value.data_ptr() for value in found.values()})
    for named in ("target_modules", "target_parameters"):  # sets have another order in every process
        if isinstance(found_names := getattr(config, named), set):
            setattr(config, named, sorted(found_names))
    config.save_pretrained(folder)


def _add_start(model: Any, found: dict[str, Any], config: Any) -> None:
    """Let an adapter that began with parts of its matrices take these off itself: one of rank 2 r.

    `found`: its tensors, and `config`: its settings, are changed. (B A - B0 A0) = [B, -B0] [A; A0].
    """
    import torch

    began = {name: m for name, m in model.named_modules() if START in getattr(m, "lora_A", {})}
    for name, layer in began.items():
        first, second = layer.lora_A[START].weight, layer.lora_B[START].weight
        for key, part, side in (("lora_A", first, 0), ("lora_B", -second, 1)):
            whole = f"{name}.{key}.weight"
            found[whole] = torch.cat([found[whole], part.to(found[whole])], side)
            found.pop(f"{name}.{key}.{START}.weight", None)
    if began:
        config.r *= 2
        config.lora_alpha *= 2**0.5 if config.use_rslora else 2


def base_model_of(folder: Path) -> tuple[str, str | None]:
    """The base model, a folder or a hub id, and its revision, of an adapter. Raises UserError."""
    from peft import PeftConfig

    if not (folder / ADAPTER_FILE).is_file():  # peft would read a pickled one
        raise UserError(f"{folder}: holds no {ADAPTER_FILE}")
    known = PeftConfig.from_pretrained(str(folder))
    if getattr(known, "megatron_config", None):  # peft would import the module that it names
        raise UserError(f"{folder}: its {CONFIG_FILE} is one of Megatron: it is no adapter of isobatch")
    base = str(known.base_model_name_or_path)
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(f"{folder}: its base model {base} is not there: name it in its {CONFIG_FILE}")
    return base, known.revision


def put_adapter(model: Any, folder: Path, base: str) -> Any:
    """A model with the adapter in `folder`, as peft wraps it. Raises UserError if it is none for `base`."""
    from peft import PeftModel

    # Where the shapes or the names do not match.
    with explain_errors(f"{folder}: is no adapter for {base}", RuntimeError, ValueError):
        return PeftModel.from_pretrained(model, str(folder))
