"""Adapters for causal language models: their flags, and the frozen model, perhaps in 8 or 4 bits.

Few weights train beside frozen ones, which may be held in 8 or 4 bits. Papers: LoRA (Hu et al. 2021), DoRA
(Liu et al. 2024), QLoRA (Dettmers et al. 2023).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.errors import ExportError, refuse
from isobatch.core.extras import need
from isobatch.core.flags import spelling
from isobatch.core.number_ranges import AboveZero, Positive, Probability
from isobatch.models import hub, lora

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.models.base import Batch

MERGE_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Most that logits may differ between a merged and an unmerged adapter, relative to the largest logit, by the
number format in which both compute."""
LOGIT_BYTES = 1 << 30
"""A merged model is compared on the held-out samples whose logits fit into so much memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """The flags of adapters."""

    lora_r: Positive = 8
    """Rank of the adapter's matrices."""
    lora_alpha: Positive = 16
    """The adapter's part is scaled by alpha / r."""
    lora_dropout: Probability = 0.05
    """Dropout of what the adapter reads."""
    lora_targets: str = "auto"
    """Which matrices get one: names such as query,value; all-linear; auto: those usual for the model."""
    lora_scale: Literal["r", "rs"] = "r"
    """What alpha is divided by: r, or its root, by which a high rank learns as fast as a low one (rsLoRA,
    Kalajdzievski 2023)."""
    lora_plus: AboveZero = 1.0
    """The learning rate of an adapter's second matrix, B, over --lr (LoRA+, Hayou et al. 2024, has 16)."""
    lora_init: Literal["kaiming", "gaussian", "pissa"] = "kaiming"
    """How an adapter begins: A drawn, evenly or normally, and B 0; or the largest r singular values of its
    matrix, which it then holds no more (PiSSA, Meng et al. 2024; its final/ has rank 2 r beside the base)."""
    lora_layers: str | None = None
    """Layers that get one, counted from 0, such as 8-15 or 0,4-7; by default all."""
    lora_experts: bool = False
    """Adapt the experts of a mixture too; without --lora-dropout."""
    lora_bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases train too."""
    adapter: Literal["none", "lora", "qlora", "dora"] = "none"
    """Train few weights beside the model's own, which stay as they are. qlora: lora beside 4-bit weights. By
    default --lr is then 2e-4 and --frozen-dtype bf16; without one, --lr of a loaded model is 5e-5."""
    load_bits: Literal[16, 8, 4] = 16
    """Bits of frozen matrices. 8 and 4 are for adapters, and save the memory of weights."""
    frozen_dtype: Literal["bf16", "fp32"] = "fp32"
    """What frozen matrices and tables are rounded to. With --adapter bf16, half the memory, unless fp32 is
    asked for; without one nothing is frozen."""
    also_train: tuple[Literal["embeddings", "head"], ...] | None = None
    """Tables that train whole beside the adapter, in fp32: embeddings, head. New tokens need both; where they
    are one tied table, either means both."""


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
    adapter, bits = options.adapter, options.load_bits
    biases, trains_all = options.lora_bias, adapter == "none"
    changed = [f.name for f in fields(AdapterOptions) if getattr(options, f.name) != f.default]
    given = [spelling(name) for name in changed if name not in ("adapter", "load_bits")]
    refuse(
        {
            f"{', '.join(given)}: means nothing without an adapter, as all weights train: add --adapter"
            " lora": trains_all and given,
            f"--adapter {adapter}: a model from scratch has nothing to adapt; give --model a folder or hub"
            " id": not (trains_all or pretrained),
            f"--load-bits {bits}: rounded weights cannot train: add --adapter lora (which is --adapter"
            " qlora with 4 bits)": trains_all and bits != 16,
            "--adapter dora: needs the weights' norms, which 8 bits do not give: use --load-bits 4": (
                adapter == "dora" and bits == 8
            ),
            "--adapter dora: has lengths of its own to begin with: leave --lora-init pissa out": (
                adapter == "dora" and options.lora_init == "pissa"
            ),
            "--lora-experts: takes --adapter lora or qlora with another --lora-init than pissa": (
                options.lora_experts and (adapter == "dora" or options.lora_init == "pissa")
            ),
            f"--lora-experts: experts have no dropout, and --lora-dropout is {options.lora_dropout:g}: say"
            " --lora-dropout 0": options.lora_experts and options.lora_dropout > 0,
            f"--lora-bias {biases}: 4-bit layers round their biases to the type they compute in: leave it"
            " out, or use --load-bits 8": biases != "none" and bits == 4,
            f"--load-bits {bits}: qlora means 4; with 8 say --adapter lora": adapter == "qlora" and bits != 4,
        }
    )


def load_base_model(
    path: str,
    config: Any,
    revision: str | None,
    bits: int = 16,
    remote_code: bool = False,
    device: Any = "cpu",
    as_stored: bool = False,
) -> nn.Module:
    """The pretrained model in fp32 on the CPU, its matrices in `bits` bits.

    With `as_stored` and 16 bits all is in the number format of its files.

    Matrices in 8 or 4 bits, and all else of that model, are on `device`: bitsandbytes cannot move the
    statistics of 8-bit matrices afterwards.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        revision=revision or "main",
        dtype="auto" if as_stored and bits == 16 else torch.float32,
        **quantized_loading(bits, device),
        **hub.remote_code_kwargs(remote_code),
    )
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.register_forward_pre_hook(_follow_autocast)
            # Otherwise an evaluation repacks the weights for an AVX-512 kernel, and training misreads them.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def _follow_autocast(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Make a 4-bit layer compute in the precision that the plan trains in, by its `compute_dtype`."""
    from isobatch.models.causal_lm.frozen_weights import product_dtype

    wanted = product_dtype(arguments[0])
    if module.compute_dtype != wanted:  # what changes nothing does not keep a block from being compiled
        module.compute_dtype = wanted  # type: ignore[assignment]


