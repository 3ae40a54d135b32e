# SPDX-License-Identifier: Apache-2.0
"""Build of the package and its native core; everything declarative is in pyproject.toml.

The core is built by CMake from ``csrc/``. Where a tool for that is missing, the build
stops before it starts, with one message that says what to install.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
PACKAGE = "vllm.v1.core.hybrid"
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


def find_tool(*names: str) -> str | None:
    """The first of these programs on PATH, or beside the Python that runs this."""
    folders = (None, os.path.dirname(sys.executable), sysconfig.get_path("scripts"))
    found = (shutil.which(name, path=path) for path in folders for name in names)
    return next(filter(None, found), None)


def find_compiler() -> str | None:
    """The compiler that CMake will take: ``$CXX``, or the first of the usual names."""
    if "CXX" in os.environ:
        command = shlex.split(os.environ["CXX"])
        return shutil.which(command[0]) if command else None
    return find_tool("c++", "g++", "clang++")


def missing_tools() -> list[str]:
    missing = []
    if find_compiler() is None:
        missing.append("a C++17 compiler (Debian/Ubuntu: apt install g++)")
    if find_tool("cmake") is None:
        missing.append("cmake 3.18 or newer (apt install cmake, or pip install cmake)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        missing.append(f"the headers of Python {version} (apt install python{version}-dev)")
    return missing


class CMakeExtension(Extension):
    """An extension whose sources CMakeLists.txt lists."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import nanobind

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / ext.name
        cmake = find_tool("cmake")
        assert cmake is not None, "checked before setup() is called"
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
            f"-DHYBRID_KV_WERROR={'ON' if self.editable_mode or self.inplace else 'OFF'}",
        ]
        ninja = find_tool("ninja")
        if ninja is not None and "CMAKE_GENERATOR" not in os.environ:
            configure += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))

        self._discard_foreign_build(build_dir, configure)
        self._run(configure)
        self._run([cmake, "--build", str(build_dir), "--config", "Release", "--parallel"])

        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new bytes in the old one: a process may have that one loaded.
        target.unlink(missing_ok=True)
        shutil.copy2(build_dir / target.name, target)

    @staticmethod
    def _discard_foreign_build(build_dir: Path, configure: list[str]) -> None:
        """CMake cannot continue a build of another generator, Python or nanobind."""
        record = build_dir / "configured-with.txt"
        command = "\n".join(configure)
        if not record.is_file() or record.read_text() != command:
            shutil.rmtree(build_dir, ignore_errors=True)
            build_dir.mkdir(parents=True)
            record.write_text(command)

    @staticmethod
    def _run(command: list[str]) -> None:
        if subprocess.run(command).returncode != 0:
            raise SystemExit(
                "vllm-hybrid-kv: the native core could not be built; the output of CMake and the "
                "compiler is above."
            )


class CleanBuildPy(build_py):
    def run(self) -> None:
        # setuptools never removes from build/lib: a module that was deleted from the
        # sources since the last build would still be put in the wheel.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, *PACKAGE.split(".")), ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """Our packages only. The folders above hold no ``__init__.py``: they are vLLM's."""
    found = find_packages(str(ROOT.joinpath(*PACKAGE.split("."))))
    return [PACKAGE, *(f"{PACKAGE}.{name}" for name in found)]


missing = missing_tools() if BUILD_COMMANDS.intersection(sys.argv) else []
if missing:
    raise SystemExit(
        "vllm-hybrid-kv: its native core cannot be built here. Please install "
        + ", and ".join(missing)
        + ", and try again."
    )

setup(
    packages=packages(),
    package_data={PACKAGE: ["*.pyi"]},
    ext_modules=[CMakeExtension(f"{PACKAGE}._core")],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
)
