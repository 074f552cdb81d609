"""Tests of engine/planning/planner.py: what is decided for each machine, why, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.gpu_table import MACHINES
from isobatch.engine.machine.hardware import GIB, Hardware, parse_hardware
from isobatch.engine.planning.choices import fixed_loader_settings, unmet_wishes
from isobatch.engine.planning.planner import make_plan, with_smaller_budget
from isobatch.models.base import ModelSize
from isobatch.models.causal_lm.adapter_sizes import BYTES_PER_WEIGHT
from isobatch.models.head_chunks import CHUNK_BYTES


def sized(parameters: int, *shape: int, **more: Any) -> ModelSize:
    """All of it trains; `shape`: layers, hidden width, heads, width of the MLP, vocabulary."""
    names = ("layers", "hidden", "heads", "intermediate", "vocabulary")
    return ModelSize(
        parameters=parameters, trainable=parameters, **dict(zip(names, shape, strict=False)), **more
    )


GPT2 = sized(124_439_808, 12, 768, 12, 3072, 50257)
TINY = sized(900_000, 4, 128, 2, 512, 1000)
BERT6 = sized(66_400_000, 6, 768, 12, 3072)
SEVEN_B = sized(6_738_000_000, 32, 4096, 32, 11008, 32000)
TEXTS = Facts(fingerprint="0", folder="", samples={"train": 10_000}, lengths=tuple(range(64, 129)))
BLOCKS = Facts(fingerprint="0", folder="", samples={"train": 10_000}, lengths=(1024,) * 65)
LAPTOP = parse_hardware("rtx4080-laptop")


def planned(machine: str | Hardware, shape: ModelSize = GPT2, facts: Facts = TEXTS, **asked: Any) -> Plan:
    recipe = Recipe(task="causal-lm", **asked.pop("recipe", {}))
    world = asked.pop("world", None)
    hardware = parse_hardware(machine) if isinstance(machine, str) else machine
    return make_plan(recipe, facts, shape, hardware, PlanOptions(**asked), world=world)


LLAMA_7B = dataclasses.replace(SEVEN_B, gated=True, head_bytes=CHUNK_BYTES)
ADAPTED = dataclasses.replace(  # Llama's 7B with LoRA of rank 8 on all its matrices
    LLAMA_7B,
    parameters=SEVEN_B.parameters + 19_988_480,
    trainable=19_988_480,
    adapter_inputs=6 * 4096 + 11008,
)
LORA_7B = dataclasses.replace(ADAPTED, frozen_bytes=2.0)
ROUNDED = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
WITH_QLORA = dataclasses.replace(  # embeddings, head and norms are not rounded: bf16
    ADAPTED,
    frozen_bytes=(BYTES_PER_WEIGHT[4] * ROUNDED + 2 * (SEVEN_B.parameters - ROUNDED)) / SEVEN_B.parameters,
    why_unshardable="bitsandbytes' weights cannot be cut",
)
LLAMA_70B = sized(
    68_976_648_192, 80, 8192, 64, 28672, 32000, key_width=1024, gated=True, head_bytes=CHUNK_BYTES
)
LARGE = [
    # machine, model, batch, processes, strategy, activation checkpointing
    # Four fifths of a card's memory may be used. LoRA of 7B in bf16 at one row of 1,024 tokens: weights
    # 2 x 6.74 = 13.5 GB; 20 million that train x (4 + 4 + 8 + 2) = 0.4; context 1.2; with activation
    # checkpointing 32 inputs of 2 x 4,096 bytes and two layers of 0.24 MB a token x 1.1 = 0.8; 0.3 of logits:
    # 16.1 GB. Without: 33 x 0.24 MB x 1,024 x 1.1 = 8.9 in place of 0.8: 24.2 GB.
    # 16 GB: 13.7 may be used, so weights stay in host memory, of 64 GiB.
    ("rtx4080", LORA_7B, 32, 1, "zero3-offload", "on"),
    # 24 GB: 20.6 may be used, so it fits with selective checkpointing, and crossing PCIe (2 x 13.5 GB a
    # micro-batch at 12 GB/s = 2.2 s) is slower.
    ("rtx4090", LORA_7B, 32, 1, "single", "selective"),
    ("l40s", LORA_7B, 32, 1, "single", "off"),  # 48 GB: 38.6 may be used
    # 70B: 20 x 69e9 / n bytes of state: 43 GB on 32 cards, 86 on 16, so not 16 of 80 GB; with 32 rows more
    # than 32 cards have nothing to do. Offloaded, 276 GB of weights would cross PCIe twice as well, and
    # 28 x 69e9 bytes of moments go through the hosts' memory.
    ("8x8xh100", LLAMA_70B, 32, 32, "zero3", "on"),
    # With 512 rows ZeRO's copy of the weights, 4 x 69e9 / 64 = 4.3 GB, is room that FSDP2 has for more tokens
    # at a time, and weights cross the network for fewer micro-batches.
    ("8x8xh100", LLAMA_70B, 512, 64, "fsdp2", "on"),
    # 7B, two micro-batches a step at 25 GB/s: sharded over all cards 2 x 13.5 + 27 GB cross the network in
    # each, with a copy on each node (20 x 6.7e9 / 8 = 17 GB a card) 2 x 3/4 x 27 GB of gradients, once.
    ("4x8xa100-80gb@200gbit", SEVEN_B, 512, 32, "hsdp", "off"),
    ("4x8xa100-80gb@1600gbit", SEVEN_B, 512, 32, "zero3", "off"),  # at 200 GB/s arithmetic hides that
    # QLoRA: 6.48e9 x 0.5625 + 0.26e9 x 2 = 4.2 GB of weights; 0.4, 1.2 and 0.3 as above, and of each layer
    # 2 x (6 x 4,096 + 2 x 11,008) bytes a token that products and attention give: 4.2 in place of 0.8, so
    # 10.2 of the 10.3 GB that may be used of 12. Without checkpointing 15.
    ("rtx4080-laptop", WITH_QLORA, 1, 1, "single", "selective"),
]


@pytest.mark.parametrize("row", LARGE, ids=lambda row: f"{row[0]}-{row[1].trainable}-{row[2]}")
def test_large_models(row: tuple[Any, ...]) -> None:
    machine, shape, batch, processes, strategy, recompute = row
    plan = planned(machine, shape, BLOCKS, recipe={"max_length": 1024, "batch_size": batch})
    found = (plan.processes, plan.strategy, plan.activation_checkpointing)
    assert found == (processes, strategy, recompute)
    assert plan.predicted_peak_memory_bytes <= 0.8 * parse_hardware(machine).gpu.memory_bytes
    if shape is WITH_QLORA:
        assert plan.predicted_peak_memory_bytes == pytest.approx(10.2e9, rel=0.03)


DECISIONS = [
    # machine, device, processes, strategy, precision, pad, reduction, invariance; a batch of 32 short texts
    ("rtx4080-laptop", "cuda", 1, "single", "bf16", 8, "explicit", "precision"),
    ("t4", "cuda", 1, "single", "fp16", 8, "explicit", "precision"),
    ("8xh100", "cuda", 4, "ddp", "bf16", 8, "overlapped", "precision"),
    ("4x8xa100-80gb", "cuda", 8, "ddp", "bf16", 8, "overlapped", "precision"),
    ("cpu:2x24gb", "cpu", 1, "single", "fp32", 1, "explicit", "exact"),
    ("mps:16gb", "mps", 1, "single", "fp32", 1, "explicit", "exact"),
]


@pytest.mark.parametrize("row", DECISIONS, ids=lambda row: row[0])
def test_decisions_for_gpt2(row: tuple[Any, ...]) -> None:
    plan = planned(row[0])
    found = (plan.device, plan.processes, plan.strategy, plan.precision, plan.pad_multiple, plan.reduction)
    assert (*found, plan.invariance) == row[1:]


@pytest.mark.parametrize("machine", [*MACHINES, "8xh100", "8xrtx4080", "4x8xa100-80gb", "64x8xh100"])
def test_a_tiny_model_with_a_small_batch_takes_one_gpu_or_a_few_of_one_node(machine: str) -> None:
    plan = planned(machine, TINY)
    assert (plan.nodes, plan.strategy in ("single", "ddp"), plan.compile) == (1, True, "off")
    assert plan.micro_batch_tokens == 32 * 128 // plan.processes  # the whole batch at once


@pytest.mark.parametrize("shape", [GPT2, TINY, ModelSize(parameters=5_000_000, trainable=5_000_000)])
@pytest.mark.parametrize("machine", [row[0] for row in DECISIONS])
def test_every_field_has_its_reason_in_one_sentence(machine: str, shape: ModelSize) -> None:
    plan = planned(machine, shape)
    # Measured later; only of a strategy that keeps copies; only of data in a store.
    others = {"reasons", "rounding", "copies", "stream_cache_bytes"}
    fields = {field.name for field in dataclasses.fields(Plan)} - others
    assert set(plan.reasons) == fields
    assert all(reason.strip() and "\n" not in reason for reason in plan.reasons.values())
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        (None, "plan.json: .*missing"),
        ({"invariance": "perfect"}, "plan.json: .*invariance perfect"),
        ({"rounding": ["much", 1.0]}, "plan.json: .*rounding"),
        ({"processes": "two"}, "plan.json: .*processes two"),
    ],
)
def test_a_broken_plan_is_named(changes: dict[str, Any] | None, hint: str) -> None:
    written = {} if changes is None else {**planned("h100", TINY).to_dict(), **changes}
    with pytest.raises(UserError, match=hint):
        Plan.from_dict(written)


def test_one_of_eight_gpus_without_fast_links_and_the_numbers_why() -> None:
    plan = planned("8xrtx4080", BERT6, recipe={"batch_size": 8})
    assert (plan.processes, plan.strategy) == (1, "single")
    assert plan.reasons["processes"].startswith("I use 1 of 8 GPUs: this batch of 8 takes ")
    assert planned("8xrtx4080", BERT6, recipe={"batch_size": 4096}).processes == 8


def test_a_memory_limit_shrinks_the_micro_batch_only() -> None:
    wide, narrow = planned(LAPTOP, facts=BLOCKS), planned(LAPTOP, facts=BLOCKS, memory_limit="6GB")
    assert narrow.micro_batch_tokens < wide.micro_batch_tokens
    assert narrow.predicted_peak_memory_bytes <= 6e9 < wide.predicted_peak_memory_bytes
    assert planned(LAPTOP, memory_limit="80%") == planned(LAPTOP)


def test_checkpointing_comes_where_nothing_fits_without() -> None:
    long = dataclasses.replace(BLOCKS, lengths=(24576,) * 65)
    shape = dataclasses.replace(GPT2, vocabulary=0)
    plan = planned(LAPTOP, shape, long)
    assert plan.activation_checkpointing == "selective"
    assert planned(LAPTOP, shape, long, memory_limit="6GB").activation_checkpointing == "on"
    with pytest.raises(UserError, match="without --activation-checkpointing off, or memory of"):
        planned(LAPTOP, shape, long, activation_checkpointing="off", strategy="single")


def test_partitioning_comes_only_where_ddp_does_not_fit() -> None:
    plan = planned("8xh100", SEVEN_B, recipe={"batch_size": 256})
    assert plan.strategy.startswith("zero")
    assert plan.reduction == "explicit"
    assert planned("8xh100").strategy == "ddp"
    assert planned("8xh100", strategy="zero2").reasons["strategy"] == "you asked for it"


@pytest.mark.parametrize(
    ("machine", "asked", "mesh"),
    [
        ("8x8xh100", {}, (8, 8)),  # a copy a node
        ("8x8xh100", {"copies": 2}, (2, 32)),
        ("8xh100", {}, (1, 8)),
        ("8xh100", {"copies": 2}, (2, 4)),
        (
            "2x4xrtx4090@100gbit",
            {"processes": 8},
            (1, 8),
        ),  # a quarter of 20 x 6.7e9 bytes does not fit a card
    ],
)
def test_copies_are_one_a_node_where_one_fits(machine: str, asked: Any, mesh: tuple[int, int]) -> None:
    plan = planned(machine, SEVEN_B, BLOCKS, recipe={"batch_size": 512}, strategy="hsdp", **asked)
    assert plan.mesh == mesh
    assert f"a mesh of {mesh[0]} x {mesh[1]}" in plan.reasons["copies"]
    assert Plan.from_dict(plan.to_dict()).mesh == mesh


def test_copies_save_what_each_further_micro_batch_would_send() -> None:
    """In one, 2 x 2 + 4 bytes a parameter cross the network as weights and gradients, 2 x 4 as gradients."""

    def ratio(batch: int, network: str) -> float:
        asked: Any = {"recipe": {"batch_size": batch}, "processes": 64, "micro_batch": 8}
        asked |= {"activation_checkpointing": "off", "compile": "off"}
        plans = [
            planned(f"8x8xh100@{network}", SEVEN_B, BLOCKS, **asked, strategy=s) for s in ("fsdp2", "hsdp")
        ]
        return plans[0].predicted_step_seconds / plans[1].predicted_step_seconds

    assert ratio(64, "400gbit") == pytest.approx(1, abs=0.01)
    assert 1 < ratio(4096, "3200gbit") < ratio(4096, "800gbit") < ratio(4096, "200gbit")


@pytest.mark.parametrize(("ram", "strategy"), [("128gb", "fsdp2-offload"), ("192gb", "zero3-offload")])
def test_offloading_without_a_copy_takes_a_smaller_host(ram: str, strategy: str) -> None:
    """4 + 4 + 8 bytes x 6.7e9 = 108 GB, and 4 of ZeRO's copy: 135; four fifths of 128 GiB are 110."""
    plan = planned(f"rtx4090:24gb:{ram}", SEVEN_B, BLOCKS)
    assert plan.strategy == strategy


