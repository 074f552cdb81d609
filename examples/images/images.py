"""Images in a folder per class. They are decoded once, to a fixed size, and lie on disk as uint8.

`--data` is a folder with cat/*.jpg, of which a part is held out, or with train/cat/*.jpg and valid/cat/*.jpg.
Needs Pillow. In this folder:

    isobatch auto --task ./images.py:Images --data pets --size 64 --name pets
    isobatch predict runs/pets --file new_pets --out labels.csv
    isobatch serve runs/pets  # POST /predict with {"rows": [{"image": "the file in base64"}]}
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch import Batch, Columns, Data, Loss, StepContext, Sum, Task, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
BLOCK = 256
"""Images that are in memory at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions:
    """Flags of this kind of data."""

    size: int = 32
    """Pixels of a side: the middle of each image is cut out as a square and scaled."""
    holdout: float = 0.2
    """Share of the images that is held out where the folder has no splits."""


class ImageFolder(Data):
    """Columns `image` (n, size, size, 3) uint8 and `label` (n,) int64."""

    Options = ImageOptions
    assumed: ClassVar = {"classes": ["a", "b"]}

    def check(self) -> None:
        if self.options.size < 8:
            raise UserError(f"--size {self.options.size}: must be at least 8")
        if not 0 <= self.options.holdout < 1:
            raise UserError(f"--holdout {self.options.holdout:g}: must be at least 0 and below 1")
        if not self._classes():
            raise UserError(f"--data {self.recipe.data}: has no images in a folder per class, as cat/1.jpg")

    def identity(self) -> dict[str, Any]:
        """The names, sizes and times of the files, and what becomes of them here."""
        return {**super().identity(), "size": self.options.size, "holdout": self.options.holdout}

    def prepare(self, folder: Path) -> dict[str, Any]:
        """The task finds the names of the classes in `facts.extra`."""
        return {**super().prepare(folder), "classes": self._classes()}

    def read(self) -> Iterator[tuple[str, Columns]]:
        """Blocks of images: all together may be larger than memory."""
        if self.recipe.data == "demo":
            yield "train", _stripes(320, self.options.size)
            yield "valid", _stripes(80, self.options.size, seed=1)
            return
        classes = self._classes()
        for split, files in self._files().items():
            for start in range(0, len(files), BLOCK):
                block = files[start : start + BLOCK]
                label = np.array([classes.index(file.parent.name) for file in block])
                yield split, {"image": self._decode(block), "label": label}

    def read_rows(self) -> Columns:
        """The images of a folder, wherever in it; or those in a csv file, in base64 in the column `image`."""
        place = Path(self.recipe.data)
        if place.suffix == ".csv":
            with place.open(newline="", encoding="utf-8") as stream:
                return {"image": self._decode([_from_base64(row["image"]) for row in csv.DictReader(stream)])}
        files = _images_in(place, "**/*") if place.is_dir() else [place]
        return {"image": self._decode(files), "file": np.array([str(file) for file in files])}

    def _files(self) -> dict[str, list[Path]]:
        """Split -> its files. Where the folder has no splits an image is held out by its name."""
        root = Path(self.recipe.data).expanduser()
        patterns = {"train": "train/*/*", "valid": "val*/*/*", "test": "test/*/*"}
        given = {split: _images_in(root, pattern) for split, pattern in patterns.items()}
        if given["train"]:
            return given
        found: dict[str, list[Path]] = {"train": [], "valid": []}
        for file in _images_in(root, "*/*"):
            digest = hashlib.sha256(f"{file.parent.name}/{file.name}".encode()).digest()
            is_held_out = int.from_bytes(digest[:4]) < self.options.holdout * 2**32
            found["valid" if is_held_out else "train"].append(file)
        return found

    def _classes(self) -> list[str]:
        if self.recipe.data == "demo":
            return ["across", "down"]
        return sorted({file.parent.name for files in self._files().values() for file in files})

    def _decode(self, files: Sequence[Path | io.BytesIO]) -> np.ndarray:
        """(n, size, size, 3) uint8."""
        from PIL import Image, ImageOps

        size, decoded = self.options.size, np.empty((len(files), *[self.options.size] * 2, 3), np.uint8)
        for place, file in enumerate(files):
            try:
                with Image.open(file) as image:
                    whole = ImageOps.exif_transpose(image).convert("RGB")
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                name = file if isinstance(file, Path) else f"image {place + 1}"
                raise UserError(f"{name}: is no image that can be read") from None
            decoded[place] = np.asarray(ImageOps.fit(whole, (size, size)))
        return decoded


def _images_in(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.suffix.lower() in ENDINGS)


def _from_base64(text: str) -> io.BytesIO:
    return io.BytesIO(base64.b64decode(text))


def _stripes(count: int, size: int, seed: int = 0) -> Columns:
    """Stripes that run across, or down, in grey with noise."""
    generator = np.random.default_rng(seed)
    label = np.arange(count) % 2
    wave = np.sin(np.arange(size) + generator.uniform(0, 6, (count, 1)))
    across = np.broadcast_to(wave[:, :, None], (count, size, size))
    grey = np.where(label[:, None, None] == 0, across, across.transpose(0, 2, 1))
    image = 128 + 60 * grey[..., None] + generator.normal(0, 40, (count, size, size, 3))
    return {"image": image.clip(0, 255).astype(np.uint8), "label": label}


class Images(Task):
    """A small convolutional network. Its norm is of each sample: BatchNorm would see how batches are cut."""

    data = ImageFolder
    defaults = {"epochs": 10, "lr": 3e-3, "batch_size": 32}
    monitor = ("accuracy", "max")

    def build_model(self, facts: Any) -> nn.Module:
        from torch import nn

        self.classes = facts.extra["classes"]
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.GroupNorm(4, outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(self.classes)))

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        from torch.nn import functional

        logits = model(_as_input(_augmented(batch["image"], step)))
        return {"loss": Loss(functional.cross_entropy(logits, batch["label"], reduction="sum"), "sample")}

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum]:
        from torch.nn import functional

        logits, label = model(_as_input(batch["image"])), batch["label"]
        return {
            "loss": Sum(functional.cross_entropy(logits, label, reduction="sum"), len(label)),
            "accuracy": Sum((logits.argmax(1) == label).sum(), len(label)),
        }

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        probability, label = model(_as_input(batch["image"])).softmax(1).max(1)
        return {"label": [self.classes[n] for n in label.tolist()], "probability": probability}


def _as_input(image: torch.Tensor) -> torch.Tensor:
    """(B, H, W, 3) uint8 -> (B, 3, H, W), mean about 0."""
    return image.permute(0, 3, 1, 2).float() / 127.5 - 1


def _augmented(image: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Each image moved by up to an eighth of its side, and every other one mirrored.

    The draws are keyed by the sample and the step: the same however batches are cut.
    """
    import torch
    from torch.nn import functional

    count, size = image.shape[:2]
    edge = size // 8
    corner = step.noise.integers("crop", (2,), high=2 * edge + 1)
    is_mirrored = step.noise.uniform("mirror", (1,)) < 0.5
    along = torch.arange(size, device=image.device)
    rows, columns = corner[:, :1] + along, corner[:, 1:] + along
    columns = torch.where(is_mirrored, columns.flip(1), columns)
    padded = functional.pad(image, (0, 0, edge, edge, edge, edge))
    each = torch.arange(count, device=image.device)
    return padded[each[:, None, None], rows[:, :, None], columns[:, None, :]]
