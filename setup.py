"""The packages of the distribution: this folder is `isobatch`, and the folders below it are found."""

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("core", "data", "engine", "launch", "models", "configs")


class BuildWithoutThisFile(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [one for one in super().find_package_modules(package, package_dir) if one[1] != "setup"]


patterns = [pattern for name in FOLDERS for pattern in (name, f"{name}.*")]
found = [name for name in find_namespace_packages(include=patterns) if "__pycache__" not in name]
setup(
    packages=["isobatch", *(f"isobatch.{name}" for name in found)],
    cmdclass={"build_py": BuildWithoutThisFile},
)
