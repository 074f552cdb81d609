"""The workload sequence-vae: a variational autoencoder over sequences, watched for posterior collapse.

python -m launch auto --task sequence-vae --data lines.txt
python -m launch auto --task sequence-vae --data ids.parquet --backbone transformer --free-bits 4
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from isobatch.core.errors import refuse
from isobatch.core.number_ranges import Fraction, Positive, Probability, Rate
from isobatch.core.package import table_beside
from isobatch.models import hub, saving
from isobatch.models.base import Batch, Change, Loss, ModelSize, Phase, Rows, StepContext, Sum, Task
from isobatch.models.head_chunks import CHUNK_BYTES
from isobatch.models.model_card import ModelDescription
from isobatch.models.protocols import Drawing, TaskReport

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.models.sequence_vae.generation import SequenceCodec

DROPOUT = 0.5
"""Of the decoder's inputs and outputs, and between layers (He et al. 2019)."""
EVALUATED_POSTERIORS = 4096
"""Held-out samples among which mutual information is measured."""
SHOWN_TOKENS = 40
"""Most tokens of the sequences that are shown at the end of a run."""
SITUATIONS = table_beside(__file__, "situations")


class MonitorPace(NamedTuple):
    """In steps: between reports and drawings, and how far a report looks back."""

    report_every: int
    plot_every: int
    window: int


PACES = {"full": MonitorPace(20, 500, 100), "fast": MonitorPace(100, 2000, 50)}
"""--monitor -> its pace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceVAEOptions:
    """The flags of sequence VAEs."""

    backbone: Literal["gru", "transformer"] = "gru"
    """What encoder and decoder are made of."""
    hidden: Positive = 256
    """Width of encoder and decoder."""
    layers: Positive = 1
    """Layers of each."""
    latent: Positive = 32
    """Dimensions of the latent vector."""
    word_dropout: Probability = 0.0
    """Share of the decoder's inputs that it reads as unknown (Bowman et al. 2016)."""
    kl_schedule: Literal["constant", "linear", "cyclical"] = "constant"
    """The weight of the KL: constant, rising once (Bowman et al. 2016), or in cycles (Fu et al. 2019)."""
    kl_warmup: Fraction = 0.25
    """Share of the steps over which a linear schedule rises."""
    kl_cycles: Positive = 4
    """Cycles of a cyclical schedule."""
    beta: Rate = 1.0
    """The weight of the KL term at its highest (Higgins et al. 2017); 1 is the evidence lower bound."""
    free_bits: Rate = 0.0
    """Nats of KL of a sample, summed over dimensions, that cost nothing (Kingma et al. 2016)."""
    monitor: Literal["full", "fast", "off"] = "full"
    """The posterior monitor: reports every 20 steps (fast: 100), plots every 500 (2000), window 100 (50)."""
    monitor_every: Positive | None = None
    """Steps between reports; by default --monitor decides."""
    monitor_window: Positive | None = None
    """Steps that a report looks back; by default --monitor decides."""
    plot_every: Positive | None = None
    """Steps between drawings; by default --monitor decides."""
    on_collapse: Literal["warn", "stop", "remedy"] = "warn"
    """A collapsing posterior: say so, end the run (exit 3) when it has collapsed, or switch free bits on."""

    @property
    def pace(self) -> MonitorPace | None:
        """The monitor's; None where it is off."""
        if self.monitor == "off":
            return None
        asked = (self.monitor_every, self.plot_every, self.monitor_window)
        return MonitorPace(*(given or usual for given, usual in zip(asked, PACES[self.monitor], strict=True)))


class SequenceVAEReport(TaskReport):
    """KL per dimension, active units and mutual information over the steps."""

    curves: ClassVar = ("reconstruction", "kl")
    reported: ClassVar = (
        *("kl_per_dimension", "window_kl", "active_units", "mutual_information"),
        "mutual_information_ceiling",
    )

    def run_drawings(self, run: Mapping[str, Any]) -> list[Drawing]:
        """From the rows of metrics.jsonl that follow a report of the monitor."""
        rows = [row for row in run["reported"] if "kl_per_dimension" in row]
        if not rows:
            return []
        columns = {name: [row.get(name) for row in rows] for name in ("step", *self.reported)}
        return [Drawing("Posterior over the steps", partial(_posterior, columns), 12, 3.4, 3)]


