"""Hooks of mkdocs for this repository: pages outside of docs/, and links to files that are no pages.

In the repository links are relative paths, which editors and code hosts follow. On the site a path inside docs/, or of
a page of `PAGES`, is a link to that page; any other file of the repository becomes a link to `repo_url`, and as long as
mkdocs.yml has none, its text with the path as a note.
"""

import posixpath
import re
from html import escape

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Name on the site, and path in the repository.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmark_scripts.md": "benchmarks/README.md",
}
BLOCK = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>[^)\s]+)\)")
PICTURE = re.compile(r"(?P<text>!\[[^\]]*\])\((?P<path>[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere."""
    for name, path in PAGES.items():
        with open(posixpath.join(posixpath.dirname(config.config_file_path), path), encoding="utf-8") as file:
            files.append(File.generated(config, name, content=file.read()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(source)

    def picture(match: re.Match[str]) -> str:
        return f"{match['text']}({site_path(posixpath.join(folder, match['path']))})"

    def link(match: re.Match[str]) -> str:
        path, hash_mark, anchor = match["path"].partition("#")
        if ":" in path or not path:
            return match[0]
        inside = site_path(posixpath.join(folder, path))
        if inside is not None:
            return f"[{match['text']}]({inside}{hash_mark}{anchor})"
        path = posixpath.normpath(posixpath.join(folder, path))
        if config.repo_url:
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{path}{hash_mark}{anchor})"
        return f'<abbr title="in the repository: {escape(path)}">{match["text"]}</abbr>'

    parts = BLOCK.split(markdown)  # text and blocks of code in turn
    parts[::2] = [LINK.sub(link, PICTURE.sub(picture, text)) for text in parts[::2]]
    return "".join(parts)


def site_path(path: str) -> str | None:
    """Place on the site of a path in the repository, or None. All pages lie in one folder."""
    path = posixpath.normpath(path)
    names = {source: name for name, source in PAGES.items()}
    if path in names:
        return names[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None
