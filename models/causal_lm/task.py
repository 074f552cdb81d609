"""Causal language models: GPT-2s trained from scratch, or any decoder that transformers opens, fine-tuned.

python -m launch auto --task causal-lm --data FOLDER --model small
python -m launch auto --task causal-lm --data FOLDER --model openai-community/gpt2 --preset finetune
python -m launch auto --task causal-lm --data FOLDER --model FOLDER --adapter qlora
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.errors import UserError
from isobatch.models import hub, saving
from isobatch.models.base import Batch, Loss, ModelSize, Rows, StepContext, Sum, Task
from isobatch.models.causal_lm import adapters, model_sizes, perplexity
from isobatch.models.causal_lm.generation import Sampling
from isobatch.models.causal_lm.model_sizes import PRESETS

if TYPE_CHECKING:
    from torch import Tensor, nn

LONGEST_WITH_ATTENTION_DROPOUT = 512
"""Above it attention dropout is 0: keyed noise would take the kernel's speed and memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CausalLMOptions(adapters.AdapterOptions):
    """The fields of causal language models."""

    generate_prompt: str | None = None
    """What the sample at the end of training starts with; by default the validation text's first words."""
    generate_tokens: int = 60
    """Length of that sample; 0 for none."""
    resize_embeddings: bool = False
    """Give a loaded model this tokenizer's tokens: those it knows keep their embeddings, others the mean."""
    remote_code: bool = False
    """Run the Python code that a loaded model brings along, where transformers lacks its architecture."""


