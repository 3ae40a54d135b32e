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
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "tools"))

from native_tools import find_tool, missing_tools  # noqa: E402

PACKAGE = "vllm.v1.core.hybrid"
#: Files beside base's own, in packages that are base's.
MODULES = [
    "vllm.model_executor.models.plamo2",
    "vllm.model_executor.models.plamo2_mamba",
    "vllm.transformers_utils.configs.plamo2",
]
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


class CMakeExtension(Extension):
    """An extension whose sources CMakeLists.txt lists."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    def run(self) -> None:
        # Asked here: setuptools clears `inplace` while it builds.
        self.for_developers = bool(self.editable_mode or self.inplace)
        super().run()

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
            f"-DHYBRID_KV_WERROR={'ON' if self.for_developers else 'OFF'}",
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
            shutil.rmtree(Path(self.build_lib, PACKAGE.split(".")[0]), ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """Our packages only. The folders above hold no ``__init__.py``: they are vLLM's."""
    found = find_packages(str(ROOT.joinpath(*PACKAGE.split("."))))
    return [PACKAGE, *(f"{PACKAGE}.{name}" for name in found)]


# Before setup(): a build that cannot succeed says so first and alone.
if BUILD_COMMANDS.intersection(sys.argv) and (missing := missing_tools()):
    raise SystemExit(f"vllm-hybrid-kv: to build its native core, please install {missing}.")

setup(
    packages=packages(),
    py_modules=MODULES,
    package_data={PACKAGE: ["*.pyi"]},
    ext_modules=[CMakeExtension(f"{PACKAGE}._core")],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
)
