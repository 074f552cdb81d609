"""Models with Python code of their own: it runs only if allowed, and is exported with the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserError
from isobatch.models import hub
from isobatch.tests.integration.helpers import launch, losses, succeed
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.tiny_models import save_gpt2, write_stories

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
from transformers import GPT2Config

class MineConfig(GPT2Config):
    model_type = "mine"
"""
MODEL = """
from pathlib import Path

from transformers import GPT2LMHeadModel
from .configuration_mine import MineConfig

Path("it-ran").write_text("")

class MineLM(GPT2LMHeadModel):
    config_class = MineConfig
"""
TASK = ["auto", "--task", "causal-lm", "--model", "mine", "--data", "stories.txt", "--max-length", "32"]
TASK += ["--quiet", "--steps", "24"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the model, `mine`."""
    folder = tmp_path / "mine"
    model = save_gpt2(folder, 300)
    write_stories(tmp_path / "stories.txt")
    (folder / "configuration_mine.py").write_text(CONFIG)
    (folder / "modeling_mine.py").write_text(MODEL)
    mapped = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineLM"}
    numbers = {**model.config.to_dict(), "model_type": "mine", "auto_map": mapped}
    (folder / "config.json").write_text(json.dumps(numbers))
    return tmp_path


def test_it_runs_when_asked_for_and_goes_with_the_model(home: Path) -> None:
    said = complaint(launch(*TASK, cwd=home))
    assert "its own code (modeling_mine.MineLM), then add --remote-code" in said
    assert not (home / "it-ran").exists()
    succeed(*TASK, "--remote-code", "--name", "own", cwd=home)
    found = losses(home / "runs" / "own")
    assert sum(found[-4:]) < sum(found[:4])
    (home / "mine").rename(home / "gone")
    written = succeed("generate", "runs/own", "--prompt", "def ", "--tokens", "5", cwd=home)
    assert written.stdout.startswith("def ")


def test_an_architecture_that_nobody_knows_is_one_line(home: Path) -> None:
    config = json.loads((home / "mine" / "config.json").read_text())
    del config["auto_map"]
    (home / "mine" / "config.json").write_text(json.dumps(config))
    said = complaint(launch(*TASK, cwd=home))
    assert "transformers has no causal language model of type mine" in said


def test_code_of_the_hub_is_pinned() -> None:
    brought = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.MineLM"}}
    hub.check_architecture("owner/mine", brought, remote_code=True, revision="a" * 40)
    with pytest.raises(UserError, match="add --revision COMMIT"):
        hub.check_architecture("owner/mine", brought, remote_code=True, revision=None)
