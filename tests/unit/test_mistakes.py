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
    ("auto", "needs --task NAME"),
    ("auto causal-lm", "what is 'causal-lm'? Flags start with --"),
    ("auto --task causallm", "did you mean causal-lm?"),
    ("auto --task ./missing.py:Task", "missing.py"),
    (f"auto {LM} --epohs 3", "did you mean --epochs?"),
    (f"auto {LM} --epochs 2 --steps 9", "--epochs and --steps exclude each other"),
    (f"auto {LM} --epochs 1,2,3", "epochs"),
    (f"auto {LM} --lr fast", "--lr fast: is not a number"),
    (f"auto {LM} --lr 1e-3 --lr 2e-3", "--lr is given twice"),
    (f"auto {LM} --lr 1e-3 --learning_rate 1e-3", "say the same thing"),
    (f"auto {LM} --warmup 10m", "minutes depend on the machine"),
    (f"auto {LM} --warmup-ratio 10", "has no meaning here"),
    (f"auto {LM} --eval-every 0", "leave it out to evaluate once an epoch"),
    (f"auto {LM} --optimizer adm", "did you mean adam"),
    (f"auto {LM} --preset fats", "--preset fats: valid for causal-lm"),
    # Data and models
    (f"auto {LM} --data nowhere/", "nowhere"),
    (f"auto {LM} --model tny", "did you mean tiny?"),
    (f"auto {LM} --template chatlm", "did you mean chatml?"),
    (f"auto {LM} --load-in-4bit", "--load-bits 4"),
    (f"auto {CLF} --metric_for_best_model f1", "--load-best-model-at-end, or with --patience 3"),
    (f"auto {REC} --text of", "did you mean off?"),
    # The machine
    (f"auto {LM} --strategy dp", "use ddp"),
    (f"auto {LM} --deepspeed ds.json", "use --strategy zero1, zero2 or zero3"),
    (f"auto {LM} --memory-limit lots", "is not a size such as 10GB"),
    (f"auto {LM} --accelerator tpu", "--accelerator tpu"),
    (f"auto {LM} --device-ids 0", "--processes says how many GPUs"),
    (f"plan {LM} --hardware h100x8", "did you mean h100?"),
    (f"plan {LM} --compare h100 --price cheap", "such as 2.10/h"),
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
