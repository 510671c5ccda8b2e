# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The pages hang together: links lead somewhere, nothing is left out of the index, and names exist."""

import re
from pathlib import Path

import pytest

from recipe.agent_env.rollout.episode import EndReason
from tests.test_config_on_cpu import composed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    page
    for folder in (ROOT, *(ROOT / name for name in ("docs", "docker", "examples", "recipe", "requirements")))
    for page in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
FAQ = (DOCS / "faq.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_index_names_every_page():
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in sorted(DOCS.glob("*.md")) if f"({page.name})" not in index] == ["README.md"]


def test_keys_that_the_faq_names_exist():
    config = composed()
    for section, key in set(re.findall(r"`\+?(env|data|algorithm)\.(\w+)", FAQ)):
        assert key in config[section], f"{section}.{key}"


def test_metrics_that_the_faq_names_exist():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "recipe" / "agent_env").rglob("*.py"))
    for name in set(re.findall(r"`env/([a-z_]+)`", FAQ)):
        assert name in source, f"env/{name}"


def test_options_of_the_service_that_the_faq_names_exist():
    from recipe.agent_env.env_service.__main__ import build_parser

    known = build_parser().format_help()
    for option in set(re.findall(r"`(--[a-z-]+)", FAQ)) - {"--cfg"}:
        assert option in known


def test_ends_that_the_faq_names_are_those_of_the_code():
    for word in re.findall(r"ends? as `(\w+)`", FAQ):
        assert word in {reason.value for reason in EndReason}
