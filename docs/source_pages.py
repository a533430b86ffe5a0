"""Hook of the site: files that pages link to, such as ../configs/quickstart.yaml, become pages too.

So one relative link works on a git host and in the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

LINK = re.compile(r"\]\(\.\./([\w./-]+)\)")  # out of docs/


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every linked file."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for path in LINK.findall(page.content_string):
            if not (root / path).is_file():
                raise PluginError(
                    f"docs/{page.src_uri} links to ../{path}, which is no file of the repository."
                )
            language = {".py": "python", ".sh": "sh", ".yaml": "yaml"}.get(Path(path).suffix, "text")
            text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
            text += f"````{language}\n{(root / path).read_text()}````\n"
            if f"source/{path}.md" not in files.src_uris:
                files.append(File.generated(config, f"source/{path}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn the links to the files into links to their pages."""
    return LINK.sub(r"](source/\1.md)", markdown)
