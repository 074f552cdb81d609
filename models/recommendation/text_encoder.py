"""Texts of a catalogue as vectors, at the price of what is trained.

Three exact savings, each of which may be switched off: a text is encoded once however many rows want it; what
lies below the lowest trained block is computed once for the whole catalogue; and the encoder's backward runs
in chunks from the gradient of its outputs (Gao et al. 2021, GradCache), so that memory does not grow with the
number of texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.models.causal_lm.adapters import quiet_bitsandbytes
from isobatch.models.recommendation.catalogue import Catalogue

CHUNK_TOKENS = 4096
"""Padded tokens that the encoder computes at a time."""
LORA_TARGETS = ("c_attn", "query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_key_value", "q", "v")
"""Attention's projections by the names that model families give them."""


class TextEncoder(nn.Module):
    """A transformers model that turns numbered texts into (n, hidden) vectors."""

    def __init__(
        self,
        net: nn.Module,
        known: Catalogue,
        pooling: str,
        prefix_cache: bool = True,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        self.net, self.pooling, self.uses_prefix = net, pooling, prefix_cache
        self.lengths = torch.from_numpy(np.diff(known.offsets))
        self.starts = torch.from_numpy(np.array(known.offsets[:-1]))
        self.tokens = torch.from_numpy(known.tokens.astype(np.int64))
        self.below = 0
        """Blocks whose output is known: `prefix` holds it."""
        self.prefix: Tensor | None = None
        """(all tokens, hidden) states that enter block `below`."""
        self.chunk_tokens = chunk_tokens
        self.chunked: bool | None = None
        """Whether the backward runs in chunks; None: where more than one chunk is needed."""

    @property
    def hidden(self) -> int:
        config: Any = self.net.config
        return int(config.hidden_size)

    @property
    def blocks(self) -> tuple[nn.Module, str, nn.ModuleList]:
        """The module that holds the list of blocks, the list's name there, and the list."""
        config: Any = self.net.config
        for name, module in self.net.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) >= int(config.num_hidden_layers):
                parent, _, last = name.rpartition(".")
                return self.net.get_submodule(parent), last, module
        raise UserError(f"--text-model: a {config.model_type} has no list of blocks")

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def forward(self, numbers: Tensor) -> Tensor:
        """(n,) numbers of texts, all different -> (n, hidden)."""
        order = torch.argsort(self.lengths[numbers.cpu()], stable=True).to(numbers.device)
        chunks = self._chunks(numbers[order].cpu())
        trained = self.trained() if torch.is_grad_enabled() else []
        if trained and (self.chunked or (self.chunked is None and len(chunks) > 1)):
            vectors = _Chunked.apply(self._encode, chunks, numbers.device, *trained)
        else:
            vectors = torch.cat([self._encode(chunk, numbers.device) for chunk in chunks])
        return nn.functional.embedding(torch.argsort(order), vectors)

    def _chunks(self, numbers: Tensor) -> list[Tensor]:
        """Texts of like lengths, as many as `chunk_tokens` holds when padded."""
        lengths = self.lengths[numbers].tolist()
        found, start = [], 0
        for place, length in enumerate(lengths):
            if place > start and (place + 1 - start) * length > self.chunk_tokens:
                found.append(numbers[start:place])
                start = place
        return [*found, numbers[start:]]

    def _encode(self, numbers: Tensor, device: torch.device) -> Tensor:
        lengths = self.lengths[numbers]
        columns = torch.arange(int(lengths.max()))
        mask = columns < lengths[:, None]
        places = (self.starts[numbers][:, None] + columns).masked_fill(~mask, 0)
        mask = mask.to(device)
        if self.prefix is None:
            states = self._states(mask, input_ids=self.tokens[places].to(device))
        else:
            rows = self.prefix[places.to(self.prefix.device)].to(device)
            states = self._upper(rows, mask)
        return self._pooled(states, mask)

    def _states(self, mask: Tensor, **given: Tensor) -> Tensor:
        config: Any = self.net.config
        cache = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
        found = self.net(attention_mask=mask.long(), **cache, **given)
        states: Tensor = found.last_hidden_state
        return states

    def _upper(self, states: Tensor, mask: Tensor) -> Tensor:
        """From the states that enter block `below` through the rest of the model, as it does it itself."""
        parent, name, blocks = self.blocks
        first = blocks[self.below]
        handle = first.register_forward_pre_hook(_replacing(states), with_kwargs=True)
        setattr(parent, name, blocks[self.below :])
        try:
            return self._states(mask, inputs_embeds=states)
        finally:
            setattr(parent, name, blocks)
            handle.remove()

    def _pooled(self, states: Tensor, mask: Tensor) -> Tensor:
        if self.pooling == "last":
            return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]
        weights = mask.to(states.dtype)[:, :, None]
        return (states * weights).sum(1) / weights.sum(1)

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """(texts, hidden) of the whole catalogue."""
        device = next(self.net.parameters()).device
        return self(torch.arange(len(self.lengths), device=device))

    @torch.no_grad()
    def remember_prefix(self, below: int, folder: Path) -> None:
        """Compute, or read from `folder`, what enters block `below`; the net must be in evaluation mode."""
        self.prefix, self.below = None, 0
        if not self.uses_prefix or below == 0:
            return
        device = next(self.net.parameters()).device
        file = folder / f"prefix-{self._identity(below)}.bin"
        states = _kept(file, (len(self.tokens), self.hidden), lambda: self._entering(below, device))
        self.prefix, self.below = _placed(states, device), below

    def _entering(self, below: int, device: torch.device) -> Tensor:
        """(all tokens, hidden) states that enter a block."""
        _, _, blocks = self.blocks
        found = torch.empty(len(self.tokens), self.hidden)
        seen: list[Tensor] = []
        handle = blocks[below].register_forward_pre_hook(_watching(seen), with_kwargs=True)
        try:
            order = torch.argsort(self.lengths, stable=True)
            for chunk in self._chunks(order):
                seen.clear()
                self._encode(chunk, device)
                for text, states in zip(chunk.tolist(), seen[0].float().cpu(), strict=True):
                    start, length = int(self.starts[text]), int(self.lengths[text])
                    found[start : start + length] = states[:length]
        finally:
            handle.remove()
        return found

    def weights_identity(self) -> str | None:
        """Hash of the weights as they were loaded or drawn; None where they are trained themselves."""
        base = [(n, p) for n, p in sorted(self.net.named_parameters()) if "lora_" not in n]
        if any(p.requires_grad for _, p in base):
            return None
        digest = hashlib.blake2b(digest_size=12)
        _add(digest, ((name.replace(".base_layer", ""), p) for name, p in base))
        return digest.hexdigest()

    def _identity(self, below: int) -> str:
        """Hash of texts, frozen weights, block and precision: what the states depend on."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(repr((below, self.pooling, torch.is_autocast_enabled("cpu"))).encode())
        for tensor in (self.tokens, self.starts):
            digest.update(tensor.numpy().tobytes())
        _add(digest, ((n, p) for n, p in sorted(self.net.named_parameters()) if not p.requires_grad))
        return digest.hexdigest()


def _add(digest: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in weights:
        digest.update(name.encode())
        digest.update(p.detach().float().cpu().contiguous().numpy().tobytes())


def _replacing(states: Tensor) -> Callable[..., Any]:
    def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if given:
            return (states, *given[1:]), named
        return given, {**named, "hidden_states": states}

    return hook


def _watching(seen: list[Tensor]) -> Callable[..., None]:
    def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(given[0] if given else named["hidden_states"])

    return hook


def _kept(file: Path, size: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
    """A float32 tensor from a file, which one process writes where there is none."""
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.is_file():
            beside = file.with_suffix(".tmp")
            compute().contiguous().numpy().tofile(beside)
            os.replace(beside, file)
    return torch.from_file(str(file), shared=False, size=size[0] * size[1]).view(size)


def _placed(states: Tensor, device: torch.device) -> Tensor:
    """On the device if it fits well, else in pinned memory, else as it is: mapped from the file."""
    if device.type != "cuda":
        return states
    size = states.numel() * 4
    free, _ = torch.cuda.mem_get_info(device)
    if size < free // 4:
        return states.to(device)
    with contextlib.suppress(RuntimeError):
        return states.pin_memory()
    return states


class _Chunked(torch.autograd.Function):
    """Encodes without a graph; backward encodes each chunk again, with one."""

    @staticmethod
    def forward(
        ctx: Any,
        encode: Callable[..., Tensor],
        chunks: Sequence[Tensor],
        device: torch.device,
        *trained: Tensor,
    ) -> Tensor:
        ctx.encode, ctx.chunks, ctx.device, ctx.trained = encode, chunks, device, trained
        ctx.precision = _autocast(device)
        with torch.no_grad():
            return torch.cat([encode(chunk, device) for chunk in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        total = [torch.zeros_like(p) for p in ctx.trained]
        parts = gradient.split([len(chunk) for chunk in ctx.chunks])
        for chunk, part in zip(ctx.chunks, parts, strict=True):
            with torch.enable_grad(), ctx.precision():
                vectors = ctx.encode(chunk, ctx.device)
            found = torch.autograd.grad(vectors, ctx.trained, part, allow_unused=True)
            for whole, piece in zip(total, found, strict=True):
                if piece is not None:
                    whole += piece
        return (None, None, None, *total)


def _autocast(device: torch.device) -> Callable[[], Any]:
    """The autocast that is on now, to be entered again in a backward."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def add_lora(encoder: TextEncoder, blocks: int, rank: int, alpha: int) -> int:
    """LoRA (Hu et al. 2021) on attention's projections of the top `blocks`; the lowest trained block."""
    quiet_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model

    _, _, every = encoder.blocks
    lowest = len(every) - blocks
    wanted = {
        f"{place}.{name}"
        for place, block in _numbered(encoder)
        if place_number(place) >= lowest
        for name, module in block.named_modules()
        if name.rpartition(".")[2] in LORA_TARGETS and hasattr(module, "weight")
    }
    if not wanted:
        raise UserError("--text lora: this text model has no attention projections that LoRA knows")
    config: Any = encoder.net.config
    conv = config.model_type == "gpt2"
    lora = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(wanted), fan_in_fan_out=conv
    )
    inject_adapter_in_model(lora, encoder.net)
    return lowest


def _numbered(encoder: TextEncoder) -> Iterator[tuple[str, nn.Module]]:
    _, _, every = encoder.blocks
    for name, module in encoder.net.named_modules():
        if module is every:
            yield from ((f"{name}.{n}", block) for n, block in enumerate(every))


def place_number(place: str) -> int:
    return int(place.rpartition(".")[2])


def make_net(config: Any, place: str | None, revision: str | None) -> nn.Module:
    """A transformers model without dropout: from a folder or the hub, or with random weights.

    Rows of its batch are texts, not samples, so that its noise could not be keyed by sample.
    """
    from transformers import AutoModel

    for name in list(vars(config)):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    if place is None:
        return AutoModel.from_config(config, dtype=torch.float32)
    found = AutoModel.from_pretrained(place, config=config, revision=revision or "main", dtype=torch.float32)
    made: nn.Module = found
    return made
