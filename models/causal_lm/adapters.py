"""Adapters: few trained weights beside frozen ones, which may lie in 8 or 4 bits.

LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), QLoRA (Dettmers et al. 2023), by peft and bitsandbytes.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.errors import ExportError, UserError
from isobatch.core.number_ranges import Positive, Probability
from isobatch.models import hub
from isobatch.models.base import Batch, ModelSize

if TYPE_CHECKING:
    from torch import nn

FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
TOLERANCE = 1e-4
"""Between logits with an adapter beside the weights and in them, in shares of the largest."""
PREFIX = "base_model.model."
"""What peft's own wrapper puts before the names of a model's parts."""
BYTES = {16: 4.0, 8: 1.0 + 4 / 1024, 4: 0.5 + 4 / 64}
"""Of a number in a frozen matrix: 4 bits have a float for each 64 of them, 8 bits about one a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The fields of adapters."""

    adapter: Literal["none", "lora", "qlora", "dora"] = "none"
    """Train few weights beside the model's own, which stay as they are. qlora: lora beside 4-bit weights."""
    lora_r: Positive = 8
    """Rank of the adapter's matrices."""
    lora_alpha: Positive = 16
    """The adapter's part is scaled by alpha / r."""
    lora_dropout: Probability = 0.05
    """Dropout of what the adapter reads."""
    lora_targets: str = "auto"
    """Which matrices get one: names such as c_attn,c_proj; all-linear; auto: those usual for the model."""
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases train too."""
    load_bits: Literal[16, 8, 4] = 16
    """Bits of frozen matrices. 8 and 4 are for adapters, and save the memory of weights."""


UNSHARDABLE = "bitsandbytes' weights cannot be cut"
"""Why a model with weights of 8 or 4 bits is whole on every process."""


def complete(values: Mapping[str, Any]) -> dict[str, Any]:
    """qlora is lora in 4 bits."""
    return {"load_bits": 4} if values.get("adapter") == "qlora" and "load_bits" not in values else {}


def cheaper(options: Any) -> dict[str, dict[str, Any]]:
    """Flags that would take less memory than these, with their values."""
    ways: dict[str, dict[str, Any]] = {
        "--adapter lora": {"adapter": "lora"},
        "--adapter lora --load-bits 8": {"adapter": "lora", "load_bits": 8},
        "--adapter qlora": {"adapter": "qlora", "load_bits": 4},
    }
    if options.adapter == "none":
        return ways
    return {k: v for k, v in ways.items() if v.get("load_bits", 16) < options.load_bits}


def check(options: Any, pretrained: bool) -> None:
    """Raise where these fields contradict each other or the model."""
    if options.adapter == "none":
        if idle := [f.name for f in dataclasses.fields(AdapterOptions) if _is_idle(f, options)]:
            flag = "--" + idle[0].replace("_", "-")
            raise UserError(f"{flag}: means nothing without an adapter: add --adapter lora, or leave it out")
        if options.load_bits != 16:
            raise UserError(
                f"--load-bits {options.load_bits}: rounded weights cannot train: add --adapter lora (which is"
                " --adapter qlora with 4 bits)"
            )
        return
    if options.resize_embeddings:
        raise UserError(
            f"--resize-embeddings: with --adapter {options.adapter} the new embeddings would never train:"
            " leave one of them out"
        )
    if options.adapter == "dora" and options.load_bits == 8:
        raise UserError(
            "--adapter dora: needs the weights' norms, which 8 bits do not give: use --load-bits 4"
        )
    if options.lora_bias != "none" and options.load_bits == 4:
        raise UserError(
            f"--lora-bias {options.lora_bias}: 4-bit layers round their biases to the type they compute in:"
            " leave it out, or use --load-bits 8"
        )
    if options.adapter == "qlora" and options.load_bits != 4:
        raise UserError(f"--load-bits {options.load_bits}: qlora means 4; with 8 say --adapter lora")
    if not pretrained:
        raise UserError(
            f"--adapter {options.adapter}: a model from scratch has nothing to adapt; give --model a folder"
            " or hub id"
        )


def _is_idle(field: dataclasses.Field[Any], options: Any) -> bool:
    """Whether a field of LoRA was given another value than it has unasked."""
    return field.name.startswith("lora_") and getattr(options, field.name) != field.default


def load(
    place: str, config: Any, revision: str | None, bits: int = 16, remote_code: bool = False
) -> nn.Module:
    """The pretrained model, its frozen matrices in as many bits as asked for."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    given: dict[str, Any] = {}
    if bits != 16:
        given = {"quantization_config": _rounding(bits), "device_map": {"": "cpu"}}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        place,
        config=config,
        revision=revision or "main",
        dtype=torch.float32,
        **given,
        **hub.remote_code_kwargs(remote_code),
    )
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.register_forward_pre_hook(_follow_autocast)
            # Else an evaluation packs the weights for a kernel of its own, and training reads them wrongly.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def _follow_autocast(module: nn.Module, given: tuple[Any, ...]) -> None:
    """4-bit layers compute in a type of their own: let it be the plan's."""
    import torch

    kind = given[0].device.type
    half = torch.is_autocast_enabled(kind)
    module.compute_dtype = torch.get_autocast_dtype(kind) if half else given[0].dtype  # type: ignore[assignment]


