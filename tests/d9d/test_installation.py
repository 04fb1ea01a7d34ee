"""Having PyPI's own `d9d` beside ours is refused at import."""

import subprocess
import sys
from pathlib import Path

import pytest

from d9d._installation import refuse_foreign_d9d


def install_fake(folder: Path, name: str, version: str) -> None:
    """Write the metadata that pip leaves for an installed distribution."""
    dist_info = folder / f"{name}-{version}.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def test_a_foreign_d9d_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_fake(tmp_path, "d9d", "0.24.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"'d9d' 0\.24\.0 is installed in .*`pip uninstall d9d`") as caught:
        refuse_foreign_d9d()
    assert str(tmp_path) in str(caught.value)
    assert "--force-reinstall --no-deps d9d-lightning" in str(caught.value)


def test_our_own_distribution_is_no_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install_fake(tmp_path, "d9d_lightning", "0.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    refuse_foreign_d9d()


@pytest.mark.parametrize("package", ["d9d", "d9d_lightning"])
def test_importing_a_package_runs_the_check(package: str, tmp_path: Path):
    install_fake(tmp_path, "d9d", "0.24.0")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip uninstall d9d" in done.stderr


def test_a_d9d_that_hides_ours_is_explained(tmp_path: Path):
    """An editable install stands behind site-packages, where PyPI's `d9d` folder would win."""
    install_fake(tmp_path, "d9d", "0.24.0")
    (tmp_path / "d9d").mkdir()
    (tmp_path / "d9d" / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import d9d_lightning"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip uninstall d9d" in done.stderr
