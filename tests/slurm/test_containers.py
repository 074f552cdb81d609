"""A job whose nodes train in a container.

Debian 12 and PyPI have no apptainer, so the script `apptainer` beside this file stands in for it: a root
folder of its own, in which only what is mounted is there. Pyxis has no stand-in: its words are tested in
tests/unit/test_containers.py.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import ROOT, losses, summary
from isobatch.tests.slurm.nodes import Job

if TYPE_CHECKING:
    from isobatch.tests.slurm.nodes import Cluster

pytestmark = pytest.mark.slurm
SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sys", "/usr")
INSIDE = """
import os
import shutil
from isobatch.tests.tasks.failing import Line

class Inside(Line):
    def loss(self, model, batch, step):
        assert os.path.exists("beside.txt"), "the working folder is mounted"
        assert not os.path.exists(HIDDEN), "what is not mounted is not there"
        assert shutil.which("scontrol") is None, "the image has none of Slurm's commands"
        return super().loss(model, batch, step)
"""


def test_nodes_train_inside_a_container(cluster: Cluster, tmp_path: Path) -> None:
    image, work, tools = tmp_path / "image", tmp_path / "it's work", tmp_path / "tools"
    for folder in (image, work, tools):
        folder.mkdir()
    content = [path for path in (*SYSTEM, sys.base_prefix, sys.prefix) if Path(path).exists()]
    (image / "content").write_text("".join(f"{path}\n" for path in dict.fromkeys(content)))
    (tools / "apptainer").symlink_to(f"{ROOT}/tests/slurm/apptainer")
    setup = tmp_path / "setup.sh"
    setup.write_text(f"export PATH={shlex.quote(str(tools))}:$PATH PYTHONPATH=/nowhere/outside\n")
    (work / "beside.txt").touch()
    (work / "inside.py").write_text(INSIDE.replace("HIDDEN", repr(str(setup))))
    flags = ["--task", "./inside.py:Inside", "--cpu", "--nodes", "2", "--time", "5", "--name", "r"]
    words = ["--setup", str(setup), "--container", str(image), "--container-python", sys.executable]
    done = cluster.slurm(*flags, *words, "--submit", cwd=work)
    assert done.returncode == 0, done.stderr
    job = Job(cluster, done.stdout.strip(), work / "runs" / "r")
    job.finish(120)
    assert summary(job.run)["world_size"] == 2
    assert len(losses(job.run)) == 40
