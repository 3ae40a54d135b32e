# SPDX-License-Identifier: Apache-2.0
"""Build of the package and its native core; everything declarative is in pyproject.toml.

CMake builds the core from ``csrc/``. If a tool for that is missing, the build stops at once with
one message that says what to install.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))

from tools.native_tools import build_core, configure_core, missing_tools  # noqa: E402

PACKAGE = "vllm.v1.core.hybrid"
#: The command, and modules that are installed into packages of base.
MODULES = [
    "vllm_hybrid_kv",
    "vllm.model_executor.models.plamo2",
    "vllm.model_executor.models.plamo2_mamba",
    "vllm.transformers_utils.configs.plamo2",
]
#: `HYBRID_KV_STABLE_ABI=1` builds one wheel for all versions of Python from 3.12 on.
STABLE_ABI = os.environ.get("HYBRID_KV_STABLE_ABI") == "1" and sys.version_info >= (3, 12)
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}


class CMakeExtension(Extension):
    """An extension whose sources CMakeLists.txt lists."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[], py_limited_api=STABLE_ABI)


class CMakeBuild(build_ext):
    def run(self) -> None:
        # Read here: setuptools clears `inplace` while it builds.
        self.for_developers = bool(self.editable_mode or self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / ext.name
        try:
            werror = "ON" if self.for_developers else "OFF"
            stable = "ON" if ext.py_limited_api else "OFF"
            options = (f"-DHYBRID_KV_WERROR={werror}", f"-DHYBRID_KV_STABLE_ABI={stable}")
            configure_core(ROOT, build_dir, *options)
            core = build_core(build_dir)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                "vllm-hybrid-kv: the native core could not be built; the output of CMake and the "
                "compiler is above."
            ) from error
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file, not new bytes in the old one: a process may have that one loaded.
        target.unlink(missing_ok=True)
        shutil.copy2(core, target)


class CleanBuildPy(build_py):
    def run(self) -> None:
        # setuptools never removes files from build/lib: the wheel would still get a module that
        # was deleted from the sources since the last build.
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, PACKAGE.split(".")[0]), ignore_errors=True)
        super().run()


def packages() -> list[str]:
    """Our packages only. The folders above have no ``__init__.py``: they are vLLM's."""
    found = find_packages(str(ROOT.joinpath(*PACKAGE.split("."))))
    return [PACKAGE, *(f"{PACKAGE}.{name}" for name in found)]


def long_description() -> str:
    """README with absolute links: a package index shows it outside of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = f"]({project['urls']['Homepage']}/blob/main/"
    return re.sub(r"\]\((?!https?:|#|mailto:)", target, (ROOT / "README.md").read_text())


# Before setup(), so that this message is the only output of a build that cannot succeed.
if BUILD_COMMANDS.intersection(sys.argv) and (missing := missing_tools()):
    raise SystemExit(f"vllm-hybrid-kv: to build its native core, please install {missing}.")

setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=packages(),
    py_modules=MODULES,
    package_data={PACKAGE: ["*.pyi"]},
    ext_modules=[CMakeExtension(f"{PACKAGE}._core")],
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if STABLE_ABI else {},
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
)
