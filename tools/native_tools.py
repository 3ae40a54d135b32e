# SPDX-License-Identifier: Apache-2.0
"""What building the native core needs on the machine. Standard library only.

setup.py and bootstrap.py both ask here, so that both say the same.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path


def find_tool(*names: str) -> str | None:
    """The first of these programs on PATH, or beside the Python that runs this."""
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


def configure_core(sources: Path, build: Path, *options: str) -> list[str]:
    """The command with which CMake prepares a build of the native core in ``build``."""
    import nanobind  # not there yet where bootstrap.py runs

    return [
        find_tool("cmake") or "cmake",
        f"-S{sources}",
        f"-B{build}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        *options,
    ]


def missing_tools() -> str:
    """What to install, as the end of a sentence; empty where all is there."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = []
    if find_compiler() is None:
        missing.append("a C++17 compiler (Debian, Ubuntu: apt install g++)")
    if find_tool("cmake") is None:
        missing.append("cmake (apt install cmake)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append(f"the headers of Python {version} (apt install python{version}-dev)")
    return " and ".join(missing)
