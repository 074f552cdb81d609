"""The workload recommender: recommendations from ids and texts of users and items.

python -m launch auto --task recommender --data FOLDER
python -m launch auto --task recommender --data FOLDER --text lora --text-model FOLDER
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import AboveZero
from isobatch.core.recipe import DEMO
from isobatch.models import hub
from isobatch.models.base import Batch, Loss, ModelSize, Phase, Rows, StepContext, Sum, Task
from isobatch.models.causal_lm import model_sizes
from isobatch.models.causal_lm.model_sizes import PRESETS
from isobatch.models.model_card import ModelDescription
from isobatch.models.recommendation import model_size
from isobatch.models.recommendation.recommendations import BASELINES, BASELINES_FILE, EASE, KNN, MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.models.recommendation.item_lists import RecommendationLists

TRAINABLE_PARTS = ("projection", "fusion", "mlp", "ids")
"""What --trainable can name: the parts of the network that train besides the encoder."""
LORA_BLOCKS = 4
"""Default of --lora-blocks."""
LORA_GRADIENT_STEPS = 20
"""Steps within which LoRA must get a gradient: a small batch may hold no text."""
USAGE = """\
from recommendations import open_recommendations

trained = open_recommendations(".")  # by="ease", "knn" or "popularity": a baseline; "best": on validation
for title, score in trained.top(trained.users[0], 10):
    print(f"{score:8.3f}  {title}")
"""
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
    text_dedup: bool = True
    """Encode a text once however many rows of a batch want it."""
    text_chunk: int = 4096
    """Tokens that the encoder computes at a time; more than one chunk are encoded again in the backward."""
    start: str | None = None
    """A finished recommender, a run or its final/, whose weights training begins with; see --phase."""
    lora_blocks: int | None = None
    """The top blocks of the encoder that get LoRA; by default 4, or all of a smaller one."""
    lora_r: int = 8
    """Rank of LoRA."""
    lora_alpha: int = 16
    """LoRA's update is scaled by alpha / r."""
    lora_lr: float = 1e-4
    """Peak learning rate of phase lora; --lr is that of the others."""
    trainable: str = ",".join(TRAINABLE_PARTS)
    """The parts that train besides the encoder."""
    head: Literal["dot", "mlp", "neumf"] = "dot"
    """How two vectors make a score."""
    dim: int = 64
    """Width of users' and items' vectors."""
    layers: str = "128,64"
    """Widths of the MLP of heads mlp and neumf."""
    loss: Literal["sampled-softmax", "bce", "gbce", "bpr"] = "sampled-softmax"
    """sampled-softmax: against items that the whole batch shares. bce, gbce, bpr: against some of its own."""
    negatives: int = 0
    """Items each pair is trained against; 0: 4 of its own, or 1,024 shared ones."""
    cohort: int = 0
    """In place of drawn negatives, the items of the other pairs in groups of so many; 0 draws."""
    gbce_t: float = 0.75
    """Calibration of gbce (Petrov and Macdonald 2023): 0 is bce, 1 makes scores probabilities."""
    sparse_tables: bool = False
    """Ids' tables are trained by SparseAdam (Adam that moves only the rows a step reads, without decay): for
    tables so large that reading all of them in each step would cost the most."""
    l2: float = 0.0
    """Penalty on the squared id vectors of each pair, of a user with an item taken or one drawn against it,
    also where the loss leaves that out as taken too (half the regularization of Rendle et al. 2020)."""
    pooling: Literal["mean", "last"] = "mean"
    """A text's vector: the mean of its tokens' states, or the last one's."""
    top_k: int = 10
    """Length of the list in which a hit counts."""
    ease_lambda: AboveZero | None = None
    """EASE's regularization; by default that with the best full_ndcg on the validation data. --like takes
    this and the next two from the run's, where it is given --split none."""
    knn_shrinkage: AboveZero | None = None
    """item-kNN's shrinkage, chosen likewise."""
    best_by: Literal["model", "popularity", "knn", "ease"] | None = None
    """With --split none: what `--by best` means, by the validation data of another run."""


