# SPDX-License-Identifier: Apache-2.0
"""What a package index and an installer see. `tools.install_routes` really installs."""

import re
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tools import install_routes, wheels

ROOT = Path(__file__).resolve().parents[2]


def test_links_of_the_description_work_outside_of_the_repository() -> None:
    description = metadata("vllm-hybrid-kv").json["description"]
    links = re.findall(r"\]\(([^)\s]+)\)", str(description))
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for link in links:
        if "/blob/main/" in link:
            path = link.split("/blob/main/")[1].split("#")[0]
            assert (ROOT / path).exists(), link


def test_the_readme_has_commands_for_each_route() -> None:
    routes = install_routes.read_routes((ROOT / "README.md").read_text())
    assert routes.keys() == set(install_routes.ROUTES)
    for commands in routes.values():
        assert all(line.startswith("pip install ") for line in commands.splitlines())


def test_an_unknown_route(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        install_routes.main(["gpu"])
    assert error.value.code == 2
    assert "routes must be of cuda, cpu, editable, wheel, got gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("minor", "tag"),
    [(11, "cp311-cp311"), (12, "cp312-abi3"), (13, "cp312-abi3")],
)
def test_names_of_wheels(minor: int, tag: str) -> None:
    pattern = wheels.expected_name(minor)
    assert pattern.fullmatch(f"vllm_hybrid_kv-0.1.0-{tag}-manylinux_2_34_x86_64.whl")
    assert not pattern.fullmatch(f"vllm_hybrid_kv-0.1.0-{tag}-linux_x86_64.whl")
    assert not pattern.fullmatch("vllm_hybrid_kv-0.1.0-cp312-cp312-manylinux_2_34_x86_64.whl")


def test_wheels_need_a_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.minor_version(sys.executable) == sys.version_info[1]
    missing = str(tmp_path / "python")
    assert wheels.main(["--python", missing, "--out", str(tmp_path)]) == 1
    expected = f"wheels: --python must name interpreters of Python 3, got {missing}\n"
    assert capsys.readouterr().err == expected


def test_a_machine_without_the_other_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(wheels.Problem, match=r"Python 3\.1.* must be on PATH"):
        wheels.find_pythons()


def test_wheels_are_built_with_the_versions_of_the_lock() -> None:
    """Otherwise tests and wheels could use different versions of nanobind."""
    lines = {
        name: set((ROOT / "requirements" / name).read_text().splitlines())
        for name in ("cpu.lock", "wheels.txt")
    }
    shared = {line for line in lines["wheels.txt"] if line.startswith(("nanobind", "setuptools"))}
    assert len(shared) == 2
    assert shared <= lines["cpu.lock"]
