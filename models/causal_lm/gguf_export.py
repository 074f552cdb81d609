"""A model of transformers as one GGUF file, as llama.cpp and what is built on it read them.

The `gguf` package names the tensors and writes the file; what llama.cpp keeps in other numbers than
transformers is changed here (`_stored`). Tensors are read and written in pieces of some rows. Followed:
llama.cpp's convert_hf_to_gguf.py and src/llama-model.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from isobatch.core.errors import ExportError, UserError, explain_errors, refuse
from isobatch.core.package import table_beside
from isobatch.models import lora
from isobatch.models.causal_lm import gguf_vocabulary

WORST = {"F16": 2**-10, "F32": 0.0, "BF16": 2**-8, "Q8_0": 1 / 127}
"""Number format -> most that a weight may be off, by the largest of its tensor. Vectors are F32."""
FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES, BLOCK = 1 << 22, 32
"""Of a tensor in memory, so few that the processor's caches hold them; and weights that q8_0 rounds together:
rows that are no multiple of it stay f16."""
NOT_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Buffers that old files hold."""
TRANSPOSED = re.compile(r"\.c_(attn|proj|fc)\.weight$")
"""GPT-2's matrices."""


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """What llama.cpp calls models of a type, and how its numbers differ from transformers'."""

    arch: str
    activation: Sequence[str] = ("silu",)
    """Names in the config of what llama.cpp computes."""
    pairs_neighbours: bool = False
    """Whether its rotary embedding turns neighbouring numbers of a head, not those of the two halves."""
    norms_from_one: bool = False
    """Whether transformers stores its norms as differences from one."""
    full_every: int = 1
    """One layer in so many sees all tokens, the others a window."""


FAMILIES = {kind: GGUFFamily(**row) for kind, row in table_beside(__file__, "gguf_families").items()}
"""model_type -> its family."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file: its rows are made from those of safetensors when they are written."""

    name: str
    shape: tuple[int, ...]
    kind: str
    rows: Callable[[int, int], Any]
    """(first, last + 1) -> a tensor of these rows, as llama.cpp wants them."""
    together: int = 1
    """Rows that are made together: those of a head, where they change places."""

    @property
    def type(self) -> Any:
        return gguf.GGMLQuantizationType[self.kind]

    @property
    def nbytes(self) -> int:
        weights, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // weights * size

    def pieces(self) -> Iterator[Tensor]:
        """The rows in pieces of some megabytes; a vector is one."""
        count, width = math.prod(self.shape[:-1]), self.shape[-1]
        step = max(1, PIECE_BYTES // (4 * width * self.together)) * self.together
        for first in range(0, count, step):
            yield self.rows(first, min(first + step, count)).reshape(-1, width)

    def tofile(self, file: Any) -> None:
        """Write the tensor: GGUFWriter calls it as it would NumPy's."""
        for piece in self.pieces():
            if dtype := FORMATS.get(self.kind):
                file.write(piece.to(dtype).contiguous().view(torch.uint8).numpy().data)
            else:
                file.write(gguf.quantize(piece.float().numpy(), self.type).data)


def check(config: Any, place: str) -> GGUFFamily:
    """The family of a model, by its config of transformers. Raises UserError, which begins with `place`, for
    what llama.cpp computes otherwise than transformers.
    """
    family, kind = FAMILIES.get(config.model_type), config.model_type
    if family is None:
        raise UserError(
            f"{place}: models of type {kind} cannot be written as GGUF here, only {', '.join(FAMILIES)}: take"
            " the folder of transformers to llama.cpp's own converter"
        )
    keys = ("activation_function", "hidden_act", "hidden_activation")  # Gemma has two, and the last counts
    activation = [found for key in keys if (found := getattr(config, key, None))][-1]
    rope, scale = _rope(config), getattr(config, "query_pre_attn_scalar", None)
    fixed: dict[str, Any] = dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"))
    fixed |= {"beta_fast": 32, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1.0}
    rotary = [name for name, usual in fixed.items() if rope.get(name) not in (usual, None)]
    ropes = ("default", "linear", "yarn", "llama3" if family.arch == "llama" else "")
    layers, every = getattr(config, "layer_types", None) or [], family.full_every
    full = [number for number, layer in enumerate(layers) if layer == "full_attention"]
    # llama.cpp knows the largest Gemmas, of 27B, by their layers.
    is_largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}.get(family.arch)
    known_scale = config.hidden_size // config.num_attention_heads if is_largest else _head_dim(config)
    caps = {bool(getattr(config, f"{name}_logit_softcapping", None)) for name in ("final", "attn")}
    windows = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention", {})
    wrong = {
        f"the activation {activation}": activation not in family.activation,
        f"rope_type {rope.get('rope_type')}": rope.get("rope_type", "default") not in ropes,
        f"this {', '.join(rotary)} of its rotary embedding": rotary,
        "this rope_theta of windows": windows.get("rope_theta", 10000.0) != 10000.0,
        f"query_pre_attn_scalar {scale}": scale is not None and scale != known_scale,
        "attention_bias": getattr(config, "attention_bias", False) and family.arch != "llama",
        "windows in these layers": every > 1 and full != list(range(every - 1, len(layers), every)),
        "attention scaled by layer": getattr(config, "scale_attn_by_inverse_layer_idx", False),
        "this softcapping": caps != {family.arch == "gemma2"},
    }
    refuse({f"{place}: llama.cpp has no {kind} with {what}": is_wrong for what, is_wrong in wrong.items()})
    return family


