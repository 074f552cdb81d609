"""Mistakes that users make at the command line: each is answered by one line with the right way out."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserError
from isobatch.launch.cli import COMMANDS, find_command

if TYPE_CHECKING:
    from pathlib import Path

LM, CLF, REC, VAE = (f"--task {name}" for name in ("causal-lm", "classifier", "recommender", "sequence-vae"))
MISTAKES = [
    # What is trained
    ("auto causal-lm", "what is 'causal-lm'? Flags start with --"),
    ("auto --task causallm", "did you mean causal-lm?"),
    ("auto --task ./missing.py:Task", "missing.py"),
    (f"auto {LM} --warmup-ratio 10", "has no meaning here"),
    (f"auto {LM} --preset fats", "--preset fats: valid for causal-lm"),
    # Data and models
    (f"auto {LM} --data nowhere/", "nowhere"),
    (f"auto {LM} --template chatlm", "did you mean chatml?"),
    (f"auto {CLF} --metric_for_best_model f1", "--load-best-model-at-end, or with --patience 3"),
    (f"auto {REC} --text of", "did you mean off?"),
    # The machine
    (f"auto {LM} --deepspeed ds.json", "use --strategy zero1, zero2 or zero3"),
    (f"auto {LM} --memory-limit lots", "is not a size such as 10GB"),
    (f"auto {LM} --accelerator tpu", "--accelerator tpu"),
    (f"plan {LM} --compare h100 --price cheap", "such as 2.10/h"),
    (f"plan {LM} --compare h100 --deadline soon", "is no time such as 6h"),
    (f"plan {LM} --mtbf 6h", "taken out: --save-every 5m"),
    ("auto --task orpo --response-only off", "taken out: the tokens of answers are learnt"),
    ("auto --task dpo --loss_type ipo", "taken out: the loss is DPO's own"),
    ("auto --task sequence-vae --pretrain 3", "taken out: hold the posterior up"),
    # Where it is kept, and other files
    (f"auto {LM} --name a/b", "is a folder's name in --out"),
    (f"auto {LM} --save-every 0ep", "--save-every 0ep: must be above 0"),
    (f"auto {LM} --tracker wandbb", "did you mean wandb?"),
    (f"auto {LM} --config none.yaml", "No such file"),
    (f"auto {LM} --like nowhere", "is no folder of a run"),
    ("resume", "give the folder of one run"),
    ("resume runs/none", "runs/none"),
    ("evaluate", "folder"),
    ("generate runs/none --prompt hi", "runs/none"),
    ("predict", "predict"),
    ("compare runs/a", "is not a run"),
    ("rm", "give the folders of runs"),
    ("runs nowhere", "there is no folder nowhere"),
    ("describe causal-ln", "did you mean causal-lm?"),
    ("report", "folder"),
    ("logs", "give the folder of one run"),
    ("serve", "give the folder of one run"),
]
"""What was typed -> a part of the answer."""


@pytest.mark.parametrize(("typed", "way_out"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_answered_with_the_way_out(
    typed: str, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, words = find_command(shlex.split(typed))
    with pytest.raises(UserError) as refused:
        COMMANDS[command].load()(words)
    assert way_out in str(refused.value)
    assert "\n" not in str(refused.value).strip()
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"