OTHERS = (*BASELINES, "chance")
"""What the model's own figures are set beside."""


class Recommender(Task):
    """Learns from pairs of users and items that they took, against items that they did not take.

    Metrics: hit rate, NDCG and reciprocal rank at k of held-out items among the sampled negatives `rivals`
    (hr@10, ndcg@10, mrr@10), and among all items that the user had not, in any split (full_...); beside them
    those of baselines, by the same protocol.
    """

    Options: ClassVar[type] = RecommenderOptions
    measured_files: ClassVar[tuple[str, ...]] = (BASELINES_FILE,)
    monitor: ClassVar[tuple[str, str]] = ("ndcg@10", "max")
    told_once: ClassVar[tuple[str, ...]] = ("popularity_", "full_popularity_", "protocol")
    set_beside: ClassVar[tuple[str, ...]] = (*(f"full_{one}" for one in OTHERS), "full", *OTHERS)
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "small",
        "batch_size": 2048,
        "max_length": 64,
        "lr": 1e-3,
        "weight_decay": 0.0,
        "clip": 0.0,
    }
    demo: ClassVar[Mapping[str, Any]] = {
        "model": "tiny",
        "batch_size": 256,
        "lr": 3e-3,
        "epochs": [12],
        "lora_blocks": 1,
    }
    fast: ClassVar[Mapping[str, Any]] = {"train_fraction": 0.3, "eval_fraction": 0.5, "min_delta": 0.002}
    schemes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "frozen": {"text": "frozen", "text_cache": "off"},
        "cached": {"text": "frozen", "text_cache": "on"},
        "lora": {"text": "lora"},
        "full": {"text": "full"},
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ids": {  # Rendle et al. 2020: a product of vectors, logistic loss, regularized, wide
            "text": "off",
            "loss": "bce",
            "negatives": 8,
            "dim": 192,
            "l2": 0.0025,
            "lr": 2e-3,
            "schedule": "cosine",
            "epochs": [30],
            "least_steps": 1800,
        }
    }

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self.cohort = options.cohort or 1  # type: ignore[misc]
        self._lora_has_gradient = False
        self.monitor = (f"ndcg@{options.top_k}", "max")  # type: ignore[misc]

    def phases(self) -> list[Phase]:
        lora = Phase(name="lora", epochs=1.0, lr=self.options.lora_lr, share=0.25)
        match self.options.text:
            case None:
                return [Phase(name="frozen", epochs=10.0), lora]
            case "lora":
                return [lora]
            case other:
                return [Phase(name=other if other != "off" else "ids", epochs=10.0)]

    def unread(self) -> Mapping[str, str]:
        found = {"dropout": "a recommender has none", "label_smoothing": "a pair has no label"}
        found |= hub.unread_revision(self._text_model, self.recipe.tokenizer)
        if self.options.text == "off":
            found |= dict.fromkeys(("model", "tokenizer", "revision", "max_length"), "texts are off")
        drawn = not self.options.cohort and self.options.loss != "sampled-softmax"
        found["noise"] = "the negatives' draws are keyed" if drawn else "nothing here draws any"
        return found

    def check(self) -> None:
        options = self.options
        trains = options.text in (None, "lora", "full")
        if options.text_cache == "on" and trains:
            how = "the phase lora" if options.text is None else f"--text {options.text}"
            raise UserError(
                f"--text-cache on: a cached vector passes no gradient, so {how} would learn nothing of texts;"
                " leave it out (texts are encoded once a batch, what lies below LoRA once and for all), or"
                " use --text frozen"
            )
        if options.start is not None and not _training_weights_file(options.start).is_file():
            raise UserError(f"--start {options.start}: is no finished recommender (a run, or its final/)")
        if options.sparse_tables and self.recipe.optimizer != "adamw":
            raise UserError(
                f"--sparse-tables: rows are updated by Adam; leave out --optimizer {self.recipe.optimizer}"
            )
        for flag in ("dim", "lora_blocks", "lora_r", "top_k", "text_chunk"):
            value = getattr(options, flag)
            if value is not None and value < 1:
                raise UserError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: must be at least 1")
        if options.head == "neumf" and options.dim % 2:
            raise UserError(f"--dim {options.dim}: neumf halves it, so it must be even")
        if unknown := set(self._trainable) - set(TRAINABLE_PARTS):
            raise UserError(f"--trainable {unknown.pop()}: is not one of {', '.join(TRAINABLE_PARTS)}")
        if options.cohort == 1 or options.cohort < 0:
            raise UserError(f"--cohort {options.cohort}: must be 0 or at least 2")
        if options.cohort and options.loss != "sampled-softmax":
            raise UserError(f"--cohort {options.cohort}: in-batch negatives are for --loss sampled-softmax")
        if options.cohort and self.recipe.batch_size % options.cohort:
            raise UserError(f"--cohort {options.cohort}: must divide --batch-size {self.recipe.batch_size}")
        model_size.parse_layer_widths(options.layers)
        self._check_text_model()

    @property
    def _text_model(self) -> str:
        """A preset, a folder or a hub id."""
        return self.recipe.model or str(self.defaults["model"])

    def fetch(self) -> None:
        if self.options.text != "off" and self._text_model not in PRESETS:
            hub.fetch_weights(self._text_model, self.recipe.revision, "--text-model")

    def _check_text_model(self) -> None:
        name = self._text_model
        if self.options.text == "off" or name in PRESETS:
            return
        folder = Path(name).expanduser()
        if folder.is_dir():
            hub.check_folder(folder, self.recipe.tokenizer)
        elif hub.is_id(name):
            hub.require_available(name, self.recipe.revision, "--text-model")
        else:
            raise UserError(
                f"--text-model {name}: is no preset ({', '.join(PRESETS)}), folder or hub id (owner/name)"
            )

    @classmethod
    def inherit(cls, values: Mapping[str, Any], metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """For --split none: the settings of baselines, and what ranked best, on the run's validation data."""
        best = metrics.get("best_on_validation")
        if values.get("split") != "none" or best not in (MODEL, *BASELINES):
            return {}
        settings = {n: metrics.get(f"full_{n}") for n in ("ease_lambda", "knn_shrinkage")}
        return {"best_by": best, **{n: v for n, v in settings.items() if isinstance(v, float)}}

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """--start becomes a whole path, so that `verify` works from any folder."""
        start = values.get("start")
        return {} if start is None else {"start": str(Path(start).expanduser().resolve())}

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
        longest = model_sizes.context_length(config)
        if longest is not None and self.recipe.max_length > longest:
            raise UserError(
                f"--max-length {self.recipe.max_length}: --text-model {name} reads at most {longest} tokens"
            )
        hub.check_vocabulary(name, config.get("vocab_size"), vocabulary)
        return config

    def build_model(self, facts: Facts) -> nn.Module:
        from isobatch.models.recommendation.catalogue import Catalogue
        from isobatch.models.recommendation.network import RecommenderNet

        options, catalogue = self.options, Catalogue.read(facts.folder)
        encoder = self._build_encoder(facts, catalogue)
        self._text_cache = Path(facts.folder) / TEXT_CACHE_FOLDER
        layers = model_size.parse_layer_widths(options.layers)
        pointwise = options.loss in model_size.POINTWISE
        net = RecommenderNet(catalogue, options.dim, layers, options.head, encoder, user_bias=pointwise)
        net.deduplicate = options.text_dedup
        if self.options.start is not None:
            self._load_start_weights(net, self.options.start, facts)
        return net

    def _load_start_weights(self, net: Any, start: str, facts: Facts) -> None:
        """Load the weights of another run; parameters that it lacks, such as LoRA, stay as they are.

        Raises UserError unless its users, items, encoder and shapes are the same.
        """
        from safetensors.torch import load_file

        from isobatch.models.recommendation.catalogue import read_names
        from isobatch.models.recommendation.recommendations import CONFIG_FILE, NAMES_FILE

        folder = _training_weights_file(start).parent
        start_names, start_config = (
            json.loads((folder / file).read_text()) for file in (NAMES_FILE, CONFIG_FILE)
        )
        own_names = read_names(facts.folder)
        if any(start_names[kind] != own_names[kind] for kind in ("users", "items")):
            raise UserError(
                f"--start {start}: its users or items are others than those of {self.recipe.data}"
            )
        own_encoder = None if net.encoder is None else net.encoder.weights_identity()
        if None not in (start_config.get("encoder"), own_encoder) and start_config["encoder"] != own_encoder:
            raise UserError(
                f"--start {start}: its texts were read by another encoder: give its --text-model and"
                " --tokenizer, and for one with random weights its --seed"
            )
        found, own = load_file(_training_weights_file(start)), net.state_dict()
        for name, value in found.items():
            if name in own and own[name].shape != value.shape:
                raise UserError(
                    f"--start {start}: its {name} is {tuple(value.shape)}, here {tuple(own[name].shape)}: it"
                    " was trained on other data or with other --dim, --head or --layers"
                )
        net.load_state_dict({k: v for k, v in found.items() if k in own}, strict=False)

    def _build_encoder(self, facts: Facts, catalogue: Any) -> Any:
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
        encoder = TextEncoder(
            net, catalogue, options.pooling, options.text_cache != "off", options.text_chunk
        )
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

    def begin_phase(
        self,
        model: Any,
        phase: str,
        first: Callable[[int], Iterable[Batch]],
    ) -> None:
        """Choose what trains, and compute once what will not change in this phase."""
        for kind, parameters in model.trainable_parts().items():
            for p in parameters:
                p.requires_grad_(kind in self._trainable)
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
        """batch: user (B,), item (B,)."""
        import torch

        from isobatch.models.recommendation import losses

        user, item = batch["user"].long(), batch["item"].long()
        options, count = self.options, model_size.num_negatives(self.options)
        net: Any = getattr(model, "module", model)
        pairs = item[:, None]
        if options.cohort:
            total = losses.in_batch_softmax(model, user, item, options.cohort)
        elif options.loss == "sampled-softmax":
            shared = losses.draw_shared_negatives(
                count, len(net.item_text), (self.recipe.seed, step.phase, step.number)
            )
            total = losses.sampled_softmax(model, user, item, shared.to(user.device))
        else:
            drawn = step.noise.integers("negatives", (count, 2), len(net.item_text))
            negatives, is_positive = losses.avoid_positives(net, user, drawn)
            if options.loss == "bpr":
                total = losses.pairwise_logistic(model, user, item, negatives, is_positive)
            else:
                calibration = options.gbce_t if options.loss == "gbce" else 0.0
                total = losses.binary_cross_entropy(model, user, item, negatives, is_positive, calibration)
            pairs = torch.cat([pairs, negatives], 1)
        if not options.l2:
            return {"loss": Loss(total, "sample")}
        penalty = options.l2 * losses.squared_norms(net, user, pairs)
        return {"ranking": Loss(total, "sample"), "l2": Loss(penalty, "sample")}

    def observe(self, model: Any, step: StepContext) -> Mapping[str, float]:
        """Raise if no LoRA parameter receives a gradient within LORA_GRADIENT_STEPS."""
        last = min(LORA_GRADIENT_STEPS, step.total_steps) - 1
        if step.phase != "lora" or step.number > last or model.encoder is None or self._lora_has_gradient:
            return {}
        gradients = [p.grad for p in model.encoder.trainable_parameters() if p.grad is not None]
        norm = float(sum(float(g.float().square().sum()) for g in gradients) ** 0.5)
        self._lora_has_gradient = norm > 0
        if not self._lora_has_gradient and step.number >= last:
            raise UserError("phase lora: LoRA gets no gradient, so that it would not learn")
        return {"lora_grad_norm": norm}

    def evaluate(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        from isobatch.models.recommendation import ranking

        return {**ranking.metric_parts(model, batch, self.options.top_k)}

    @property
    def compared_by(self) -> tuple[str, str]:
        """NDCG among all items, by which baselines are judged too: the sampled one may order models otherwise
        (Krichene and Rendle 2020).
        """
        return f"full_ndcg@{self.options.top_k}", "max"

    def notes(self, facts: Facts) -> list[str]:
        """Without those on missing texts where none are used."""
        found = super().notes(facts)
        return [n for n in found if self.options.text != "off" or " have no text: " not in n]

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        found: dict[str, Any] = super().metrics(parts, split, facts)
        del found["loss"]
        untaken = facts.extra.get("untaken", 0)
        some = f" of {facts.extra['items']:,} items, {untaken:,} taken by nobody" if untaken else ""
        return {**found, "protocol": f"{facts.extra['protocol']}{some}"}

    def final_metrics(
        self,
        model: Any,
        final: Path,
        facts: Facts,
        batches: Callable[..., Iterable[Batch]],
    ) -> Mapping[str, Any]:
        """What chance hits, and metrics of baselines of the same interactions, which `final` keeps."""
        from isobatch.models.recommendation import baselines

        validation = partial(batches, "valid") if {"valid", "test"} <= facts.samples.keys() else None
        return baselines.final_figures(
            model, final, batches, validation, self.options.top_k, self._chosen_settings
        )

    def finish_unmeasured(self, model: Any, final: Path) -> str:
        """Fit the baselines to all interactions; say what another run measured of them, if one did."""
        from isobatch.models.recommendation import baselines

        baselines.fit_unmeasured(model, final, self._chosen_settings, self.options.best_by or MODEL)
        ways = ": `isobatch recommend RUN --by best` gives its lists" if self._inherited_baseline else ""
        return f"{self._said_unmeasured}{ways}"

    @property
    def _chosen_settings(self) -> dict[str, float]:
        """Baseline -> its setting that the recipe names."""
        named = {KNN: self.options.knn_shrinkage, EASE: self.options.ease_lambda}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def _inherited_baseline(self) -> str | None:
        """The baseline that ranked better than the model where that was measured; None where none did."""
        return self.options.best_by if self.options.best_by in BASELINES else None

    @property
    def _said_unmeasured(self) -> str:
        best = self.options.best_by
        if best is None:
            return "nothing tells whether the model or a baseline ranks better: choose by a run with a split"
        if best == MODEL:
            return "the model ranked the validation data of the run that this is like best (--best-by model)"
        return (
            f"{BASELINES[best]} ranked the validation data of the run that this is like better than the model"
            f" (--best-by {best})"
        )

    def kept_metrics(
        self, model: Any, final: Path, batches: Callable[[], Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """See `models/protocols.py::KeepsBaselines`."""
        from isobatch.models.recommendation import baselines

        return baselines.kept_metrics(model, final, batches, self.options.top_k)

    def final_remark(self, metrics: Mapping[str, Any]) -> str:
        """Which baseline ranks better, the best of them; and whether the split makes sense at all."""
        k = self.options.top_k
        hits, chance = metrics.get(f"popularity_hr@{k}"), metrics.get(f"chance_hr@{k}")
        if self.recipe.data == DEMO:
            return ""
        if hits is not None and chance is not None and hits < chance / 2:
            return (
                f"popularity ranks worse than chance (hr@{k} {hits:.4f} against {chance:.4f}): the held-out"
                " items are rarer than those before them, and no model can be judged by them; look at the"
                " order of the times, or take --split random"
            )
        name, said, is_better = _verdict(metrics, k)
        said += _on_test_another(metrics, k, name)
        tries = [] if self.recipe.preset == "ids" else ["try --preset ids"]
        tries += [f"`isobatch recommend RUN --by {name}` gives its lists"]
        return f"{said}: {', or '.join(tries)}" if is_better else said

    def better_baseline(self, metrics: Mapping[str, Any]) -> str:
        if not metrics and self.recipe.options.get("split") == "none":
            ways = ": --by best gives its lists" if self._inherited_baseline else ""
            return f"nothing was measured here; {self._said_unmeasured}{ways}"
        name, said, is_better = _verdict(metrics, self.options.top_k)
        return f"{said}: --by {name} gives its lists" if is_better else ""

    def open_lists(self, final: Path, by: str = MODEL) -> RecommendationLists:
        from isobatch.models.recommendation.item_lists import RecommendationLists

        return RecommendationLists(final, by)

    def sample(self, model: Any, facts: Facts, folder: Path) -> str | None:
        """The first user's recommendations."""
        from isobatch.models.recommendation.recommendations import Recommendations

        found = Recommendations(folder)
        lines = [f"  {title}  {score:.2f}" for title, score in found.top(found.users[0], 5)]
        return "\n".join([f"for user {found.users[0]}:", *lines])

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        from isobatch.models.recommendation.export import export_recommender

        export_recommender(model, folder, facts)

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        return ModelDescription(
            title="Recommender",
            summary="Ranks all items for a user of the training data, without those that the user had.",
            usage=USAGE,
            remark="with numpy and safetensors alone",
        )


def _verdict(metrics: Mapping[str, Any], k: int) -> tuple[str, str, bool]:
    """(the best baseline, what the held-out users say of it and the model, whether it ranks better).

    The best is the one on the validation data, where that was no model: to choose it by the figures in which
    it is then held against the model would flatter it. Empty where a received run has no such metrics.
    """
    metric, figures = f"full_ndcg@{k}", {}
    own, users = metrics.get(metric), metrics.get("held_out_users")
    for name in BASELINES:
        figure, interval = (metrics.get(f"full_{name}_ndcg@{k}{end}") for end in ("", "_difference_ci95"))
        if isinstance(interval, list) and [*map(type, [figure, *interval])] == [float] * 3:
            figures[name] = (figure, *interval)
    if not (figures and isinstance(own, float) and isinstance(users, int)):
        return "", "", False
    best = str(metrics.get("best_on_validation"))
    if best not in figures:  # the model, or nothing was tuned
        best = max(figures, key=lambda name: figures[name][0])
    figure, low, high = figures[best]
    shown = f"95 %: {low:.4f} to {high:.4f}; {metric} {figure:.4f} against {own:.4f}"
    if low > 0:
        return best, f"{BASELINES[best]} ranks better than this model by {figure - own:.4f} ({shown})", True
    if high < 0:
        return best, "", False
    said = f"the {users:,} held-out users do not tell {BASELINES[best]} and this model apart"
    return best, f"{said} (difference, {shown})", False


def _on_test_another(metrics: Mapping[str, Any], k: int, name: str) -> str:
    """In brackets the baseline with a larger figure than `name`, the best on the validation data."""
    if name != metrics.get("best_on_validation"):
        return ""
    figures = {n: metrics.get(f"full_{n}_ndcg@{k}") for n in BASELINES}
    known = {n: f for n, f in figures.items() if isinstance(f, float)}
    best = max(known, key=lambda n: known[n], default=name)
    if best == name:
        return ""
    return f" (chosen on the validation data; here {BASELINES[best]} has {known[best]:.4f})"


def _training_weights_file(start: str) -> Path:
    """The file of a run, or of its final/, that training can start from."""
    from isobatch.models.recommendation.export import TRAINING_FILE

    folder = Path(start).expanduser()
    return (folder / "final" if (folder / "final").is_dir() else folder) / TRAINING_FILE
