"""Keyed noise: random draws that depend on (seed, step, sample, site, position) alone.

They are the same for any micro-batching, number of processes, padding and device, because a draw is a hash
and there is no generator state. Each row of a batch gets a 64-bit key from (seed, step, sample, site); the
bits at a position are two rounds of a 32-bit integer finaliser (Wellons 2018, "lowbias32") over the position,
with half of the key added before and the other half mixed in between. Positions count along the row in C
order, so padding on the right of the second dimension changes no draw.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.loading.device_copies import array_to_device
from isobatch.engine.loading.permutation import mix_bits
from isobatch.models.fused_kernels import fused_on_gpu

_CHUNK = 1 << 15
"""Pairs hashed at a time on a CPU: 128 KB of uint32, so that all passes stay in the L2 cache."""
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
_CALL_STRIDE = 0x3C6EF372
"""Added to both halves of a key for each further call of one module in one forward."""


class KeyedNoise:
    """The noise of one run. `bind` it to a micro-batch, then draw; the same draw gives the same numbers.

    `rows_per_sample`: rows of the model's input for each sample; B below counts rows.
    """

    def __init__(self, seed: int, rows_per_sample: int = 1) -> None:
        self.seed, self.rows_per_sample = seed, rows_per_sample
        self.sites: dict[str, NoiseSite] = {}
        self.rows = 0
        self.packed_rows: Any = None
        """The `PackedLayout` of the rows (model_setup/packing.py); None while they are padded."""
        self._bound = (0, np.empty(0, np.int64))
        """Step and sample numbers. They are hashed at the first draw: most tasks draw nothing."""
        self._row_keys: np.ndarray | None = None
        self._device = torch.device("cpu")

    def register(self, site: str) -> NoiseSite:
        """The site of this name. Keys of all sites are computed together, once per micro-batch."""
        return self.sites.setdefault(site, NoiseSite(self, site))

    def bind(self, step: int, samples: np.ndarray, device: torch.device) -> None:
        """Key further draws by this optimizer step and these sample numbers, 1-d."""
        self._bound, self._row_keys, self._device = (step, samples), None, device
        self.rows = len(samples) * self.rows_per_sample
        for site in self.sites.values():
            site.calls = 0
        if self.sites:
            keys = np.stack([self._site_keys(name) for name in self.sites])
            for site, own in zip(self.sites.values(), array_to_device(keys, device).unbind(), strict=True):
                site.keys = own

    @contextlib.contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore binding and draw counts afterwards, so that other samples can be bound inside."""
        before, sites = dict(vars(self)), [(site, site.keys, site.calls) for site in self.sites.values()]
        yield
        vars(self).update(before)
        for site, keys, calls in sites:
            site.keys, site.calls = keys, calls

    def _site_keys(self, site: str) -> np.ndarray:
        """(B, 2) int32 keys of a site."""
        name = np.frombuffer(hashlib.blake2b(site.encode(), digest_size=8).digest(), np.uint64)
        if self._row_keys is None:
            self._row_keys = _hash_rows(self.seed, *self._bound, self.rows_per_sample)
        return mix_bits(self._row_keys ^ name).view(np.int32).reshape(-1, 2)

    def bits(self, site: str, count: int, salt: int = 0) -> Tensor:
        """(B, count) int32 of random bits. `salt`: another draw of the same site."""
        key = array_to_device(self._site_keys(f"{site}#{salt}" if salt else site), self._device)
        return hash_bits(key, count)

    def uniform(self, site: str, shape: Sequence[int], salt: int = 0) -> Tensor:
        """(B, *shape) float32 in [0, 1), multiples of 2^-24."""
        bits = self.bits(site, math.prod(shape), salt)
        return ((bits >> 8) & 0xFFFFFF).float().mul_(2.0**-24).view(self.rows, *shape)

    def normal(self, site: str, shape: Sequence[int]) -> Tensor:
        """(B, *shape) float32, standard normal (Box and Muller 1958)."""
        radius = self.uniform(site, shape, 1).neg_().add_(1).log_().mul_(-2).sqrt_()
        return radius * self.uniform(site, shape, 2).mul_(2 * math.pi).cos_()

    def integers(self, site: str, shape: Sequence[int], high: int) -> Tensor:
        """(B, *shape) int64 in [0, high); the bias is below high / 2^32."""
        bits = self.bits(site, math.prod(shape)).to(torch.int64) & 0xFFFFFFFF
        return ((bits * high) >> 32).view(self.rows, *shape)


