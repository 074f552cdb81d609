"""The workload recommender: recommendations from ids and texts of users and items.

python -m launch auto --task recommender --data FOLDER
python -m launch auto --task recommender --data FOLDER --text lora --text-model FOLDER
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import UserError, refuse
from isobatch.core.number_ranges import Positive, Probability
from isobatch.core.package import table_beside
from isobatch.core.recipe import Recipe
from isobatch.models import hub
from isobatch.models.base import Batch, Loss, ModelSize, Phase, Rows, StepContext, Sum, Task
from isobatch.models.causal_lm import model_sizes
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.model_card import ModelDescription, usage_lines
from isobatch.models.recommendation import catalogue, model_size, recommendations
from isobatch.models.recommendation.recommendations import ALS, BASELINES, EASE, MODEL, POPULARITY

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.models.protocols import Batches

SITUATIONS = table_beside(__file__, "situations")
TRAINABLE_PARTS = ("projection", "fusion", "mlp", "ids")
"""What --trainable can name: the parts of the network that train besides the encoder."""
LORA_BLOCKS = 4
"""Default of --lora-blocks."""
TEXT_CACHE_FOLDER = "encoded"
"""Folder beside the prepared data for the states that enter the lowest trained block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecommenderOptions:
    """The flags of recommenders."""

    text: Literal["frozen", "lora", "full", "off"] | None = None
    """How texts are used: encoder fixed, vectors kept; LoRA in its top blocks; all of it trained; or
    not at all. By default a phase `frozen`, then a phase `lora`."""
    text_cache: Literal["auto", "on", "off"] = "auto"
    """What a fixed part of the encoder computes is kept: all of it for frozen, what lies below the lowest
    trained block for lora. off computes it anew for each batch."""
    lora_blocks: Positive | None = None
    """The top blocks of the encoder that get LoRA; by default 4, or all of a smaller one."""
    lora_r: Positive = 8
    """Rank of LoRA."""
    lora_alpha: int = 16
    """LoRA's update is scaled by alpha / r."""
    lora_lr: float = 1e-4
    """Peak learning rate of phase lora; --lr is that of the others."""
    trainable: str = ",".join(TRAINABLE_PARTS)
    """The parts that train besides the encoder."""
    head: Literal["dot", "mlp", "neumf", "none"] = "dot"
    """How two vectors make a score. none: no network is trained, and the classics alone are fitted."""
    dim: Positive = 64
    """Width of users' and items' vectors."""
    layers: str = "128,64"
    """Widths of the MLP of heads mlp and neumf."""
    loss: Literal["sampled-softmax", "bce", "gbce"] = "sampled-softmax"
    """sampled-softmax: against items that the whole batch shares; gbce too, see --calibration. bce: against
    some of each pair's own, in sequences against shared ones."""
    negatives: int = 0
    """Items each pair is trained against; 0: 4 of its own, or 1,024 shared ones."""
    calibration: Probability = 0.75
    """How much gbce corrects for drawing few negatives (t of gSASRec): 0 is bce."""
    blocks: Positive = 2
    """Layers of the transformer over a user's items, in sequences."""
    heads: Positive = 2
    """Attention heads of each."""
    cohort: int = 0
    """In place of drawn negatives, the items of the other pairs in groups of so many; 0 draws."""
    sparse_tables: bool = False
    """Ids' tables are trained by SparseAdam (Adam that moves only the rows a step reads, without decay): for
    tables so large that reading all of them in each step would cost the most."""
    l2: float = 0.0
    """Penalty on the squared id vectors of each pair, of a user with an item taken or one drawn against it,
    also where the loss leaves that out as taken too (half the regularization of Rendle et al. 2020)."""
    top_k: Positive = 10
    """Length of the list in which a hit counts."""


