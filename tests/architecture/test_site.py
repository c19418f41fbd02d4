"""The documentation's site is built without a network and without a warning, and loads nothing from other servers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mkdocs.structure.files import File, Files

from docs.site import hooks

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]* src="([^"]+)"|<link[^>]* rel="?(?:stylesheet|preload|icon)"?[^>]* href="([^"]+)"'
)


def build(site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for document in (*documents, *map(Path, hooks.PAGES)):
        page = document.with_suffix(".html") if document.stem != "README" else document.with_name("index.html")
        assert (site / page).is_file(), document


def test_pages_load_nothing_from_other_servers(site: Path) -> None:
    for page in site.rglob("*.html"):
        for loaded in LOADED.findall(page.read_text()):
            assert not "".join(loaded).startswith(("http:", "https:", "//")), page
    assert "mermaid" in (site / "site/mermaid.tiny.js").read_text()


def test_the_http_api_has_every_endpoint(site: Path) -> None:
    text = (site / "reference/http-api.html").read_text()
    for endpoint in ("POST /v1/completions", "POST /v1/messages", "GET /metrics"):
        assert endpoint in text
    assert "max_tokens" in text
    assert "At most" in text


def test_links_to_what_the_site_does_not_have_are_errors(tmp_path: Path) -> None:
    names = ("tiers.md", "SECURITY.md", "deploy/README.md")
    files = Files([File(name, str(tmp_path), str(tmp_path), use_directory_urls=False) for name in names])

    def rewritten(markdown: str) -> str:
        return hooks.with_links_of_the_site(markdown, "tiers.md", files)

    assert rewritten("[a](../SECURITY.md#keys)") == "[a](SECURITY.md#keys)"
    assert rewritten("[a](../deploy/README.md)") == "[a](deploy/README.md)"
    assert rewritten("[a](#here) [b](https://example.org)") == "[a](#here) [b](https://example.org)"
    assert rewritten("```\n[a](nothing.md)\n```") == "```\n[a](nothing.md)\n```"
    with pytest.raises(hooks.PluginError, match=re.escape("docs/tiers.md links to nothing.md")):
        rewritten("[a](nothing.md)")
