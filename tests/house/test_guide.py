"""The guide as a site: built without the network, without a broken link, and needing nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# A link that a reader may follow is no harm; what a browser fetches by itself is.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?:https?:)?//[^"']*"""
    r"""|<link\b[^>]*\brel=["'](?:stylesheet|preconnect|preload|icon)["'][^>]*\bhref=["'](?:https?:)?//[^"']*"""
    r"""|<link\b[^>]*\bhref=["'](?:https?:)?//[^"']*["'][^>]*\brel=["'](?:stylesheet|preconnect|preload)"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("guide") / "site"
    # Every way out leads to a closed port: what needs the network fails here.
    closed = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | closed | {"NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr
    return target


def test_every_page_is_there(built):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in built.glob("*.html")}


def test_a_browser_fetches_nothing_from_elsewhere(built):
    wrong = []
    for path in built.rglob("*"):
        if path.suffix in (".html", ".css"):
            found = FETCHED.search(path.read_text(encoding="utf-8"))
            wrong += [f"{path.relative_to(built)}: {found[0]}"] if found else []
    assert not wrong, "\n".join(wrong)


def test_the_check_can_fail():
    assert FETCHED.search('<script src="https://example.org/a.js"></script>')
    assert FETCHED.search('<link href="//example.org/a.css" rel="stylesheet">')
    assert FETCHED.search('@import url("https://fonts.example.org/x")')
    assert not FETCHED.search('<script src="assets/a.js"></script><a href="https://example.org">text</a>')


def test_a_broken_link_would_be_found(tmp_path):
    """The settings of the site, with a page that links to nothing."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:  #")[0]
    (tmp_path / "mkdocs.yml").write_text(text + "nav:\n  - index.md\n")
    (tmp_path / "docs").mkdir()
    for content in ("[a](nowhere.md)", "[a](index.md#nowhere)", "[a](../configs/x.yaml)"):
        (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n{content}\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert found.returncode != 0, content
        assert "nowhere" in found.stderr or "x.yaml" in found.stderr
