"""Shows pages that lie outside of docs/ in the site, too, and points links at them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md",
         "deploy.md": "deploy/README.md", "development.md": "CONTRIBUTING.md"}
"""Pages of the site, and the files that they show."""


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=relinked(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point a link from a page of docs/ to one of those files at the site's page."""
    for name, source in PAGES.items():
        markdown = markdown.replace(f"](../{source})", f"]({name})")
    return markdown


def relinked(source: str) -> str:
    """A file with its links as from docs/; what the site does not have is named without a link."""
    text = (ROOT / source).read_text()
    text = re.sub(r"\]\((?:\.\./)?docs/", "](", text).replace('src="docs/', 'src="')
    for name, other in PAGES.items():
        text = text.replace(f"]({other})", f"]({name})")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|[\w/.-]+\.(?:md|svg)[)#])[^)]*\)", r"\1", text)
