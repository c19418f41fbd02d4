"""What MkDocs does beside its own work when it builds the site from this repository.

Documents outside ``docs/`` (CONTRIBUTING.md, SECURITY.md, CHANGELOG.md and those of deploy/) become pages as well, the
reference of the HTTP API is made from the gateway's own description, and results of benchmarks can be downloaded. A
link from a document to another file of the repository is turned into one that is right on the site; a link to a file
that the site does not have is an error.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md", "deploy/observability/README.md")
"""Documents outside ``docs/`` that are pages of the site, at the same paths."""

_LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_ELSEWHERE = ("http://", "https://", "mailto:")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and downloads that do not lie in ``docs/``."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "reference/http-api.md", content=_http_api()))
    for result in sorted((ROOT / "benchmarks/results").glob("*.json")):
        name = result.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    if page.file.generated_by and page.file.src_uri not in PAGES:
        return markdown
    return with_links_of_the_site(markdown, page.file.src_uri, files)


def with_links_of_the_site(markdown: str, name: str, files: Files) -> str:
    """Return a page's text with links to other pages, as they are found from the page called ``name``.

    Raises:
        PluginError: a link leads to something that the site does not have.
    """
    source = name if name in PAGES else f"docs/{name}"

    def on_site(link: re.Match[str]) -> str:
        path, anchor = link["path"], link["anchor"] or ""
        if path.startswith(_ELSEWHERE):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)).removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            raise PluginError(f"{source} links to {path}, which the site does not have")
        return posixpath.relpath(target, posixpath.dirname(name) or ".") + anchor

    parts = _FENCE.split(markdown)  # odd ones are blocks of code
    return "".join(part if number % 2 else _LINK.sub(on_site, part) for number, part in enumerate(parts))


def _http_api() -> str:
    """Return a page about all endpoints, made from the OpenAPI document of a gateway with default options."""
    document = _document()
    schemas = document["components"]["schemas"]
    lines = [
        "# HTTP API",
        "",
        "Every server describes itself at `/openapi.json`; this page is made from that, with default options.",
        "With API keys, each request carries `Authorization: Bearer KEY`.",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += ["", f"## {method.upper()} {path}", "", operation["summary"]]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                name = _named(content["schema"])
                lines += ["", operation["requestBody"]["description"], "", *_fields(schemas[name])]
            lines += ["", "| status | |", "|---|---|"]
            lines += [
                f"| {status} | {_cell(answer['description'])} |" for status, answer in operation["responses"].items()
            ]
    return "\n".join(lines) + "\n"


def _document() -> dict[str, Any]:
    from pagewise_gateway.http.app import ENDPOINTS
    from pagewise_gateway.http.intake import AnswerMemory, BodyMemory
    from pagewise_gateway.http.openapi import document
    from pagewise_gateway.http.params import Limits
    from pagewise_gateway.metrics import Metrics
    from pagewise_shared.config import GatewayConfig
    from pagewise_shared.version import package_version

    config = GatewayConfig()
    metrics = Metrics(config.model)
    memory = BodyMemory(config.max_body_memory, config.max_body_bytes, metrics)
    answers = AnswerMemory(config.max_answer_memory, metrics)
    limits = Limits(config.model, config.max_n)
    return document(ENDPOINTS, package_version(), limits, config.max_body_bytes, memory, answers)


def _fields(schema: dict[str, Any]) -> list[str]:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_cell(_kind(field))} | {'required' if name in required else _default(field)} |"
        for name, field in schema.get("properties", {}).items()
    ]
    return ["| field | type | default |", "|---|---|---|", *rows]


def _kind(schema: dict[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "$ref" in schema:
        return _named(schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"array of {_kind(schema['items'])}" if isinstance(schema.get("items"), dict) else "array"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    return " ".join([kind, *(bound for bound in bounds if bound)])


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None or value in ([], {}, "") else f"`{value}`"


def _named(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