def test_zero_keeps_to_what_it_can_compute_exactly() -> None:
    for asked, message in (({"optimizer": "adafactor"}, "flat"), ({"optimizer": "adamw8bit"}, "flat")):
        with pytest.raises(UserError, match=message):
            planned("8xh100", strategy="zero2", recipe=asked)
    with pytest.raises(UserError, match="fp16's loss scale"):
        planned("8xv100", strategy="zero2")
    assert planned("8xh100", strategy="zero3", recipe={"steps": (1_000_000,)}).compile == "off"


def test_after_an_out_of_memory_the_budget_halves_down_to_one_sample() -> None:
    recipe = Recipe(task="causal-lm", batch_size=8)
    plan = make_plan(recipe, TEXTS, GPT2, LAPTOP, PlanOptions())
    seen = []
    while plan.activation_checkpointing != "on":
        seen.append((plan.micro_batch_samples, plan.micro_batch_tokens))
        plan = with_smaller_budget(plan, recipe, TEXTS)
    assert seen == [(8, 1024), (4, 512), (2, 256), (1, 128)]
    with pytest.raises(TrainingError, match="one sample of 128 tokens"):
        with_smaller_budget(plan, recipe, TEXTS)


@pytest.mark.parametrize(
    ("machine", "shape", "asked", "message"),
    [
        ("t4", GPT2, {"precision": "bf16"}, "--precision bf16: t4 only emulates it"),
        ("cpu:2x24gb", GPT2, {"precision": "fp16"}, "fp16 needs a GPU"),
        ("cpu:2x24gb", GPT2, {"device": "cuda"}, "no NVIDIA GPU"),
        ("h100", GPT2, {"device": "mps"}, "not an Apple machine"),
        ("8xh100", GPT2, {"processes": 9}, "there are 8 GPUs"),
        ("mps", GPT2, {"processes": 2}, "there is 1 GPU"),
        ("8xh100", GPT2, {"strategy": "single", "processes": 2}, "--strategy single"),
        ("h100", GPT2, {"strategy": "zero2"}, "two or more processes"),
        ("t4", GPT2, {"attention": "flash"}, "compute capability 8.0"),
        ("t4", GPT2, {"memory_limit": "120%"}, "--memory-limit 120%"),
        ("t4", GPT2, {"memory_limit": "1GB"}, "without --memory-limit 1GB, or memory"),
        (
            "cpu:2x24gb",
            sized(9, fit_bytes=2e9),
            {"memory_limit": "2GB"},
            "end fits to the data.* 2.4.* GB.* without --memory-limit 2GB",
        ),
        ("rtx4080-laptop", SEVEN_B, {}, "needs 12.*: memory of 1.* GB would do"),
        ("8xh100", SEVEN_B, {"strategy": "ddp"}, "used: without --strategy ddp, or memory"),
        ("h100", SEVEN_B, {"strategy": "single"}, "used: without --strategy single, or memory of"),
        ("4xrtx4090", SEVEN_B, {"strategy": "zero3"}, "used: without --strategy zero3, or memory of"),
        ("8xh100", GPT2, {"copies": 2}, "--copies 2: hsdp alone keeps copies: add --strategy hsdp"),
        ("8xh100", GPT2, {"copies": 2, "strategy": "fsdp2"}, "--copies 2: hsdp alone keeps copies"),
        ("8xh100", GPT2, {"copies": 3, "strategy": "hsdp"}, "--copies 3: 8 processes cannot be divided so"),
        ("8xh100", GPT2, {"processes": 4, "world": 8}, "the launcher formed a world of 8"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    machine: str, shape: ModelSize, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        planned(machine, shape, **asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "precision"),
    [("16-mixed", "fp16"), ("bf16-mixed", "bf16"), ("32", "fp32"), ("fp32", "fp32"), ("auto", "bf16")],
)
def test_spellings_of_precision(word: str, precision: str) -> None:
    plan = planned(LAPTOP, precision=word)
    assert plan.precision == precision
    assert plan.invariance == ("exact" if precision == "fp32" else "precision")
    assert plan.pad_multiple == (1 if precision == "fp32" else 8)


@pytest.mark.parametrize(
    ("machine", "word", "reason"),
    [
        ("cpu:2x24gb", "16-mixed", "fp16 needs a GPU, so this is fp32"),
        ("cpu:2x24gb", "bf16-mixed", "no arithmetic for bf16 (AMX or AVX512_BF16), so this is fp32"),
        ("v100", "bf16-mixed", "only emulates it (compute capability 7.0, it takes 8.0), so this is fp32"),
    ],
)
def test_a_mixed_precision_is_a_wish_and_the_plan_says_why_not(machine: str, word: str, reason: str) -> None:
    plan = planned(machine, precision=word)
    assert plan.precision == "fp32"
    assert plan.reasons["precision"].endswith(reason)
    line = f"--precision {word}: {plan.reasons['precision']}"
    assert unmet_wishes(PlanOptions(precision=word), plan) == [line]  # type: ignore[arg-type]


def test_what_of_the_loader_is_no_choice_has_its_reason_too() -> None:
    thread = fixed_loader_settings(planned("cpu:8x64gb", TINY))
    assert {name: value for name, (value, _) in thread.items()} == dict.fromkeys(thread, True)
    workers = fixed_loader_settings(planned(LAPTOP, workers=8))
    assert workers["persistent_workers"][1].startswith("the 8 loader processes live as long as a phase")
    assert not fixed_loader_settings(dataclasses.replace(planned(LAPTOP), pack=True))["dynamic_padding"][0]


def test_wishes_that_the_plan_cannot_follow_are_said() -> None:
    asked: dict[str, Any] = {"pin_memory": "on", "strategy": "ddp", "micro_batch": 100, "prefetch": 4}
    lines = unmet_wishes(PlanOptions(**asked), planned("cpu:8x64gb", TINY, **asked))
    assert [line.partition(": ")[0] for line in lines] == [
        "--micro-batch 100",
        "--pin-memory on",
        "--strategy ddp",
    ]
    assert "--processes 2 or more" in lines[2]


@pytest.mark.parametrize(
    ("asked", "invariance"),
    [
        ({"recipe": {"noise": "native"}}, "noise"),
        ({"precision": "fp32", "compile": "on"}, "precision"),
        ({"precision": "bf16", "shape": dataclasses.replace(BERT6, rounds=True)}, "precision"),
        (
            {"precision": "fp32", "compile": "off", "shape": dataclasses.replace(BERT6, rounds=True)},
            "rounding",
        ),
        ({"recipe": {"noise": "native"}, "shape": dataclasses.replace(BERT6, rounds=True)}, "noise"),
    ],
)
def test_what_differs_most_is_stated(asked: dict[str, Any], invariance: str) -> None:
    assert planned(LAPTOP, **asked).invariance == invariance


def test_a_matrix_unit_makes_bf16_the_choice_on_a_cpu_where_it_is_faster_and_nothing_rounds() -> None:
    cpu = parse_hardware("cpu:8x64gb")
    amx = dataclasses.replace(cpu, cpu_bf16=True, cpu_amx=True)
    assert planned(dataclasses.replace(cpu, cpu_bf16=True)).precision == "fp32"
    assert planned(amx).precision == "bf16"
    assert planned(amx, TINY).precision == "fp32"
    assert planned(amx, dataclasses.replace(BERT6, rounds=True)).precision == "fp32"
    assert "5 times slower" in planned(cpu, precision="bf16").reasons["precision"]


def test_a_world_larger_than_the_batch_is_allowed_and_said() -> None:
    plan = planned("cpu:8x64gb", TINY, recipe={"batch_size": 3}, processes=5)
    assert plan.processes == 5
    assert "2 of them idle" in plan.reasons["processes"]


def test_a_formed_world_is_taken_even_where_one_process_would_be_faster() -> None:
    plan = planned("8xrtx4080", BERT6, world=8)
    assert plan.processes == 8
    assert planned("8xh100", world=16).nodes == 2
    seen = dataclasses.replace(parse_hardware("8xh100"), nodes=2, source="detected")
    assert planned(seen, world=8).nodes == 2  # four processes on each of two nodes


def test_micro_batch() -> None:
    plan = planned(LAPTOP, micro_batch=4)
    assert (plan.micro_batch_samples, plan.micro_batch_tokens) == (4, 4 * 128)
    clamped = planned(LAPTOP, micro_batch=100)
    assert clamped.micro_batch_samples == 32
    assert "more than the global batch" in clamped.reasons["micro_batch_samples"]


def test_a_head_in_chunks_has_no_tensor_of_all_logits() -> None:
    """64 rows of 1,024 tokens times 50,257 are more than 2^31, and are never there at once."""
    whole = planned("h100", GPT2, BLOCKS, recipe={"max_length": 1024, "batch_size": 64})
    chunked = dataclasses.replace(GPT2, head_bytes=CHUNK_BYTES)
    plan = planned("h100", chunked, BLOCKS, recipe={"max_length": 1024, "batch_size": 64})
    assert whole.micro_batch_tokens == 2**31 // GPT2.vocabulary
    assert plan.micro_batch_tokens == 64 * 1024


def test_the_least_memory_is_that_of_one_sample_and_the_rest_is_kept() -> None:
    plan, limited = planned(LAPTOP, facts=BLOCKS), planned(LAPTOP, facts=BLOCKS, memory_limit="6GB")
    assert plan.least_memory_bytes == limited.least_memory_bytes < plan.predicted_peak_memory_bytes
    assert (plan.usable_memory_bytes / LAPTOP.gpu.memory_bytes, limited.usable_memory_bytes) == (
        pytest.approx(0.8),
        6e9,
    )


def test_cpu_micro_batches_stay_small_and_hold_the_longest_sample() -> None:
    assert planned("cpu:2x24gb", TINY, recipe={"batch_size": 4096}).micro_batch_tokens == 24 * 2**20 // 4000
    assert (
        planned("cpu:2x24gb", GPT2).micro_batch_tokens == 512
    )  # 32 MiB / (4 B x 50,257) is less than the floor
    assert planned("cpu:2x24gb", GPT2, BLOCKS).micro_batch_tokens == 1024


def test_runs_compile_where_it_pays() -> None:
    plan = planned("h100", recipe={"steps": (1_000_000,)})
    assert (plan.compile, plan.pad_multiple) == ("max-autotune", 8)
    assert planned("h100", recipe={"steps": (20_000,)}).compile == "on"
    graphs = planned("h100", compile="reduce-overhead")
    assert (graphs.compile, graphs.pad_multiple) == ("reduce-overhead", 16)  # 128 / 8 shapes
    assert planned("h100", recipe={"steps": (100,)}).compile == "off"
    assert planned("h100", recipe={"steps": (1_000_000,)}, precision="fp32").invariance == "exact"
    assert planned("cpu:2x24gb", recipe={"steps": (1_000_000,)}).compile == "off"


def test_pinned_memory_but_not_under_wsl() -> None:
    assert planned(LAPTOP).pin_memory
    assert not planned(dataclasses.replace(LAPTOP, wsl=True)).pin_memory
    assert not planned("cpu:2x24gb", pin_memory="on").pin_memory


def test_more_memory_never_makes_the_micro_batch_smaller() -> None:
    tokens = []
    for memory in (6, 8, 12, 16, 24, 48, 80):
        gpu = dataclasses.replace(LAPTOP.gpu, memory_bytes=memory * GIB)
        machine = dataclasses.replace(LAPTOP, gpus=(gpu,))
        tokens.append(planned(machine, facts=BLOCKS, recipe={"batch_size": 512}).micro_batch_tokens)
    assert tokens == sorted(tokens)
    assert len(set(tokens)) > 3


def test_cuda_graphs_need_whole_gradients_and_no_ddp_hooks() -> None:
    plan = planned("2xh100", compile="reduce-overhead", strategy="ddp")
    assert (plan.compile, plan.reduction) == ("reduce-overhead", "explicit")
    with pytest.raises(UserError, match="under zero2 gradients leave the memory of CUDA graphs"):
        planned("8xh100", compile="reduce-overhead", strategy="zero2")