def _rounding(bits: int) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise UserError(f"--load-bits {bits} needs: pip install bitsandbytes") from None
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def add(model: nn.Module, options: Any, base: str, revision: str | None) -> None:
    """Put adapters into a model; nothing else of it trains from then on."""
    quiet_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        bias=options.lora_bias,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
        use_dora=options.adapter == "dora",
        target_modules=_targets(model, options.lora_targets),
    )
    _check_targets(model, options.lora_targets)
    inject_adapter_in_model(config, model)


def _check_targets(model: Any, asked: str) -> None:
    """Each name must be that of matrices in the blocks; embeddings and the head may be one table for both."""
    if asked in ("auto", "all-linear"):
        return
    matrices = _matrices(model)
    for name in (name.strip() for name in asked.split(",")):
        if not any(f".{matrix}".endswith(f".{name}") for matrix in matrices):
            known = sorted({matrix.rpartition(".")[2] for matrix in matrices})
            raise UserError(
                f"--lora-targets {asked}: {name} is no matrix of the blocks; there are {', '.join(known)}"
            )


def quiet_bitsandbytes() -> None:
    """peft imports it, and it complains of kernels that it would like to download."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _matrices(model: Any) -> dict[str, Any]:
    """The modules of the blocks that are a matrix, by name: neither embeddings nor the head."""
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if _is_matrix(m) and m is not head}


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2 and "Embedding" not in type(module).__name__


def _targets(model: Any, asked: str) -> Any:
    """None lets peft choose, which it can for the families it knows."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    if asked not in ("auto", "all-linear"):
        return [name.strip() for name in asked.split(",")]
    if asked == "auto" and model.config.model_type in USUAL:
        return None
    return sorted(_matrices(model))


@dataclass(frozen=True, slots=True)
class Counted:
    """What an adapter trains, by numbers."""

    trained: int
    targets: Mapping[str, int]
    """Last part of a module's name -> how many of them have an adapter."""
    frozen_matrices: int
    """Numbers in matrices that --load-bits rounds."""
    added: int
    """Numbers that the model has more with it."""


