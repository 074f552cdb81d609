"""Tests of containers: which program opens an image, and the words it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.package import ROOT
from isobatch.core.recipe import Recipe
from isobatch.launch.clusters.slurm import client, containers

WORDS = ("node", "RUN", "NONCE")
INSIDE = ["python3", "-P", str(ROOT / "__main__.py"), *WORDS]


def container(*mounts: str, image: str = "nvcr.io/nvidia/pytorch:26.01-py3") -> dict[str, Any]:
    return {"image": image, "python": "python3", "folder": "/home/me", "mounts": mounts}


def test_pyxis_gets_its_words_through_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "run_slurm", lambda *_: client.Done((), 0, PYXIS, ""))
    words = [
        "--container-image=nvcr.io/nvidia/pytorch:26.01-py3",
        "--container-mounts=/home/me:/home/me,/shared/it's-mine:/shared/it's-mine",
        "--container-workdir=/home/me",
        "--no-container-mount-home",
    ]
    mine = container("/home/me", "/shared/it's-mine")
    assert containers.in_container(mine, 8, *WORDS) == (words, INSIDE)
    with pytest.raises(UserError, match=r"/a b has a space in its path, which pyxis cannot mount"):
        containers.in_container(container("/a b"), 8, *WORDS)


@pytest.mark.parametrize(("gpus", "nv"), [(0, []), (8, ["--nv"])])
def test_apptainer_is_what_a_node_starts(gpus: int, nv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/opt/{name}")
    mine = container("/home/me", "/shared/a b", image="/images/torch.sif")
    command = [
        *("/opt/apptainer", "exec", "--no-home", *nv),
        *("--bind", "/home/me:/home/me", "--bind", "/shared/a b:/shared/a b"),
        *("--pwd", "/home/me", "/images/torch.sif", *INSIDE),
    ]
    assert containers.in_container(mine, gpus, *WORDS) == ([], command)


PYXIS = "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n"
OCI = "      --container             Path to OCI container bundle\n"


@pytest.mark.parametrize(
    ("image", "srun", "there", "chosen"),
    [
        ("docker://ubuntu", PYXIS, ["apptainer"], "pyxis"),
        ("/", OCI, ["singularity"], "/bin/singularity"),
        ("/images/torch.sif", PYXIS, ["apptainer"], "/bin/apptainer"),
        ("docker://ubuntu", OCI, [], "this node has no pyxis in srun, or apptainer"),
    ],
)
def test_which_program_opens_an_image(
    image: str, srun: str, there: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "run_slurm", lambda *_: client.Done((), 0, srun, ""))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in there else None)
    if chosen.startswith("this"):
        with pytest.raises(UserError, match=f"--container {image}: {chosen}: load its module in --setup"):
            containers.find_runtime(image)
    else:
        assert containers.find_runtime(image) == chosen


def test_what_is_mounted(tmp_path: Path) -> None:
    for name in ("a", "a/b", "c", "it's"):
        (tmp_path / name).mkdir()
    paths = [tmp_path / name for name in ("a/b", "a", "it's", "c", "gone", "c")]
    wanted = [f"{tmp_path}/{name}" for name in ("a", "c", "it's")]
    assert list(containers.checked_mounts([*paths, Path("/")])) == wanted
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert list(containers.checked_mounts([tmp_path / "link"])) == [f"{tmp_path}/c", f"{tmp_path}/link"]
    for unfit in ("x:y", "x,y"):
        (tmp_path / unfit).mkdir()
        with pytest.raises(UserError, match=f"{unfit} has a ':' or ',' in its path, which no mount can have"):
            containers.checked_mounts([tmp_path / unfit])


def test_an_image_is_a_file_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.sif").touch()
    assert containers.checked_image("torch.sif") == f"{tmp_path}/torch.sif"
    for name in ("docker://a/b.sif", "nvcr.io#nvidia/pytorch:26.01-py3", "ubuntu"):
        assert containers.checked_image(name) == name
    for gone in ("gone.sif", "./gone", "~/gone", "/gone", "gone.sqsh"):
        with pytest.raises(UserError, match="there is no such file"):
            containers.checked_image(gone)


def test_what_the_recipe_names_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "teacher", "tasks", "hooks"):
        (tmp_path / name).mkdir()
    task = tmp_path / "tasks" / "mine.py"
    task.touch()
    options = {"teacher": f"{tmp_path}/teacher", "prompt": "long " * 999, "size": 3}
    recipe = Recipe(task=f"{task}:Mine", model=f"{tmp_path}/model", options=options)
    found = set(
        containers.needed_paths(recipe, tmp_path / "run", [f"{tmp_path}/hooks/mine.py:Mine", "object"])
    )
    assert {ROOT, tmp_path / "run", *(tmp_path / n for n in ("model", "teacher", "tasks", "hooks"))} <= found