def _rope(config: Any) -> dict[str, Any]:
    """The rotary embedding's settings, of Gemma 3 those of the layers that see all tokens."""
    found = getattr(config, "rope_parameters", None) or {}
    return dict(found.get("full_attention", found))


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write(source: Path, file: Path, kind: str, place: str) -> dict[str, Any]:
    """Write a model's folder as one GGUF file, matrices in the number format `kind`, and compare the two.

    Returns `bytes` and `max_weight_difference`, by the largest weight of its tensor. Raises UserError, which
    begins with `place`, for a model or a tokenizer that llama.cpp computes otherwise, and ExportError where
    the file holds other numbers than the folder.
    """
    config: Any = AutoConfig.from_pretrained(source)
    family = check(config, place)
    writer = gguf.GGUFWriter(file, family.arch)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    _add_shape(writer, config, family)
    gguf_vocabulary.add(writer, source, config, place)
    if not (files := sorted(source.glob("model*.safetensors"))):
        raise UserError(f"{place}: {source} holds no model.safetensors: copy it from where it was trained")
    with explain_errors(f"{place}: the weights in {source} cannot be read", SafetensorError):
        tensors = list(_tensors(files, config, family, kind, place))
    if (rope := _rope(config)).get("rope_type") == "llama3":
        factors = _llama3_factors(rope, _head_dim(config))
        tensors.append(Stored("rope_freqs.weight", (len(factors),), "F32", lambda *_: factors))
    return _written(writer, file, tensors)