class CausalLM(Task):
    """Next-token prediction on independent blocks of tokens.

    The defaults suit training from scratch; `--preset finetune` has those for a loaded model.

    Convention of the metrics: blocks are independent and the first token of each is not predicted, as in
    Hugging Face's run_clm; with --stride they overlap, and all tokens but the first are. `loss` is the mean
    over predicted tokens. `word_perplexity` and `bits_per_byte` spread that mean over ALL tokens of the
    split's text (first ones included, so that the block length does not flatter it), then over its words
    (separated by white space; ends of lines are none; left out where the script has no such words) or UTF-8
    bytes. `stride` is what it was measured with.
    With a fraction of the blocks evaluated, the mean is the fraction's, the ratios are the whole split's.
    """

    Options: ClassVar[type] = CausalLMOptions
    exports: ClassVar[tuple[str, ...]] = ("merged", "adapter")
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "small",
        "max_length": 256,
        "weight_decay": 0.1,
        "warmup": "0.05ep",
        "schedule": "cosine",
    }
    fast: ClassVar[Mapping[str, Any]] = {"max_length": 128, "train_fraction": 0.25, "eval_fraction": 0.25}
    demo: ClassVar[Mapping[str, Any]] = {"model": "tiny", "max_length": 128, "batch_size": 16, "lr": 3e-3}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "finetune": {
            "model": "openai-community/gpt2",
            "batch_size": 8,
            "max_length": 512,
            "lr": 5e-5,
            "weight_decay": 0.01,
            "schedule": "linear",
        }
    }

    @property
    def _name(self) -> str:
        return self.recipe.model or "small"

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return adapters.complete(values)

    def check(self) -> None:
        name = self._name
        adapters.check(self.options, pretrained=name not in PRESETS)
        if self.recipe.max_length < 2:
            raise UserError(f"--max-length {self.recipe.max_length}: a block needs at least 2 tokens")
        if self.options.generate_tokens < 0:
            raise UserError(f"--generate-tokens {self.options.generate_tokens}: must be at least 0")
        folder = Path(name).expanduser()
        if name in PRESETS:
            self._check_context(PRESETS[name].config(0, self.recipe.max_length))
        elif folder.is_dir():
            hub.check_folder(folder, self.recipe.tokenizer)
            self._check_config(hub.load_config(str(folder), None))
        elif hub.is_id(name):
            hub.require_available(name, self.recipe.revision)
            if hub.snapshot(name, self.recipe.revision):
                self._check_config(hub.load_config(name, self.recipe.revision))
        else:
            close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(
                f"--model {name}: is no preset{hint}, folder or hub id (owner/name, such as "
                f"openai-community/gpt2); presets: {', '.join(PRESETS)}"
            )

    def _check_config(self, config: Mapping[str, Any]) -> None:
        if config.get("model_type") not in model_sizes.PLAIN_HEADS or "auto_map" in config:
            hub.check_architecture(self._name, config, self.options.remote_code, self.recipe.revision)
        self._check_context(config)

    def _check_context(self, config: Mapping[str, Any]) -> None:
        longest = model_sizes.context(config)
        if longest is not None and self.recipe.max_length > longest:
            raise UserError(
                f"--max-length {self.recipe.max_length}: {self._name} reads at most {longest} tokens"
            )

    def _config(self, facts: Any) -> dict[str, Any]:
        """The model's config.json as a mapping, checked against the tokenizer and the block length."""
        name, vocabulary = self._name, facts.extra["vocabulary"]
        if name in PRESETS:
            return PRESETS[name].config(vocabulary, self.recipe.max_length)
        config = hub.load_config(name, self.recipe.revision)
        self._check_config(config)
        if self.options.resize_embeddings:
            return {**config, "vocab_size": vocabulary}
        more = "; --resize-embeddings adds rows, to be trained"
        hub.check_vocabulary(name, config.get("vocab_size"), vocabulary, more)
        return config

    def fetch(self) -> None:
        if self._name not in PRESETS:
            hub.fetch_weights(self._name, self.recipe.revision)

    def build_model(self, facts: Any) -> nn.Module:
        from transformers import GPT2LMHeadModel

        from isobatch.models.causal_lm import chunked_cross_entropy

        config, options = self._transformers_config(facts), self.options
        self._answers = _answers(facts)
        if self._name in PRESETS:
            model: nn.Module = GPT2LMHeadModel(config)
        else:
            where, revision = hub.fetch_weights(self._name, self.recipe.revision), self.recipe.revision
            model = adapters.load(where, config, revision, options.load_bits, options.remote_code)
            if options.resize_embeddings:
                from isobatch.models.causal_lm import resize_embeddings as embeddings

                embeddings.resize(model, facts.extra["vocabulary"], self._known(facts))
            if options.adapter != "none":
                adapters.add(model, options, self._base, self.recipe.revision)
        chunked_cross_entropy.make_passable(model)
        return model

    @property
    def _base(self) -> str:
        """What an adapter is for, as others can find it."""
        folder = Path(self._name).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self._name

    def _transformers_config(self, facts: Any) -> Any:
        from transformers import AutoConfig, GPT2Config

        numbers = self._config(facts)
        if self._name in PRESETS:
            ids = {f"{role}_token_id": facts.extra.get(role) for role in ("eos", "bos")}
            config = GPT2Config(**numbers, **ids, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        else:
            where = hub.local_path_or_id(self._name, self.recipe.revision)
            config = AutoConfig.from_pretrained(
                where,
                revision=self.recipe.revision or "main",
                **hub.remote_code_kwargs(self.options.remote_code),
            )
        for name, value in self._dropouts(config.to_dict()).items():
            setattr(config, name, value)
        return config

    def _dropouts(self, config: Mapping[str, Any]) -> dict[str, float]:
        """The dropout fields to set: all to the recipe's, attention's to 0 for long blocks."""
        names = [
            k for k, v in config.items() if isinstance(v, float | int) and ("pdrop" in k or "dropout" in k)
        ]
        chosen = self.recipe.dropout
        values = {} if chosen is None else dict.fromkeys(names, chosen)
        if self.recipe.max_length > LONGEST_WITH_ATTENTION_DROPOUT:
            values |= {name: 0.0 for name in names if "att" in name}
        return values

    def model_size(self, facts: Any) -> ModelSize:
        """Counted from the config's numbers; other architectures are built without storage."""
        whole = model_sizes.shape_of(self._config(facts)) or self._counted(facts)
        if self._name in PRESETS:
            return whole
        if self.options.adapter == "none":
            said = [adapters.advice(whole, self.recipe.optimizer)]
            if self.options.resize_embeddings and not facts.extra.get("assumed"):
                said.append(self._resizing(facts))
            return dataclasses.replace(whole, remark="; ".join(filter(None, said)))
        return adapters.shape(whole, self._transformers_config(facts), self.options, self.recipe.optimizer)

    def _known(self, facts: Any) -> dict[int, int] | None:
        from isobatch.models.causal_lm import resize_embeddings as embeddings

        return embeddings.known(
            hub.local_path_or_id(self._name, self.recipe.revision), saving.load_tokenizer(facts)
        )

    def _resizing(self, facts: Any) -> str:
        """What becomes of the embeddings, for a person to know."""
        if (rows := self._known(facts)) is None:
            return (
                "the model brings no tokenizer.json: embeddings keep their numbers, whatever tokens they were"
            )
        all_of_them = facts.extra["vocabulary"]
        return (
            f"{len(rows):,} of {all_of_them:,} tokens keep the model's embeddings; others begin at the mean"
        )

    def memory_saving_flags(self) -> Mapping[str, Mapping[str, Any]]:
        return {} if self._name in PRESETS else adapters.cheaper(self.options)

    def _counted(self, facts: Any) -> ModelSize:
        import torch
        from transformers import AutoModelForCausalLM

        config = self._transformers_config(facts).get_text_config()
        trust = hub.remote_code_kwargs(self.options.remote_code)
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config, **trust).parameters())
        hidden = config.hidden_size
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        kind = config.model_type
        plain, packs = kind in model_sizes.PLAIN_HEADS, kind in model_sizes.PACKED
        return model_sizes.shape(count, layers, hidden, heads, inner, config.vocab_size, plain, packs)

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens (B, T), length (B,). Cross-entropy in nats, summed over the predicted tokens."""
        return {"loss": Loss(self._nll(model, batch), "token")}

    def _nll(self, model: nn.Module, batch: Batch) -> Tensor:
        from isobatch.models.causal_lm import chunked_cross_entropy

        # No attention mask: padding is on the right, and a token sees none to its right, so real positions
        # never see it and the others' targets are ignored. It keeps SDPA on its causal path without a mask.
        return chunked_cross_entropy.loss(model, batch["tokens"].long(), _targets(batch))

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        """Of each set of a mixture apart: every process names all parts, with rows or without."""
        if "set" not in batch:
            return {"nll": self._nll_of(model, batch)}
        parts: dict[str, Sum | Rows] = {}
        for number, answers in enumerate(self._answers):
            some = {name: values[batch["set"] == number] for name, values in batch.items()}
            parts[f"nll.{number}"] = self._nll_of(model, some) if len(some["set"]) else Sum(0.0, 0)
            if answers:
                parts[f"right.{number}"] = self._right_of(model, some, answers)
        return parts

    def _nll_of(self, model: nn.Module, batch: Batch) -> Sum:
        from isobatch.models.causal_lm.chunked_cross_entropy import IGNORED

        return Sum(self._nll(model, batch), (_targets(batch) != IGNORED).sum())

    def _right_of(self, model: nn.Module, batch: Batch, answers: list[list[int]]) -> Sum:
        from isobatch.models.causal_lm.label_accuracy import right

        count = len(batch["tokens"])
        return Sum(right(model, batch, answers).sum(), count) if count else Sum(0.0, 0)

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Any) -> dict[str, Any]:
        stride = self.recipe.options.get("stride") or self.recipe.max_length
        return perplexity.metrics(parts, split, facts.extra, stride)

    def export(self, model: nn.Module, folder: Path, facts: Any) -> None:
        """A folder for AutoModelForCausalLM and AutoTokenizer; an adapter's for PeftModel."""
        configured: Any = model
        if self.options.adapter == "none":
            saving.save(model, facts, folder)
            configured.generation_config.save_pretrained(folder)
        else:
            adapters.save(model, folder)
            saving.save_tokenizer(configured.config.to_dict(), facts, folder)

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Any, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        if self.options.adapter == "none":
            raise UserError(f"--to {kind}: the run trained no adapter: final/ is the whole model")
        reopened = partial(adapters.opened, remote_code=self.options.remote_code)
        adapted = reopened(final).eval()
        if kind == "adapter":
            adapters.copy(final, folder)
            return adapters.compared(adapted, reopened(folder).eval(), batches())
        merged = reopened(final).eval().merge_and_unload()
        saving.save(merged, facts, folder)
        merged.generation_config.save_pretrained(folder)
        figures = adapters.compared(adapted, merged, batches())
        if self.options.load_bits != 16:
            figures["remark"] = (
                f"merged into the weights before they were rounded: the run's own figures are those of"
                f" {self.options.load_bits} bits"
            )
        return figures

    def writer(self, final: Path) -> Callable[[Any, Sampling], Iterator[str]]:
        from isobatch.models.causal_lm import generation

        return partial(
            generation.pieces, *generation.opened(final, self.options.load_bits, self.options.remote_code)
        )

    def sample(self, model: nn.Module, facts: Any, folder: Path) -> str | None:
        """A continuation; of a model trained on conversations, answers to held-out prompts."""
        from isobatch.models.causal_lm.generation import continuation, pieces

        if self.options.generate_tokens == 0:
            return None
        tokenizer, template = saving.load_tokenizer(facts), facts.extra.get("template") or {}
        how = Sampling(tokens=self.options.generate_tokens, seed=self.recipe.seed, end=template.get("end_id"))
        asked = facts.extra.get("prompts")
        if not asked or self.options.generate_prompt:
            prompt = self.options.generate_prompt or facts.extra.get("prompt", "")
            return continuation(model, tokenizer, prompt, how)
        shown = []
        for prompt, reference in asked:
            answer = "".join(pieces(model, tokenizer, prompt, how))
            shown.append(f"{prompt}{answer.strip()}\n[reference: {reference.strip()}]")
        return "\n\n".join(shown)


def _answers(facts: Any) -> list[list[list[int]]]:
    """Set -> the tokens of its classes' names, each with the end token; none where answers are no classes."""
    return [one.get("label_tokens") or [] for one in facts.extra.get("sets") or []]


def _targets(batch: Batch) -> Tensor:
    """(B, T): the next token at each position that has one to learn, IGNORED elsewhere."""
    import torch

    from isobatch.models.causal_lm.chunked_cross_entropy import IGNORED

    tokens_BT, length_B = batch["tokens"], batch["length"]
    shifted = torch.nn.functional.pad(tokens_BT[:, 1:].long(), (0, 1), value=IGNORED)
    position = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    nothing = position >= (length_B - 1)[:, None]
    if "learn" in batch:
        nothing = nothing | torch.nn.functional.pad(batch["learn"][:, 1:] == 0, (0, 1), value=True)
    return shifted.masked_fill(nothing, IGNORED)