def _hash_rows(seed: int, step: int, samples: np.ndarray, rows_per_sample: int) -> np.ndarray:
    """(B,) uint64 keys of the rows of these samples."""
    numbers = np.add.outer(np.asarray(samples, np.int64) * rows_per_sample, np.arange(rows_per_sample))
    key = mix_bits(np.array([seed], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    key = mix_bits(key ^ np.array([step], np.uint64))
    return mix_bits(key + numbers.reshape(-1).astype(np.uint64))


class NativeNoise:
    """The noise that tasks get under `--noise native`: it refuses every draw with TrainingError.

    Draws of torch's generators would depend on the division into micro-batches.
    """

    def _refuse(self, site: str, *_: object) -> Tensor:
        raise TrainingError(f"this task draws noise ({site}) of its own: use --noise keyed")

    uniform = normal = integers = _refuse


class NoiseSite:
    """One place in a model that draws noise, such as a dropout module."""

    def __init__(self, noise: KeyedNoise, name: str) -> None:
        self.noise, self.name = noise, name
        self.keys: Tensor | None = None
        """(B, 2) int32, a tensor of its own: by a number of the site each site would be compiled anew."""
        self.calls = 0
        """Draws so far for the bound micro-batch."""

    def draw(self) -> Tensor:
        """(B, 2) int32 keys: others at each call in a forward pass, the same again when it is recomputed.

        Raises UserError where it is unknown which call is to be repeated.
        """
        keys = self.keys
        assert keys is not None, "noise drawn outside a bound micro-batch"
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            # Inside a backward pass (torch has no public way to ask): activations are being recomputed.
            if self.calls > 1:
                raise UserError(
                    f"dropout {self.name} is called several times in a forward, so its noise cannot be"
                    " recomputed: use --activation-checkpointing off or --noise native"
                )
            return keys
        self.calls += 1
        return keys if self.calls == 1 else keys + (self.calls - 1) * _CALL_STRIDE


def hash_bits(keys: Tensor, count: int) -> Tensor:
    """(B, count) int32 hashes of positions 0..count-1 under (B, 2) int32 keys."""
    if keys.device.type != "cpu" or torch.compiler.is_compiling():
        return _hash_on_device(keys, count)
    out = torch.empty(len(keys), count, dtype=torch.int32)
    _hash_on_cpu(out.numpy().view(np.uint32), np.ascontiguousarray(keys.numpy()).view(np.uint32))
    return out


def _hash_on_cpu(out: np.ndarray, keys: np.ndarray) -> None:
    """Hash into `out` by chunks, in numpy: its unsigned shift needs fewer passes than torch's signed one."""
    count = out.shape[1]
    positions = np.arange(count, dtype=np.uint32)
    scratch = np.empty(_CHUNK, np.uint32)
    rows = max(1, _CHUNK // max(1, count))
    for top in range(0, len(out), rows):
        for left in range(0, count, _CHUNK):
            part, key = out[top : top + rows, left : left + _CHUNK], keys[top : top + rows]
            spare = scratch[: part.size].reshape(part.shape)
            np.add(positions[left : left + _CHUNK], key[:, :1], out=part)
            _finalise(part, spare)
            np.bitwise_xor(part, key[:, 1:], out=part)
            _finalise(part, spare)


def _finalise(x: np.ndarray, spare: np.ndarray) -> None:
    for shift, multiplier in ((16, _MULTIPLIERS[0]), (15, _MULTIPLIERS[1] + (1 << 32)), (16, None)):
        np.right_shift(x, shift, out=spare)
        np.bitwise_xor(x, spare, out=x)
        if multiplier is not None:
            np.multiply(x, np.uint32(multiplier), out=x)


def _hash_formula(keys: Tensor, count: int) -> Tensor:
    return _finalised(torch.arange(count, dtype=torch.int32, device=keys.device), keys)


def _finalised(places: Tensor, keys: Tensor) -> Tensor:
    x = places + keys[:, :1]
    for half in (0, 1):
        if half:
            x = x ^ keys[:, 1:]
        x = (x ^ ((x >> 16) & 0xFFFF)) * _MULTIPLIERS[0]
        x = (x ^ ((x >> 15) & 0x1FFFF)) * _MULTIPLIERS[1]
        x = x ^ ((x >> 16) & 0xFFFF)
    return x


_hash_on_device = fused_on_gpu(_hash_formula)
"""One fused kernel where torch can compile, else several kernels; the numbers are the same."""


def keep_mask(keys: Tensor, count: int, probability: float) -> Tensor:
    """(B, count) of 1 with probability `1 - probability`, else 0; each 32-bit hash gives two draws."""
    return kept(hash_bits(keys, (count + 1) // 2).view(torch.int16), probability)[:, :count]


def kept(draws: Tensor, probability: float) -> Tensor:
    """Which int16 draws stay: bool, or on a CPU int8, which torch multiplies 4 times as fast."""
    threshold = round(probability * 65536) - 32768
    if draws.device.type != "cpu" or torch.compiler.is_compiling():
        return draws >= threshold
    return torch.from_numpy(np.greater_equal(draws.numpy(), threshold).view(np.int8))


class _ApplyMask(torch.autograd.Function):
    """x * mask * scale; keeps only the mask for the backward pass, a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _scaled(x * mask, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _scaled(gradient * mask, ctx.scale), None, None


def _scaled(x: Tensor, scale: float) -> Tensor:
    """In place but where it is compiled: torch 2.11 gives a Function with an operation in place no
    gradient.
    """
    return x * scale if torch.compiler.is_compiling() else x.mul_(scale)


class _DropOnDevice(torch.autograd.Function):
    """Dropout that hashes, compares and multiplies in one kernel, and again in the backward pass: no mask is
    kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.probability = probability
        return _dropped(x, keys, probability)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(gradient, *ctx.saved_tensors, ctx.probability), None, None


def _dropped_formula(x: Tensor, keys: Tensor, probability: float) -> Tensor:
    """What `apply_mask` makes of `keep_mask`."""
    dropped = round(probability * 65536)
    places = torch.arange(x[0].numel(), dtype=torch.int32, device=x.device)
    draws = (_finalised(places >> 1, keys) >> ((places & 1) << 4)).to(torch.int16)
    scaled = (x * (65536.0 / (65536 - dropped))).to(x.dtype)
    return torch.where((draws >= dropped - 32768).view(x.shape), scaled, 0)


_dropped = fused_on_gpu(_dropped_formula)


def apply_mask(x: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Dropout with a given (B, ...) mask; `probability` is rounded to 1/65536, as in the mask."""
    return _ApplyMask.apply(x, mask.view(x.shape), 65536.0 / (65536 - round(probability * 65536)))


class KeyedDropout(nn.Module):
    """Dropout of (B, ...) activations whose mask depends on the sample, not on the rest of its batch.

    Raises UserError where the input does not have one row per sample.
    """

    def __init__(self, p: float, noise: KeyedNoise, site: str) -> None:
        super().__init__()
        self.p, self.site = p, noise.register(site)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keys, layout = self.site.draw(), self.site.noise.packed_rows
        if layout is not None and x.shape[:2] == (1, layout.tokens):
            rest = x[0, 0].numel()
            padded = keep_mask(keys, layout.width * rest, self.p)
            return apply_mask(x, layout.take(padded.view(len(keys), layout.width, rest)), self.p)
        if len(keys) != len(x):
            raise UserError(
                f"dropout {self.site.name} sees a tensor of shape {tuple(x.shape)} in a micro-batch of"
                f" {len(keys)} samples, so its noise cannot be keyed by sample: use --noise native (the plan"
                " then says `noise`) or --dropout 0"
            )
        if x.device.type != "cpu":
            return _DropOnDevice.apply(x, keys, self.p)
        return apply_mask(x, keep_mask(keys, x[0].numel(), self.p), self.p)
