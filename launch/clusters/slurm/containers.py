"""A container around the launcher of each node: by pyxis where srun has it, else by apptainer.

The batch script and `job` stay outside, where Slurm's commands are; `node` and its workers run inside, by the
image's own Python, on isobatch's code from outside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import hub_cache
from isobatch.core.errors import UserError, nearest_file
from isobatch.core.package import ROOT, cache_folder, own_command
from isobatch.core.recipe import Recipe
from isobatch.engine import consent
from isobatch.engine.task_files import is_task_file, task_file
from isobatch.launch.clusters.slurm import client

APPTAINER_NAMES = ("apptainer", "singularity")
IMAGE_FILES = (".sif", ".sqsh", ".squashfs", ".img")
ENVIRONMENT = ("env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "PYTHONNOUSERSITE=1")
"""Stands before srun, so that nothing of the Python outside is imported inside; what the image sets stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What request.json says of it."""

    image: str
    python: str
    """The image's Python, which has torch and isobatch's other requirements."""
    folder: str
    """The working folder."""
    mounts: tuple[str, ...]
    """Folders and files that have the same path inside."""


def checked_image(image: str) -> str:
    """The image of --container; a file or folder by its whole path. Raises UserError where it is missing."""
    path = Path(image).expanduser()
    if path.exists():
        return str(path.resolve())
    if "://" not in image and (image.startswith(("/", ".", "~")) or path.suffix in IMAGE_FILES):
        raise UserError(f"--container {image}: there is no such file{nearest_file(image)}")
    return image


def needed_paths(recipe: Recipe, folder: Path, hooks: Iterable[str] = ()) -> Iterator[Path]:
    """What a node reads or writes for a run in `folder`: run, caches, code, files that the recipe names."""
    yield from (folder, cache_folder(), hub_cache.cache_home(), consent.state_folder(), ROOT, Path.cwd())
    yield from (task_file(name).parent for name in (recipe.task, *hooks) if is_task_file(name))
    for value in (recipe.data, recipe.model, recipe.tokenizer, *recipe.options.values()):
        # Path.exists raises where a text is too long for a file's name.
        if isinstance(value, str) and os.path.exists(path := Path(value).expanduser()):  # noqa: PTH110
            yield path


def checked_mounts(paths: Iterable[Path]) -> tuple[str, ...]:
    """The existing ones of `paths` and where links lead, without those that lie in another.

    Raises UserError for a path with : or , in it.
    """
    both = {place for path in paths for place in (path.absolute(), path.resolve())} - {Path("/")}
    if unfit := [path for path in sorted(both) if ":" in str(path) or "," in str(path)]:
        raise UserError(f"--container: {unfit[0]} has a ':' or ',' in its path, which no mount can have")
    there = {path for path in both if path.exists()}
    return tuple(str(path) for path in sorted(there) if not there.intersection(path.parents))


def find_runtime(image: str) -> str:
    """`pyxis`, or the path of apptainer, on this host. Raises UserError where neither can open the image.

    Asked in the job and not at its submission: a login node may lack what the nodes have, and apptainer is
    often a module that --setup loads.
    """
    for_apptainer = image.endswith(".sif") or Path(image).is_dir()
    if not for_apptainer and "--container-image" in client.run_slurm("srun", "--help").stdout:
        return "pyxis"
    if found := next(filter(None, map(shutil.which, APPTAINER_NAMES)), None):
        return found
    needs = "apptainer" if for_apptainer else "pyxis in srun, or apptainer"
    raise UserError(f"--container {image}: this node has no {needs}: load its module in --setup")


def in_container(asked: Mapping[str, Any] | None, gpus: int, *words: str) -> tuple[list[str], list[str]]:
    """(words of srun that put a step into the container, what a node runs): isobatch with `words`, by this
    Python where there is no container. `asked`: the fields of a `Container`.

    pyxis is told by srun (https://github.com/NVIDIA/pyxis/wiki/Usage), apptainer is what the node starts
    (https://apptainer.org/docs/user/latest/cli/apptainer_exec.html). Raises UserError for paths that cannot
    be mounted.
    """
    if asked is None:
        return [], own_command(*words)
    container, runtime = Container(**asked), find_runtime(asked["image"])
    inside = [container.python, "-P", str(ROOT / "__main__.py"), *words]
    if runtime != "pyxis":
        binds = [word for path in container.mounts for word in ("--bind", f"{path}:{path}")]
        where = ["--pwd", container.folder, container.image]
        return [], [runtime, "exec", "--no-home", *(["--nv"] if gpus else []), *binds, *where, *inside]
    # enroot reads a mount from a line of words, as fstab has them.
    if unfit := [path for path in container.mounts if any(c.isspace() for c in path)]:
        raise UserError(f"--container: {unfit[0]} has a space in its path, which pyxis cannot mount")
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in container.mounts)}",
        f"--container-workdir={container.folder}",
        "--no-container-mount-home",
    ], inside
