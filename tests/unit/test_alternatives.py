"""Tests of engine/planning/estimate.py: what other settings would take, by the plan's arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config

from isobatch.core.facts import Facts
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning.estimate import Target, estimate, memory_alternatives
from isobatch.engine.registry import workload
from isobatch.launch.commands.plan import format_alternatives

PARAMETERS = 124_439_808
LORA = 294_912
"""Rank 8 on 12 matrices of 768 by 2,304."""
MATRICES = 12 * 12 * 768**2
"""Of the blocks: c_attn, both c_proj and c_fc."""


@pytest.fixture
def peaks(tmp_path):  # type: ignore[no-untyped-def]
    """Flags -> bytes, for GPT-2 on an 8 GB card with these options."""
    GPT2Config().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    facts = Facts(
        fingerprint="0",
        folder="",
        samples={"train": 1000},
        lengths=(256,) * 65,
        extra={"vocabulary": 50257},
    )

    def of(**options):  # type: ignore[no-untyped-def]
        recipe = Recipe(task="causal-lm", model=str(tmp_path), batch_size=8, max_length=256, options=options)
        machine = parse_hardware("rtx4060")
        found = estimate(Target("", workload("causal-lm"), recipe, facts, machine, PlanOptions()), {})
        assert found.plan
        rows = memory_alternatives(found)
        assert rows[0] == {
            **rows[0],
            "flags": "",
            "peak_memory_bytes": found.plan.predicted_peak_memory_bytes,
        }
        assert all(row.keys() == {"flags", "peak_memory_bytes", "remark"} for row in rows)
        return {row["flags"]: row["peak_memory_bytes"] for row in rows}

    return of


def test_all_of_a_model(peaks) -> None:  # type: ignore[no-untyped-def]
    found = peaks()
    whole = found[""]
    assert whole - found["--optimizer adamw8bit"] == pytest.approx(6 * PARAMETERS, rel=1e-3)
    assert found["--optimizer adafactor"] < found["--optimizer adamw8bit"]
    assert found["--activation-checkpointing on"] < whole
    # Frozen weights have neither gradients nor moments; matrices keep autocast's copies, adapters their
    # inputs: 768 numbers of 2 bytes and a mark of dropout for each token and layer.
    tables = 2 * 4 * 50257 * 768
    inputs = 8 * 256 * 12 * 768 * 3
    assert whole - found["--adapter lora"] == pytest.approx(
        (2 + 4 + 8) * PARAMETERS - 2 * MATRICES + tables - inputs, rel=0.02
    )
    lora, eight = found["--adapter lora"], found["--adapter lora --load-bits 8"]
    assert lora - eight == pytest.approx((3 + 2) * MATRICES, rel=0.01)
    assert found["--adapter qlora"] < eight


def test_an_adapter_leaves_little_to_save(peaks) -> None:  # type: ignore[no-untyped-def]
    found = peaks(adapter="lora")
    assert found[""] - found["--optimizer adamw8bit"] == 6 * LORA
    assert "--adapter lora" not in found
    assert found["--adapter qlora"] < found["--adapter lora --load-bits 8"] < found[""]
    assert (
        set(peaks(adapter="qlora", load_bits=4)) & {"--adapter qlora", "--adapter lora --load-bits 8"}
        == set()
    )


def test_alternatives_that_hardly_differ_are_not_shown() -> None:
    def rows(*peaks: int) -> list[dict[str, Any]]:
        return [{"flags": f"--n {p}", "peak_memory_bytes": p, "remark": ""} for p in peaks]

    def shown(*peaks: int) -> list[str]:
        lines = format_alternatives(rows(*peaks))
        return [line.split()[1] for line in lines[1:-1]]

    assert shown(1000, 985, 1015, 900, 1200) == ["1000", "900", "1200"]
    assert shown(1000, 985) == []
