"""A container image as a virtual environment: what its file copies and installs, without the container."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy import files

DEADLINE_S = 900.0  # to fetch and install


class Image:
    """A virtual environment in which a stage's files were copied and its pip commands were run, in their order."""

    def __init__(self, stage: list[files.Instruction], folder: Path) -> None:
        self._folder = folder
        build, elsewhere = folder / "build", folder / "home"
        build.mkdir()
        elsewhere.mkdir()
        self._cwd = build
        self._call(sys.executable, "-m", "venv", str(folder / "venv"))
        for instruction in stage:
            for sources, target in files.copied([instruction]):
                for source in sources:
                    self._copy(files.ROOT / source, build / target)
            for arguments in files.pip_commands([instruction]):
                self.python("-m", "pip", *_from_the_usual_index(arguments))
        self._cwd = elsewhere

    def _copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)

    def python(self, *arguments: str) -> str:
        return self._call(str(self._folder / "venv" / "bin" / "python"), *arguments)

    def stepweave(self, *arguments: str, ends_with: int = 0) -> str:
        return self._call(str(self._folder / "venv" / "bin" / "stepweave"), *arguments, ends_with=ends_with)

    def _call(self, *command: str, ends_with: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            command, cwd=self._cwd, env=environment, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == ends_with, f"{command}:\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


def _from_the_usual_index(arguments: list[str]) -> list[str]:
    """The same packages, from the index that this machine uses."""
    if "--index-url" not in arguments:
        return arguments
    place = arguments.index("--index-url")
    return arguments[:place] + arguments[place + 2 :]
