"""The workload qat: quantization-aware training of a classifier to 4-bit weights and 8-bit activations.

python -m launch auto --task qat --pruned runs/pruning-0123456789ab --data FOLDER
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.extras import need
from isobatch.models import saving
from isobatch.models.base import CHANGES_SHAPE, Batch, ModelSize, Phase
from isobatch.models.classification.distillation import DistillationOptions, DistilledClassifier
from isobatch.models.classification.task import SITUATIONS, onnx_variants
from isobatch.models.encoder import encoders, evaluation
from isobatch.models.encoder import export as exporting
from isobatch.models.model_card import ModelDescription, usage_lines

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.models.protocols import Batches

CALIBRATION_SAMPLES = 256
"""Training samples from which the ranges of the activations are chosen."""
QUANTIZERS_FILE = "quantizers.safetensors"
"""Scales and zero points in final/."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QATOptions(DistillationOptions):
    """The flags of quantization-aware training."""

    pruned: str | None = None
    """The classifier to quantize, pruned or not: a run, a folder or a hub id. It is the teacher too."""
    bits: Literal[4, 8] = 4
    """Bits of a weight, with a scale per output channel; activations have 8, with one per tensor."""
    embedding_bits: Literal[4, 8, 32] = 8
    """Bits of a word embedding, with a scale per word; 32 leaves all embeddings as they are."""


class QAT(DistilledClassifier):
    """Fake-quantizes in the forward, learns the scales with the weights, exports the ONNX file that runs.

    Without --pruned or a finished classifier as --model, a phase of its own trains the baseline first.
    """

    Options: ClassVar[type] = QATOptions
    initial_model_option: ClassVar[str] = "pruned"
    follow_ups: ClassVar = ('predict {run} "a" "b"', "report {run}", "export {run} --to onnx")
    exports: ClassVar[tuple[str, ...]] = ("hf", "dense", "onnx", "onnx-int8", "onnx-int4")
    defaults, fast, demo = (SITUATIONS["qat"][name] for name in ("defaults", "fast", "demo"))

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        own = f"onnx-int{options.bits}"  # a run has one of the two
        self.exports = (*self.exports[:-2], own)  # type: ignore[misc]
        self._levels: dict[str, int] = {}
        self._file_name = exporting.ONNX_FILES[own]
        """Of the ONNX file in final/."""

    def phases(self) -> list[Phase]:
        if self.teacher_name:
            return [Phase(name="qat", rounds=True)]
        return [Phase(name="train", early_stopping=False), Phase(name="qat", share=0.5, rounds=True)]

    def check(self) -> None:
        super().check()
        # Said before it trains: its last act is to write such a file.
        for library in ("onnx", "onnxruntime", "onnxscript"):
            need(library, f"--task {self.recipe.task}")

    def model_size(self, facts: Facts) -> ModelSize:
        """A run of two phases has two shapes, so its model cannot be sharded. A teacher stays in memory."""
        why = "" if self.teacher_name else CHANGES_SHAPE
        size = super().model_size(facts)
        return dataclasses.replace(size, rounds=True, why_unshardable=why, cached_bytes=size.weight_bytes)

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Quantize the model, with activation ranges calibrated on the first training samples."""
        from isobatch.models.encoder import quantization

        if phase == "qat" and not quantization.quantizers(model):
            quantization.quantize_model(model, self.options.bits, self.options.embedding_bits)
            model.to(next(model.parameters()).device)  # the quantizers are new, on the CPU
            batches = first(CALIBRATION_SAMPLES)
            quantization.calibrate(model, (self.forward(model, batch) for batch in batches))
        self._levels = quantization.levels_of_scales(model)

    def rate_share(self, name: str) -> float:
        """A range learns at the rate of weights, so a scale, the range over its levels, at a share of it:
        at the whole rate the scales of 8 bits reached zero in one step of 1e-3.
        """
        return super().rate_share(name) / self._levels.get(name, 1)

    def export(self, model: nn.Module, folder: Path, facts: Facts) -> None:
        """The ONNX file, the rounded weights as a folder for AutoModel, and the scales beside them."""
        from safetensors.torch import save_file

        from isobatch.models.encoder import onnx_graph, quantization

        weights, quantized = quantization.split_state(model)
        saving.save(model, facts, folder, weights)
        encoders.write_layer_sizes(model, folder)
        metadata = {"bits": str(self.options.bits), "embedding_bits": str(self.options.embedding_bits)}
        save_file(quantized, folder / QUANTIZERS_FILE, metadata=metadata)
        onnx_graph.classifier_program(open_quantized(folder)).save(folder / self._file_name)

    def _open_trained(self, final: Path) -> Any:
        """With its activations rounded as in training."""
        return open_quantized(final)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        """The lines for onnxruntime: they need no torch."""
        described = super().describe_model(final, facts)
        text = evaluation.example_texts(facts)
        usage = usage_lines(__file__, file=self._file_name, text=text, length=self.recipe.max_length)
        beside = "model.safetensors has the same weights, rounded, for transformers"
        title = f"{described.title}, quantized"
        return dataclasses.replace(described, title=title, usage=usage, remark=beside)

    def variants(self, final: Path, exports: Path) -> dict[str, Path]:
        """The ONNX file in final/, and the exports that were made."""
        (others := onnx_variants(exports)).pop(name := f"onnxruntime {self.options.bits}-bit", None)
        return {name: final / self._file_name, **others}

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Batches
    ) -> Mapping[str, Any]:
        """onnx-int8 and onnx-int4: the file in final/. Others round weights alone."""
        if not kind.startswith("onnx-int"):
            return super().export_as(kind, final, folder, facts, batches)
        exporting.copy_beside(final, folder, self._file_name)
        return exporting.check_quantized(open_quantized(final), folder / self._file_name, batches)

    def final_metrics(self, model: nn.Module, final: Path, facts: Facts, batches: Batches) -> dict[str, Any]:
        """The exported file compared with the trained model, and with the teacher."""
        file = final / self._file_name
        run = evaluation.onnx_runner(file, threads=1)
        found: dict[str, Any] = {
            "bits": self.options.bits,
            **exporting.check_quantized(open_quantized(final), file, batches),
            "file_bytes": file.stat().st_size,
        }
        return {**found, **self.against_teacher(run, batches), **self.settle(run, final, facts, batches)}


def open_quantized(folder: Path) -> Any:
    """The trained model of a finished run's final/, with its quantized layers, in evaluation mode."""
    from safetensors import safe_open

    from isobatch.models.encoder import quantization

    model = encoders.open_classifier(str(folder))
    with safe_open(folder / QUANTIZERS_FILE, framework="pt") as file:
        metadata = file.metadata()
        quantization.quantize_model(model, int(metadata["bits"]), int(metadata["embedding_bits"]))
        names = file.keys()
        model.load_state_dict({name: file.get_tensor(name) for name in names}, strict=False)
    return model.eval()