def quantized_loading(bits: int, device: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` for matrices in 8 or 4 bits; none for 16. Raises UserError."""
    if bits == 16:
        return {}
    need("bitsandbytes", f"--load-bits {bits}")
    importlib.import_module("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4")
    return {"quantization_config": config, "device_map": {"": device}}


def add_adapter(
    model: nn.Module, options: Any, base: str, revision: str | None, also: Sequence[str] = ()
) -> None:
    """Add adapters to a model in place; its other weights are frozen, and rounded as --frozen-dtype says,
    except the biases of --lora-bias, the tables of --also-train, and the modules `also`.

    `base`: the model's folder or hub id, which a saved adapter names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from isobatch.models.causal_lm.frozen_weights import held_in_fp32, hold_matrices_in_bf16

    folder, head = Path(base).expanduser(), [*lora.modules_named(model, options.also_train or ()), *also]
    if options.frozen_dtype == "bf16":
        hold_matrices_in_bf16(model, head)
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
        use_rslora=options.lora_scale == "rs",
        init_lora_weights="gaussian" if options.lora_init == "gaussian" else True,
        target_modules=lora.target_modules(model, options.lora_targets, options.lora_layers, head),
        target_parameters=lora.adapted_experts(lora.expert_tensors(model), options) or None,
    )
    lora.check_targets(lora.block_matrices(model, head), options.lora_targets)
    # The magnitudes of DoRA are the norms of the matrices, and peft gives them the matrices' number format.
    with held_in_fp32(model) if options.adapter == "dora" else contextlib.nullcontext():
        inject_adapter_in_model(config, model)
    if options.lora_init == "pissa":
        lora.begin_with_principal_parts(model, config)
    for name in head:
        model.get_submodule(name).requires_grad_(True)
    for p in (p for p in model.parameters() if p.requires_grad):
        p.data = p.data.float()


def open_adapted_model(folder: Path, bits: int = 16, remote_code: bool = False, **more: Any) -> Any:
    """The base model with the adapter in `folder`; `more` as of `load_base_model`.

    Raises UserError if they do not fit together.
    """
    base, revision = lora.base_model_of(folder)
    return lora.put_adapter(load_base_model(base, None, revision, bits, remote_code, **more), folder, base)


def first_logits(model: Any, batches: Iterable[Batch]) -> list[tuple[Tensor, Tensor]]:
    """(tokens, logits) of the batches' rows, as many as LOGIT_BYTES hold: the model need not stay in memory.
    A sample may have several rows.
    """
    import torch

    found: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        tokens = batch["tokens"].flatten(0, -2).long()
        with torch.no_grad():
            found.append((tokens, model(input_ids=tokens, use_cache=False).logits))
        if sum(logits.nbytes for _, logits in found) > LOGIT_BYTES:
            break
    return found


def check_same_logits(trained: Sequence[tuple[Tensor, Tensor]], model: Any) -> dict[str, Any]:
    """Largest difference of a model's logits from those of `first_logits`, relative to the largest logit.

    Raises ExportError above MERGE_TOLERANCE.
    """
    worst, samples = 0.0, 0
    for tokens, wanted in trained:
        ((_, found),) = first_logits(model, [{"tokens": tokens}])
        difference = (wanted - found).float().abs().max()
        worst = max(worst, float(difference / wanted.float().abs().max().clamp_min(1)))
        samples += len(tokens)
    most = MERGE_TOLERANCE[str(trained[0][1].dtype).removeprefix("torch.")] if trained else 0.0
    if not worst <= most:
        raise ExportError(f"merged logits differ by {worst:.1e} of the largest: at most {most:.0e}")
    return {"max_logit_difference": worst, "samples": samples}
