"""The text encoder of recommenders: vectors of a catalogue's texts, at the cost of what is trained.

Three savings, all of them exact, and each may be switched off: a text is encoded once however many rows of a
batch use it; the states that enter the lowest trained block are computed once for the whole catalogue; and
the backward runs in chunks from the gradient of the outputs (Gao et al. 2021, GradCache), so that memory does
not grow with the number of texts.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.models import hub
from isobatch.models.activations import fuse_gelu
from isobatch.models.lora import quiet_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from isobatch.models.recommendation.catalogue import Catalogue

CHUNK_TOKENS = 4096
"""Padded tokens that the encoder computes at a time."""
LORA_TARGETS = ("c_attn", "query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_key_value", "q", "v")
"""Names of attention projections in the model families."""


class TextEncoder(nn.Module):
    """A transformers model that turns texts, given by number, into (n, hidden) vectors."""

    def __init__(
        self,
        net: nn.Module,
        catalogue: Catalogue,
        pooling: str,
        prefix_cache: bool = True,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        super().__init__()
        self.net, self.pooling, self.use_prefix_cache = net, pooling, prefix_cache
        self.lengths = torch.from_numpy(np.diff(catalogue.offsets))
        self.starts = torch.from_numpy(np.array(catalogue.offsets[:-1]))
        self.tokens = torch.from_numpy(catalogue.tokens.astype(np.int64))
        self.num_prefix_blocks = 0
        """Number of lowest blocks that `prefix` stands for."""
        self.prefix: Tensor | None = None
        """(all tokens, hidden) states that enter block `num_prefix_blocks`, if they are cached."""
        self.chunk_tokens = chunk_tokens
        self.chunked: bool | None = None
        """Whether the backward runs in chunks; None: if there is more than one chunk."""

    @property
    def hidden(self) -> int:
        """Width of a vector."""
        config: Any = self.net.config
        return int(config.hidden_size)

    @property
    def blocks(self) -> tuple[nn.Module, str, nn.ModuleList]:
        """The module that holds the list of transformer blocks, the list's name in it, and the list.

        Raises UserError if there is none.
        """
        config: Any = self.net.config
        for name, module in self.net.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) >= int(config.num_hidden_layers):
                parent, _, last = name.rpartition(".")
                return self.net.get_submodule(parent), last, module
        raise UserError(f"--text-model: a {config.model_type} has no list of blocks")

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.net.parameters() if p.requires_grad]

    def forward(self, numbers: Tensor) -> Tensor:
        """(n,) different numbers of texts -> (n, hidden)."""
        order = torch.argsort(self.lengths[numbers.cpu()], stable=True).to(numbers.device)
        chunks = self.split_into_chunks(numbers[order].cpu())
        trained = self.trainable_parameters() if torch.is_grad_enabled() else []
        if trained and (self.chunked or (self.chunked is None and len(chunks) > 1)):
            vectors = ChunkedEncoding.apply(self._encode, chunks, numbers.device, *trained)
        else:
            vectors = torch.cat([self._encode(chunk, numbers.device) for chunk in chunks])
        return nn.functional.embedding(torch.argsort(order), vectors)

    def split_into_chunks(self, numbers: Tensor) -> list[Tensor]:
        """Neighbours in `numbers`, as many as `chunk_tokens` holds when padded; sort them by length first."""
        lengths = self.lengths[numbers].tolist()
        found, start = [], 0
        for stop, length in enumerate(lengths):
            if stop > start and (stop + 1 - start) * length > self.chunk_tokens:
                found.append(numbers[start:stop])
                start = stop
        return [*found, numbers[start:]]

    def _encode(self, numbers: Tensor, device: torch.device) -> Tensor:
        lengths = self.lengths[numbers]
        columns = torch.arange(int(lengths.max()))
        mask = columns < lengths[:, None]
        positions = (self.starts[numbers][:, None] + columns).masked_fill(~mask, 0)
        mask = mask.to(device)
        if self.prefix is None:
            states = self._run_network(mask, input_ids=self.tokens[positions].to(device))
        else:
            rows = self.prefix[positions.to(self.prefix.device)].to(device)
            states = self._run_upper_blocks(rows, mask)
        return self._pool(states, mask)

    def _run_network(self, mask: Tensor, **arguments: Tensor) -> Tensor:
        config: Any = self.net.config
        cache = {"use_cache": False} if getattr(config, "use_cache", None) is not None else {}
        found = self.net(attention_mask=mask.long(), **cache, **arguments)
        states: Tensor = found.last_hidden_state
        return states

    def _run_upper_blocks(self, states: Tensor, mask: Tensor) -> Tensor:
        """Run the model from the states that enter block `num_prefix_blocks`.

        The lower blocks are taken out meanwhile, so that masks and positions are made by the model itself.
        """
        parent, name, blocks = self.blocks
        first = blocks[self.num_prefix_blocks]
        handle = first.register_forward_pre_hook(_replace_input(states), with_kwargs=True)
        setattr(parent, name, blocks[self.num_prefix_blocks :])
        try:
            return self._run_network(mask, inputs_embeds=states)
        finally:
            setattr(parent, name, blocks)
            handle.remove()

    def _pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """(n, hidden) of (n, T, hidden) states: the mean over tokens, or the last token's."""
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
    def cache_prefix(self, num_prefix_blocks: int, folder: Path) -> None:
        """Compute what enters this block, or read it from `folder`; the net must be in evaluation mode."""
        self.prefix, self.num_prefix_blocks = None, 0
        if not self.use_prefix_cache or num_prefix_blocks == 0:
            return
        device = next(self.net.parameters()).device
        file = folder / f"prefix-{self._prefix_identity(num_prefix_blocks)}.bin"
        states = _load_or_compute(
            file, (len(self.tokens), self.hidden), lambda: self._compute_prefix(num_prefix_blocks, device)
        )
        self.prefix, self.num_prefix_blocks = _move_if_it_fits(states, device), num_prefix_blocks

    def _compute_prefix(self, num_prefix_blocks: int, device: torch.device) -> Tensor:
        """(all tokens, hidden) fp32 states that enter a block."""
        _, _, blocks = self.blocks
        found = torch.empty(len(self.tokens), self.hidden)
        seen: list[Tensor] = []
        handle = blocks[num_prefix_blocks].register_forward_pre_hook(_record_input(seen), with_kwargs=True)
        try:
            order = torch.argsort(self.lengths, stable=True)
            for chunk in self.split_into_chunks(order):
                seen.clear()
                self._encode(chunk, device)
                for text, states in zip(chunk.tolist(), seen[0].float().cpu(), strict=True):
                    start, length = int(self.starts[text]), int(self.lengths[text])
                    found[start : start + length] = states[:length]
        finally:
            handle.remove()
        return found

    def weights_identity(self) -> str | None:
        """Hash of the weights as they were loaded or drawn; None if they are trained themselves."""
        base = [(n, p) for n, p in sorted(self.net.named_parameters()) if "lora_" not in n]
        if any(p.requires_grad for _, p in base):
            return None
        digest = hashlib.blake2b(digest_size=12)
        _hash_weights(digest, ((name.replace(".base_layer", ""), p) for name, p in base))
        return digest.hexdigest()

    def _prefix_identity(self, num_prefix_blocks: int) -> str:
        """Hash of texts, frozen weights, block and precision: all that the prefix depends on."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(repr((num_prefix_blocks, self.pooling, torch.is_autocast_enabled("cpu"))).encode())
        for tensor in (self.tokens, self.starts):
            digest.update(tensor.numpy().tobytes())
        _hash_weights(digest, ((n, p) for n, p in sorted(self.net.named_parameters()) if not p.requires_grad))
        return digest.hexdigest()


def _hash_weights(digest: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    for name, p in weights:
        digest.update(name.encode())
        digest.update(p.detach().float().cpu().contiguous().numpy().tobytes())


def _replace_input(states: Tensor) -> Callable[..., Any]:
    """A forward pre-hook: the block gets these states as its input."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        if arguments:
            return (states, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": states}

    return hook


def _record_input(seen: list[Tensor]) -> Callable[..., None]:
    """A forward pre-hook: the block's input is appended to `seen`."""

    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        seen.append(arguments[0] if arguments else keywords["hidden_states"])

    return hook


def _load_or_compute(file: Path, size: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
    """A float32 tensor, memory-mapped from a file that one process writes if it is missing."""
    from filelock import FileLock

    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.is_file():
            temporary = file.with_suffix(".tmp")
            compute().contiguous().numpy().tofile(temporary)
            temporary.replace(file)
    return torch.from_file(str(file), shared=False, size=size[0] * size[1]).view(size)


def _move_if_it_fits(states: Tensor, device: torch.device) -> Tensor:
    """On the GPU if it takes less than a quarter of the free memory; else in pinned memory or as it is."""
    if device.type != "cuda":
        return states
    size = states.numel() * 4
    free, _ = torch.cuda.mem_get_info(device)
    if size < free // 4:
        return states.to(device)
    with contextlib.suppress(RuntimeError):
        return states.pin_memory()
    return states


class ChunkedEncoding(torch.autograd.Function):
    """Encodes without a graph; the backward encodes each chunk again, with one (GradCache)."""

    @staticmethod
    def forward(
        ctx: Any,
        encode: Callable[..., Tensor],
        chunks: Sequence[Tensor],
        device: torch.device,
        *trained: Tensor,
    ) -> Tensor:
        ctx.encode, ctx.chunks, ctx.device, ctx.trained = encode, chunks, device, trained
        ctx.precision = _current_autocast(device)
        with torch.no_grad():
            return torch.cat([encode(chunk, device) for chunk in chunks])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        totals = [torch.zeros_like(p) for p in ctx.trained]
        parts = gradient.split([len(chunk) for chunk in ctx.chunks])
        for chunk, output_gradient in zip(ctx.chunks, parts, strict=True):
            with torch.enable_grad(), ctx.precision():
                vectors = ctx.encode(chunk, ctx.device)
            found = torch.autograd.grad(vectors, ctx.trained, output_gradient, allow_unused=True)
            for total, weight_gradient in zip(totals, found, strict=True):
                if weight_gradient is not None:
                    total += weight_gradient
        return (None, None, None, *totals)


def _current_autocast(device: torch.device) -> Callable[[], Any]:
    """Makes the autocast context that is on now, to be entered again in a backward."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


def add_lora(encoder: TextEncoder, blocks: int, rank: int, alpha: int) -> int:
    """Add LoRA (Hu et al. 2021) to the attention projections of the top `blocks`, in place.

    Returns the lowest block with LoRA. Raises UserError if no attention projection is found.
    """
    quiet_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model

    _, _, all_blocks = encoder.blocks
    lowest = len(all_blocks) - blocks
    wanted = {
        f"{path}.{name}"
        for path, block in _numbered_blocks(encoder)
        if _block_number(path) >= lowest
        for name, module in block.named_modules()
        if name.rpartition(".")[2] in LORA_TARGETS and hasattr(module, "weight")
    }
    if not wanted:
        raise UserError("--text lora: this text model has no attention projections that LoRA knows")
    config: Any = encoder.net.config
    is_conv1d = config.model_type == "gpt2"
    lora = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(wanted), fan_in_fan_out=is_conv1d
    )
    inject_adapter_in_model(lora, encoder.net)
    return lowest


def _numbered_blocks(encoder: TextEncoder) -> Iterator[tuple[str, nn.Module]]:
    """(full name, block) of all transformer blocks."""
    _, _, all_blocks = encoder.blocks
    for name, module in encoder.net.named_modules():
        if module is all_blocks:
            yield from ((f"{name}.{n}", block) for n, block in enumerate(all_blocks))


def _block_number(path: str) -> int:
    return int(path.rpartition(".")[2])


def load_text_model(config: Any, path: str | None, revision: str | None) -> nn.Module:
    """A transformers model without dropout: from a folder or the hub, or with random weights.

    Rows of its batches are texts and not samples, so that dropout could not be keyed by sample.
    """
    from transformers import AutoModel

    fuse_gelu()
    for name in list(vars(config)):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    if path is None:
        return AutoModel.from_config(config, dtype=torch.float32)
    found = AutoModel.from_pretrained(
        path,
        config=config,
        revision=revision or "main",
        dtype=torch.float32,
        **hub.remote_code_kwargs(False),
    )
    made: nn.Module = found
    return made
