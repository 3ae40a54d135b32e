# SPDX-License-Identifier: Apache-2.0
"""Builds the native core, and checks what the machine needs for that.

Uses only the standard library. setup.py, the bootstrap and the tools that build variants of the
core all use it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


def find_tool(*names: str) -> str | None:
    """The first of these programs on PATH, or in the folder of the Python that runs this."""
    for path in (None, os.path.dirname(sys.executable), sysconfig.get_path("scripts")):
        for name in names:
            if found := shutil.which(name, path=path):
                return found
    return None


def find_compiler() -> str | None:
    """The compiler that CMake will take: ``$CXX``, or the first of the usual names."""
    if command := shlex.split(os.environ.get("CXX", "")):
        return shutil.which(command[0])
    return find_tool("c++", "g++", "clang++")


def missing_tools() -> str:
    """What to install, as the end of a sentence; empty if nothing is missing."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = []
    if find_compiler() is None:
        missing.append("a C++17 compiler (Debian, Ubuntu: apt install g++)")
    if find_tool("cmake") is None:
        missing.append("cmake (apt install cmake)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append(f"the headers of Python {version} (apt install python{version}-dev)")
    return " and ".join(missing)


def configure_core(sources: Path, build: Path, *options: str, quiet: bool = False) -> None:
    """Prepare a build of the native core.

    Args:
        sources: The folder with ``CMakeLists.txt`` and ``csrc``.
        build: The folder of the build; emptied if it was configured in another way.
        options: Arguments for CMake; those in ``$CMAKE_ARGS`` follow them.
        quiet: Capture the output instead of showing it.

    Raises:
        subprocess.CalledProcessError: if CMake fails.
    """
    import nanobind  # missing where the bootstrap runs

    command = [
        _cmake(),
        f"-S{sources}",
        f"-B{build}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        *options,
    ]
    ninja = find_tool("ninja")
    if ninja is not None and "CMAKE_GENERATOR" not in os.environ:
        command += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    command += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    _discard_foreign_build(build, command)
    _run(command, quiet)


def build_core(build: Path, *, quiet: bool = False) -> Path:
    """Build what `configure_core` has prepared, and return the path of the library.

    Raises:
        subprocess.CalledProcessError: if the build fails; its ``output`` is set if ``quiet``.
    """
    _run([_cmake(), "--build", str(build), "--config", "Release", "--parallel"], quiet)
    (core,) = build.glob("_core*.so")
    return core


def _cmake() -> str:
    return find_tool("cmake") or "cmake"


def _discard_foreign_build(build: Path, configure: list[str]) -> None:
    """Remove a build of another generator, Python or nanobind: CMake cannot continue it."""
    record = build / "configured-with.txt"
    command = "\n".join(configure)
    if not record.is_file() or record.read_text() != command:
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        record.write_text(command)


def _run(command: list[str], quiet: bool) -> None:
    if quiet:
        output, errors = subprocess.PIPE, subprocess.STDOUT
        subprocess.run(command, check=True, stdout=output, stderr=errors, text=True)
    else:
        subprocess.run(command, check=True)
