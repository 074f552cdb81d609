"""Adapters: LoRA, DoRA and QLoRA for causal language models, by peft and bitsandbytes.

Few weights train beside frozen ones, which may be held in 8 or 4 bits. Papers: LoRA (Hu et al. 2021), DoRA
(Liu et al. 2024), QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.errors import ExportError, UserError
from isobatch.core.flags import ADDED_LATER
from isobatch.core.number_ranges import Positive, Probability
from isobatch.models import hub

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from isobatch.models.base import Batch

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MERGE_TOLERANCE = 1e-4
"""Most that logits may differ between a merged and an unmerged adapter, relative to the largest logit."""
PEFT_PREFIX = "base_model.model."
"""What peft's wrapper model puts before the names of a model's parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The flags of adapters."""

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
    frozen_dtype: Literal["bf16", "fp32"] = field(default="fp32", metadata=ADDED_LATER)
    """What frozen matrices and tables are rounded to; bf16, half the memory, unless fp32 is asked for."""


def implied_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a new recipe's --adapter implies unless it is given: --frozen-dtype bf16; qlora: --load-bits 4."""
    if values.get("adapter", "none") == "none":
        return {}
    implied = {"frozen_dtype": "bf16"} | ({"load_bits": 4} if values["adapter"] == "qlora" else {})
    return {name: value for name, value in implied.items() if name not in values}


def check_options(options: Any, pretrained: bool) -> None:
    """Raise UserError if the adapter's flags contradict each other or the model.

    `pretrained`: whether the model is loaded, not trained from scratch.
    """
    if options.adapter == "none":
        if unused := [f.name for f in dataclasses.fields(AdapterOptions) if _is_set_lora_option(f, options)]:
            flag = "--" + unused[0].replace("_", "-")
            raise UserError(f"{flag}: means nothing without an adapter: add --adapter lora, or leave it out")
        if options.load_bits != 16:
            raise UserError(
                f"--load-bits {options.load_bits}: rounded weights cannot train: add --adapter lora (which is"
                " --adapter qlora with 4 bits)"
            )
        if options.frozen_dtype != "fp32":
            raise UserError(
                "--frozen-dtype bf16: without an adapter nothing is frozen: add --adapter lora, or leave out"
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


def _is_set_lora_option(field: dataclasses.Field[Any], options: Any) -> bool:
    """Whether a --lora-* flag has another value than its default."""
    return field.name.startswith("lora_") and getattr(options, field.name) != field.default


def load_base_model(
    path: str,
    config: Any,
    revision: str | None,
    bits: int = 16,
    remote_code: bool = False,
    frozen_dtype: str = "fp32",
    device: Any = "cpu",
) -> nn.Module:
    """The pretrained model in fp32 on the CPU, its matrices in `bits` bits or, of 16, in `frozen_dtype`.

    Matrices in 8 or 4 bits, and all else of that model, are on `device`: bitsandbytes cannot move the
    statistics of 8-bit matrices afterwards.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    arguments: dict[str, Any] = {}
    if bits != 16:
        arguments = {"quantization_config": _quantization_config(bits), "device_map": {"": device}}
    rounds = frozen_dtype == "bf16"
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        revision=revision or "main",
        dtype="auto" if rounds and bits == 16 else torch.float32,
        **arguments,
        **hub.remote_code_kwargs(remote_code),
    )
    if rounds:
        from isobatch.models.causal_lm.frozen_weights import hold_matrices_in_bf16

        hold_matrices_in_bf16(model)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.register_forward_pre_hook(_follow_autocast)
            # Otherwise an evaluation repacks the weights for an AVX-512 kernel, and training misreads them.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def _follow_autocast(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Make a 4-bit layer compute in the precision that the plan trains in, by its `compute_dtype`."""
    import torch

    kind = arguments[0].device.type
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else arguments[0].dtype
    if module.compute_dtype != wanted:  # what changes nothing does not keep a block from being compiled
        module.compute_dtype = wanted  # type: ignore[assignment]


def _quantization_config(bits: int) -> Any:
    try:
        importlib.import_module("bitsandbytes")
    except ImportError:
        raise UserError(f"--load-bits {bits} needs: pip install bitsandbytes") from None
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def add_adapter(model: nn.Module, options: Any, base: str, revision: str | None) -> None:
    """Add adapters to a model in place; its other weights are frozen, except the biases of --lora-bias."""
    quiet_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model

    from isobatch.models.causal_lm.frozen_weights import hold_in_fp32, matrices_in_fp32

    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision,
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        bias=options.lora_bias,
        fan_in_fan_out=any(type(m).__name__.endswith("Conv1D") for m in model.modules()),
        use_dora=options.adapter == "dora",
        target_modules=_target_modules(model, options.lora_targets),
    )
    check_targets(block_matrices(model), options.lora_targets)
    # The magnitudes of DoRA are the norms of the matrices, and peft gives them the matrices' number format.
    whole = matrices_in_fp32(model) if options.adapter == "dora" else contextlib.nullcontext()
    with whole:
        inject_adapter_in_model(config, model)
    hold_in_fp32(p for p in model.parameters() if p.requires_grad)