def write_adapter(source: Path, file: Path, place: str) -> dict[str, Any]:
    """Write peft's LoRA in a folder as a GGUF adapter in F32; else as `write`."""
    from peft import LoraConfig

    base, revision = lora.base_model_of(source)
    config: Any = AutoConfig.from_pretrained(base, revision=revision)
    family, adapter = check(config, place), LoraConfig.from_pretrained(str(source))
    more = adapter.use_dora or adapter.modules_to_save or adapter.bias != "none" or adapter.rank_pattern
    refuse({f"{place}: GGUF's adapters are plain LoRA: write the merged model, --to gguf": more})
    writer = gguf.GGUFWriter(file, family.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    # llama.cpp divides by the rank, rank-stabilised LoRA by its root.
    stabilised = math.sqrt(adapter.r) if adapter.use_rslora else 1
    writer.add_float32("adapter.lora.alpha", adapter.lora_alpha * stabilised)
    tensors = list(_tensors([source / lora.ADAPTER_FILE], config, family, "F32", place))
    return _written(writer, file, tensors)


def _add_shape(writer: Any, config: Any, family: GGUFFamily) -> None:
    """The model's sizes and settings, as metadata of the file."""
    window, context = getattr(config, "sliding_window", None), config.max_position_embeddings
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    # Every layer of llama.cpp sees all of such a context: up to the window that is the same.
    writer.add_context_length(min(context, window) if window and family.full_every == 1 else context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family.arch == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = _rope(config)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings") or context)
    if family.full_every > 1:
        writer.add_sliding_window(window)
    if family.arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _tensors(files: list[Path], config: Any, family: GGUFFamily, kind: str, place: str) -> Iterator[Stored]:
    """The tensors of files of safetensors, matrices in the number format `kind`."""
    arch, seen = gguf.MODEL_ARCH[family.arch.upper()], set()
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for file in files:
        with safe_open(file, "pt") as stored:
            shapes = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        for key, shape in shapes.items():
            stem, _, part = key.removeprefix(lora.PEFT_PREFIX).rpartition(".")
            if of_adapter := re.search(r"\.lora_[AB]$", stem):
                stem, part = stem[: of_adapter.start()], f"weight{of_adapter[0].lower()}"
            # Files keep a tied table under one of its names, or under both.
            known = "token_embd" if stem == "lm_head" and config.tie_word_embeddings else names.get_name(stem)
            if known is None and not NOT_WEIGHTS.search(key):
                raise UserError(f"{place}: llama.cpp's {family.arch} has no tensor for {key}")
            name, is_matrix = f"{known}.{part}", len(shape) > 1 and known != "position_embd"
            if name not in seen and not NOT_WEIGHTS.search(key):
                seen.add(name)
                yield _stored(name, file, key, shape, config, family, kind if is_matrix else "F32")


def _stored(
    name: str, file: Path, key: str, shape: tuple[int, ...], config: Any, family: GGUFFamily, kind: str
) -> Stored:
    """The tensor `key` of a file of safetensors as llama.cpp keeps it, under its own name."""
    head, turned = _head_dim(config), family.arch == "gpt2" and TRANSPOSED.search(key)
    changes_places = family.pairs_neighbours and re.search(r"\.(q|k)_proj\.(weight|bias|lora_B)", key)
    one = 1.0 if family.norms_from_one and key.endswith("norm.weight") else 0.0

    def rows(first: int, last: int) -> Tensor:
        with safe_open(file, "pt") as stored:  # opened again, so that what was read leaves the memory
            found: Tensor = stored.get_tensor(key) if len(shape) == 1 else stored.get_slice(key)
            found = found[:, first:last].T if turned else found if len(shape) == 1 else found[first:last]
        if changes_places:
            found = found.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).reshape(found.shape)
        return found.float() + one if one else found

    shape = shape[::-1] if turned else shape
    kind = "F16" if kind == "Q8_0" and shape[-1] % BLOCK else kind
    return Stored(name, shape, kind, rows, head if changes_places else 1)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """By what each frequency of Llama 3.1 is divided (transformers' modeling_rope_utils.py)."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _written(writer: Any, file: Path, tensors: list[Stored]) -> dict[str, Any]:
    """Write the file with these tensors, and read it back: the largest difference, by that of its tensor."""
    for tensor in tensors:
        form = tensor.shape, np.dtype("f4"), tensor.nbytes
        writer.add_tensor_info(tensor.name, *form, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor)
    writer.close()
    sizes = [writer.ggml_pad(tensor.nbytes, writer.data_alignment) for tensor in tensors]
    worst, start = 0.0, file.stat().st_size - sum(sizes)  # GGUFReader takes a minute for a large vocabulary
    for tensor, size in zip(tensors, sizes, strict=True):
        place, most, largest = start, 0.0, 1e-30
        row = tensor.nbytes // math.prod(tensor.shape[:-1])
        for piece in tensor.pieces():
            stored = np.fromfile(file, np.uint8, row * len(piece), offset=place).reshape(len(piece), row)
            dtype, wanted = FORMATS.get(tensor.kind), piece.float()
            found = torch.from_numpy(stored if dtype else gguf.dequantize(stored, tensor.type))
            difference = found.view(dtype or torch.float32) - wanted
            if not difference.isfinite().all():
                way_out = ": take gguf-bf16" if wanted.isfinite().all() else ", and no number"
                raise UserError(f"--to gguf: {tensor.name} is beyond what {tensor.kind} holds{way_out}")
            place, most = place + stored.size, max(most, float(difference.abs().max()))
            largest = max(largest, float(wanted.abs().max()))
        if not most <= WORST[tensor.kind] * largest:
            raise ExportError(f"{file.name}: {tensor.name} differs by {most:.1e} from the trained weights")
        worst, start = max(worst, most / largest), start + size
    return {"bytes": file.stat().st_size, "max_weight_difference": worst}