class SequenceVAE(Task):
    """Learns to encode sequences in a latent vector, and to write them again from it.

    The loss is the negative evidence lower bound in nats per sample: `reconstruction` (all tokens, the end
    token too) plus `kl_term`, the weighted KL. Held-out metrics: `nll` (the bound at weight 1, which is the
    loss), `reconstruction`, `kl`, `perplexity` by the bound, `active_units`, `mutual_information` and its
    ceiling (the logarithm of the samples), `collapsed`. The monitor's figures are in metrics.jsonl, in the
    rows of the steps that a report follows.
    """

    Options: ClassVar = SequenceVAEOptions
    data: ClassVar = "data.sequences:Sequences"
    forms: ClassVar = ("torch",)
    follow_ups: ClassVar = ("vae sample {run}", 'vae interpolate {run} "a" "b"', "report {run}")
    defaults, fast, demo, presets = (SITUATIONS[kind] for kind in ("defaults", "fast", "demo", "presets"))

    def __init__(self, recipe: Recipe, options: Any) -> None:
        super().__init__(recipe, options)
        self.plot_every = options.pace.plot_every if options.pace else 0

    def phases(self) -> list[Phase]:
        return [Phase(name="vae")]

    def unread(self) -> Mapping[str, str]:
        return {
            "model": "a sequence VAE is trained from scratch, see --backbone",
            "label_smoothing": "the evidence lower bound is of the plain likelihood",
            "noise": "this task draws noise, which is keyed",
            **hub.unread_revision(self.recipe.tokenizer),
        }

    def check(self) -> None:
        options, longest = self.options, self.recipe.max_length
        on_collapse = options.on_collapse
        refuse(
            {
                f"--max-length {longest}: a row needs a token and the end token": longest < 2,
                f"--on-collapse {on_collapse}: the monitor is off: leave --monitor out": on_collapse != "warn"
                and options.monitor == "off",
            }
        )

    def build_model(self, facts: Facts) -> nn.Module:
        from isobatch.models.sequence_vae import network

        options, extra = self.options, facts.extra
        sizes = {name: getattr(options, name) for name in ("backbone", "hidden", "layers", "latent")}
        config = network.NetworkConfig(
            max_length=self.recipe.max_length,
            dropout=DROPOUT if self.recipe.dropout is None else self.recipe.dropout,
            **sizes,
            **{name: extra[name] for name in ("vocabulary", "bos", "eos", "unk")},
        )
        model = network.VAENetwork(config)
        if model.decoder.head.weight.device.type != "meta":
            network.initialize(model, self.recipe.seed)
        model.objective = network.Objective(options)
        if options.pace is not None:
            model.monitor = network.PosteriorMonitor(options.pace, options.latent, self.recipe.batch_size)
        return model

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        if model.monitor is not None:
            model.monitor.reset()

    def model_size(self, facts: Facts) -> ModelSize:
        options, size = self.options, super().model_size(facts)
        is_gru = options.backbone == "gru"
        return dataclasses.replace(
            size,
            layers=2 * options.layers,
            hidden=options.hidden,
            intermediate=options.hidden if is_gru else 4 * options.hidden,
            recurrent_layers=2 * options.layers if is_gru else 0,
            vocabulary=facts.extra["vocabulary"],
            head_bytes=CHUNK_BYTES,
            needs_transformers=False,
            why_unshardable="torch's GRU reads all of its weights at once" if is_gru else "",
        )

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        """batch: tokens (B, T) that end with the end token, length (B,). Sums of nats over the samples."""
        import torch

        network: Any = getattr(model, "module", model)
        tokens, length = batch["tokens"].long(), batch["length"]
        share, dropped = self.options.word_dropout, None
        if share:  # of the inputs that the decoder sees; the first token of a row it always does
            dropped = step.noise.uniform("word-dropout", tokens.shape[1:]) < share
            dropped[:, 0] = False
        monitor = network.monitor if step.positions is not None else None
        noise = step.noise.normal("posterior", (self.options.latent,))
        in_all = None if step.host is None else int(step.host["length"].numpy().sum())
        nll, posterior = model(tokens, length, noise, dropped, in_all)
        kl = posterior.kl()
        per_sample = kl.sum(1)
        count = torch.full_like(nll, len(tokens))
        step.record("totals", torch.stack([count, length.sum(), per_sample.sum(), nll]))
        if monitor is not None:
            monitor.record(posterior, kl, step)
        term = network.objective.kl_term(per_sample, step.number, step.total_steps)
        return {"reconstruction": Loss(nll, "sample"), "kl_term": Loss(term, "sample")}

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        """`kl`: nats per sample of the global batch."""
        return {"kl": recorded["totals"][2] / recorded["totals"][0]} if "totals" in recorded else {}

    def after_step(self, model: Any, step: StepContext) -> Change | None:
        """At a report log the monitor's figures and judge them."""
        monitor = model.monitor
        if monitor is None:
            return None
        monitor.add(step.number, step.total_steps, step.recorded)
        is_due = (step.number + 1) % monitor.pace.report_every == 0 or step.number + 1 == step.total_steps
        return self._report(model, step) if is_due else None

    def _report(self, model: Any, step: StepContext) -> Change | None:
        from isobatch.models.sequence_vae.monitor import sentence

        figures = model.monitor.report(step.number, step.total_steps, self.recipe.seed)
        history, changed = model.monitor.judge(figures)
        nats, free_bits = max(2.0, self.options.latent / 8), float(model.objective.free_bits)
        asked = self.options.on_collapse == "remedy" and history.state in ("collapsing", "collapsed")
        remedied = asked and free_bits < nats and step.number + 1 < step.total_steps
        advice = f"try --free-bits {nats:g}, --kl-schedule cyclical or --on-collapse remedy"
        if free_bits:
            advice = "try --word-dropout 0.2 or more --free-bits"
        message = sentence(figures, history, "" if remedied else advice)
        said = {**figures.metrics(), "verdict": history.state, "verdict_says": message}
        for name, value in said.items():
            step.log(name, value)
        if not changed:
            return None
        facts = {"state": history.state, "since": history.since, "active_units": len(figures.active)}
        facts |= {"kl": round(figures.kl, 6)}
        if remedied:
            model.objective.free_bits.fill_(nats)
            facts |= {"remedy": "free bits", "free_bits": nats}
            message += f"; remedy: free bits of {nats:g} nats from step {step.number + 2} on"
        stop = history.state == "collapsed" and self.options.on_collapse == "stop"
        return Change(facts, decision="posterior", message=message, stop=stop)

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        import torch

        tokens, length = batch["tokens"].long(), batch["length"]
        nll, posterior = model(tokens, length, step.noise.normal("posterior", (self.options.latent,)))
        count = len(tokens)
        return {
            "nll": Sum(nll, count),
            "kl": Sum(posterior.kl().sum(), count),
            "tokens": Sum(length.sum(), count),
            "posterior": Rows(torch.cat(list(posterior), dim=1)),
        }

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Facts) -> dict[str, Any]:
        import numpy as np
        import torch

        from isobatch.models.causal_lm.perplexity import finite_exp
        from isobatch.models.sequence_vae import monitor

        nll, kl, tokens = (float(parts[name].value / parts[name].weight) for name in ("nll", "kl", "tokens"))
        found: dict[str, Any] = {"loss": nll + kl, "nll": nll + kl, "reconstruction": nll, "kl": kl}
        found |= {"perplexity": finite_exp((nll + kl) / tokens), "unit": "token, the end too"}
        sizes = facts.extra.get("splits", {}).get(split, {})
        if sizes.get("words"):  # not of ids; the end is a word, as in the literature (Bowman et al. 2016)
            found["word_perplexity"] = finite_exp((nll + kl) / (sizes["words"] / sizes["sequences"] + 1))
        mean, logvar = torch.from_numpy(parts["posterior"].astype(np.float64)).chunk(2, dim=1)
        variance = monitor.mean_variance(mean.sum(0), mean.square().sum(0), len(mean))
        mean, logvar = mean[:EVALUATED_POSTERIORS], logvar[:EVALUATED_POSTERIORS]
        noise = torch.from_numpy(np.random.default_rng(0).standard_normal(tuple(mean.shape)))
        active = int((variance > monitor.ACTIVE).sum())
        information = monitor.mutual_information(mean, logvar, noise)
        return found | {
            "active_units": active,
            "mutual_information": information,
            "mutual_information_ceiling": math.log(len(mean)),
            "collapsed": monitor.has_collapsed(active, kl, information),
        }

    def open_codec(self, final: Path) -> SequenceCodec:
        from isobatch.models.sequence_vae.generation import SequenceCodec

        return SequenceCodec.open(final)

    def open_predictor(self, final: Path, exports: Path, form: str) -> SequenceCodec:
        """Samples are texts, or lists of ids."""
        return self.open_codec(final)

    def sample(self, model: nn.Module, facts: Facts, folder: Path) -> str | None:
        """Three sequences from the prior."""
        return "\n".join(self.open_codec(folder).sample(3, SHOWN_TOKENS, 1.0, self.recipe.seed))

    def report(self) -> SequenceVAEReport:
        return SequenceVAEReport()

    def export(self, model: Any, folder: Path, facts: Facts) -> None:
        """model.safetensors (encoder and decoder), config.json, and tokenizer.json of a text's."""
        from safetensors.torch import save_file

        weights = {k: v for k, v in model.state_dict().items() if k.split(".")[0] in ("encoder", "decoder")}
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
        config = {"model_type": "sequence-vae", **dataclasses.asdict(model.config)}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if "tokenizer" in facts.extra:
            saving.load_tokenizer(facts).save(str(folder / "tokenizer.json"))

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        return ModelDescription(
            title="Variational autoencoder over sequences",
            summary="Encodes a sequence as a latent vector, and writes sequences from such vectors.",
            usage="isobatch sample .. --count 3",
            language="sh",
            remark="a part of the run, which isobatch opens",
        )


def _posterior(columns: Mapping[str, list[Any]], *axes: Any) -> None:
    """KL per dimension as a map, active units, mutual information under its ceiling."""
    heat, units, information = axes
    steps, kl = columns["step"], list(zip(*columns["kl_per_dimension"], strict=True))
    image = heat.pcolormesh(steps, range(len(kl)), kl, shading="nearest", cmap="viridis", vmin=0)
    heat.figure.colorbar(image, ax=heat, label="KL, nats")
    heat.set(xlabel="step", ylabel="dimension")
    units.plot(steps, columns["active_units"])
    units.set(xlabel="step", ylabel="active units", ylim=(0, len(kl)))
    information.plot(steps, columns["mutual_information"], label="mutual information")
    information.plot(steps, columns["mutual_information_ceiling"], ls="--", c="grey", label="its ceiling")
    information.plot(steps, columns["window_kl"], label="KL")
    information.set(xlabel="step", ylabel="nats")
    information.legend(fontsize=8, frameon=False)