def check_targets(matrices: Iterable[str], wanted: str) -> None:
    """Raise UserError unless each name of --lora-targets is one of `matrices`, those of the blocks.

    Embeddings and head are refused: they may be one tied table.
    """
    if wanted in ("auto", "all-linear"):
        return
    for name in (name.strip() for name in wanted.split(",")):
        if not any(f".{matrix}".endswith(f".{name}") for matrix in matrices):
            known = sorted({matrix.rpartition(".")[2] for matrix in matrices})
            raise UserError(
                f"--lora-targets {wanted}: {name} is no matrix of the blocks; there are {', '.join(known)}"
            )


def quiet_bitsandbytes() -> None:
    """Silence bitsandbytes' warnings about missing kernels; call it before peft is imported."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def block_matrices(model: Any) -> dict[str, Any]:
    """Name -> module of all matrices in the transformer blocks: neither embeddings nor the head."""
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if _is_matrix(m) and m is not head}


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2 and "Embedding" not in type(module).__name__


def _target_modules(model: Any, wanted: str) -> Any:
    """Names of the modules that get an adapter; None lets peft choose for the model types that it knows."""
    if wanted not in ("auto", "all-linear"):
        return [name.strip() for name in wanted.split(",")]
    if wanted == "auto" and usual_targets(model.config.model_type):
        return None
    return sorted(block_matrices(model))


def usual_targets(model_type: str) -> list[str] | None:
    """The names that peft adapts in models of this type; None where it knows none."""
    quiet_bitsandbytes()
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN_TARGETS

    names = KNOWN_TARGETS.get(model_type)
    return list(names) if names else None


def save_adapter(model: Any, folder: Path) -> None:
    """Save the adapter as peft does: PeftModel.from_pretrained opens the folder."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    # The default would ask the hub for the base model's number of embeddings.
    found = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = {PEFT_PREFIX + name: value.detach().cpu().contiguous() for name, value in found.items()}
    save_file(weights, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = model.peft_config["default"]
    config.inference_mode = True
    config.save_pretrained(folder)


def open_adapted_model(folder: Path, bits: int = 16, remote_code: bool = False) -> Any:
    """The base model with the adapter in `folder`. Raises UserError if they do not fit together."""
    quiet_bitsandbytes()
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig

    if not (folder / ADAPTER_FILE).is_file():  # peft would read a pickled one
        raise UserError(f"{folder}: holds no {ADAPTER_FILE}")
    known = PeftConfig.from_pretrained(str(folder))
    if getattr(known, "megatron_config", None):  # peft would import the module that it names
        raise UserError(f"{folder}: its {CONFIG_FILE} is one of Megatron: it is no adapter of isobatch")
    base = str(known.base_model_name_or_path)
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UserError(f"{folder}: its base model {base} is not there: name it in its {CONFIG_FILE}")
    config = AutoConfig.from_pretrained(base, revision=known.revision, **hub.remote_code_kwargs(remote_code))
    model = load_base_model(base, config, known.revision, bits, remote_code)
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # the shapes or the names do not match
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder}: is no adapter for {base}: {reason}") from None


def rounding_of(options: Any, config: Mapping[str, Any]) -> str:
    """What training rounded the frozen matrices to; empty where they have their checkpoint's own values.

    `config`: the base model's config.json.
    """
    if options.load_bits != 16:
        return f"{options.load_bits} bits"
    stored = config.get("dtype") or config.get("torch_dtype")
    return "" if options.frozen_dtype == "fp32" or stored == "bfloat16" else options.frozen_dtype


def copy_adapter_files(final: Path, folder: Path) -> None:
    """Copy the adapter and its tokenizer from `final` to `folder`."""
    for file in (ADAPTER_FILE, CONFIG_FILE, *TOKENIZER_FILES):
        if (final / file).is_file():
            shutil.copy(final / file, folder)


def check_same_logits(one: Any, other: Any, batches: Iterable[Batch]) -> dict[str, Any]:
    """Largest difference of two models' logits over all batches, relative to the largest logit.

    Raises ExportError above MERGE_TOLERANCE.
    """
    import torch

    worst, samples = 0.0, 0
    for batch in batches:
        tokens = batch["tokens"].long()
        with torch.no_grad():
            a, b = (net(input_ids=tokens, use_cache=False).logits for net in (one, other))
        worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1)))
        samples += len(tokens)
    if worst > MERGE_TOLERANCE:
        raise ExportError(
            f"merged logits differ by {worst:.1e} of the largest: at most {MERGE_TOLERANCE:.0e}"
        )
    return {"max_logit_difference": worst, "samples": samples}
