"""LoRA and DoRA by peft (Hu et al. 2021; Liu et al. 2024): an adapter is added, saved and opened."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError

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


def add_adapter(
    model: nn.Module, options: Any, base: str, revision: str | None, head: Sequence[str] = ()
) -> None:
    """Add adapters to a model in place; its other weights are frozen, except the biases of --lora-bias.

    `base`: the model's folder or hub id, which a saved adapter names; modules of `head` train as they are.
    """
    quiet_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model

    folder = Path(base).expanduser()
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.resolve()) if folder.is_dir() else base,
        revision=revision,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        bias=options.lora_bias,
        fan_in_fan_out=any(type(m).__name__.endswith("Conv1D") for m in model.modules()),
        use_dora=options.adapter == "dora",
        target_modules=target_modules(model, options.lora_targets, head),
    )
    check_targets(block_matrices(model, head), options.lora_targets)
    inject_adapter_in_model(config, model)
    for name in head:
        model.get_submodule(name).requires_grad_(True)


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
    suffixes = [] if wanted in ("auto", "all-linear") else [name.strip() for name in wanted.split(",")]
    for name in suffixes:
        if not any(f".{matrix}".endswith(f".{name}") for matrix in matrices):
            known = ", ".join(sorted({matrix.rpartition(".")[2] for matrix in matrices}))
            raise UserError(f"--lora-targets {wanted}: {name} is no matrix of the blocks; there are {known}")


def quiet_bitsandbytes() -> None:
    """Silence bitsandbytes' warnings about missing kernels; call it before peft is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


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
    """Weights of a mixture's experts, of which a layer has one tensor (a depthwise convolution is none), and
    of what peft takes for them; 0 without a mixture.
    """
    routed = sum(p.numel() for p in model.parameters() if p.ndim == 3 and p.shape[1] > 1)
    named = ((name.rpartition(".")[2], m) for name, m in model.named_modules() if _is_matrix(m))
    return routed and routed + sum(m.weight.numel() for name, m in named if name in TAKEN_FOR_EXPERTS)


def _is_matrix(module: nn.Module) -> bool:
    """Whether an adapter fits: a router and the experts of a mixture are no linear layers to peft."""
    from torch.nn import Linear

    return isinstance(module, Linear) or type(module).__name__.endswith("Conv1D")


def target_modules(model: Any, wanted: str, head: Sequence[str] = ()) -> Any:
    """Names of the modules that get an adapter; `auto` takes those that peft knows for the model type."""
    if wanted not in ("auto", "all-linear"):
        return [name.strip() for name in wanted.split(",")]
    known = usual_targets(model.config.model_type) if wanted == "auto" else None
    return known or sorted(block_matrices(model, head))


def usual_targets(model_type: str) -> list[str] | None:
    """The names that peft adapts in models of this type; None where it knows none."""
    quiet_bitsandbytes()
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN_TARGETS

    return list(KNOWN_TARGETS.get(model_type) or ()) or None


def save_adapter(model: Any, folder: Path, head: Sequence[str] = ()) -> None:
    """Save the adapter, and modules of `head`, as peft does: PeftModel.from_pretrained opens the folder."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # The default would ask the hub for the base model's number of embeddings.
    found = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    for name in head:
        found |= {f"{name}.{part}": p for part, p in model.get_submodule(name).state_dict().items()}
    # Cloned, because the file's format has no tied tables.
    weights = {PEFT_PREFIX + name: value.detach().cpu().contiguous().clone() for name, value in found.items()}
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.modules_to_save = list(head) or None
    config.ensure_weight_tying = len(found) > len({value.data_ptr() for value in found.values()})
    if isinstance(config.target_modules, set):  # whose order differs between processes
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)


def base_model_of(folder: Path) -> tuple[str, str | None]:
    """The base model, a folder or a hub id, and its revision, of an adapter. Raises UserError."""
    quiet_bitsandbytes()
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

    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # the shapes or the names do not match
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder}: is no adapter for {base}: {reason}") from None