def counted(config: Any, options: Any) -> Counted:
    """Of the model with this config, built without storage."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **hub.remote_code_kwargs(options.remote_code))
        matrices = sum(m.weight.numel() for m in _matrices(model).values())
        add(model, options, "", None)
    targets: dict[str, int] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            kind = name.rpartition(".")[2]
            targets[kind] = targets.get(kind, 0) + 1
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return Counted(trained, targets, matrices, added)


def shape(whole: ModelSize, config: Any, options: Any, optimizer: str) -> ModelSize:
    """The size of a model with an adapter, and what a user should know of the choice."""
    found = counted(config, options)
    weights = 4.0 * whole.parameters - (4.0 - BYTES[options.load_bits]) * found.frozen_matrices
    return dataclasses.replace(
        whole,
        parameters=whole.parameters + found.added,
        trainable=found.trained,
        weight_bytes=weights + 4.0 * found.added,
        why_unshardable=whole.why_unshardable if options.load_bits == 16 else UNSHARDABLE,
        remark="; ".join(_remarks(whole, found, options, optimizer, weights)),
    )


def _remarks(whole: ModelSize, found: Counted, options: Any, optimizer: str, weights: float) -> list[str]:
    where = ", ".join(f"{count} {name}" for name, count in found.targets.items())
    share = found.trained / whole.parameters
    said = [
        f"{options.adapter} of rank {options.lora_r} on {where} trains {found.trained:,} of"
        f" {whole.parameters + found.added:,} parameters ({share:.2%})"
    ]
    if options.load_bits != 16:
        said.append(
            f"weights in {options.load_bits} bits take {weights / 1e6:,.0f} MB in place of"
            f" {4 * whole.parameters / 1e6:,.0f} on a GPU; that is all they save, and on a CPU nothing"
        )
    if "8bit" in optimizer:
        said.append(
            f"--optimizer {optimizer} saves {6 * found.trained / 1e6:.1f} MB at most: so little is trained"
        )
    return said


def advice(whole: ModelSize, optimizer: str) -> str:
    """What cheaper ways to train all of this model would leave of its weights, gradients and moments."""
    if optimizer != "adamw":
        return ""
    billions = whole.parameters / 1e9
    return (
        f"weights, gradients and moments take {16 * billions:.2f} GB; with --optimizer adamw8bit"
        f" {10 * billions:.2f}, --adapter lora {4 * billions:.2f}, on a GPU --adapter qlora"
        f" {BYTES[4] * billions:.2f}"
    )


def save(model: Any, folder: Path) -> None:
    """As peft saves: PeftModel.from_pretrained opens it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # Left to itself it asks the hub whether the base has as many embeddings.
    found = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = {PREFIX + name: value.detach().cpu().contiguous() for name, value in found.items()}
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)


def opened(folder: Path, bits: int = 16, remote_code: bool = False) -> Any:
    """The base model with the adapter in `folder` upon it."""
    quiet_bitsandbytes()
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig

    known = PeftConfig.from_pretrained(str(folder))
    base = str(known.base_model_name_or_path)
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(f"{folder}: its base model {base} is not there: name it in its {CONFIG_FILE}")
    config = AutoConfig.from_pretrained(base, revision=known.revision, **hub.remote_code_kwargs(remote_code))
    model = load(base, config, known.revision, bits, remote_code)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # other sizes, other names
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder}: is no adapter for {base}: {reason}") from None


def copy(final: Path, folder: Path) -> None:
    """An adapter's files."""
    for file in (FILE, CONFIG_FILE, *TOKENIZER_FILES):
        if (final / file).is_file():
            shutil.copy(final / file, folder)


def compared(one: Any, other: Any, batches: Iterable[Batch]) -> dict[str, Any]:
    """How far apart the logits of two models are over all batches; ExportError where that is too far."""
    import torch

    worst, samples = 0.0, 0
    for batch in batches:
        tokens = batch["tokens"].long()
        with torch.no_grad():
            a, b = (net(input_ids=tokens, use_cache=False).logits for net in (one, other))
        worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1)))
        samples += len(tokens)
    if worst > TOLERANCE:
        raise ExportError(f"merged logits differ by {worst:.1e} of the largest: at most {TOLERANCE:.0e}")
    return {"max_logit_difference": worst, "samples": samples}