class Recommender(Task):
    """Learns from pairs of users and items that they took, against items that they did not take.

    Metrics: hit rate, NDCG and reciprocal rank at k of held-out items among all items that the user had not,
    in any split (full_hr@10, full_ndcg@10, full_mrr@10), and, where the data has such, among the sampled
    negatives `rivals` (hr@10, ...); beside them those of baselines, by the same protocol.
    """

    Options: ClassVar = RecommenderOptions
    data: ClassVar = "data.interactions.dataset:Interactions"
    measured_files: ClassVar = (recommendations.BASELINES_FILE,)
    follow_ups: ClassVar = (
        "serve {run}{by}",
        "recommend {run}{by} --out lists.csv",
        "auto --task recommender {live} --split none",
    )
    set_beside: ClassVar = (*(f"full_{one}" for one in BASELINES), "full", *BASELINES)
    defaults, demo, fast, presets = (SITUATIONS[kind] for kind in ("defaults", "demo", "fast", "presets"))

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self.cohort = options.cohort or 1
        self.in_sequences = recipe.options.get("samples") == "sequences"
        # Among all items: the sampled one may order models otherwise (Krichene and Rendle 2020).
        self.monitor = (f"full_ndcg@{options.top_k}", "max")

    @property
    def exports(self) -> tuple[str, ...]:
        """See `models/protocols.py::Exports`: what this network, or the classics, can be written as."""
        vectors = ("vectors", "vectors-als") if self._has_network else ("vectors-als",)
        return ("onnx", *vectors) if self.in_sequences else vectors

    def phases(self) -> list[Phase]:
        if not self._has_network:
            return [Phase(name="classics", epochs=0.0)]
        lora = Phase(name="lora", epochs=1.0, lr=self.options.lora_lr, share=0.25)
        if self.options.text == "lora":
            return [lora]
        ids = "sequence" if self.in_sequences else "ids"
        name = {None: "frozen", "off": ids}.get(self.options.text, self.options.text)
        return [Phase(name=name, epochs=10.0), *([] if self.options.text else [lora])]

    def unread(self) -> Mapping[str, str]:
        found = {"label_smoothing": "a pair has no label"}
        if not self.in_sequences:
            found["dropout"] = "only a recommender of --samples sequences has some"
        found |= hub.unread_revision(self._text_model, self.recipe.tokenizer)
        if self.options.text == "off":
            read = ("model", "tokenizer", "revision", *(() if self.in_sequences else ("max_length",)))
            found |= dict.fromkeys(read, "no texts are read (--text off, which every --preset has)")
        if not self._has_network:
            steps = "epochs steps least_steps ema lr weight_decay warmup schedule clip optimizer"
            found |= dict.fromkeys(steps.split(), "the classics are not trained by steps")
        if self.in_sequences:
            return found
        drawn = self.options.loss == "bce"
        found["noise"] = "the negatives' draws are keyed" if drawn else "nothing here draws any"
        return found

    def check(self) -> None:
        options, recipe, dim, cohort = self.options, self.recipe, self.options.dim, self.options.cohort
        unknown = set(self._trainable) - set(TRAINABLE_PARTS)
        refuse(
            {
                "--text-cache on: a cached vector passes no gradient, so the encoder learns nothing: leave"
                " it out (texts are encoded once a batch, and once for all below LoRA), or say --text"
                " frozen": options.text in (None, "lora", "full") and options.text_cache == "on",
                f"--sparse-tables: rows are updated by Adam; leave out --optimizer {recipe.optimizer}": (
                    options.sparse_tables and recipe.optimizer != "adamw"
                ),
                "--head none, as in --preset classics: no network is trained that could read texts: say"
                f" --text off; {recommendations.READS_TEXTS}": not self._has_network
                and options.text != "off",
                f"--dim {dim}: neumf halves it, so it must be even": options.head == "neumf" and dim % 2,
                f"--trainable {','.join(unknown)}: is not one of {', '.join(TRAINABLE_PARTS)}": unknown,
                f"--cohort {cohort}: must be 0, or from 2 on and divide --batch-size {recipe.batch_size}": (
                    cohort and (cohort < 2 or recipe.batch_size % cohort)
                ),
                f"--cohort {cohort}: in-batch negatives are for --loss sampled-softmax": (
                    cohort and options.loss != "sampled-softmax"
                ),
            }
        )
        if self.in_sequences:
            asked = {"--head": options.head != "dot", "--l2": options.l2, "--cohort": cohort}
            refuse(
                {
                    **{f"{flag}: is for --samples pairs: leave it out": bad for flag, bad in asked.items()},
                    f"--heads {options.heads}: must divide --dim {dim}": dim % options.heads,
                }
            )
        elif self._has_network and recipe.options.get("split") == "users":
            raise UserError("--split users: no user of the test has a vector: --preset sequence or classics")
        model_size.parse_layer_widths(options.layers)
        if options.text != "off" and self._text_model not in PRESETS:
            hub.check_model(self._text_model, recipe.revision, recipe.tokenizer, PRESETS, "--text-model")

    @property
    def _has_network(self) -> bool:
        return self.options.head != "none"

    @property
    def _text_model(self) -> str:
        """A preset, a folder or a hub id."""
        return self.recipe.model or str(self.defaults["model"])

    def fetch(self) -> None:
        if self.options.text != "off" and self._text_model not in PRESETS:
            hub.fetch_weights(self._text_model, self.recipe.revision, "--text-model")

    @property
    def _trainable(self) -> list[str]:
        return [part.strip() for part in self.options.trainable.split(",")]

    def _encoder_config(self, facts: Facts) -> dict[str, Any] | None:
        """The text encoder's config.json; None if no texts are used."""
        if self.options.text in ("lora", "full") and not facts.extra.get("texts", 1):
            raise UserError(f"--text {self.options.text}: no user or item has a text; say --text off")
        if self.options.text == "off" or not facts.extra.get("texts", 1):
            return None
        name, vocabulary = self._text_model, facts.extra.get("vocabulary", 0)
        if name in PRESETS:
            return PRESETS[name].config(vocabulary, self.recipe.max_length)
        config = hub.load_config(name, self.recipe.revision)
        hub.check_length(name, model_sizes.context_length(config), self.recipe.max_length)
        hub.check_vocabulary(name, config.get("vocab_size"), vocabulary)
        return config

    def build_model(self, facts: Facts) -> nn.Module:
        from isobatch.models.recommendation.network import RecommenderNet

        options, known = self.options, catalogue.Catalogue.read(facts.folder)
        encoder = self._build_encoder(facts, known)
        self._text_cache = Path(facts.folder) / TEXT_CACHE_FOLDER
        if self.in_sequences:
            from isobatch.models.recommendation.sequence import SequenceNet

            sizes = {"longest": self.recipe.max_length, "blocks": options.blocks, "heads": options.heads}
            dropout = self.recipe.dropout or 0.0
            net: RecommenderNet = SequenceNet(known, options.dim, encoder, dropout=dropout, **sizes)
        else:
            layers = model_size.parse_layer_widths(options.layers)
            # Probabilities need to know how many items a user takes.
            bias, head = options.loss != "sampled-softmax", options.head if self._has_network else "dot"
            net = RecommenderNet(known, options.dim, layers, head, encoder, user_bias=bias)
        net.repeats, net.is_trained = bool(facts.extra.get("repeats")), self._has_network
        return net

    def _build_encoder(self, facts: Facts, known: catalogue.Catalogue) -> Any:
        from transformers import AutoConfig

        from isobatch.models.recommendation.text_encoder import TextEncoder, add_lora, load_text_model

        if (config := self._encoder_config(facts)) is None:
            return None
        name, options = self._text_model, self.options
        if name in PRESETS:
            net = load_text_model(AutoConfig.for_model(**config), None, None)
        else:
            place = hub.fetch_weights(name, self.recipe.revision, "--text-model")
            config_there = AutoConfig.from_pretrained(place, **hub.remote_code_kwargs(False))
            net = load_text_model(config_there, place, self.recipe.revision)
        encoder = TextEncoder(net, known, options.text_cache != "off")
        self._first_lora_block = 0
        if options.text in (None, "lora"):
            blocks = len(encoder.blocks[2])
            top = options.lora_blocks or min(LORA_BLOCKS, blocks)
            if top > blocks:
                raise UserError(f"--lora-blocks {top}: this text model has {blocks} blocks")
            self._first_lora_block = add_lora(encoder, top, options.lora_r, options.lora_alpha)
        net.requires_grad_(False)
        return encoder

    def model_size(self, facts: Facts) -> ModelSize:
        return model_size.recommender_size(self.recipe, self.options, facts, self._encoder_config(facts))

    def sparse_parameters(self, model: Any) -> Iterable[nn.Parameter]:
        tables = (model.user_ids, model.item_ids, model.item_bias, model.user_bias)
        return [t.weight for t in tables if t is not None] if self.options.sparse_tables else []

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Choose what trains, and compute once what will not change in this phase."""
        from isobatch.models.recommendation.network import PARTS

        for name, p in model.named_parameters():
            p.requires_grad_(PARTS.get(name.partition(".")[0], "ids") in self._trainable)
        encoder = model.encoder
        if encoder is None:
            return
        for name, p in encoder.net.named_parameters():
            p.requires_grad_("lora_" in name if phase == "lora" else phase == "full")
        model.text_vectors, model.text_vectors_fixed = None, False
        encoder.cache_prefix(self._first_lora_block if phase == "lora" else 0, self._text_cache)
        if phase == "frozen" and self.options.text_cache != "off":
            model.text_vectors, model.text_vectors_fixed = encoder.vectors(), True

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: user (B,), item (B,); or items (B, T) of sequences, length (B,)."""
        from isobatch.models.recommendation.losses import next_items, ranking_loss

        options, seed = self.options, self.recipe.seed
        if self.in_sequences:
            longest = self.recipe.max_length + 1  # a multiple of padding may be longer
            rows = batch["items"][:, :longest].long()
            length = (step.host or batch)["length"].cpu().numpy()
            total, _ = ranking_loss(model, *next_items(rows, length, step), options, step, seed)
            return {"loss": Loss(total, "target")}
        user, item = batch["user"].long(), batch["item"].long()
        total, penalty = ranking_loss(model, user, item, options, step, seed)
        if not options.l2:
            return {"loss": Loss(total, "sample")}
        return {"ranking": Loss(total, "sample"), "l2": Loss(options.l2 * penalty, "sample")}

    def evaluate(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        from isobatch.models.recommendation import ranking

        return {**ranking.metric_parts(model, batch, self.options.top_k)}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        found: dict[str, Any] = super().metrics(parts, split, facts)
        del found["loss"]
        if not self._has_network:
            found = {name: value for name, value in found.items() if POPULARITY in name}
        untaken = facts.extra.get("untaken", 0)
        some = f" of {facts.extra['items']:,} items, {untaken:,} taken by nobody" if untaken else ""
        return {**found, "protocol": f"{facts.extra['protocol']}{some}"}

    def final_metrics(
        self, model: Any, final: Path, facts: Facts, batches: Callable[..., Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """Metrics of baselines of the same interactions, which `final` keeps."""
        from isobatch.models.recommendation import baselines

        valid = partial(batches, "valid") if {"valid", "test"} <= facts.samples.keys() else None
        return baselines.final_figures(model, final, batches, valid, self.options.top_k, self._earlier)

    @property
    def _earlier(self) -> Path | None:
        """final/ of the run that this one goes on from."""
        start = self.recipe.starts_from
        return Path(start["run"]) / "final" if start else None

    def finish_unmeasured(self, model: Any, final: Path) -> str:
        """Fit the baselines to all interactions."""
        from isobatch.models.recommendation import baselines

        if best := baselines.fit_unmeasured(model, final, self._earlier):
            chosen = "with the settings that the run of --from chose on its validation data"
            return f"lists are by {best}, {chosen}"
        by, or_not = ("the model", "a baseline") if self._has_network else ("EASE", "another")
        return f"lists are by {by}, nothing tells whether {or_not} ranks better: choose by a run with a split"

    def kept_metrics(self, model: Any, final: Path, batches: Batches, facts: Any) -> Mapping[str, Any]:
        """See `models/protocols.py::KeepsBaselines`."""
        from isobatch.models.recommendation import baselines

        return baselines.kept_metrics(model, final, batches, self.options.top_k)

    def final_remark(self, metrics: Mapping[str, Any]) -> str:
        """What ranks the lists; which baseline ranks better than the model, the best of them; what to try."""
        best = metrics.get("best_on_validation", MODEL if self._has_network else EASE)
        other = "; try --preset sequence" if self._has_network and not self.recipe.preset else ""
        said = _verdict(metrics, self.options.top_k, "this model" if self._has_network else "", other)
        k, what = self.options.top_k, "this model" if self._has_network else BASELINES.get(str(best), "")
        beside = _beside_popularity(metrics, k, what) if said and BASELINES[POPULARITY] not in said else ""
        lists = f"lists are by {BASELINES[best]} unless --by names another" if best in BASELINES else ""
        return "; ".join(filter(None, (said, beside, lists)))

    def kept_rows(self, run: Path, facts: Facts) -> tuple[Mapping[str, Any], str]:
        sides = ("item",) if self.in_sequences else ("user", "item")
        return catalogue.kept_rows(run / "final", facts.folder, sides, self.options.text != "off")

    def trained_before(self, run: Path, facts: Facts) -> str:
        return catalogue.trained_before(run / "final", facts.folder)

    def lists_by(self, metrics: Mapping[str, Any]) -> str:
        best = _rival(metrics, self.options.top_k)
        beside = _beside(metrics, best, self.options.top_k)
        loses = beside and (beside[1] > 0 or best == metrics.get("best_on_validation"))
        return best if self._has_network and loses else ""

    def live_flags(self, run: str, metrics: Mapping[str, Any], steps: str) -> str:
        best, kept = metrics.get("best_on_validation"), f" --patience 0 --steps {steps}"
        if not self._has_network or (not best and self.recipe.starts_from):  # the next night
            return f"--from {run}"
        if best in (None, MODEL) and not self.lists_by(metrics):
            return f"--like {run}" + kept * bool(self.recipe.patience)
        return f"--from {run}" + (
            kept if MODEL in str(metrics.get("blend_of")) else " --patience 0 --steps 0"
        )

    def open_lists(self, final: Path, by: str = recommendations.BEST) -> recommendations.Recommendations:
        with hub.reading(final):
            return recommendations.open_recommendations(final, by)

    def sample(self, model: Any, facts: Facts, folder: Path) -> str | None:
        """The first user's recommendations."""
        if not self._has_network:
            return None  # nothing is fitted yet
        found = recommendations.Recommendations(folder)
        lines = [f"  {title}  {score:.2f}" for title, score in found.top(found.users[0], 5)]
        return "\n".join([f"for user {found.users[0]}:", *lines])

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        """What `Recommendations` reads, and a copy of recommendations.py."""
        import numpy as np
        from safetensors.numpy import save_file

        users, items = model.eval().all_vectors()
        arrays = {"users": users, "items": items, "bias": model.item_bias.weight[:, 0]}
        heads = ("mlp_layers.", "product.", "sequence.")
        arrays |= {name: p for name, p in model.named_parameters() if name.startswith(heads)}
        vectors = {k: np.ascontiguousarray(v.detach().cpu().numpy()) for k, v in arrays.items()}
        known = catalogue.Catalogue.read(facts.folder)
        owner = np.repeat(np.arange(len(known.trained)), np.diff(known.starts))
        vectors["had"] = np.unique(owner * len(known.item_text) + known.history)
        vectors["held_out"] = np.setdiff1d(vectors["had"], known.seen)
        save_file(vectors, folder / recommendations.VECTORS_FILE)
        described = (model.item_text >= 0) & (model.encoder is not None)
        told = {"counts": model.counts.tolist(), "described": described.long().tolist()}
        told |= {"repeats": model.repeats}
        names = {**catalogue.read_names(facts.folder), **told}
        (folder / recommendations.NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
        config = {"model_type": "isobatch-recommender", "head": self.options.head}
        if self.in_sequences:
            config["attention_heads"] = self.options.heads
        (folder / recommendations.CONFIG_FILE).write_text(json.dumps(config))
        shutil.copy(recommendations.__file__, folder / "recommendations.py")

    def export_as(
        self, kind: str, final: Path, folder: Path, facts: Facts, batches: Callable[..., Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """onnx: a model of sequences, beside the names of its items. See `models/protocols.py::Exports`."""
        from isobatch.models.recommendation import exports

        if kind != "onnx":
            return exports.export_vectors(final, folder, ALS if kind.endswith(ALS) else MODEL)
        shutil.copy(final / recommendations.NAMES_FILE, folder)
        return exports.export_onnx(final, folder, self.build_model(facts), batches)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        return ModelDescription(
            title="Recommender",
            summary="Ranks all items for a user of the training data, without those that the user had.",
            usage=usage_lines(__file__),
            remark="with numpy and safetensors alone",
        )


def _beside_popularity(metrics: Mapping[str, Any], k: int, what: str) -> str:
    """How much better `what` ranks than the list that a shop has without it; "" where that is not known."""
    own, figures = metrics.get(f"full_ndcg@{k}"), _beside(metrics, POPULARITY, k)
    if not (figures and isinstance(own, float)):
        return ""
    figure, low, high = figures
    return f"beside what most took {what} has {own - figure:+.4f} (95 %: {-high:+.4f} to {-low:+.4f})"


def _beside(metrics: Mapping[str, Any], name: str, k: int) -> list[float]:
    """The figure of a baseline, and the ends of its difference's interval; empty where one is missing."""
    figure, interval = (metrics.get(f"full_{name}_ndcg@{k}{end}") for end in ("", "_difference_ci95"))
    found = [figure, *interval] if isinstance(interval, list) else []
    return found if [*map(type, found)] == [float] * 3 else []


def _rival(metrics: Mapping[str, Any], k: int) -> str:
    """The baseline that the model is held against: the best on the validation data, where that was no model,
    else on the held-out users; empty where there is none.
    """
    figures = {name: found[0] for name in BASELINES if (found := _beside(metrics, name, k))}
    best = str(metrics.get("best_on_validation"))
    return best if best in figures else max(figures, key=figures.__getitem__, default="")


def _verdict(metrics: Mapping[str, Any], k: int, model: str, other: str) -> str:
    """What the held-out users say of the best baseline and the model, or where there is none of the two best
    baselines; `other`: what else to try.

    The best is the one on the validation data, where that was no model: to choose it by the figures in which
    it is then held against the model would flatter it. Empty where a received run has no such metrics.
    """
    metric, figures = f"full_ndcg@{k}", {n: found for n in BASELINES if (found := _beside(metrics, n, k))}
    own, users = metrics.get(metric), metrics.get("held_out_users")
    if not (figures and isinstance(own, float) and isinstance(users, int)):
        return ""
    chosen, best = str(metrics.get("best_on_validation")), _rival(metrics, k)
    model = model or BASELINES.get(chosen, BASELINES[EASE])
    figure, low, high = figures[best]
    better, other_one, sign = (BASELINES[best], model, 1) if figure > own else (model, BASELINES[best], -1)
    ends = sorted((sign * low, sign * high))
    shown = f"{abs(figure - own):+.4f} (95 %: {ends[0]:+.4f} to {ends[1]:+.4f}; {metric}"
    shown += f" {max(figure, own):.4f} against {min(figure, own):.4f})"
    if ends[0] <= 0:
        return f"the {users:,} held-out users do not tell {better} and {other_one} apart: {shown}"
    said = f"{better} ranks better than {other_one} by {shown}"
    if better == model:
        return said
    return said + other if best == chosen else f"{said}; `isobatch recommend RUN --by {best}` gives its lists"
