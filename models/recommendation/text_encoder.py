"""The text encoder of recommenders: vectors of a catalogue's texts, at the cost of what is trained.

Three savings, all of them exact: a text is encoded once however many rows of a batch use it; the states that
enter the lowest trained block are computed once for the whole catalogue; and the backward encodes a chunk of
texts at a time again, as in GradCache (Gao et al. 2021), so that memory does not grow with their number.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isobatch.core.atomic_files import shared_folder
from isobatch.core.errors import UserError
from isobatch.models import hub
from isobatch.models.activations import fuse_gelu
from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.model_size import CHUNK_TOKENS

LORA_TARGETS = ("c_attn", "query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "query_key_value", "q", "v")
"""Names of attention projections in the model families."""


class TextEncoder(nn.Module):
    """A transformers model that turns texts, given by number, into (n, hidden) vectors."""

    def __init__(self, net: Any, catalogue: Catalogue, prefix_cache: bool = True) -> None:
        super().__init__()
        self.net, self.config, self.use_prefix_cache = net, net.config, prefix_cache
        self.hidden = int(self.config.hidden_size)
        """Width of a vector."""
        self.lengths = torch.from_numpy(np.diff(catalogue.offsets))
        self.starts = torch.from_numpy(np.array(catalogue.offsets[:-1]))
        self.tokens = torch.from_numpy(catalogue.tokens.astype(np.int64))
        self.num_prefix_blocks = 0
        """Number of lowest blocks that `prefix` stands for."""
        self.prefix: Tensor | None = None
        """(all tokens, hidden) states that enter block `num_prefix_blocks`, if they are cached."""
        self.chunk_tokens = CHUNK_TOKENS

    @property
    def blocks(self) -> tuple[nn.Module, str, nn.ModuleList]:
        """The module that holds the list of transformer blocks, the list's name in it, and the list.

        Raises UserError if there is none.
        """
        for name, module in self.net.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) >= int(self.config.num_hidden_layers):
                parent, _, last = name.rpartition(".")
                return self.net.get_submodule(parent), last, module
        raise UserError(f"--text-model: a {self.config.model_type} has no list of blocks")

    def forward(self, numbers: Tensor) -> Tensor:
        """(n,) different numbers of texts -> (n, hidden)."""
        order = torch.argsort(self.lengths[numbers.cpu()], stable=True).to(numbers.device)
        chunks = self.split_into_chunks(numbers[order].cpu())
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self.net.parameters())
        encode = self._encode_again_in_backward if trains and len(chunks) > 1 else self._encode
        # From the last one on: the backward adds up gradients in the other order.
        parts = [encode(chunk, numbers.device) for chunk in reversed(chunks)]
        return nn.functional.embedding(torch.argsort(order), torch.cat(parts[::-1]))

    def split_into_chunks(self, numbers: Tensor) -> list[Tensor]:
        """Neighbours in `numbers`, as many as `chunk_tokens` holds when padded; sort them by length first."""
        lengths = self.lengths[numbers].tolist()
        found, start = [], 0
        for stop, length in enumerate(lengths):
            if stop > start and (stop + 1 - start) * length > self.chunk_tokens:
                found.append(numbers[start:stop])
                start = stop
        return [*found, numbers[start:]]

    @torch.compiler.disable  # the backward computes it again, where nothing is compiled
    def _encode_again_in_backward(self, numbers: Tensor, device: torch.device) -> Tensor:
        kind = device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # With autocast's cache chunks would share the cast weights, whose gradients add up in 16 bits.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            return checkpoint(self._encode, numbers, device, use_reentrant=False, preserve_rng_state=False)

    def _encode(self, numbers: Tensor, device: torch.device) -> Tensor:
        """(n, hidden): the mean over each text's tokens."""
        positions, is_token = self._positions(numbers)
        mask = is_token.to(device)
        if self.prefix is None:
            states = self._run_network(mask, input_ids=self.tokens[positions].to(device)).last_hidden_state
        else:
            rows = self.prefix[positions.to(self.prefix.device)].to(device)
            states = self._run_upper_blocks(rows, mask)
        weights = mask.to(states.dtype)[:, :, None]
        return (states * weights).sum(1) / weights.sum(1)

    def _positions(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(n, T) places in `tokens` of padded texts, and (n, T) bool: what is no padding."""
        lengths = self.lengths[numbers]
        columns = torch.arange(int(lengths.max()))
        is_token = columns < lengths[:, None]
        return (self.starts[numbers][:, None] + columns).masked_fill(~is_token, 0), is_token

    def _run_network(self, mask: Tensor, **arguments: Any) -> Any:
        cache = {"use_cache": False} if getattr(self.config, "use_cache", None) is not None else {}
        return self.net(attention_mask=mask.long(), **cache, **arguments)

    def _run_upper_blocks(self, states: Tensor, mask: Tensor) -> Any:
        """Run the model from the states that enter block `num_prefix_blocks`.

        The lower blocks are taken out meanwhile, so that masks and positions are made by the model itself.
        """
        parent, name, blocks = self.blocks

        def replace_input(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if arguments:
                return (states, *arguments[1:]), named
            return arguments, {**named, "hidden_states": states}

        handle = blocks[self.num_prefix_blocks].register_forward_pre_hook(replace_input, with_kwargs=True)
        setattr(parent, name, blocks[self.num_prefix_blocks :])
        try:
            return self._run_network(mask, inputs_embeds=states).last_hidden_state
        finally:
            setattr(parent, name, blocks)
            handle.remove()

    @torch.no_grad()
    def vectors(self) -> Tensor:
        """(texts, hidden) of the whole catalogue."""
        return self(torch.arange(len(self.lengths), device=next(self.net.parameters()).device))

    @torch.no_grad()
    def cache_prefix(self, num_prefix_blocks: int, folder: Path) -> None:
        """Compute what enters this block, or read it from `folder`; the net must be in evaluation mode."""
        self.prefix, self.num_prefix_blocks = None, 0
        if not self.use_prefix_cache or num_prefix_blocks == 0:
            return
        from filelock import FileLock

        device = next(self.net.parameters()).device
        file, size = folder / f"prefix-{self._prefix_identity(num_prefix_blocks)}.bin", len(self.tokens)
        # One process computes it, and all map the file.
        with shared_folder(folder), FileLock(f"{file}.lock"):
            if not file.is_file():
                temporary = file.with_suffix(".tmp")
                self._compute_prefix(num_prefix_blocks, device).numpy().tofile(temporary)
                temporary.replace(file)
        states = torch.from_file(str(file), shared=False, size=size * self.hidden).view(size, self.hidden)
        if device.type == "cuda" and states.nbytes < torch.cuda.mem_get_info(device)[0] // 4:
            states = states.to(device)
        self.prefix, self.num_prefix_blocks = states, num_prefix_blocks

    def _compute_prefix(self, num_prefix_blocks: int, device: torch.device) -> Tensor:
        """(all tokens, hidden) fp32 states that enter a block."""
        found = torch.empty(len(self.tokens), self.hidden)
        for chunk in self.split_into_chunks(torch.argsort(self.lengths, stable=True)):
            positions, is_token = self._positions(chunk)
            ids = self.tokens[positions].to(device)
            output = self._run_network(is_token.to(device), input_ids=ids, output_hidden_states=True)
            found[positions[is_token]] = output.hidden_states[num_prefix_blocks].float().cpu()[is_token]
        return found

    def _prefix_identity(self, num_prefix_blocks: int) -> str:
        """Hash of texts, frozen weights, block and precision: all that the prefix depends on."""
        kind = next(self.net.parameters()).device.type
        of_the_rest = repr((num_prefix_blocks, torch.is_autocast_enabled(kind)))
        texts = self.tokens.numpy().tobytes() + self.starts.numpy().tobytes()
        digest = hashlib.blake2b(of_the_rest.encode() + texts, digest_size=12)
        for name, p in sorted(self.net.named_parameters()):
            if not p.requires_grad:
                digest.update(name.encode())
                digest.update(p.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def add_lora(encoder: TextEncoder, blocks: int, rank: int, alpha: int) -> int:
    """Add LoRA (Hu et al. 2021) to the attention projections of the top `blocks`, in place.

    Returns the lowest block with LoRA. Raises UserError if no attention projection is found.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _, name, all_blocks = encoder.blocks
    lowest = len(all_blocks) - blocks
    numbers = "|".join(map(str, range(lowest, len(all_blocks))))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=rf"(.*\.)?{name}\.({numbers})\.(.*\.)?({'|'.join(LORA_TARGETS)})",
        fan_in_fan_out=encoder.config.model_type == "gpt2",
    )
    try:
        inject_adapter_in_model(config, encoder.net)
    except ValueError as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"--text lora: peft finds no attention projections to adapt: {why}") from None
    return lowest


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
    how = {"config": config, "revision": revision or "main", "dtype": torch.float32}
    return AutoModel.from_pretrained(path, **how, **hub.remote_code_kwargs(False))
