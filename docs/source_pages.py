"""Hooks of mkdocs: research/ and the files that pages link to become pages of the site too.

So a relative link such as ../configs/laptop/rlt.yaml works both on a git host and on the site.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

# Out of docs/ and research/, but to a page or picture of the other.
LINK = re.compile(r"\]\(\.\./(?!docs/|research/[\w-]+\.(?:md|svg))([\w./-]+)\)")
CODE = re.compile(r"(<code.*?</code>)", re.DOTALL)
TAG_OR_OPTION = re.compile(r"<[^>]*>|(?<![\w-])--?[a-zA-Z][\w.-]*")
BEFORE_UNIT = re.compile(r"(?<=\d) (?=[±%]|Gi?B\b)|(?<=±) (?=\d)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures of research/, and a page for every linked file."""
    root = Path(config.config_file_path).parent
    for path in [*(root / "research").glob("*.md"), *(root / "research").glob("*.svg")]:
        files.append(File.generated(config, f"research/{path.name}", abs_src_path=str(path)))
    for page in list(files.documentation_pages()):
        if page.src_uri.startswith("api/"):  # what it links by ../ is a page of docs/
            continue
        for path in LINK.findall(page.content_string):
            if not (root / path).is_file():
                raise PluginError(
                    f"docs/{page.src_uri} links to ../{path}, which is no file of the repository."
                )
            if path.endswith(".ipynb"):
                text = notebook_page(json.loads((root / path).read_text()))
                files.append(File.generated(config, f"source/{path}.md", content=text))
                continue
            language = {".py": "python", ".sh": "sh", ".yaml": "yaml"}.get(Path(path).suffix, "text")
            text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
            text += f"````{language}\n{(root / path).read_text()}````\n"
            if f"source/{path}.md" not in files.src_uris:
                files.append(File.generated(config, f"source/{path}.md", content=text))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: its texts, its code, and what it has shown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="what the cell draws" src="data:image/png;base64,{image}">')
            elif "text/html" in data:
                parts.append("".join(data["text/html"]))
            elif output.get("name") == "stdout":
                parts.append(f"````text\n{''.join(output['text'])}````")
    # Its links are relative to its own folder, which is beside docs/.
    body = "\n\n".join(parts).replace("](../docs/", "](../../")
    return f"---\nsearch: {{exclude: true}}\n---\n{body}\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to the files into links to their pages; the search begins with index.md, ends with api/."""
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.001}  # the title of a class counts a thousandfold
    if page.file.src_uri.startswith("research/"):
        page.meta["search"] = {"boost": 0.3}
    if page.file.src_uri == "index.md":
        page.meta["search"] = {"boost": 4}
    if page.file.src_uri.startswith(("source/", "api/")):  # links of these are right already
        return markdown
    if page.file.src_uri.startswith("research/"):
        return LINK.sub(r"](../source/\1.md)", markdown).replace("](../docs/", "](../")
    return LINK.sub(r"](source/\1.md)", markdown).replace("](../research/", "](research/")


def on_page_content(html: str, **_: Any) -> str:
    """Keep lines from breaking inside an option, as browsers do at its hyphens, and before ± or a unit."""
    pieces = CODE.split(html)  # every second one is code
    pieces[::2] = [BEFORE_UNIT.sub("\u00a0", piece) for piece in pieces[::2]]
    pieces[1::2] = [TAG_OR_OPTION.sub(mark_option, piece) for piece in pieces[1::2]]
    return "".join(pieces)


def mark_option(match: re.Match[str]) -> str:
    """Return a tag as it is, and an option in a span that site.css keeps whole."""
    return match[0] if match[0].startswith("<") else f'<span class="option">{match[0]}</span>'
